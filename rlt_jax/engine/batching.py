"""Which rows run next, and what is done with them: the choice of a batch.

Decode rows are chosen by masks and sorts over the slots, since there may be hundreds of them at
every step; prompts one by one.
"""

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.slots import CODA, FREE, HELD, PREFILL, RECURRENT, Slots
from rlt_jax.engine.staging import Part, Staging
from rlt_jax.engine.types import SHARED_PREFILL_TOKENS, Row, Rows, Stage


class Choice(NamedTuple):
    """What a batch does, with which rows; num_tokens, num_loops: as in SchedulerOutput."""

    stage: Stage
    rows: Rows
    num_tokens: int = 1
    num_loops: int = 1

    def without(self, slot_n: Sequence[int]) -> "Choice":
        """Less the decode rows of these slots."""
        kept = ~np.isin(self.rows.slot, slot_n) | (self.rows.size > 0)
        rows, stage = self.rows.where(kept), self.stage
        if stage is Stage.BOUNDARY and not rows.exit_depth.any():
            stage = Stage.RECURRENT
        return self._replace(stage=stage, rows=rows)

    @property
    def has_decode_loops(self) -> bool:
        """Decode rows come first, so the first row tells."""
        return self.stage is not Stage.CODA and not self.rows.size[0]

    @property
    def last_position(self) -> np.ndarray:
        """The last one whose K/V each decode row writes, [rows]."""
        rows = self.rows
        if self.stage is Stage.TOKENS:
            return rows.position + (self.num_tokens - 1)
        if self.stage is Stage.BOUNDARY:
            return rows.position + ((rows.exit_depth > 0) & (rows.depth > 0))
        return rows.position


class _Phase(enum.Enum):
    """no_refill: admit and prefill, run all loops (or one whole token), then sample everything."""

    FILL = 0
    CORE = 1
    CODA = 2


