"""Random workloads, and what each request of one must give, computed one token after the other."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.exit_policy import (
    ExitPolicy,
    OuroDelayedExit,
    OuroExit,
    RandomLookaheadExit,
    TraceExit,
)
from rlt_jax.sampling_params import SamplingParams
from tests.engine import simulated_model as model
from tests.engine.simulated_device import FAILURES, Trigger
from tests.engine.simulated_model import FULL_DEPTH, VOCAB_SIZE


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request. params.seed is its number in the workload, and names it there.

    depths: where its tokens exit if recorded depths are replayed. arrives, aborted: engine steps.
    """

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    depths: tuple[int, ...]
    arrives: int
    aborted: int | None = None

    @property
    def number(self) -> int:
        return self.params.seed

    @property
    def positions(self) -> int:
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def max_loops(self) -> int:
        return self.params.max_loops or FULL_DEPTH

    @property
    def min_loops(self) -> int:
        return self.params.min_loops or min(2, self.max_loops)


@dataclasses.dataclass(frozen=True)
class Workload:
    """exit_mode: of EXIT_MODES. failures: what goes wrong, by the number of the submitted batch."""

    exit_mode: str
    device_decides: bool
    run_ahead: bool
    scheduling: SchedulerConfig
    num_pages: int
    planes: int
    block_size: int
    incremental: bool
    caches_prefixes: bool
    watermark_ratio: float
    host_pages: int
    pages_per_transfer: int
    max_in_flight: int
    tokens_per_dispatch: int
    eos_token_ids: tuple[int, ...]
    only_finished: bool
    asks: tuple[Ask, ...]
    failures: Mapping[int, str]
    lateness: int

    @property
    def overcommits(self) -> bool:
        """Running requests may lack pages, and others then leave for them."""
        return self.scheduling.enable_preemption and self.incremental


