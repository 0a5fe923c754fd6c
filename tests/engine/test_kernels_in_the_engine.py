"""An engine that runs the GPU's kernels, here in Pallas' interpreter, and one that runs jnp."""

from rlt_jax.engine.types import Stage
from rlt_jax.kernels.selection import REFERENCE, Kernels
from rlt_jax.runtime.programs import Kind
from tests.support import build_engine, drive, random_work, watch

# What the run below reaches. Whole tokens are left out: they are the same calls, dear to compile.
STAGES = {Stage.PREFILL, Stage.RECURRENT, Stage.CODA, Stage.BOUNDARY}
KINDS = [Kind.SET_SLOTS, Kind.PREFILL, Kind.RECURRENT, Kind.CODA_GREEDY, Kind.BOUNDARY_GREEDY]


def test_the_triton_kernels_give_the_tokens_and_depths_of_the_reference():
    """Prompts of one chunk and of several, a crowd of rows at mixed depths, early exits."""
    work = random_work(numbers=1, count=5, max_tokens=8, exit_threshold=0.5)
    outputs, kernels = [], []
    for requested in ("reference", "triton"):
        engine = build_engine("tight", kernels=requested, prefill_chunk_size=16)
        programs, watched = engine.programs, watch(engine)
        programs.prefetch((kind, bucket) for kind in KINDS for bucket in programs.buckets.of(kind))
        run = drive(engine, work)
        outputs.append({i: (o.token_ids, o.exit_depths) for i, o in run.items()})
        kernels.append(programs.spec.kernels)
        assert {batch.stage for batch in watched.batches} == STAGES
        assert {kind for kind, _ in programs.compiled} == set(KINDS)
        assert any(len({row.depth for row in batch.rows}) > 1 for batch in watched.batches)
    assert kernels == [REFERENCE, Kernels("triton", "triton", "triton", "triton", interpret=True)]
    assert outputs[0] == outputs[1]
    assert {depth for _, depths in outputs[1].values() for depth in depths} == {2, 3, 4}
    assert sum(len(tokens) for tokens, _ in outputs[1].values()) == 40
