"""Ouro over whole rows at once, for training and scoring: no paged cache, no scheduler.

The same mathematics as rlt_jax.models.ouro, with early exit in it: a token that has left the loop
keeps the keys and values of its last loop, and later tokens see those at every deeper loop (the
LAST_EXITED layout). Each token's own deeper loops are still computed, as if it had stayed, so that
one pass gives every token's result at every depth.

Rows of several widths share all matrix products: their tokens lie on one axis t, cut into rows only
for attention. Axes: t tokens, n rows, w width, h heads, x head_dim, d hidden.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rlt_jax.models.ouro import (
    DTypePolicy,
    OuroLayerParams,
    OuroParams,
    abstract_params,
    apply_rotary,
    linear,
    rms_norm,
    rotary_angles,
)
from rlt_jax.models.ouro_config import OuroConfig

Shapes = tuple[tuple[int, int], ...]  # (n, w) of each group of rows
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


def flatten(groups: Sequence[jax.Array]) -> jax.Array:
    """[n, w] arrays to one [t]."""
    return jnp.concatenate([group.reshape(-1) for group in groups])


def positions(shapes: Shapes) -> jax.Array:
    """[t]: each row counts from 0."""
    return flatten([jnp.broadcast_to(jnp.arange(w), (n, w)) for n, w in shapes])


def attend_rows(
    q: jax.Array, own: tuple[jax.Array, jax.Array], seen: tuple[jax.Array, jax.Array] | None
) -> jax.Array:
    """Causal attention in rows [n, w, h, x]: a token sees itself by `own`, earlier ones by `seen`.

    seen None: the same as own.
    """
    (k_own, v_own), (k, v) = own, seen or own
    width, scale = q.shape[1], q.shape[-1] ** -0.5
    scores = jnp.einsum("nqhx,nkhx->nhqk", q, k, preferred_element_type=jnp.float32)
    itself = jnp.eye(width, dtype=bool)
    if seen is not None:
        own_score = jnp.einsum("nqhx,nqhx->nhq", q, k_own, preferred_element_type=jnp.float32)
        scores = jnp.where(itself, own_score[..., None], scores)
    causal = jnp.tril(jnp.ones((width, width), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores * scale, -jnp.inf), axis=-1)
    attended = jnp.einsum("nhqk,nkhx->nqhx", weights.astype(q.dtype), v)
    if seen is not None:
        own_weight = jnp.sum(jnp.where(itself, weights, 0), axis=-1).swapaxes(1, 2)
        attended += own_weight[..., None].astype(q.dtype) * (v_own - v)
    return attended


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def layer(
    config: OuroConfig,
    policy: DTypePolicy,
    shapes: Shapes,
    params: OuroLayerParams,
    hidden: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    history: tuple[jax.Array, jax.Array] | None,
    left: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer of one loop: (hidden [t, d], the keys and values that later loops inherit)."""
    heads, x = config.num_attention_heads, config.head_dim
    norm = functools.partial(rms_norm, eps=config.rms_norm_eps)

    qkv = linear(norm(hidden, params.norms[0]), params.wqkv, policy).reshape(-1, 3 * heads, x)
    q, k, v = jnp.split(qkv, 3, axis=1)
    q, k = (apply_rotary(a[None], *angles)[0] for a in (q, k))
    kept = (k, v)
    if history is not None:
        kept = tuple(jnp.where(left[:, None, None], *pair) for pair in zip(history, kept))

    attended, start = [], 0
    for n, w in shapes:

        def rows(array, start=start, n=n, w=w):
            return array[start : start + n * w].reshape(n, w, heads, x)

        seen = None if history is None else (rows(kept[0]), rows(kept[1]))
        part = attend_rows(rows(q), (rows(k), rows(v)), seen)
        attended.append(part.reshape(n * w, heads * x))
        start += n * w
    attended = linear(jnp.concatenate(attended), params.wo, policy)
    hidden = hidden + norm(attended, params.norms[1])

    gate_up = linear(norm(hidden, params.norms[2]), params.w_gate_up, policy)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    hidden = hidden + norm(linear(jax.nn.silu(gate) * up, params.w_down, policy), params.norms[3])
    return hidden, kept


def loop(
    config: OuroConfig,
    policy: DTypePolicy,
    shapes: Shapes,
    params: OuroParams,
    hidden: jax.Array,
    history: KV | None = None,
    left: jax.Array | None = None,
) -> tuple[jax.Array, KV]:
    """All layers and the final norm, once, for [t, d].

    left: [t], tokens that left before this loop; their keys and values are those of `history`,
    what the loop before returned. Both None in the first loop.
    """
    angles = rotary_angles(
        positions(shapes)[None], config.head_dim, config.rope_theta, hidden.dtype
    )
    kept = []
    for index, layer_params in enumerate(params.layers):
        layer_history = None if history is None else history[index]
        hidden, layer_kept = layer(
            config, policy, shapes, layer_params, hidden, angles, layer_history, left
        )
        kept.append(layer_kept)
    return rms_norm(hidden, params.norm, config.rms_norm_eps), tuple(kept)
