"""Ouro's tensors as a checkpoint names them: shapes, and the items that they are stored in.

An item is what is read, converted and stored at once: "embed", one per layer ("layers.00", ...),
and "head" (the final norm, the exit gate and the output head).
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

import ml_dtypes
import numpy as np

from rlt_jax.checkpoints_convert.errors import CheckpointError
from rlt_jax.models.ouro_config import OuroConfig

# The dtypes a checkpoint may hold, by NumPy name.
DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

NORMS = (
    "input_layernorm",
    "input_layernorm_2",
    "post_attention_layernorm",
    "post_attention_layernorm_2",
)

_LAYER_AXES: dict[str, tuple[str, ...]] = {
    "self_attn.q_proj.weight": ("heads x head_dim", "hidden_size"),
    "self_attn.k_proj.weight": ("kv_heads x head_dim", "hidden_size"),
    "self_attn.v_proj.weight": ("kv_heads x head_dim", "hidden_size"),
    "self_attn.o_proj.weight": ("hidden_size", "heads x head_dim"),
    "mlp.gate_proj.weight": ("intermediate_size", "hidden_size"),
    "mlp.up_proj.weight": ("intermediate_size", "hidden_size"),
    "mlp.down_proj.weight": ("hidden_size", "intermediate_size"),
    **{f"{norm}.weight": ("hidden_size",) for norm in NORMS},
}

_HEAD_AXES: dict[str, tuple[str, ...]] = {
    "model.norm.weight": ("hidden_size",),
    "model.early_exit_gate.weight": ("1", "hidden_size"),
    "model.early_exit_gate.bias": ("1",),
    "lm_head.weight": ("vocab_size", "hidden_size"),
}

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What the config says of one tensor. `axes` names each entry of `shape`."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint says of one tensor. dtype is a NumPy name, or whatever else was there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def layer_item(layer: int) -> str:
    return f"layers.{layer:02d}"


def expected_items(config: OuroConfig) -> dict[str, tuple[TensorSpec, ...]]:
    """Every item's tensors, in the order in which they are stored."""
    sizes = {
        "1": 1,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads x head_dim": config.num_attention_heads * config.head_dim,
        "kv_heads x head_dim": config.num_key_value_heads * config.head_dim,
    }

    def specs(prefix: str, table: Mapping[str, tuple[str, ...]]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(prefix + name, axes, tuple(sizes[axis] for axis in axes))
            for name, axes in table.items()
        )

    items = {"embed": specs("", {"model.embed_tokens.weight": ("vocab_size", "hidden_size")})}
    for layer in range(config.num_hidden_layers):
        items[layer_item(layer)] = specs(f"model.layers.{layer}.", _LAYER_AXES)
    items["head"] = specs("", _HEAD_AXES)
    return items


def expected_tensors(config: OuroConfig) -> dict[str, TensorSpec]:
    """Every tensor of the model by name."""
    return {spec.name: spec for specs in expected_items(config).values() for spec in specs}


def parameter_count(config: OuroConfig) -> int:
    return sum(math.prod(spec.shape) for spec in expected_tensors(config).values())


def check_tensors(where: object, found: Mapping[str, TensorInfo], config: OuroConfig) -> None:
    """Raises CheckpointError unless `found` is exactly what the config asks for."""
    layers = {int(match[1]) for match in map(_LAYER_NAME.match, found) if match}
    contiguous = layers == set(range(len(layers)))
    if (contiguous and len(layers) != config.num_hidden_layers) or (
        config.num_hidden_layers > len(found)
    ):
        raise CheckpointError(
            f"{where}: config.json says num_hidden_layers = {config.num_hidden_layers}, "
            f"the tensors have {len(layers)} layers"
        )
    expected = expected_tensors(config)
    if missing := [name for name in expected if name not in found]:
        raise CheckpointError(
            f"{where}: missing tensor {_few(missing)}: config.json asks for {len(expected)} tensors"
        )
    if unexpected := [name for name in found if name not in expected]:
        file = found[unexpected[0]].file
        raise CheckpointError(
            f"{where}: unexpected tensor {_few(unexpected)} in {file}: not part of an Ouro model "
            "with this config.json"
        )
    for name, spec in expected.items():
        info = found[name]
        if info.shape != spec.shape:
            raise CheckpointError(
                f"{where}: tensor {name} in {info.file} has shape {info.shape}: config.json asks "
                f"for {spec.shape}, that is ({', '.join(spec.axes)})"
            )
        if info.dtype not in DTYPES:
            raise CheckpointError(
                f"{where}: tensor {name} in {info.file} has dtype {info.dtype}: must be one of "
                + ", ".join(DTYPES)
            )


def _few(names: Iterable[str], limit: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
