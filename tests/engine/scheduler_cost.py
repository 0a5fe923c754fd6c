"""What a step costs on the host: python -m tests.engine.scheduler_cost

Prints how long schedule() and update() take per step with many running requests on the fake
device, whose own time is left out; then the same with requests that wait.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.exit_policy import ExitPolicy, OuroDelayedExit, OuroExit, TraceExit
from rlt_jax.engine.intake import ModelLimits, make_request
from rlt_jax.engine.kv_accounting import KVAccounting, KVGeometry
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.engine.types import Stage
from rlt_jax.sampling_params import SamplingParams
from tests.engine.fake_device import FULL_DEPTH, FakeDevice

MAX_TOKENS = 10_000
WAITING = (10, 100, 1000, 10_000)


@dataclasses.dataclass(frozen=True)
class Case:
    policy: ExitPolicy
    params: SamplingParams
    run_ahead: bool = False


def mixed_depths(requests: int) -> TraceExit:
    """Each request's tokens leave at depths of their own."""
    later = np.random.default_rng(0).integers(1, FULL_DEPTH + 1, (requests, MAX_TOKENS - 1))
    return TraceExit({str(i): (FULL_DEPTH, *row) for i, row in enumerate(later.tolist())})


def cases(requests: int) -> dict[str, Case]:
    fixed = SamplingParams(max_tokens=MAX_TOKENS)
    any_depth = dataclasses.replace(fixed, min_loops=1)
    gated = dataclasses.replace(any_depth, exit_threshold=0.5)
    return {
        "fixed depth, whole tokens": Case(OuroExit(), fixed),
        "trace, mixed depths": Case(mixed_depths(requests), any_depth),
        "ouro, gates": Case(OuroExit(), gated),
        "ouro_delayed, one loop ahead": Case(OuroDelayedExit(), gated, run_ahead=True),
    }


@dataclasses.dataclass(frozen=True)
class Cost:
    """Median microseconds per decode step, and the mean number of its rows."""

    schedule: float
    update: float
    rows: float

    @property
    def total(self) -> float:
        return self.schedule + self.update


def measure(
    case: Case,
    requests: int = 128,
    steps: int = 300,
    waiting: int = 0,
    shared: int = 0,
    changing: bool = False,
) -> Cost:
    """waiting: further requests, which have a slot but no blocks: each step looks for one that
    fits. shared: prompt tokens that all begin with, where prefixes are cached. changing: before
    each step something changes which prefixes are held."""
    limits = ModelLimits(97, FULL_DEPTH, max_positions=2 * MAX_TOKENS, eos_token_ids=(0,))
    prompt = [1] * (shared + 8)
    pages = requests * -(-(len(prompt) + MAX_TOKENS - 1) // 16)
    kv = KVAccounting(KVGeometry(pages, planes=FULL_DEPTH, block_size=16))
    slots = requests + (waiting > 0)
    config = SchedulerConfig(max_num_seqs=slots, max_num_batched_tokens=2048).resolve("cpu")
    scheduler = Scheduler(
        config,
        limits,
        case.policy,
        kv,
        run_ahead=case.run_ahead,
        caches_prefixes=shared > 0,
    )
    hazards = np.random.default_rng(1).random(4096).tolist()
    device = FakeDevice(hazard=lambda g, position, loop: hazards[(g + 7 * position + loop) % 4096])
    for i in range(requests + waiting):
        scheduler.add(
            make_request(
                str(i),
                prompt,
                dataclasses.replace(case.params, seed=i),
                generation=i,
                arrived=0.0,
                limits=limits,
                policy=case.policy,
                kv=kv,
            )
        )
    times: list[Sequence[float]] = []  # of steps in which all run
    while len(times) < steps:
        if changing and times:
            kv.publish(0, (), first=0)
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        output = device.collect(device.submit(batch))
        collected = time.perf_counter()
        scheduler.update(batch, output)
        updated = time.perf_counter()
        if batch.stage is not Stage.PREFILL and scheduler.stats()["waiting"] == waiting:
            times.append((scheduled - start, updated - collected, len(batch.rows)))
    schedule, update, _ = (1e6 * float(np.median(column)) for column in zip(*times, strict=True))
    return Cost(schedule, update, float(np.mean([rows for *_, rows in times])))


def main(requests: int = 128) -> None:
    print(f"{requests} running requests: us per step of schedule() + update()")
    for name, case in cases(requests).items():
        show(name, measure(case, requests))
    for waiting in WAITING:
        case = cases(requests)["ouro, gates"]
        show(f"ouro, gates, {waiting:,} waiting", measure(case, requests, waiting=waiting))
    for changing in (False, True):  # a step admits 64, and none is to begin behind another
        cost = measure(case, requests=64, waiting=100, shared=1024, changing=changing)
        show(f"64 running, 64 pages shared{', changing' * changing}, 100 waiting", cost)


def show(name: str, cost: Cost) -> None:
    parts = f"{cost.schedule:.0f} + {cost.update:.0f}, {cost.rows:.0f} rows"
    print(f"{name:50} {cost.total:5.0f}  ({parts})")


if __name__ == "__main__":
    main()
