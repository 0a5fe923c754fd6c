"""How requests come on: what a batch will have done, and where their tokens go from there."""

import numpy as np

from rlt_jax.engine.batching import Choice
from rlt_jax.engine.exit_policy import ExitPolicy
from rlt_jax.engine.slots import CODA, HELD, LAST, PREFILL, RECURRENT, Slots
from rlt_jax.engine.staging import Staging
from rlt_jax.engine.types import Rows, RunnerOutput, Stage


class Progress:
    """Moves requests from stage to stage, in the slots.

    What needs no result happens when a batch is scheduled; the rest when its signals are there.
    """

    def __init__(
        self, slots: Slots, staging: Staging, policy: ExitPolicy, full_depth: int, run_ahead: bool
    ):
        self._slots = slots
        self._staging = staging
        self._policy = policy
        self._full_depth = full_depth
        self._ahead = int(run_ahead)

    def schedule(self, choice: Choice) -> None:
        """These rows are about to run."""
        rows, stage = choice.rows, choice.stage
        if stage is Stage.PREFILL or stage is Stage.MIXED:
            self._prompts(rows, stage, choice.num_loops)
        if stage is not Stage.PREFILL:
            self._decode_rows(rows, stage, choice.num_tokens)

    def _prompts(self, rows: Rows, stage: Stage, num_loops: int) -> None:
        slots, full_depth = self._slots, self._full_depth
        prompts = rows.size > 0
        slot_n, position_n, depth_n = (c[prompts] for c in (rows.slot, rows.position, rows.depth))
        begins, ends = depth_n == 1, rows.ends_prompt[prompts]
        if stage is Stage.PREFILL:
            begins = depth_n > 0
        else:
            ends = ends & (depth_n + num_loops > full_depth)
            for slot, position in zip(slot_n.tolist(), position_n.tolist(), strict=True):
                self._staging.advance(slot, position, num_loops)
        slots.position[slot_n[begins]] = (position_n + rows.size[prompts])[begins]
        ended = slot_n[ends]
        slots.position[ended] -= 1  # the last prompt position gives the first output
        slots.depth[ended] = slots.exit_depth[ended] = full_depth
        slots.enter(slot_n, np.where(ends, CODA, PREFILL))

    def _decode_rows(self, rows: Rows, stage: Stage, num_tokens: int) -> None:
        """As far as no result is needed to know."""
        slots = self._slots
        exits = rows.exit_depth > 0
        if exits.any():
            slot_n = rows.slot[exits]
            slots.sampled[slot_n] += num_tokens
            last = slots.sampled[slot_n] >= slots.max_tokens[slot_n]
            slots.stage[slot_n[last]] = LAST
            going_on = slot_n[~last]
            slots.position[going_on] += num_tokens
            slots.start_token(going_on)
            if stage is Stage.CODA or stage is Stage.TOKENS:
                slots.enter(going_on, RECURRENT)
        if stage is not Stage.CODA and stage is not Stage.TOKENS:
            loops = rows.depth > 0
            if stage is Stage.MIXED:
                loops &= rows.size == 0
            slots.depth[rows.slot[loops]] = rows.depth[loops]
            self._route(rows.slot[loops])

    def _route(self, slot_n: np.ndarray) -> None:
        """Where requests go after their last scheduled loop, by what is known by now."""
        slots = self._slots
        depth = slots.depth[slot_n]
        # The signals up to this loop, or the one before, must be known.
        needed = np.minimum(depth - self._ahead, slots.last_gate[slot_n])
        awaited = needed >= np.maximum(slots.heard[slot_n] + 1, slots.first_gate[slot_n])
        leaves = depth >= slots.exit_depth[slot_n]
        known = np.where(leaves, CODA, RECURRENT)
        slots.enter(slot_n, np.where(awaited, HELD, known))

    def hear(self, rows: Rows, output: RunnerOutput) -> int:
        """Applies the signals of a batch; how many loops turn out to have been run in vain."""
        slots = self._slots
        # Only of the token that the request is at.
        current = rows.output_index + (rows.exit_depth > 0) == slots.sampled[rows.slot]
        stage = slots.stage[rows.slot]
        current &= rows.reads_gate & (stage >= RECURRENT) & (stage <= HELD)
        slots.heard[rows.slot[current]] = rows.depth[current]
        # Not of a loop that was run in vain, or whose exit is decided.
        decides = current & (rows.depth < slots.exit_depth[rows.slot])
        slot_n, loop = rows.slot[decides], rows.depth[decides]
        if output.rows.leaves is not None:
            leaves = output.rows.leaves[decides]
        else:
            leaves, slots.remaining[slot_n] = self._policy.decide(
                output.rows.exit_probability[decides],
                slots.remaining[slot_n],
                loop,
                slots.min_loops[slot_n],
                slots.threshold[slot_n],
            )
        slot_n = slot_n[leaves]
        slots.exit_depth[slot_n] = loop[leaves] + self._policy.lag
        in_vain = slots.depth[slot_n] - slots.exit_depth[slot_n]
        slot_n = rows.slot[current]
        held = slots.stage[slot_n] == HELD
        has_left = slots.depth[slot_n] >= slots.exit_depth[slot_n]
        self._route(slot_n[held | (has_left & (slots.stage[slot_n] == RECURRENT))])
        return int(in_vain[in_vain > 0].sum())