class Batcher:
    """Chooses batches from the progress of the requests, which it only reads; a prompt chunk that
    it starts has a place in the staging from then on."""

    def __init__(
        self,
        config: SchedulerConfig,
        full_depth: int,
        tokens_per_dispatch: int,
        slots: Slots,
        staging: Staging,
        shared: bool,
    ):
        """shared: one K/V plane for all depths."""
        self._config = config
        self._full_depth = full_depth
        self._tokens_per_dispatch = tokens_per_dispatch
        self._slots = slots
        self._staging = staging
        self._shared = shared
        self._max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._choose: Callable[[], Choice | None] = {
            "refill": self._choose_refill,
            "no_refill": self._choose_no_refill,
            "mixed": self._choose_mixed,
        }[config.mode]
        self._stage = slots.stage  # of each slot, as this choice sees it: those paused have none
        self._prefills_since_decode = 0
        self._phase = _Phase.FILL

    def choose(self) -> Choice | None:
        """The next batch, or None when nothing can run now."""
        stage, paused = self._slots.stage, self._slots.paused
        self._stage = np.where(paused, FREE, stage) if paused.any() else stage
        choice = self._choose()
        if choice is None:
            return None
        if choice.has_decode_loops:
            self._prefills_since_decode = 0
        elif choice.stage is not Stage.CODA:
            self._prefills_since_decode += 1
        return choice

    def _at(self, stage: int) -> np.ndarray:
        return self._stage == stage

    def _count_decoding(self) -> int:
        return int(np.count_nonzero((self._stage >= RECURRENT) & (self._stage <= HELD)))

    # -- the modes -------------------------------------------------------------------------------

    def _choose_refill(self) -> Choice | None:
        recurrent, coda = self._at(RECURRENT), self._at(CODA)
        # Without the held rows a batch would stream the weights for a part of the rows only.
        held = bool(self._at(HELD).any())
        can_decode = not held and bool(recurrent.any() or coda.any())
        coda_due = can_decode and self._enough_exits(recurrent, coda)
        if self._at(PREFILL).any() and (not (held or can_decode) or self._may_prefill()):
            return self._decode(Stage.CODA) if coda_due else self._prompts()
        if not can_decode:
            return None
        if coda_due:
            return self._decode(self._choose_coda(recurrent, coda))
        return self._decode(self._choose_loop(recurrent))

    def _choose_mixed(self) -> Choice | None:
        """As refill while no prompt is there; else prompts join the loops of the decode rows, and
        rows that exit sample before."""
        if not self._at(PREFILL).any():
            return self._choose_refill()
        if self._at(HELD).any():
            return None
        recurrent, coda = self._at(RECURRENT), self._at(CODA)
        if self._enough_exits(recurrent, coda):
            return self._decode(Stage.CODA)
        if not recurrent.any():
            return self._prompts()
        slot_n = self._slots.oldest(recurrent, self._max_rows)
        others = self._count_decoding() - len(slot_n)
        chunks = self._chunks(self._config.max_num_batched_tokens - len(slot_n), others)
        if chunks:
            rows = self._decode_rows(slot_n, Stage.RECURRENT)
            return Choice(Stage.MIXED, rows.followed_by(Rows.of(chunks)))
        if self._may_prefill():  # the next prompt does not fit beside the decode rows
            return self._prompts()
        return self._decode(self._choose_loop(recurrent))

    def _choose_no_refill(self) -> Choice | None:
        if self._at(HELD).any():
            return None
        for _ in range(len(_Phase) + 1):  # once around, from wherever it stands
            if self._phase is _Phase.FILL:
                if self._at(PREFILL).any():
                    return self._prompts()
                self._phase = _Phase.CORE
            if self._phase is _Phase.CORE:
                recurrent = self._at(RECURRENT)
                if recurrent.any():
                    stage = self._choose_loop(recurrent)
                    if stage is Stage.TOKENS:
                        self._phase = _Phase.CODA
                    return self._decode(stage)
                self._phase = _Phase.CODA
            if self._at(CODA).any():
                return self._decode(Stage.CODA)
            self._phase = _Phase.FILL
        return None

    def _may_prefill(self) -> bool:
        """Whether prompts may run before decode rows that wait."""
        return self._prefills_since_decode < self._config.max_prefill_batches_before_decode

    def _enough_exits(self, recurrent: np.ndarray, coda: np.ndarray) -> bool:
        count = np.count_nonzero(coda)
        if count >= self._config.min_coda_batch_size:
            return True
        # Whole tokens bring no row to the coda, nor do no rows at all: no use to wait for more.
        return count > 0 and self._choose_loop(recurrent) is Stage.TOKENS

    def _choose_coda(self, recurrent: np.ndarray, coda: np.ndarray) -> Stage:
        """Rows that exit run their next loop in the same batch, unless whole tokens are next."""
        slots = self._slots
        going_on = coda & (slots.sampled + 1 < slots.max_tokens)
        return Stage.CODA if slots.whole[going_on | recurrent].all() else Stage.BOUNDARY

    def _choose_loop(self, recurrent: np.ndarray) -> Stage:
        slots = self._slots
        ready = slots.whole[recurrent].all() and not slots.depth[recurrent].any()
        return Stage.TOKENS if ready else Stage.RECURRENT

    # -- decode rows -----------------------------------------------------------------------------

    def _decode(self, stage: Stage) -> Choice:
        stage, slot_n = self._take(stage)
        num_tokens = self._tokens_at_once(slot_n) if stage is Stage.TOKENS else 1
        return Choice(stage, self._decode_rows(slot_n, stage), num_tokens)

    def _take(self, stage: Stage) -> tuple[Stage, np.ndarray]:
        """The slots of a decode batch, within the token budget; whoever waits longest comes first,
        in whichever stage: where not all fit, none is passed over."""
        slots = self._slots
        recurrent, coda = self._at(RECURRENT), self._at(CODA)
        if stage is Stage.CODA:
            return stage, slots.oldest(coda, self._max_rows)
        if stage is Stage.BOUNDARY:
            slot_n = slots.oldest(coda | recurrent, self._max_rows)
            if coda[slot_n].any():
                return stage, slot_n
            return Stage.RECURRENT, slot_n  # the rows that exit had to wait for older ones
        if stage is Stage.RECURRENT and slots.whole[recurrent].all():
            # Full-depth rows that are out of step meet at the start of a token.
            recurrent &= slots.depth > 0
        return stage, slots.oldest(recurrent, self._max_rows)

    def _tokens_at_once(self, slot_n: np.ndarray) -> int:
        slots, n = self._slots, self._tokens_per_dispatch
        left = slots.max_tokens[slot_n] - slots.sampled[slot_n]
        return 1 if slots.draws[slot_n].any() or (left < n).any() else n

    def _decode_rows(self, slot_n: np.ndarray, stage: Stage) -> Rows:
        slots = self._slots
        exits = slots.stage[slot_n] == CODA
        sampled, none = slots.sampled[slot_n], np.zeros(len(slot_n), np.int32)
        reads_gate = none > 0
        if stage is Stage.TOKENS:
            depth = exit_depth = none + self._full_depth
        else:
            exit_depth = np.where(exits, slots.exit_depth[slot_n], 0)
            begins = (stage is Stage.BOUNDARY) & (sampled + 1 < slots.max_tokens[slot_n])
            depth = np.where(exits, begins, slots.depth[slot_n] + 1)
            # With no gate to read the first is behind the last.
            reads_gate = (depth >= slots.first_gate[slot_n]) & (depth <= slots.last_gate[slot_n])
        return Rows(
            generation=slots.generation[slot_n],
            slot=slot_n,
            position=slots.position[slot_n],
            depth=depth,
            exit_depth=exit_depth,
            output_index=sampled,
            reads_gate=reads_gate,
            ends_prompt=none > 0,
            size=none,
            window=none,
        )

    # -- prompts ---------------------------------------------------------------------------------

    def _prompts(self) -> Choice:
        """A batch of prompts alone: through all loops at once, unless some are between their loops
        or the chunks of one can run side by side."""
        slots, budget = self._slots, self._config.max_num_batched_tokens
        prompts = self._at(PREFILL)
        left_n = (slots.prompt_size - slots.position)[prompts]
        regroups = self._side_by_side(len(left_n)) > 1 and bool(
            (left_n > self._config.prefill_chunk_size).any()
        )
        if not self._staging and not regroups:
            return Choice(Stage.PREFILL, Rows.of(self._whole_chunks(budget)))
        decoding = self._count_decoding()
        may_join = self._config.mode == "mixed" and decoding < budget
        rows = Rows.of(self._chunks(budget, decoding if may_join else 0))
        # Decode rows or a next chunk wait no longer than for one loop.
        one_loop = regroups or decoding > 0
        num_loops = 1 if one_loop else self._full_depth + 1 - int(rows.depth.max())
        return Choice(Stage.MIXED, rows, num_loops=num_loops)

    def _whole_chunks(self, budget: int) -> list[Row]:
        """Chunks for all loops. Prompts take turns."""
        rows: list[Row] = []
        most = self._config.prefill_chunk_size
        if self._shared:
            most = min(most, SHARED_PREFILL_TOKENS)
        for slot in self._slots.oldest(self._at(PREFILL), self._max_rows).tolist():
            part = self._next_part(slot, min(most, budget))
            if part.size:
                rows.append(self._prompt_row(slot, part, self._full_depth, begins=True))
                budget -= part.size
        return rows

    def _chunks(self, budget: int, others: int) -> list[Row]:
        """Chunks for one loop: those between their loops, and new ones in what they leave. Prompts
        take turns; where a chunk does not fit nothing else is taken, so that its turn comes.

        others: decode rows of other batches, which are to fit beside the new ones' next loops.
        """
        slots, staging = self._slots, self._staging
        rows: list[Row] = []
        queue = slots.oldest(self._at(PREFILL), len(slots.stage)).tolist()
        for slot in queue:
            for chunk in staging.chunks_of(slot):
                if chunk.part.size > budget:
                    return rows
                rows.append(self._prompt_row(slot, chunk.part, chunk.depth + 1, chunk.window))
                budget -= chunk.part.size
        budget -= others
        side_by_side = self._side_by_side(len(queue))
        for slot in queue:
            part = self._next_part(slot, min(self._config.prefill_chunk_size, budget))
            may_start = part.size > 0 and len(staging.chunks_of(slot)) < side_by_side
            if may_start and (window := staging.start(slot, part)) is not None:
                rows.append(self._prompt_row(slot, part, 1, window, begins=True))
                budget -= part.size
        return rows

    def _side_by_side(self, prompts: int) -> int:
        """Chunks of one prompt that may be between their loops: one where a chunk of each prompt
        fills the budget too."""
        config = self._config
        room = prompts * config.prefill_chunk_size < config.max_num_batched_tokens
        return self._full_depth if config.wavefront_chunked_prefill and room else 1

    def _next_part(self, slot: int, most: int) -> Part:
        """The next tokens of a prompt."""
        position, end = int(self._slots.position[slot]), int(self._slots.prompt_size[slot])
        size = min(most, end - position)
        return Part(position, size, ends_prompt=position + size == end)

    def _prompt_row(
        self, slot: int, part: Part, depth: int, window: int = 0, begins: bool = False
    ) -> Row:
        request = self._slots.request[slot]
        end = part.position + part.size
        return Row(
            request.generation,
            slot,
            part.position,
            depth=depth,
            size=part.size,
            window=window,
            tokens=request.prompt[part.position : end] if begins else (),
            ends_prompt=part.ends_prompt,
        )
