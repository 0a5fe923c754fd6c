"""Ouro's config.json: what is read, what is ignored, and what is refused."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlt_jax.validation import check_float, check_int, fail

# Keys of config.json that say nothing about the computation.
METADATA_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "initializer_range",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

# Keys that must hold one of these values: anything else asks for what Ouro's math here lacks.
FIXED_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_bias": ((False, None), "attention biases are not supported"),
    "mlp_bias": ((False, None), "MLP biases are not supported"),
    "attention_dropout": ((0, 0.0, None), "dropout does not exist at inference; must be 0"),
    "hidden_act": (("silu",), "only the silu activation is supported"),
    "rope_scaling": ((None,), "rope scaling is not supported"),
    "sliding_window": ((None,), "sliding windows are not supported"),
    "use_sliding_window": ((False, None), "sliding windows are not supported"),
    "tie_word_embeddings": ((False, None), "Ouro's output head is its own tensor"),
}

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "total_ut_steps",
)


@dataclasses.dataclass(frozen=True)
class OuroConfig:
    """Sizes and constants of an Ouro model (field names as in its config.json)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    total_ut_steps: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        for name in _SIZES:
            check_int(name, getattr(self, name), minimum=1)
        if self.head_dim % 2:
            fail("head_dim", self.head_dim, "must be even (rotary halves)")
        if self.num_attention_heads % self.num_key_value_heads:
            rule = f"must divide num_attention_heads = {self.num_attention_heads}"
            fail("num_key_value_heads", self.num_key_value_heads, rule)
        check_float("rms_norm_eps", self.rms_norm_eps, "> 0", lambda eps: eps > 0)
        check_float("rope_theta", self.rope_theta, "> 0", lambda theta: theta > 0)
        last = self.vocab_size - 1
        for i, token in enumerate(self.eos_token_ids):
            check_int(f"eos_token_id[{i}]", token, minimum=0, maximum=last)
        for name in ("bos_token_id", "pad_token_id"):
            check_int(name, getattr(self, name), minimum=0, maximum=last, optional=True)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "OuroConfig":
        """Reads a parsed config.json.

        Raises ValueError naming the field, its value and the rule for anything missing,
        unknown or impossible to honour.
        """
        if not isinstance(raw, Mapping):
            fail("config.json", raw, "must be a JSON object")
        if raw.get("model_type", "ouro") != "ouro":
            fail("model_type", raw["model_type"], "must be 'ouro'")
        for key, (allowed, rule) in FIXED_KEYS.items():
            if key in raw and not any(raw[key] is value or raw[key] == value for value in allowed):
                fail(key, raw[key], rule)
        sizes = {key: raw[key] for key in _SIZES if raw.get(key) is not None}
        _fill_in_derived_sizes(sizes)
        for key in _SIZES:
            if key not in sizes:
                fail(key, raw.get(key), "config.json must give this key")
        _check_layer_types(raw.get("layer_types"), sizes["num_hidden_layers"])
        check_float(
            "early_exit_threshold",
            raw.get("early_exit_threshold", 1.0),
            "in [0, 1]",
            lambda threshold: 0 <= threshold <= 1,
        )
        known = set(_SIZES) | METADATA_KEYS | set(FIXED_KEYS)
        known |= {"rms_norm_eps", "rope_theta", "rope_parameters", "layer_types"}
        known |= {"bos_token_id", "eos_token_id", "pad_token_id", "early_exit_threshold"}
        for key in sorted(set(raw) - known):
            fail(key, raw[key], "unknown key in config.json")
        eos = raw.get("eos_token_id")
        return cls(
            **sizes,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(raw),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            pad_token_id=raw.get("pad_token_id"),
        )

    @classmethod
    def from_json_file(cls, path: str | Path) -> "OuroConfig":
        """Reads config.json; raises ValueError with the path when it cannot be honoured."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
        try:
            return cls.from_dict(raw)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def kv_bytes_per_position(self, itemsize: int) -> int:
        """Bytes of one token's K and V in one plane."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * itemsize

    def with_total_ut_steps(self, steps: int | None) -> "OuroConfig":
        """The same model run for fewer loops, prompt and decode alike (None: as it is)."""
        if steps is None:
            return self
        check_int("total_ut_steps", steps, minimum=1, maximum=self.total_ut_steps)
        return dataclasses.replace(self, total_ut_steps=steps)


def _fill_in_derived_sizes(sizes: dict[str, int]) -> None:
    heads = sizes.get("num_attention_heads")
    hidden = sizes.get("hidden_size")
    if "num_key_value_heads" not in sizes and heads is not None:
        sizes["num_key_value_heads"] = heads
    if "head_dim" not in sizes and heads is not None and hidden is not None:
        check_int("num_attention_heads", heads, minimum=1)
        check_int("hidden_size", hidden, minimum=1)
        if hidden % heads:
            rule = f"must be a multiple of num_attention_heads = {heads} when head_dim is not given"
            fail("hidden_size", hidden, rule)
        sizes["head_dim"] = hidden // heads


def _check_layer_types(layer_types: Any, num_layers: int) -> None:
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        fail("layer_types", layer_types, "every layer must be 'full_attention'")
    if len(layer_types) != num_layers:
        fail("layer_types", layer_types, f"must have num_hidden_layers = {num_layers} entries")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """rope_theta, or the newer rope_parameters = {"rope_type": "default", "rope_theta": x}."""
    parameters = raw.get("rope_parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        fail("rope_parameters", parameters, "must be an object")
    if parameters.get("rope_type", "default") != "default":
        fail("rope_parameters.rope_type", parameters["rope_type"], "rope scaling is not supported")
    for key in sorted(set(parameters) - {"rope_type", "rope_theta"}):
        fail(f"rope_parameters.{key}", parameters[key], "rope scaling is not supported")
    theta = parameters.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        fail("rope_theta", None, "config.json must give it, here or in rope_parameters")
    if raw.get("rope_theta", theta) != theta:
        fail(
            "rope_theta", raw["rope_theta"], f"disagrees with rope_parameters.rope_theta = {theta}"
        )
    return theta
