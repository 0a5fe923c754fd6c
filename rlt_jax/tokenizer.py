"""A checkpoint's tokenizer: text to ids and back, piece by piece, and its chat template.

Reads what Hugging Face checkpoints carry (tokenizer.json, tokenizer_config.json,
chat_template.jinja, generation_config.json) with the `tokenizers` library alone.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from rlt_jax.chat_template import ChatTemplate
from rlt_jax.validation import check_int, fail

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# A UTF-8 character has at most 4 bytes and a byte-level id at least one: however a tail of ids
# is cut out of a text, their text is right from the fifth id on.
_RESYNC_IDS = 8
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class Tokenizer:
    """Encodes, decodes and renders chats as the checkpoint's own files say.

    `eos_token_ids` joins the ends named by generation_config.json and tokenizer_config.json.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ):
        config = config or {}
        self._backend = backend
        backend.no_padding()
        backend.no_truncation()
        _add_missing_tokens(backend, config.get("added_tokens_decoder") or {})
        self.special_tokens = _named_tokens(config)
        backend.add_special_tokens(
            [t for t in self.special_tokens.values() if backend.token_to_id(t) is not None]
        )
        self.bos_token_id = self._special_id("bos_token")
        self._eos_token_id = self._special_id("eos_token")
        self.eos_token_ids = _eos_token_ids(generation_config or {}, self._eos_token_id)
        self._add_bos = _flag(config, "add_bos_token")
        self._add_eos = _flag(config, "add_eos_token")
        for added, name in ((self._add_bos, "bos_token"), (self._add_eos, "eos_token")):
            if added and self._special_id(name) is None:
                fail(f"tokenizer_config.json: add_{name}", True, f"needs a known {name}")
        self.chat_template = _pick_template(config) if chat_template is None else chat_template
        self._compiled_template: ChatTemplate | None = None
        added = backend.get_added_tokens_decoder()
        self._special_ids = {i for i, token in added.items() if token.special}
        self._special_ids |= set(map(backend.token_to_id, self.special_tokens.values())) - {None}
        decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self._is_byte_level = b"ByteLevel" in decoder
        self._has_byte_fallback = b"ByteFallback" in decoder

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Reads a checkpoint folder; only tokenizer.json is required.

        Raises ValueError naming the file that is missing or cannot be read.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{file}: no such file; a tokenizer is read from tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{file}: cannot be read as a tokenizer: {error}") from error
        try:
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        except FileNotFoundError:
            template = None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{folder / 'chat_template.jinja'}: {error}") from error
        return cls(
            backend,
            config=_read_json_object(folder / "tokenizer_config.json"),
            generation_config=_read_json_object(folder / "generation_config.json"),
            chat_template=template,
        )

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token's exact spelling, or None."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's ids; special tokens are added around them as the checkpoint's files say."""
        if not isinstance(text, str):
            fail("text", text, "must be a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            fail("text", text, "must be valid Unicode (it has a lone surrogate)")
        if not add_special_tokens or (self._add_bos is None and self._add_eos is None):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        ids = self._backend.encode(text, add_special_tokens=False).ids
        before = [self.bos_token_id] if self._add_bos else []
        after = [self._eos_token_id] if self._add_eos else []
        return before + ids + after

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The ids' text; ids that the vocabulary lacks give none."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation, by the checkpoint's chat template.

        Encode it with add_special_tokens=False: the template writes them itself.
        """
        if self.chat_template is None:
            raise ValueError(
                "chat_template = None: the checkpoint has no chat template "
                "(chat_template.jinja, or chat_template in tokenizer_config.json)"
            )
        if self._compiled_template is None:
            self._compiled_template = ChatTemplate(self.chat_template)
        variables = {**self.special_tokens, **variables}
        return self._compiled_template.render(messages, add_generation_prompt, variables)

    def drop_textless(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """The ids without those that decode() passes over wherever they stand."""
        return [
            token_id
            for token_id in token_ids
            if not (skip_special_tokens and token_id in self._special_ids)
            and self._backend.id_to_token(token_id) is not None
        ]

    def ends_in_byte_run(self, token_ids: Sequence[int]) -> bool:
        """Whether the next byte token could rewrite text: "<0xE2>" and its like are decoded run
        by run, and one wrong byte spoils its whole run."""
        token = self._backend.id_to_token(token_ids[-1]) if self._has_byte_fallback else None
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def ends_in_partial_character(self, text: str) -> bool:
        """Whether the last character may be the start of one whose bytes are still to come."""
        return self._is_byte_level and text.endswith(REPLACEMENT)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


class IncrementalDecoder:
    """Turns a growing list of ids into text that is never taken back.

    The pieces of push() and finish(), joined, equal `tokenizer.decode` of all ids (of decoders
    that only ever add to a text; all but those that trim its end do). A character whose last
    bytes are still to come is held back. Only a tail of the ids is decoded each time: it starts
    with ids whose text is out, the left context of the new ones.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._tail: list[int] = []
        self._context = 0  # the first ids of the tail, whose text is out and settled
        self._given = 0  # characters of the tail's text that are out
        self._finished = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes further ids and returns the text that they complete (maybe none)."""
        if self._finished:
            raise RuntimeError("IncrementalDecoder.push: finish() was already called")
        new = self._tokenizer.drop_textless(token_ids, self._skip_special_tokens)
        self._tail.extend(new)
        if not new or self._tokenizer.ends_in_byte_run(self._tail):
            return ""
        text = self._decode(self._tail)
        held = self._tokenizer.ends_in_partial_character(text)
        piece = text[self._given : len(text) - held]
        self._given = len(text) - held
        if not held:
            self._forget(self._context)
        elif len(self._tail) > 2 * _RESYNC_IDS:
            self._forget(len(self._tail) - _RESYNC_IDS, held=1)
        return piece

    def finish(self) -> str:
        """Returns whatever was held back; no push() may follow."""
        if self._finished:
            return ""
        self._finished = True
        return self._decode(self._tail)[self._given :]

    def _forget(self, count: int, held: int = 0) -> None:
        """Drops the first ids; all the others become the context of what follows.

        They must have text of their own: a decoder that trims the start of a text would
        otherwise trim what follows.
        """
        kept = self._tail[count:]
        text = self._decode(kept)
        if text:
            self._tail = kept
            self._context = 0 if held else len(kept)
            self._given = len(text) - held

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)


def _read_json_object(file: Path) -> dict[str, Any]:
    """The file's object; a missing file reads as {}."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must hold a JSON object")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and so on; each is a string, or an object whose "content" is one."""
    named = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if token is None:
            continue
        if not isinstance(token, str):
            fail(f"tokenizer_config.json: {name}", token, "must be a string")
        named[name] = token
    return named


def _add_missing_tokens(backend: tokenizers.Tokenizer, added: Mapping[str, Any]) -> None:
    """Adds the tokens that only tokenizer_config.json lists, at the ids it gives them."""
    name = "tokenizer_config.json: added_tokens_decoder"
    for token_id, entry in added.items():
        if not token_id.isdecimal():
            fail(name, token_id, "its keys must be token ids")
        if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
            fail(f"{name}[{token_id}]", entry, "must be an object with a content")
    for token_id, entry in sorted(added.items(), key=lambda item: int(item[0])):
        content, special = entry["content"], entry.get("special", False)
        if backend.token_to_id(content) is None:
            token = tokenizers.AddedToken(
                content,
                special=special,
                lstrip=entry.get("lstrip", False),
                rstrip=entry.get("rstrip", False),
                single_word=entry.get("single_word", False),
                normalized=entry.get("normalized", not special),
            )
            backend.add_special_tokens([token]) if special else backend.add_tokens([token])
        if backend.token_to_id(content) != int(token_id):
            rule = f"tokenizer.json gives this token the id {backend.token_to_id(content)}"
            fail(f"{name}[{token_id}]", content, rule)


def _eos_token_ids(generation_config: Mapping[str, Any], own: int | None) -> tuple[int, ...]:
    ids = generation_config.get("eos_token_id")
    ids = [] if ids is None else list(ids) if isinstance(ids, list) else [ids]
    for i, token_id in enumerate(ids):
        check_int(f"generation_config.json: eos_token_id[{i}]", token_id, minimum=0)
    if own is not None:
        ids.append(own)
    return tuple(dict.fromkeys(ids))


def _flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        fail(f"tokenizer_config.json: {name}", value, "must be true or false")
    return value


def _pick_template(config: Mapping[str, Any]) -> str | None:
    """tokenizer_config.json's chat_template: one string, or a list of named ones."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
        if template is None:
            fail("tokenizer_config.json: chat_template", config["chat_template"], "has no default")
    if template is not None and not isinstance(template, str):
        fail("tokenizer_config.json: chat_template", template, "must be a string")
    return template
