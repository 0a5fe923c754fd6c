"""Whatever batch the scheduler makes fits the program that it is for: rows, prompt tokens, tiles,
rows of the prompt window. Real packing, under random workloads."""

import dataclasses
from collections import Counter

import jax
import pytest

from rlt_jax.assembly import plan_buckets
from rlt_jax.config import CacheConfig, ExecutionConfig
from rlt_jax.engine.types import SchedulerOutput, Stage
from rlt_jax.kernels.selection import REFERENCE
from rlt_jax.models.ouro import DTypePolicy
from rlt_jax.runtime.compilation import Programs
from rlt_jax.runtime.device_state import StateShape
from rlt_jax.runtime.programs import ProgramSpec
from rlt_jax.runtime.runner import Runner
from rlt_jax.runtime.transfers import SlotContent
from tests.engine.simulated_model import FULL_DEPTH
from tests.engine.simulator import Simulation
from tests.engine.workloads import Choices, Workload, make_workload
from tests.support import small_model

WORKLOADS = 300


def programs_of(workload: Workload, choices: Choices) -> Programs:
    cache = CacheConfig(layout="last_exited" if workload.planes > 1 else "shared")
    execution = ExecutionConfig(
        min_row_bucket=2 ** choices.integer(0, 7),
        min_prefill_bucket=2 ** choices.integer(0, 7),
        tokens_per_dispatch=workload.tokens_per_dispatch,
    )
    scheduling = workload.scheduling.resolve("cpu")
    buckets = plan_buckets(cache, scheduling, execution)
    shape = StateShape(
        num_slots=scheduling.max_num_seqs,
        num_pages=workload.num_pages,
        planes=workload.planes,
        block_size=workload.block_size,
        table_width=workload.num_pages,
        window_rows=workload.planes * buckets.prompts[-1] if workload.planes > 1 else 0,
    )
    kernels = dataclasses.replace(REFERENCE, tile_rows=choices.one_of((1, 4, 16, 64)))
    spec = ProgramSpec(small_model()[0], DTypePolicy(), shape, kernels)
    return Programs(spec, buckets, jax.devices()[0])


@pytest.fixture
def nothing_on_the_device(monkeypatch):
    """Batches are packed, and that is all."""
    monkeypatch.setattr("rlt_jax.runtime.runner.init_state", lambda *_: None)
    monkeypatch.setattr(Programs, "get", lambda *_: None)


@pytest.mark.once
@pytest.mark.usefixtures("nothing_on_the_device")
def test_every_batch_of_random_workloads_fits_its_program():
    seen = Counter()
    for seed in range(WORKLOADS):
        choices = Choices(seed)
        simulation = Simulation(make_workload(choices))
        programs = programs_of(simulation.workload, choices)
        runner, submit = Runner(None, programs), simulation.device.submit

        def packed_too(batch, programs=programs, runner=runner, submit=submit):
            runner.prepare(with_content(batch))
            rows = batch.rows
            if batch.stage is Stage.MIXED:
                assert (rows.window + rows.size).max() <= programs.spec.shape.window_rows
                seen.update(extremes(batch, programs.buckets.prompts[-1]))
            seen[batch.stage] += 1
            return submit(batch)

        simulation.device.submit = packed_too
        simulation.run()
    assert min(seen[stage] for stage in set(Stage) - {Stage.SAVE, Stage.RESTORE}) > 100
    assert all(seen[extreme] for extreme in ("all depths", "tokens alone", "full bucket")), seen


def with_content(batch: SchedulerOutput) -> SchedulerOutput:
    """A batch as the runner would get it: what it restores is not the simulated device's."""
    if batch.stage is not Stage.RESTORE:
        return batch
    transfer = dataclasses.replace(batch.transfer, content=SlotContent(0, 0, 0, 0, 0))
    return dataclasses.replace(batch, transfer=transfer)


def extremes(batch: SchedulerOutput, largest: int) -> Counter:
    """What a program might be too small for."""
    chunks = Counter(row.slot for row in batch.rows if row.size)
    size = batch.rows.size
    return Counter(
        {
            "all depths": max(chunks.values()) == FULL_DEPTH,
            "tokens alone": len(chunks) > 1 and size.max() == 1,
            "full bucket": size.sum() == largest,
        }
    )
