"""Ouro: parameters, and the pure stages prelude -> recurrent (once per loop) -> coda.

Source: "Scaling Latent Reasoning via Looped Language Models" (arXiv 2510.25741). The exact
numerics are written down in docs/architecture.md. Nothing here knows of scheduling.

Arrays are named by their axes: t rows, d hidden, h heads, k key/value heads, c = h + 2k,
x head_dim, y = x / 2, v vocabulary.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from rlt_jax.config import DTYPES
from rlt_jax.kernels.kv_update import rotate_and_write
from rlt_jax.kernels.paged_decode import prepare, write_and_decode
from rlt_jax.kernels.paged_kv import MixedBatch, PagedKV, Places, RowBatch, TileBatch
from rlt_jax.kernels.paged_prefill import paged_prefill
from rlt_jax.kernels.residual_norm import residual_norm, rms_norm
from rlt_jax.kernels.selection import Kernels
from rlt_jax.models.ouro_config import OuroConfig
from rlt_jax.validation import check_choice

__all__ = [
    "DTypePolicy",
    "OuroConfig",
    "OuroLayerParams",
    "OuroParams",
    "abstract_params",
    "coda",
    "exit_probability",
    "exit_score",
    "init_params",
    "prelude",
    "recurrent",
]


@dataclasses.dataclass(frozen=True)
class DTypePolicy:
    """Weights and activations are of `dtype`, K/V of `kv_dtype` (None: of dtype). Norms'
    statistics, rotary angles, the gate, logits and sampling are always float32."""

    dtype: str = "float32"
    kv_dtype: str | None = None

    def __post_init__(self):
        check_choice("dtype", self.dtype, DTYPES)
        if self.kv_dtype is None:
            object.__setattr__(self, "kv_dtype", self.dtype)
        check_choice("kv_dtype", self.kv_dtype, DTYPES)

    @classmethod
    def on(cls, platform: str, dtype: str) -> "DTypePolicy":
        """The policy for a device. On a CPU K/V lies in float32, which holds bfloat16 exactly:
        jax 0.10 copies a whole bfloat16 pool at every write there."""
        return cls(dtype, "float32" if platform == "cpu" else dtype)

    @property
    def precision(self) -> lax.Precision:
        """float32 products must not fall to TF32 on a GPU."""
        return lax.Precision.HIGHEST if self.dtype == "float32" else lax.Precision.DEFAULT


@struct.dataclass
class OuroLayerParams:
    """One layer; every matrix is [out, in] as in the checkpoint.

    wqkv: [(h + 2k) * x, d], the q, k and v rows one after the other.
    w_gate_up: [2 * mlp, d], gate rows then up rows. norms: [4, d], in the order of use:
    before and after attention, before and after the MLP.
    """

    wqkv: jax.Array
    wo: jax.Array
    w_gate_up: jax.Array
    w_down: jax.Array
    norms: jax.Array


@struct.dataclass
class OuroParams:
    """embed, lm_head: [v, d]. norm: [d]. gate_weight: [d], gate_bias: [] (both used in f32)."""

    embed: jax.Array
    layers: tuple[OuroLayerParams, ...]
    norm: jax.Array
    gate_weight: jax.Array
    gate_bias: jax.Array
    lm_head: jax.Array


def abstract_params(config: OuroConfig, policy: DTypePolicy) -> OuroParams:
    """The parameter tree as jax.ShapeDtypeStruct leaves."""
    dtype = jnp.dtype(policy.dtype)

    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    d, x = config.hidden_size, config.head_dim
    h, k = config.num_attention_heads, config.num_key_value_heads
    layer = OuroLayerParams(
        wqkv=leaf((h + 2 * k) * x, d),
        wo=leaf(d, h * x),
        w_gate_up=leaf(2 * config.intermediate_size, d),
        w_down=leaf(d, config.intermediate_size),
        norms=leaf(4, d),
    )
    return OuroParams(
        embed=leaf(config.vocab_size, d),
        layers=(layer,) * config.num_hidden_layers,
        norm=leaf(d),
        gate_weight=leaf(d),
        gate_bias=leaf(),
        lm_head=leaf(config.vocab_size, d),
    )


def init_params(
    config: OuroConfig,
    key: jax.Array,
    policy: DTypePolicy = DTypePolicy(),
    sharding: jax.sharding.Sharding | None = None,
) -> OuroParams:
    """Synthetic weights, drawn on the device one tensor at a time (never on the host).

    Matrices ~ N(0, 1/in); norms ~ 1 + N(0, 0.01); the embedding ~ N(0, 1).
    """

    @functools.partial(jax.jit, static_argnums=(1, 2, 3, 4), out_shardings=sharding)
    def draw(key, shape, dtype, mean, deviation):
        noise = jax.random.normal(key, shape, jnp.float32)
        return (mean + deviation * noise).astype(dtype)

    def draw_leaf(path, leaf):
        name = path[-1].name
        if name in ("norm", "norms"):
            mean, deviation = 1.0, 0.1
        elif name == "embed":
            mean, deviation = 0.0, 1.0
        else:
            mean, deviation = 0.0, float(max(leaf.shape[-1:], default=1)) ** -0.5
        leaf_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return draw(leaf_key, leaf.shape, leaf.dtype, mean, deviation)

    return jax.tree_util.tree_map_with_path(draw_leaf, abstract_params(config, policy))


def rotary_angles(
    positions_t: jax.Array, head_dim: int, theta: float, dtype
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each [t, y]; computed in float32, then cast."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse_frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    angles = positions_t[:, None].astype(jnp.float32) * inverse_frequencies
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def linear(x: jax.Array, weight: jax.Array, policy: DTypePolicy, out_dtype=None) -> jax.Array:
    """x [..., in] times weight [out, in], accumulated in float32."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    out_dtype = out_dtype or x.dtype
    return lax.dot_general(
        x, weight, contract, precision=policy.precision, preferred_element_type=out_dtype
    )


