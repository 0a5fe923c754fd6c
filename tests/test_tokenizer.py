"""The tokenizer: reading a checkpoint's files, encoding, decoding in pieces."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from rlt_jax.tokenizer import IncrementalDecoder, Tokenizer


def byte_level():
    """Byte-level BPE as Ouro's: 256 bytes, some merges, two special tokens, one added word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©"), ("â", "Ĥ"), ("ð", "Ł"), ("Ģ", "ð")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    backend.add_tokens(["<think>"])
    return backend


def byte_fallback(spaces_cut=1):
    """SentencePiece-like: pieces with a word mark, bytes for the rest, leading spaces cut."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁the", "re", "é", "\N{REPLACEMENT CHARACTER}"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", spaces_cut, 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def three_spaces_cut():
    return byte_fallback(spaces_cut=3)


def word_piece():
    words = ["[UNK]", "[SEP]", "hello", "##lo", "wor", "##ld", ".", "'", "do", "not", "n't"]
    backend = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return backend


def no_decoder():
    backend = word_piece()
    backend.decoder = None
    return backend


def metaspace():
    words = ["▁", "▁a", "b", "▁▁", "<s>"]
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "b"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return backend


BACKENDS = [byte_level, byte_fallback, three_spaces_cut, word_piece, no_decoder, metaspace]
TOKENIZERS = {make.__name__: Tokenizer(make()) for make in BACKENDS}


def write_checkpoint(folder, backend=None, **files):
    (backend or byte_level()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder, *args, **kwargs):
    return Tokenizer.from_folder(write_checkpoint(folder, *args, **kwargs))


# Reading a checkpoint's files.


def test_missing_tokenizer_json_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "\xff"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, name, content):
    write_checkpoint(tmp_path)
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        Tokenizer.from_folder(tmp_path)


def test_tokenizer_json_alone_is_enough(tmp_path):
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the thé")) == "the thé"
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.bos_token_id is None
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("generation_eos", [None, 5, [5, 7], [7, 5]])
@pytest.mark.parametrize("eos_token", [None, "<|im_end|>", {"content": "<|im_end|>"}])
def test_eos_ids_join_generation_config_and_tokenizer_config(tmp_path, generation_eos, eos_token):
    tokenizer = load(
        tmp_path,
        tokenizer_config={"eos_token": eos_token},
        generation_config={"eos_token_id": generation_eos},
    )
    expected = (
        {None: [], 5: [5]}.get(generation_eos)
        if not isinstance(generation_eos, list)
        else list(generation_eos)
    )
    if eos_token:
        expected.append(tokenizer.token_id("<|im_end|>"))
    assert list(tokenizer.eos_token_ids) == expected


def test_an_eos_id_named_twice_is_listed_once(tmp_path):
    eos = byte_level().token_to_id("<|im_end|>")
    tokenizer = load(
        tmp_path,
        tokenizer_config={"eos_token": "<|im_end|>"},
        generation_config={"eos_token_id": [eos, eos]},
    )
    assert tokenizer.eos_token_ids == (eos,)


@pytest.mark.parametrize("eos", [-1, "5", True, [1, 2.5]])
def test_bad_eos_id_names_file_field_value_and_rule(tmp_path, eos):
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id.*must be an int"):
        load(tmp_path, generation_config={"eos_token_id": eos})


def test_tokens_only_in_tokenizer_config_are_added_at_their_ids(tmp_path):
    size = byte_level().get_vocab_size(with_added_tokens=True)
    added = {str(size): {"content": "<tool>", "special": True}}
    tokenizer = load(tmp_path, tokenizer_config={"added_tokens_decoder": added})
    assert tokenizer.encode("a<tool>b")[1] == size
    assert tokenizer.decode([size]) == ""
    assert tokenizer.decode([size], skip_special_tokens=False) == "<tool>"
    assert tokenizer.vocab_size == size + 1


@pytest.mark.parametrize(
    "added, message",
    [
        ({"3": {"content": "<think>"}}, r"added_tokens_decoder\[3\] = '<think>'.* the id \d+"),
        ({"x": {"content": "<think>"}}, "added_tokens_decoder = 'x': its keys must be token ids"),
        ({"3": {}}, r"added_tokens_decoder\[3\] = \{\}: must be an object with a content"),
    ],
)
def test_bad_added_tokens_are_refused(tmp_path, added, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, tokenizer_config={"added_tokens_decoder": added})


def test_a_named_token_counts_as_special(tmp_path):
    tokenizer = load(tmp_path, tokenizer_config={"pad_token": "<think>"})
    assert tokenizer.decode(tokenizer.encode("a<think>b")) == "ab"


# Encoding.


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert len(load(tmp_path, backend).encode("abcd")) == 4


def with_bos_processor():
    backend = byte_level()
    bos = "<|endoftext|>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return backend


@pytest.mark.parametrize(
    "add_bos, add_eos, expected",
    [
        (None, None, ["<|endoftext|>", "a"]),
        (True, None, ["<|endoftext|>", "a"]),
        (False, None, ["a"]),
        (True, True, ["<|endoftext|>", "a", "<|im_end|>"]),
        (None, True, ["a", "<|im_end|>"]),
    ],
)
def test_add_bos_and_add_eos_replace_the_files_own_special_tokens(
    tmp_path, add_bos, add_eos, expected
):
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    tokenizer = load(tmp_path, with_bos_processor(), tokenizer_config=flags | tokens)
    assert tokenizer.encode("a") == [tokenizer.token_id(token) for token in expected]
    assert tokenizer.encode("a", add_special_tokens=False) == [tokenizer.token_id("a")]


@pytest.mark.parametrize(
    "config, message",
    [
        ({"add_bos_token": True}, "add_bos_token = True: needs a known bos_token"),
        ({"add_eos_token": True, "eos_token": "nope"}, "add_eos_token = True: needs a known"),
        ({"add_bos_token": "yes"}, "add_bos_token = 'yes': must be true or false"),
        ({"bos_token": 5}, "bos_token = 5: must be a string"),
        ({"chat_template": 5}, "chat_template = 5: must be a string"),
    ],
)
def test_bad_tokenizer_config_names_field_value_and_rule(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, tokenizer_config=config)


@pytest.mark.parametrize("text", [b"bytes", None, 5, "\ud800"])
def test_only_valid_unicode_strings_are_encoded(text):
    with pytest.raises(ValueError, match=r"text = .*must be"):
        TOKENIZERS["byte_level"].encode(text)


# Decoding in pieces.


def join_pieces(tokenizer, pieces_of_ids, skip_special_tokens=True):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
    pieces = [decoder.push(ids) for ids in pieces_of_ids]
    return "".join(pieces) + decoder.finish()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_pieces_of_random_ids_join_to_the_whole_decoding(name, skip_special_tokens):
    tokenizer = TOKENIZERS[name]
    ids = st.integers(0, tokenizer.vocab_size + 3)  # the last few are in no vocabulary
    often_the_same = st.sampled_from(range(0, tokenizer.vocab_size, 37))
    often_the_same |= st.integers(max(0, tokenizer.vocab_size - 7), tokenizer.vocab_size)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.lists(ids | often_the_same, max_size=3), max_size=60))
    def check(pieces):
        everything = [token for piece in pieces for token in piece]
        whole = tokenizer.decode(everything, skip_special_tokens)
        assert join_pieces(tokenizer, pieces, skip_special_tokens) == whole

    check()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=80))
def test_random_bytes_join_to_the_whole_decoding(data):
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in data]
    ids = [
        x for i, t in enumerate(ids) for x in ((t, tokenizer.token_id("a")) if i % 7 == 6 else (t,))
    ]
    assert join_pieces(tokenizer, [[token] for token in ids]) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_comes_back_from_its_ids_one_by_one(text):
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert join_pieces(tokenizer, [[token] for token in ids], skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["€", "é", "😀", "a😀b", "中文"])
def test_no_piece_shows_a_half_character(text):
    tokenizer = TOKENIZERS["byte_level"]
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push([token]) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert all(piece in ("", *text) for piece in pieces)


def test_complete_text_is_not_held_back():
    tokenizer = TOKENIZERS["byte_level"]
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push([token]) for token in tokenizer.encode("the a")] == ["the", " ", "a"]


def test_finish_gives_the_bytes_of_a_character_that_never_came():
    tokenizer = TOKENIZERS["byte_level"]
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.push(tokenizer.encode("x€")[:-1]) == "x"
    assert decoder.finish() == "\N{REPLACEMENT CHARACTER}"
    assert decoder.finish() == ""
    with pytest.raises(RuntimeError, match=r"finish\(\) was already called"):
        decoder.push([1])


@pytest.mark.parametrize("token", ["<|im_end|>", "a", "Ġ", "ÿ", "Ģ", "â"])
def test_work_per_id_does_not_grow_with_the_text(token):
    """Whatever is repeated, text or broken bytes, only a short tail is decoded again."""
    longest = 0

    class Watched(Tokenizer):
        def decode(self, token_ids, skip_special_tokens=True):
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    tokenizer = Watched(byte_level())
    ids = [tokenizer.token_id(token)] * 400
    pieces = join_pieces(tokenizer, [[token_id] for token_id in ids])
    assert longest <= 20
    assert pieces == tokenizer.decode(ids)
