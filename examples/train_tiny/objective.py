"""The two training objectives of Ouro (arXiv 2510.25741), on answer tokens only.

Stage I trains everything on the expected loss over exit steps under the gate's own distribution,
minus beta times that distribution's entropy (a uniform prior over depths). In half of the rows the
answer's tokens leave the loop at random depths, so that the model knows the keys and values that
adaptive decoding leaves behind.

Stage II freezes all but the gate, which learns whether looping on still improves the loss.
"""

import dataclasses

import jax
import jax.numpy as jnp

from examples.train_tiny import model
from examples.train_tiny.batch import DECODED, NOTHING, Batch, flatten, group_means, joined
from rlt_jax.models.ouro import DTypePolicy, OuroParams, coda
from rlt_jax.models.ouro_config import OuroConfig

POLICY = DTypePolicy("bfloat16")


@dataclasses.dataclass(frozen=True)
class Objective:
    """beta: weight of the entropy. early_rows: share of rows whose answers leave early.

    A token should go on when a later loop's loss is lower by more than `least_gain` nats;
    `sharpness` is how steeply the wanted continuation rises there.
    """

    beta: float = 0.1
    early_rows: float = 0.5
    min_loops: int = 2
    least_gain: float = 0.005
    sharpness: float = 50.0


def gate_logit(params: OuroParams, hidden: jax.Array) -> jax.Array:
    """float32 logit of the hazard for hidden [..., d]."""
    weight = params.gate_weight.astype(jnp.float32)
    return hidden.astype(jnp.float32) @ weight + params.gate_bias.astype(jnp.float32)


def is_decoded(role: jax.Array) -> jax.Array:
    return role >= DECODED


def random_exits(
    config: OuroConfig, objective: Objective, batch: Batch, key: jax.Array
) -> jax.Array:
    """Exit depth [t]: full depth for prompts and some rows, else random from min_loops on."""
    which, how_deep = jax.random.split(key)
    early = []
    for index, rows in enumerate(batch):
        shape = rows.tokens.shape
        row_key = jax.random.fold_in(which, index)
        leaves = jax.random.bernoulli(row_key, objective.early_rows, (shape[0], 1))
        early.append(leaves & is_decoded(rows.role))
    early, full = flatten(early), config.total_ut_steps
    depth = jax.random.randint(how_deep, early.shape, min(objective.min_loops, full), full + 1)
    return jnp.where(early, depth, full)


def hidden_by_depth(
    config: OuroConfig, params: OuroParams, batch: Batch, exits: jax.Array
) -> jax.Array:
    """The final-normed hidden states [D, t, d]; tokens leave after `exits` [t] loops."""
    params = jax.tree.map(lambda leaf: leaf.astype(POLICY.dtype), params)
    hidden = model.embed(params, flatten([rows.tokens for rows in batch]))

    def one_loop(carry, depth):
        hidden, history = model.loop(config, POLICY, params, batch, *carry, exits < depth)
        return (hidden, history), hidden

    start = hidden, model.no_history(config, batch, hidden.dtype)
    return jax.lax.scan(one_loop, start, 1 + jnp.arange(config.total_ut_steps))[1]


def token_losses(params: OuroParams, hidden: jax.Array, target: jax.Array) -> jax.Array:
    """Cross entropy in nats, [D, t], for hidden [D, t, d]."""
    head = params.replace(lm_head=params.lm_head.astype(POLICY.dtype))
    logits = coda(POLICY, head, hidden)
    one_hot = jax.nn.one_hot(target, logits.shape[-1])
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * one_hot, axis=-1)


def exit_distribution(gate_logits: jax.Array) -> jax.Array:
    """Probability [D, t] of each exit depth, from the gate's logits at depths 1 to D - 1."""
    go_on = jnp.cumsum(jax.nn.log_sigmoid(-gate_logits), axis=0)
    reached = jnp.concatenate([jnp.zeros_like(go_on[:1]), go_on])
    stop = jnp.concatenate([jax.nn.log_sigmoid(gate_logits), jnp.zeros_like(go_on[:1])])
    return jnp.exp(reached + stop)


def stage_one(
    config: OuroConfig, objective: Objective, params: OuroParams, batch: Batch, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, metrics): every group of rows counts alike."""
    rows = joined(batch)
    hidden = hidden_by_depth(config, params, batch, random_exits(config, objective, batch, key))
    losses = token_losses(params, hidden, rows.target)
    probability = exit_distribution(gate_logit(params, hidden[:-1]))
    entropy = -jnp.sum(probability * jnp.log(probability + 1e-9), axis=0)
    expected = jnp.sum(probability * losses, axis=0) - objective.beta * entropy

    def mean(values):
        return group_means(batch, values, rows.role != NOTHING)

    metrics = {"loss_by_depth": mean(losses), "exit_by_depth": mean(probability).mean(-1)}
    return mean(expected).mean(), metrics


def stage_two(
    config: OuroConfig, objective: Objective, params: OuroParams, batch: Batch, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, metrics): cross entropy of the gate against whether a later loop is better."""
    rows = joined(batch)
    hidden = hidden_by_depth(config, params, batch, random_exits(config, objective, batch, key))
    hidden = jax.lax.stop_gradient(hidden)
    losses = jax.lax.stop_gradient(token_losses(params, hidden, rows.target))
    best_later = jax.lax.cummin(losses, axis=0, reverse=True)[1:]
    gain = losses[:-1] - best_later
    go_on = jax.nn.sigmoid(objective.sharpness * (gain - objective.least_gain))
    logits = gate_logit(params, hidden[:-1])
    cross_entropy = -go_on * jax.nn.log_sigmoid(-logits) - (1 - go_on) * jax.nn.log_sigmoid(logits)

    def mean(values):
        return group_means(batch, values, is_decoded(rows.role)).mean(-1)

    metrics = {"wanted": mean(1 - go_on), "given": mean(jax.nn.sigmoid(logits))}
    return mean(cross_entropy).mean(), metrics
