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
from examples.train_tiny.batch import Batch, Targets, shapes_of, targets_of
from rlt_jax.models.ouro import DTypePolicy, OuroParams, coda, prelude
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


def random_exits(
    config: OuroConfig, objective: Objective, batch: Batch, decoded: jax.Array, key: jax.Array
) -> jax.Array:
    """Exit depth [t]: full depth for prompts and some rows, else random from min_loops on."""
    which, how_deep = jax.random.split(key)
    early = []
    for index, (n, w) in enumerate(shapes_of(batch)):
        row = jax.random.bernoulli(jax.random.fold_in(which, index), objective.early_rows, (n, 1))
        early.append(jnp.broadcast_to(row, (n, w)))
    full = config.total_ut_steps
    depth = jax.random.randint(how_deep, decoded.shape, min(objective.min_loops, full), full + 1)
    return jnp.where(decoded & model.flatten(early), depth, full)


def hidden_by_depth(
    config: OuroConfig, params: OuroParams, batch: Batch, exits: jax.Array
) -> list[jax.Array]:
    """The final-normed hidden states [t, d] after each loop; tokens leave after `exits` [t]."""
    params = jax.tree.map(lambda leaf: leaf.astype(POLICY.dtype), params)
    hidden, history = prelude(params, model.flatten([rows.tokens for rows in batch])), None
    result = []
    for depth in range(1, config.total_ut_steps + 1):
        left = None if history is None else exits < depth
        hidden, history = model.loop(
            config, POLICY, shapes_of(batch), params, hidden, history, left
        )
        result.append(hidden)
    return result


def token_losses(params: OuroParams, hidden: list[jax.Array], targets: Targets) -> jax.Array:
    """Cross entropy in nats, [D, t]."""
    head = params.replace(lm_head=params.lm_head.astype(POLICY.dtype))

    def at_depth(state):
        log_probs = jax.nn.log_softmax(coda(POLICY, head, state), axis=-1)
        return -jnp.take_along_axis(log_probs, targets.tokens[:, None], axis=-1)[:, 0]

    return jnp.stack([at_depth(state) for state in hidden])


def exit_distribution(gate_logits: jax.Array) -> jax.Array:
    """Probability [D, t] of each exit depth, from the gate's logits at depths 1 to D - 1."""
    go_on = jnp.cumsum(jax.nn.log_sigmoid(-gate_logits), axis=0)
    reached = jnp.concatenate([jnp.zeros_like(go_on[:1]), go_on])
    stop = jnp.concatenate([jax.nn.log_sigmoid(gate_logits), jnp.zeros_like(go_on[:1])])
    return jnp.exp(reached + stop)


def group_mean(values: jax.Array, mask: jax.Array, group: jax.Array, groups: int) -> jax.Array:
    """Mean over masked tokens within each group of rows, [groups]."""
    total = jax.ops.segment_sum(jnp.where(mask, values, 0), group, groups)
    return total / jnp.maximum(jax.ops.segment_sum(mask.astype(jnp.float32), group, groups), 1)


def stage_one(
    config: OuroConfig, objective: Objective, params: OuroParams, batch: Batch, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, metrics): every group of rows counts alike."""
    targets = targets_of(batch)
    exits = random_exits(config, objective, batch, targets.is_decoded, key)
    hidden = hidden_by_depth(config, params, batch, exits)
    losses = token_losses(params, hidden, targets)
    probability = exit_distribution(gate_logit(params, jnp.stack(hidden[:-1])))
    entropy = -jnp.sum(probability * jnp.log(probability + 1e-9), axis=0)
    expected = jnp.sum(probability * losses, axis=0) - objective.beta * entropy

    def mean(values):
        return group_mean(values, targets.is_output, targets.group, len(batch))

    metrics = {
        "loss_by_depth": jnp.stack([mean(loss) for loss in losses]),
        "exit_by_depth": jnp.stack([mean(p).mean() for p in probability]),
    }
    return mean(expected).mean(), metrics


def stage_two(
    config: OuroConfig, objective: Objective, params: OuroParams, batch: Batch, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, metrics): cross entropy of the gate against whether a later loop is better."""
    targets = targets_of(batch)
    exits = random_exits(config, objective, batch, targets.is_decoded, key)
    hidden = jax.lax.stop_gradient(hidden_by_depth(config, params, batch, exits))
    losses = jax.lax.stop_gradient(token_losses(params, hidden, targets))
    best_later = jax.lax.cummin(losses, axis=0, reverse=True)[1:]
    gain = losses[:-1] - best_later
    go_on = jax.nn.sigmoid(objective.sharpness * (gain - objective.least_gain))
    logits = gate_logit(params, jnp.stack(hidden[:-1]))
    cross_entropy = -go_on * jax.nn.log_sigmoid(-logits) - (1 - go_on) * jax.nn.log_sigmoid(logits)

    def mean(values):
        return group_mean(values, targets.is_decoded, targets.group, len(batch)).mean()

    metrics = {
        "wanted": jnp.stack([mean(1 - g) for g in go_on]),
        "given": jnp.stack([mean(jax.nn.sigmoid(logit)) for logit in logits]),
    }
    return mean(cross_entropy.mean(axis=0)), metrics