def prelude(params: OuroParams, tokens: jax.Array) -> jax.Array:
    """Token ids of any shape [...] to hidden states [..., d]."""
    return jnp.take(params.embed, tokens, axis=0, mode="clip")


@struct.dataclass
class _Part:
    """What every layer needs of a batch's decode or prompt rows: computed once per loop. cos, sin:
    [t, y]."""

    batch: RowBatch | TileBatch
    places: Places
    cos: jax.Array
    sin: jax.Array

    @classmethod
    def of(cls, batch: RowBatch | TileBatch, config: OuroConfig, kv: PagedKV, dtype) -> "_Part":
        angles = rotary_angles(batch.row_positions, config.head_dim, config.rope_theta, dtype)
        return cls(batch, batch.places(kv), *angles)


_Parts = tuple[_Part | None, _Part | None]  # decode rows, then prompt rows


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(
    config: OuroConfig,
    policy: DTypePolicy,
    kernels: Kernels,
    params: OuroLayerParams,
    next_norms_nd: jax.Array,
    layer: jax.Array,
    hidden_td: jax.Array,
    normed_td: jax.Array,
    kv: PagedKV,
    parts: _Parts,
) -> tuple[jax.Array, jax.Array, PagedKV]:
    """One sandwich-normed layer. An inner jit, so that all layers share one trace.

    normed_td: hidden_td after this layer's first norm. Returns (hidden, hidden after the norm
    next_norms_nd[0] of what follows, K/V).
    """
    attended_td, kv = _attention(config, policy, kernels, params, layer, normed_td, kv, parts)
    hidden_td, normed_td = residual_norm(
        hidden_td,
        attended_td,
        (params.norms, 1),
        (params.norms, 2),
        config.rms_norm_eps,
        kernels,
    )
    gate, up = jnp.split(linear(normed_td, params.w_gate_up, policy), 2, axis=-1)
    mlp_td = linear(jax.nn.silu(gate) * up, params.w_down, policy)
    hidden_td, normed_td = residual_norm(
        hidden_td, mlp_td, (params.norms, 3), (next_norms_nd, 0), config.rms_norm_eps, kernels
    )
    return hidden_td, normed_td, kv


