"""Ouro over whole rows at once, for training and scoring: no paged cache, no scheduler.

The same mathematics as rlt_jax.models.ouro, with early exit in it: a token that has left the loop
keeps the keys and values of its last loop, and later tokens see those at every deeper loop (the
LAST_EXITED layout). Each token's own deeper loops are still computed, as if it had stayed, so that
one pass gives every token's result at every depth.

Groups of rows of different widths share all matrix products: their tokens lie on one axis t, which
is cut into rows only for attention. Axes: t tokens, n rows, w width, h heads, x head_dim, d hidden.
"""

import functools

import jax
import jax.numpy as jnp

from examples.train_tiny.batch import Batch, Rows, flatten
from rlt_jax.kernels.kv_update import apply_rotary
from rlt_jax.kernels.residual_norm import rms_norm
from rlt_jax.models.ouro import (
    DTypePolicy,
    OuroLayerParams,
    OuroParams,
    abstract_params,
    linear,
    rotary_angles,
)
from rlt_jax.models.ouro_config import OuroConfig

KV = tuple[tuple[jax.Array, jax.Array], ...]  # for each layer: keys and values [t, h, x]


def init_params(config: OuroConfig, key: jax.Array) -> OuroParams:
    """float32 parameters to train from: every layer starts as a small step of the residual."""
    tree = abstract_params(config, DTypePolicy("float32"))
    residual_scale = (2 * config.num_hidden_layers) ** -0.5

    def draw(path, leaf):
        name = path[-1].name
        if name == "norms":  # before, after attention, before, after the MLP
            return jnp.tile(jnp.array([[1.0], [residual_scale]] * 2), (1, leaf.shape[1]))
        if name == "norm":
            return jnp.ones(leaf.shape)
        if name == "gate_weight":
            return jnp.zeros(leaf.shape)
        if name == "gate_bias":
            return jnp.float32(-1.0)
        scale = 1.0 if name == "embed" else leaf.shape[-1] ** -0.5
        index = paths.index(jax.tree_util.keystr(path))
        return scale * jax.random.normal(jax.random.fold_in(key, index), leaf.shape)

    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return jax.tree_util.tree_map_with_path(draw, tree)


def visible(rows: Rows) -> jax.Array:
    """[n, w, w]: which keys (last axis) a query sees."""
    width = rows.tokens.shape[1]
    query, key = rows.question[:, :, None], rows.question[:, None, :]
    return jnp.tril(jnp.ones((width, width), bool)) & ((key == 0) | (key == query))


def attend_rows(
    q: jax.Array, own: tuple[jax.Array, jax.Array], seen: tuple[jax.Array, jax.Array], mask
) -> jax.Array:
    """Attention in rows [n, w, h, x]: a token sees itself by `own`, the others by `seen`."""
    (k_own, v_own), (k, v) = own, seen
    itself, scale = jnp.eye(q.shape[1], dtype=bool), q.shape[-1] ** -0.5
    scores = jnp.einsum("nqhx,nkhx->nhqk", q, k).astype(jnp.float32)
    own_score = jnp.sum(q.astype(jnp.float32) * k_own.astype(jnp.float32), axis=-1)  # [n, w, h]
    scores = jnp.where(itself, own_score.swapaxes(1, 2)[..., None], scores)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores * scale, -jnp.inf), axis=-1)
    own_weight = jnp.sum(jnp.where(itself, weights, 0), axis=-1).swapaxes(1, 2)
    attended = jnp.einsum("nhqk,nkhx->nqhx", weights.astype(q.dtype), v)
    return attended + own_weight[..., None].astype(q.dtype) * (v_own - v)


@functools.partial(jax.jit, static_argnums=(0, 1))
def layer(
    config: OuroConfig,
    policy: DTypePolicy,
    params: OuroLayerParams,
    hidden: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    masks: tuple[jax.Array, ...],
    history: tuple[jax.Array, jax.Array],
    left: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer of one loop: (hidden [t, d], the keys and values that later loops inherit)."""
    heads, x = config.num_attention_heads, config.head_dim
    norm = functools.partial(rms_norm, eps=config.rms_norm_eps)

    qkv = linear(norm(hidden, params.norms[0]), params.wqkv, policy).reshape(-1, 3 * heads, x)
    q, k, v = jnp.split(qkv, 3, axis=1)
    q, k = (apply_rotary(a, *angles) for a in (q, k))
    kept = tuple(jnp.where(left[:, None, None], *pair) for pair in zip(history, (k, v)))

    attended, start = [], 0
    for mask in masks:
        n, w, _ = mask.shape

        def rows(array, start=start, n=n, w=w):
            return array[start : start + n * w].reshape(n, w, heads, x)

        part = attend_rows(rows(q), (rows(k), rows(v)), tuple(map(rows, kept)), mask)
        attended.append(part.reshape(n * w, heads * x))
        start += n * w
    attended = linear(jnp.concatenate(attended), params.wo, policy)
    hidden = hidden + norm(attended, params.norms[1])

    gate_up = linear(norm(hidden, params.norms[2]), params.w_gate_up, policy)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    hidden = hidden + norm(linear(jax.nn.silu(gate) * up, params.w_down, policy), params.norms[3])
    return hidden, kept


def no_history(config: OuroConfig, batch: Batch, dtype) -> KV:
    """Stands before the first loop, which no token can have left."""
    tokens = sum(rows.tokens.size for rows in batch)
    zeros = jnp.zeros((tokens, config.num_attention_heads, config.head_dim), dtype)
    return ((zeros, zeros),) * config.num_hidden_layers


def loop(
    config: OuroConfig,
    policy: DTypePolicy,
    params: OuroParams,
    batch: Batch,
    hidden: jax.Array,
    history: KV,
    left: jax.Array,
) -> tuple[jax.Array, KV]:
    """All layers and the final norm, once, for hidden [t, d].

    left: [t], tokens that left before this loop; they keep the keys and values of `history`,
    which the loop before returned.
    """
    position = flatten([rows.position for rows in batch])
    angles = rotary_angles(position, config.head_dim, config.rope_theta, hidden.dtype)
    masks, kept = tuple(map(visible, batch)), []
    for layer_params, layer_history in zip(params.layers, history):
        hidden, layer_kept = layer(
            config, policy, layer_params, hidden, angles, masks, layer_history, left
        )
        kept.append(layer_kept)
    return rms_norm(hidden, params.norm, config.rms_norm_eps), tuple(kept)


def embed(params: OuroParams, tokens: jax.Array) -> jax.Array:
    """prelude() as a matrix product: its gradient is one too, not a scatter into few rows."""
    one_hot = jax.nn.one_hot(tokens, params.embed.shape[0], dtype=params.embed.dtype)
    return one_hot @ params.embed
