"""A fake device: answers batches at once with scripted tokens and hazards, computing nothing.

For tests of which batches the scheduler makes; what they compute is tested on the real runner.
"""

import numpy as np

from rlt_jax.config import ExitConfig, SchedulerConfig
from rlt_jax.engine.core import EngineCore
from rlt_jax.engine.exit_policy import exit_policy
from rlt_jax.engine.intake import ModelLimits
from rlt_jax.engine.kv_accounting import KVAccounting, KVGeometry
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.engine.types import RowResult, RunnerOutput, SchedulerOutput, Stage

TOKEN, HAZARD = 7, 0.5


class FakeDevice:
    """A runner that keeps every batch it was given."""

    def __init__(self):
        self.batches: list[SchedulerOutput] = []
        self.resets = 0

    def submit(self, batch):
        self.batches.append(batch)
        return batch

    def collect(self, batch):
        rows = tuple(
            RowResult(
                row.generation,
                row.position,
                row.depth,
                exit_probability=np.float32(HAZARD) if batch.reads_gate else None,
                token=TOKEN if batch.stage is Stage.CODA else None,
                logprob=-1.0 if batch.stage is Stage.CODA else None,
            )
            for row in batch.rows
        )
        return RunnerOutput(batch.sequence, batch.stage, rows)

    def reset(self):
        self.resets += 1

    def stages(self) -> str:
        """One letter per batch: P prefill, L prelude, R recurrent, C coda."""
        letters = {Stage.PREFILL: "P", Stage.PRELUDE: "L", Stage.RECURRENT: "R", Stage.CODA: "C"}
        return "".join(letters[batch.stage] for batch in self.batches)


def fake_engine(
    *,
    num_pages: int = 1000,
    planes: int = 4,
    block_size: int = 4,
    eos_token_ids: tuple[int, ...] = (),
    exit_config: ExitConfig | None = None,
    **scheduling,
) -> tuple[EngineCore, FakeDevice]:
    limits = ModelLimits(97, full_depth=4, max_positions=512, eos_token_ids=eos_token_ids)
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 32, **scheduling})
    policy = exit_policy(exit_config or ExitConfig())
    kv = KVAccounting(KVGeometry(num_pages, planes, block_size))
    scheduler = Scheduler(config.resolve("cpu"), limits, policy, kv)
    device = FakeDevice()
    return EngineCore(scheduler, device, limits, policy), device


def run(core: EngineCore, steps: int = 10_000) -> dict:
    """Steps until everything is done; the last output of each request."""
    outputs = {}
    for _ in range(steps):
        if not core.has_unfinished_requests():
            return outputs
        outputs |= {output.request_id: output for output in core.step()}
    return outputs
