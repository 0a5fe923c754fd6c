"""Choosing tokens from logits: pure functions over whole batches.

Order: temperature, top_k (ties of the k-th survive), top_p (a token is dropped when the
probability before it exceeds top_p), then a categorical draw by the Gumbel maximum. A row's
draw depends on its own seed and output index only.
"""

import jax
import jax.numpy as jnp


def greedy(logits_rv: jax.Array) -> jax.Array:
    """The most likely token of each row, int32 [r]; the lowest id among equals."""
    return jnp.argmax(logits_rv, axis=-1).astype(jnp.int32)


def raw_logprob(logits_rv: jax.Array, token_r: jax.Array) -> jax.Array:
    """log softmax of the raw float32 logits at each row's token, f32 [r]."""
    # Shifted first: the difference of two large numbers would lose the small digits.
    shifted = logits_rv - logits_rv.max(axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(shifted, token_r[:, None], axis=-1)[:, 0]
    return chosen - jnp.log(jnp.exp(shifted).sum(axis=-1))


def kept(sorted_rv: jax.Array, top_k_r: jax.Array, top_p_r: jax.Array) -> jax.Array:
    """Which entries of each row survive, bool [r, v].

    sorted_rv: logits over temperature, in descending order.
    """
    vocab = sorted_rv.shape[-1]
    last = jnp.where(top_k_r > 0, jnp.minimum(top_k_r, vocab), vocab) - 1
    within_k = sorted_rv >= jnp.take_along_axis(sorted_rv, last[:, None], axis=-1)
    mass = jax.nn.softmax(jnp.where(within_k, sorted_rv, -jnp.inf), axis=-1)
    mass_before = jnp.cumsum(mass, axis=-1) - mass
    # A sum of rounded terms may pass 1 by some ulps: top_p 1 keeps everything, as a flag.
    within_p = (mass_before <= top_p_r[:, None]) | (top_p_r[:, None] >= 1)
    return within_k & within_p


def sample(
    logits_rv: jax.Array,
    temperature_r: jax.Array,
    top_k_r: jax.Array,
    top_p_r: jax.Array,
    seed_r2: jax.Array,
    output_index_r: jax.Array,
) -> jax.Array:
    """Draws one token per row, int32 [r]; rows of temperature 0 take the most likely token.

    seed_r2: uint32, the 64-bit seed's high and low word, used whole as threefry key data (a
    seed passed to jax.random.key would lose its high word).
    """

    def noise(seed, index):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, index), logits_rv.shape[-1:])

    # Shifted first, and 0 / 0 left out: no temperature, however small, gives NaN.
    shifted = logits_rv - logits_rv.max(axis=-1, keepdims=True)
    scaled = jnp.where(shifted == 0, 0.0, shifted / temperature_r[:, None])
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    # Noise belongs to token ids, not to ranks: a near tie that swaps ranks keeps its draw.
    perturbed = ranked + jnp.take_along_axis(
        jax.vmap(noise)(seed_r2, output_index_r), order, axis=-1
    )
    perturbed = jnp.where(kept(ranked, top_k_r, top_p_r), perturbed, -jnp.inf)
    best = jnp.argmax(perturbed, axis=-1)[:, None]
    drawn = jnp.take_along_axis(order, best, axis=-1)[:, 0].astype(jnp.int32)
    return jnp.where(temperature_r > 0, drawn, greedy(logits_rv))
