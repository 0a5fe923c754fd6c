"""The signals after a loop, and the decisions that a program makes of them by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlt_jax.models import ouro
from rlt_jax.models.ouro import OuroParams
from rlt_jax.runtime.device_state import SlotExits


@dataclasses.dataclass(frozen=True)
class Exits:
    """Static in every program. decides: whether a row leaves (the "ouro" rule) is decided on the
    device. lookahead_seed: the signal is the score of a random head and not the model's gate.
    weighted: the coda reads the mean of the loops' hidden states over the exit distribution."""

    decides: bool = False
    lookahead_seed: int | None = None
    weighted: bool = False

    def signal(self, params: OuroParams, hidden_rd: jax.Array) -> jax.Array:
        """Each row's signal after a loop, float32 [r]."""
        if self.lookahead_seed is None:
            return ouro.exit_probability(params, hidden_rd)
        weight_d = jnp.asarray(random_head(self.lookahead_seed, hidden_rd.shape[-1]))
        return ouro.exit_score(weight_d, jnp.float32(0), hidden_rd)


HOST_DECIDES = Exits()


def random_head(seed: int, width: int) -> np.ndarray:
    """The weight of the lookahead head: N(0, 1 / width), float32 [width], from NumPy's Philox."""
    normal = np.random.Generator(np.random.Philox(seed)).standard_normal(width, np.float32)
    return normal * np.float32(width**-0.5)


def has_left(exits: SlotExits, slot_r: jax.Array, depth_r: jax.Array) -> jax.Array:
    """Whether the token of each row left in a loop before this one, bool [r]."""
    return exits.left_s.at[slot_r].get(mode="clip") & (depth_r > 1)


def decide_exits(
    exits: SlotExits, slot_r: jax.Array, depth_r: jax.Array, hazard_r: jax.Array
) -> tuple[SlotExits, jax.Array]:
    """Whether each row leaves after this loop, bool [r]: the arithmetic of engine.exit_policy, to
    the bit. slot_r: past the last one for rows that did not run."""
    first_r = depth_r == 1
    remaining_r = jnp.where(first_r, 1.0, exits.remaining_s.at[slot_r].get(mode="clip"))
    # A barrier, or the product may be fused with the difference below and not be rounded.
    remaining_r = lax.optimization_barrier(remaining_r * (1.0 - hazard_r))
    threshold_r = exits.threshold_s.at[slot_r].get(mode="clip")
    leaves_r = (depth_r >= exits.min_loops_s.at[slot_r].get(mode="clip")) & (threshold_r < 1)
    leaves_r &= 1.0 - remaining_r >= threshold_r
    exits = exits.replace(
        remaining_s=exits.remaining_s.at[slot_r].set(remaining_r, mode="drop"),
        left_s=exits.left_s.at[slot_r].set(leaves_r, mode="drop"),
    )
    return exits, leaves_r
