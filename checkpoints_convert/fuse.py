"""Checkpoint tensors to and from the runtime's leaves (host side, NumPy).

The runtime fuses what it multiplies together: q, k and v; gate and up; a layer's four norms.
"""

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from rlt_jax.checkpoints_convert.tensors import NORMS, expected_items
from rlt_jax.models.ouro import OuroLayerParams, OuroParams
from rlt_jax.models.ouro_config import OuroConfig


def fuse_layer(tensors: Mapping[str, np.ndarray], layer: int, dtype: np.dtype) -> OuroLayerParams:
    """One layer's item to its leaves, each a new array of `dtype`."""

    def get(name: str) -> np.ndarray:
        return tensors[f"model.layers.{layer}.{name}.weight"]

    def rows(*names: str) -> np.ndarray:
        return np.concatenate([get(name) for name in names], dtype=dtype, casting="unsafe")

    return OuroLayerParams(
        wqkv=rows("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        wo=rows("self_attn.o_proj"),
        w_gate_up=rows("mlp.gate_proj", "mlp.up_proj"),
        w_down=rows("mlp.down_proj"),
        norms=np.stack([get(norm) for norm in NORMS], dtype=dtype, casting="unsafe"),
    )


def fuse_ends(tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> dict[str, np.ndarray]:
    """The "embed" or the "head" item to OuroParams fields, each a new array of `dtype`."""
    fields = {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "gate_weight": "model.early_exit_gate.weight",
        "gate_bias": "model.early_exit_gate.bias",
        "lm_head": "lm_head.weight",
    }
    leaves = {
        field: np.array(tensors[name], dtype) for field, name in fields.items() if name in tensors
    }
    if "gate_weight" in leaves:
        leaves["gate_weight"] = leaves["gate_weight"].reshape(-1)  # [1, d] -> [d]
        leaves["gate_bias"] = leaves["gate_bias"].reshape(())  # [1] -> []
    return leaves


def unfuse(config: OuroConfig, params: OuroParams) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The inverse: each item's name with its tensors by checkpoint name, one item at a time."""
    for item, specs in expected_items(config).items():
        if item == "embed":
            arrays = [params.embed]
        elif item == "head":
            arrays = [params.norm, params.gate_weight, params.gate_bias, params.lm_head]
        else:
            layer = jax.device_get(params.layers[int(item.removeprefix("layers."))])
            query = config.num_attention_heads * config.head_dim
            key = config.num_key_value_heads * config.head_dim
            arrays = [
                *np.split(layer.wqkv, [query, query + key]),
                layer.wo,
                *np.split(layer.w_gate_up, 2),
                layer.w_down,
                *layer.norms,
            ]
        yield (
            item,
            {
                spec.name: np.asarray(array).reshape(spec.shape)
                for spec, array in zip(specs, arrays, strict=True)
            },
        )