class Choices:
    """Where the numbers of a workload come from: a seed here, Hypothesis in another class."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def one_of(self, values: Sequence):
        return values[self.integer(0, len(values) - 1)]

    def chance(self, percent: int) -> bool:
        return self.integer(1, 100) > 100 - percent


def make_workload(choices: Choices) -> Workload:
    preempts = choices.chance(50)
    count = choices.one_of((4, 8, 16, 40) if preempts else (1, 2, 4, 8, 16, 40))
    last_arrival = choices.one_of((20, 60, 100) if preempts else (0, 20, 100))
    full_depth = choices.chance(25)
    planes, block_size = choices.one_of((1, FULL_DEPTH)), choices.one_of((1, 2, 4, 16))
    shared = choices.integer(1, 3) * block_size
    asks = tuple(
        _make_ask(choices, i, count, last_arrival, full_depth, _make_prompt(choices, i, shared))
        for i in range(count)
    )
    pages = sorted(-(-ask.positions // block_size) for ask in asks)
    num_pages = pages[-1]  # the largest one fits, alone
    if preempts and choices.chance(70):
        num_pages += choices.integer(0, pages[-1])
    elif choices.chance(80):
        num_pages += choices.integer(0, choices.one_of((2, sum(pages), 2 * sum(pages))))
    elif choices.chance(20):
        num_pages = pages[len(pages) // 2]  # and some never
    max_batched_tokens = choices.integer(1, 64)
    mode = choices.one_of(
        ("refill", "no_refill", "mixed") if planes > 1 else ("refill", "no_refill")
    )
    exit_mode = choices.one_of(tuple(EXIT_MODES))
    device_decides = choices.chance(50)
    may_run_ahead = device_decides or EXIT_MODES[exit_mode].host_may_run_ahead
    return Workload(
        exit_mode=exit_mode,
        device_decides=device_decides,
        run_ahead=may_run_ahead and choices.chance(70),
        scheduling=SchedulerConfig(
            max_num_seqs=choices.integer(1, choices.one_of((4, 16))),
            max_num_batched_tokens=max_batched_tokens,
            mode=mode,
            prefill_chunk_size=choices.one_of((None, choices.integer(1, max_batched_tokens))),
            max_prefill_batches_before_decode=choices.integer(1, 3),
            min_coda_batch_size=choices.integer(1, 5),
            wavefront_chunked_prefill=planes > 1 and mode != "no_refill" and choices.chance(40),
            policy=choices.one_of(("fcfs", "priority", "priority")),
            enable_preemption=preempts,
            admission_scan_limit=choices.one_of((1, 2, 64)),
            max_admission_bypasses=choices.one_of((0, 1, 3, 8)),
        ),
        num_pages=num_pages,
        planes=planes,
        block_size=block_size,
        incremental=choices.chance(50),
        caches_prefixes=planes > 1 and choices.chance(80),
        watermark_ratio=choices.one_of((0.0, 0.1, 0.5)),
        host_pages=choices.one_of((0, choices.integer(0, 2 * pages[-1]), 2 * sum(pages))),
        pages_per_transfer=choices.one_of((1, 2, 64)),
        max_in_flight=choices.integer(1, 3),
        tokens_per_dispatch=choices.one_of((1, 2, 4)),
        eos_token_ids=tuple(range(choices.integer(0, 2))),
        only_finished=choices.chance(10),
        asks=asks,
        failures={
            choices.integer(0, 150): choices.one_of(FAILURES)
            for _ in range(choices.one_of((0, 0, 1, 4)))
        },
        lateness=choices.integer(0, 2**16),
    )


def _make_prompt(choices: Choices, number: int, shared: int) -> tuple[int, ...]:
    """shared: tokens that some prompts begin with, one more or less: where they are the same, and
    where they are but for the first one."""

    def tokens(first: int, step: int, count: int) -> list[int]:
        return [first, *((step * 7 + i * i) % VOCAB_SIZE for i in range(1, count))][:count]

    beginning = []
    if choices.chance(80):
        beginning = tokens(choices.integer(0, 1), 0, shared + choices.integer(-1, 1))
    # The rest may be nothing at all, or a beginning that is not shared.
    rest = tokens(number % VOCAB_SIZE, number, choices.chance(80) * choices.integer(1, 60))
    return tuple((beginning + rest) or [number % VOCAB_SIZE])


def _make_ask(
    choices: Choices,
    number: int,
    count: int,
    last_arrival: int,
    full_depth: bool,
    prompt: tuple[int, ...],
) -> Ask:
    max_tokens = choices.integer(1, 12)
    max_loops = None if full_depth else choices.one_of((None, *range(1, FULL_DEPTH + 1)))
    min_loops = choices.one_of((None, choices.integer(1, max_loops or FULL_DEPTH)))
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.7 * choices.chance(20),
        seed=number,
        max_loops=max_loops,
        min_loops=min_loops,
        exit_threshold=1 if full_depth else choices.one_of((1, 0, 0.3, 0.5, 0.9)),
        ignore_eos=choices.chance(20),
        stop_token_ids=(choices.integer(0, VOCAB_SIZE - 1),) if choices.chance(30) else (),
        logprobs=0 if choices.chance(20) else None,
        priority=choices.integer(-1, 1),
        cache_salt=choices.one_of((None, None, None, "salt")),
    )
    arrives = choices.integer(0, last_arrival)
    ask = Ask(
        name=f"name {choices.integer(0, 2 * count)}",  # some ask for a name that is in use
        prompt=prompt,
        params=params,
        depths=(),
        arrives=arrives,
        aborted=arrives + choices.integer(0, 60) if choices.chance(20) else None,
    )
    low, high = (ask.min_loops, ask.max_loops)
    if full_depth or choices.chance(30):
        low = high
    recorded = (choices.integer(low, high) for _ in range(max_tokens - 1))
    return dataclasses.replace(ask, depths=(FULL_DEPTH, *recorded))


# -- what must come out ----------------------------------------------------------------------------


def remaining_falls(signals: Sequence[np.float32], min_loops: int, threshold: float) -> bool:
    """The signals are signals."""
    remaining = np.float32(1)
    for signal in signals:
        remaining *= np.float32(1) - signal
    enough = np.float32(1) - remaining >= np.float32(threshold)
    return bool(len(signals) >= min_loops and enough)


def score_is_high(signals: Sequence[np.float32], min_loops: int, threshold: float) -> bool:
    """The last signal is a score for leaving after one more loop."""
    due = len(signals) + 1 >= max(2, min_loops)
    return bool(due and signals[-1] >= np.float32(threshold))


@dataclasses.dataclass(frozen=True)
class ExitMode:
    """triggers: None where depths are recorded. lag: loops from a signal to the exit it causes."""

    policy: Callable[[Sequence[Ask]], ExitPolicy]
    triggers: Trigger | None
    lag: int = 0

    @property
    def host_may_run_ahead(self) -> bool:
        return self.triggers is None or self.lag > 0

    def leaves(self, ask: Ask, output_index: int, signals: Sequence[np.float32]) -> bool:
        """Whether a token leaves after its last loop so far, from the signals of all of them."""
        if self.triggers is None:
            return len(signals) == ask.depths[output_index]
        if len(signals) == ask.max_loops:
            return True
        seen = signals[: len(signals) - self.lag]
        if not seen or ask.params.exit_threshold == 1:
            return False
        return self.triggers(seen, ask.min_loops, ask.params.exit_threshold)


def recorded(asks: Sequence[Ask]) -> TraceExit:
    return TraceExit({str(ask.number): ask.depths for ask in asks})


# Workloads draw from this table.
EXIT_MODES = {
    "ouro": ExitMode(lambda _: OuroExit(), remaining_falls),
    "ouro_delayed": ExitMode(lambda _: OuroDelayedExit(), remaining_falls, lag=1),
    "random_lookahead": ExitMode(lambda _: RandomLookaheadExit(), score_is_high, lag=1),
    "trace": ExitMode(recorded, None),
}


def expected_output(ask: Ask, workload: Workload) -> tuple[list[int], list[int], str]:
    """Tokens, exit depths and the finish reason of a request that nothing comes in between of."""
    params, text = ask.params, model.read_text(ask.prompt)
    last, tokens, depths = ask.prompt[-1], [], []
    for i in range(params.max_tokens):
        hidden = model.prelude(text, len(ask.prompt) - 1 + i, last)
        signals = []
        leaves = False
        while not leaves:
            hidden = model.loop(hidden, len(signals) + 1)
            signals.append(model.gate(hidden))
            if i == 0:
                leaves = len(signals) == FULL_DEPTH
            else:
                leaves = EXIT_MODES[workload.exit_mode].leaves(ask, i, signals)
        last = model.coda(hidden, (params.seed, i) if params.temperature > 0 else ())
        tokens.append(last)
        depths.append(len(signals))
        is_eos = last in workload.eos_token_ids and not params.ignore_eos
        if is_eos or last in params.stop_token_ids:
            return tokens, depths, "stop"
    return tokens, depths, "length"
