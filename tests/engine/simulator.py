"""Random workloads on the real scheduler and engine core, over the simulated device.

simulate(workload) raises AssertionError at the first thing that is not as it must be. What each
request must give is computed beforehand, one token after the other (expected_output).
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.core import EngineCore
from rlt_jax.engine.exit_policy import (
    ExitPolicy,
    OuroDelayedExit,
    OuroExit,
    RandomLookaheadExit,
    TraceExit,
)
from rlt_jax.engine.intake import ModelLimits
from rlt_jax.engine.kv_accounting import KVAccounting, KVGeometry
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams
from tests.engine import simulated_model as model
from tests.engine.simulated_device import (
    FAILURES,
    Interrupt,
    Limits,
    ResetError,
    SimulatedDevice,
    Trigger,
)
from tests.engine.simulated_model import FULL_DEPTH, VOCAB_SIZE

# -- workloads -----------------------------------------------------------------------------------


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
    max_in_flight: int
    tokens_per_dispatch: int
    eos_token_ids: tuple[int, ...]
    only_finished: bool
    asks: tuple[Ask, ...]
    failures: Mapping[int, str]
    lateness: int


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
    count = choices.one_of((1, 2, 4, 8, 16, 40))
    last_arrival = choices.one_of((0, 20, 100))
    full_depth = choices.chance(25)
    asks = tuple(_make_ask(choices, i, count, last_arrival, full_depth) for i in range(count))
    planes, block_size = choices.one_of((1, FULL_DEPTH)), choices.one_of((1, 2, 4, 16))
    pages = sorted(-(-ask.positions // block_size) for ask in asks)
    num_pages = pages[-1]  # the largest one fits, alone
    if choices.chance(80):
        num_pages += choices.integer(0, 2 * sum(pages))
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
            max_num_seqs=choices.integer(1, 16),
            max_num_batched_tokens=max_batched_tokens,
            mode=mode,
            prefill_chunk_size=choices.one_of((None, choices.integer(1, max_batched_tokens))),
            max_prefill_batches_before_decode=choices.integer(1, 3),
            min_coda_batch_size=choices.integer(1, 5),
            wavefront_chunked_prefill=planes > 1 and mode != "no_refill" and choices.chance(40),
        ),
        num_pages=num_pages,
        planes=planes,
        block_size=block_size,
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


def _make_ask(
    choices: Choices, number: int, count: int, last_arrival: int, full_depth: bool
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
    )
    arrives = choices.integer(0, last_arrival)
    ask = Ask(
        name=f"name {choices.integer(0, 2 * count)}",  # some ask for a name that is in use
        prompt=tuple((number * 7 + i * i) % VOCAB_SIZE for i in range(choices.integer(1, 60))),
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
    params, text = ask.params, 0
    for token in ask.prompt:
        text = model.read_prompt(text, token)
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


# -- the simulation --------------------------------------------------------------------------------


class Simulation:
    """One workload on one engine; events counts what happened, the batches included."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.core, self.device = build(workload)
        self.events = self.device.events
        self._live: dict[int, Ask] = {}  # added and not told to have ended, by number
        self._generations: dict[int, int] = {}  # of every request added, by number
        self._outputs: dict[int, RequestOutput] = {}  # the last one, by number
        self._aborted: set[int] = set()
        self._raised = False  # by the last step, which then told nothing

    def run(self) -> Counter:
        """Steps until everything has ended."""
        tokens = sum(len(ask.prompt) + ask.params.max_tokens for ask in self._asks)
        work = tokens * (FULL_DEPTH + 1)  # each loop and coda alone
        arrivals = max(ask.arrives for ask in self._asks)
        failures = 2 * len(self.workload.failures)
        for step in range(work + arrivals + failures + len(self._asks) + 1):
            for ask in self._asks:
                if ask.arrives == step:
                    self._add(ask)
                if ask.aborted == step:
                    self._abort(ask)
            if self.core.has_unfinished_requests():
                self._step()
            elif step >= arrivals:
                self._check_end()
                return self.events
        raise AssertionError(f"not done after {step + 1} steps: {self.core.scheduler.stats()}")

    @property
    def _asks(self) -> tuple[Ask, ...]:
        return self.workload.asks

    def _add(self, ask: Ask) -> None:
        workload = self.workload
        fits = -(-ask.positions // workload.block_size) <= workload.num_pages
        taken = self.core.scheduler.find(ask.name) is not None
        if not self._raised:
            assert taken == self._is_live(ask.name)
        trace_id = str(ask.number) if workload.exit_mode == "trace" else None
        try:
            self.core.add_request(ask.name, ask.prompt, ask.params, trace_id)
        except ValueError:
            assert taken or not fits
            self.events["name in use" if taken else "too large"] += 1
            return
        assert fits and not taken
        self.events["name used again"] += ask.name in {a.name for a in self._added()}
        self._live[ask.number] = ask
        self._generations[ask.number] = self.core.scheduler.find(ask.name).generation

    def _is_live(self, name: str) -> bool:
        return any(ask.name == name for ask in self._live.values())

    def _added(self) -> list[Ask]:
        return [ask for ask in self._asks if ask.number in self._generations]

    def _abort(self, ask: Ask) -> None:
        """Whoever has the name now is meant."""
        request = self.core.scheduler.find(ask.name)
        self.events[f"abort: {self._state_of(ask.name)}"] += 1
        assert self.core.abort_request(ask.name) == (request is not None)
        if request is not None:
            victim = self._live.pop(request.params.seed)
            assert request.generation == self._generations[victim.number]
            self._aborted.add(victim.number)
        elif not self._raised:
            assert not self._is_live(ask.name)

    def _state_of(self, name: str) -> str:
        request = self.core.scheduler.find(name)
        if request is None:
            return "unknown"
        busy = self.device.is_busy(request.generation)
        return self.core.scheduler.stage_of(name).name.lower() + (" in flight" if busy else "")

    def _step(self) -> None:
        device, core = self.device, self.core
        losses, refused = device.losses, set(device.refused)
        outputs = []
        may_fail = self._raised
        try:
            outputs = core.step(self.workload.only_finished)
            self._raised = False
        except (Interrupt, ResetError):
            self._raised = True
        newly_refused = device.refused - refused
        for output in outputs:
            self._told(output, may_fail or device.losses > losses, newly_refused)
        if device.losses > losses:
            assert core.scheduler.stats()["running"] == 0
        if not self._raised:
            live = {self._generations[number] for number in self._live}
            assert not live & newly_refused
        self._check_stats()

    def _told(self, output: RequestOutput, all_failed: bool, refused: set[int]) -> None:
        number = output.sampling_params.seed
        ask = self._asks[number]
        before = self._outputs.get(number)
        assert before is None or not before.finished, "told after its end"
        self._outputs[number] = output
        assert (output.request_id, output.prompt_token_ids) == (ask.name, ask.prompt)
        assert output.finished or not self.workload.only_finished
        if before is not None:
            self._check_growth(before, output)
        if not output.finished:
            assert number in self._live and output.token_ids and output.error is None
            return
        if number not in self._aborted:
            del self._live[number]
        self.events[f"ended: {output.finish_reason}"] += 1
        assert (output.finish_reason == "abort") == (number in self._aborted)
        assert (output.finish_reason == "error") == (output.error is not None)
        if output.error is not None:
            assert all_failed or self._generations[number] in refused
            assert output.metrics.queue_time is not None, "it was waiting, and must wait on"

    def _check_growth(self, before: RequestOutput, output: RequestOutput) -> None:
        count = len(before.token_ids)
        assert output.token_ids[:count] == before.token_ids
        assert len(output.token_ids) > count or output.finish_reason in ("abort", "error")

    def _check_stats(self) -> None:
        core, workload = self.core, self.workload
        stats = core.scheduler.stats()
        tables = core.scheduler.block_tables()
        pages = [page for table in tables.values() for page in table]
        assert len(set(pages)) == len(pages)
        assert stats["total_blocks"] == workload.num_pages * workload.planes
        used = stats["total_blocks"] - stats["free_blocks"]
        assert len(pages) * workload.planes <= used <= stats["total_blocks"]
        assert used or not stats["running"]
        assert len(tables) <= stats["running"] <= workload.scheduling.max_num_seqs
        assert stats["prefill"] + stats["recurrent"] + stats["coda"] <= stats["running"]
        assert stats["staged"] <= stats["prefill"]
        assert 0 <= stats["waiting"] <= len(self._live) or self._raised
        self.events["waiting for a slot or blocks"] += stats["waiting"] > 0

    def _check_end(self) -> None:
        for ask in self._added():
            output = self._outputs[ask.number]
            assert output.finished, "its end was not told"
            tokens, depths, reason = expected_output(ask, self.workload)
            count = len(output.token_ids)
            if output.finish_reason in ("abort", "error"):
                assert count < len(tokens), "it had ended by itself"
            else:
                assert (count, output.finish_reason) == (len(tokens), reason)
            assert output.token_ids == tuple(tokens[:count])
            assert output.exit_depths == tuple(depths[:count])
            logprobs = None if ask.params.logprobs is None else (-0.5,) * count
            assert output.logprobs == logprobs
            self.events.update(f"exit at {depth}" for depth in depths[1:count])
        assert not self._live
        self._check_totals()
        stats = self.core.scheduler.stats()
        assert stats.pop("free_blocks") == stats.pop("total_blocks")
        assert set(stats.values()) == {0}, stats
        assert self.core.scheduler.block_tables() == {}
        if self.workload.exit_mode == "trace":
            assert not self.events["gates"]

    def _check_totals(self) -> None:
        totals = self.core.scheduler.totals()
        depths = [depth for output in self._outputs.values() for depth in output.exit_depths]
        assert totals["output_tokens"] == len(depths)
        assert totals["mean_depth"] == (np.mean(depths) if depths else None)
        if all(output.finish_reason == "length" for output in self._outputs.values()):
            assert totals["idle_row_loops"] == self.events["loops in vain"]


def build(workload: Workload) -> tuple[EngineCore, SimulatedDevice]:
    scheduling = workload.scheduling.resolve("cpu")
    limits = ModelLimits(VOCAB_SIZE, FULL_DEPTH, 512, workload.eos_token_ids)
    mode = EXIT_MODES[workload.exit_mode]
    policy = mode.policy(workload.asks)
    kv = KVAccounting(KVGeometry(workload.num_pages, workload.planes, workload.block_size))
    scheduler = Scheduler(
        scheduling, limits, policy, kv, workload.tokens_per_dispatch, workload.run_ahead
    )
    sizes = Limits(
        num_pages=workload.num_pages,
        planes=workload.planes,
        block_size=workload.block_size,
        num_slots=scheduling.max_num_seqs,
        max_rows=min(scheduling.max_num_seqs, scheduling.max_num_batched_tokens),
        max_prompt_tokens=scheduling.max_num_batched_tokens,
        chunk=scheduling.prefill_chunk_size,
        max_in_flight=workload.max_in_flight,
        tokens_per_dispatch=workload.tokens_per_dispatch,
        run_ahead=workload.run_ahead,
        lag=mode.lag,
    )
    decides = mode.triggers if workload.device_decides else None
    device = SimulatedDevice(sizes, workload.failures, workload.lateness, decides)
    return EngineCore(scheduler, device, limits, policy, workload.max_in_flight), device


def simulate(workload: Workload) -> Counter:
    return Simulation(workload).run()