def _attention(config, policy, kernels, params, layer, normed_td, kv, parts: _Parts):
    """Projects, rotates, writes K/V, attends, projects back: ([t, d], K/V)."""
    t = normed_td.shape[0]
    h, k, x = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    qkv_tcx = linear(normed_td, params.wqkv, policy).reshape(t, h + 2 * k, x)
    decode, prompt = parts
    r = t - prompt.batch.num_rows if prompt else t
    outs_thx = []
    # Every write comes before any read, or XLA would keep a copy of the pool to read from.
    if prompt:
        new_kv = (qkv_tcx[r:], prompt.cos, prompt.sin, kv, layer)
        q_thx, kv = rotate_and_write(*new_kv, prompt.places, kernels)
    if decode:
        new_kv = (qkv_tcx[:r], decode.cos, decode.sin, kv, layer)
        out_rhx, kv = write_and_decode(*new_kv, decode.batch, kernels, policy.precision)
        outs_thx.append(out_rhx)
    if prompt:
        out_thx = paged_prefill(q_thx, kv, layer, prompt.batch, kernels, policy.precision)
        outs_thx.append(out_thx)
    return linear(jnp.concatenate(outs_thx).reshape(t, h * x), params.wo, policy), kv


def recurrent(
    config: OuroConfig,
    policy: DTypePolicy,
    kernels: Kernels,
    params: OuroParams,
    hidden_td: jax.Array,
    kv: PagedKV,
    batch: RowBatch | TileBatch | MixedBatch,
) -> tuple[jax.Array, PagedKV]:
    """One loop through the whole stack, the final norm included.

    Writes each valid row's K/V at (its depth, its position), then attends over that plane up to
    the row itself. Depth is data: rows of one batch may be at different loops.
    """
    parts = tuple(part and _Part.of(part, config, kv, hidden_td.dtype) for part in batch.parts)
    if parts[0]:
        kv = prepare(kv, parts[0].batch, kernels)
    normed_td = rms_norm(hidden_td, params.layers[0].norms[0], config.rms_norm_eps)
    next_norms = [layer.norms for layer in params.layers[1:]] + [params.norm[None]]
    for layer, (layer_params, next_norms_nd) in enumerate(zip(params.layers, next_norms)):
        hidden_td, normed_td, kv = _layer(
            config,
            policy,
            kernels,
            layer_params,
            next_norms_nd,
            jnp.int32(layer),
            hidden_td,
            normed_td,
            kv,
            parts,
        )
    return normed_td, kv.replace(scratch=None)


def exit_probability(params: OuroParams, hidden: jax.Array) -> jax.Array:
    """The gate, a hazard: sigmoid(w . h + b) in float32 for hidden [..., d]."""
    return exit_score(params.gate_weight, params.gate_bias, hidden)


def exit_score(weight: jax.Array, bias: jax.Array, hidden: jax.Array) -> jax.Array:
    """sigmoid(w . h + b) in float32 for hidden [..., d]."""
    weight, hidden = weight.astype(jnp.float32), hidden.astype(jnp.float32)
    logit = jnp.einsum("...d,d->...", hidden, weight, precision=lax.Precision.HIGHEST)
    return jax.nn.sigmoid(logit + bias.astype(jnp.float32))


def coda(policy: DTypePolicy, params: OuroParams, hidden: jax.Array) -> jax.Array:
    """Hidden states [..., d], normed by their last loop, to float32 logits [..., v]."""
    return linear(hidden, params.lm_head, policy, out_dtype=jnp.float32)
