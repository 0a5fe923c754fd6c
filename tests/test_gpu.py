"""The engine on a GPU: `pytest -m gpu`."""

import dataclasses

import jax
import pytest

from rlt_jax.assembly import assemble
from rlt_jax.bench.synthetic import OURO_1_4B
from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.types import Stage
from rlt_jax.models.ouro import DTypePolicy, init_params
from rlt_jax.runtime.compilation import Buckets, Programs
from rlt_jax.runtime.programs import Kind
from rlt_jax.sampling_params import SamplingParams
from tests.oracle import Comparison
from tests.support import SHAPES, build_engine, drive, random_work, watch

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu():
    return jax.local_devices(backend="gpu")[0]


@pytest.fixture(scope="module")
def large(gpu):
    """Ouro-1.4B's shapes with synthetic bf16 weights, everything planned and compiled ahead."""
    policy = DTypePolicy("bfloat16")
    sharding = jax.sharding.SingleDeviceSharding(gpu)
    params = init_params(OURO_1_4B, jax.random.key(0), policy, sharding)
    return assemble(
        OURO_1_4B,
        params,
        policy=policy,
        device=gpu,
        scheduler_config=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
    )


@pytest.mark.parametrize("tokens_per_dispatch", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_tokens_and_depths_equal_the_pytorch_oracle(shape, tokens_per_dispatch):
    engine = build_engine(shape, tokens_per_dispatch=tokens_per_dispatch)
    watched = watch(engine)
    comparison = Comparison()
    for work in (
        random_work(numbers=1, count=14, logprobs=0),
        random_work(numbers=2, count=4, logprobs=0, exit_threshold=1.0, max_loops=4),
    ):
        outputs = drive(engine, work)
        for i, one in enumerate(work):
            comparison.compare(one, outputs[str(i)], SHAPES[shape].layout)
    comparison.check(min_tokens=100)
    never = {Stage.MIXED, Stage.SAVE, Stage.RESTORE}
    assert {batch.stage for batch in watched.batches} == set(Stage) - never
    assert {batch.num_tokens for batch in watched.batches} == {1, tokens_per_dispatch}
    assert watched.most_in_flight == 2


def test_mixed_batches_give_float32_tokens_and_depths_of_refill_and_compile_nothing_late():
    work = [
        dataclasses.replace(one, arrival=3 * i)
        for i, one in enumerate(random_work(numbers=30, count=12))
    ]
    expected = drive(build_engine("tight"), work)
    for wavefront in (False, True):
        engine = build_engine("tight", mode="mixed", wavefront_chunked_prefill=wavefront)
        watched = watch(engine)
        outputs = drive(engine, work)
        for i in expected:
            assert outputs[i].token_ids == expected[i].token_ids
            assert outputs[i].exit_depths == expected[i].exit_depths
        mixed = [batch.rows for batch in watched.batches if batch.stage is Stage.MIXED]
        assert any(0 < rows.num_decode < len(rows) for rows in mixed)
        assert any(len(set(rows.slot)) < len(rows) for rows in mixed) == wavefront
        assert engine.programs.late_compiles == 0


def test_the_pool_stays_at_its_address_and_steps_read_nothing_outside_collect():
    engine = build_engine("roomy")
    address = engine.runner.state.kv.pool.unsafe_buffer_pointer()
    with jax.transfer_guard_device_to_host("disallow"):
        for round_ in range(4):
            fields = [{"temperature": 0.8, "seed": round_}, {"exit_threshold": 1.0, "max_loops": 4}]
            work = random_work(numbers=20 + round_, count=10, **fields[round_ % 2])
            outputs = drive(engine, work)
            assert {output.error for output in outputs.values()} == {None}
            assert engine.runner.state.kv.pool.unsafe_buffer_pointer() == address


def test_the_memory_plan_leaves_what_it_says(large, gpu):
    plan = large.memory_plan
    assert plan.source == "device_memory"
    assert plan.bytes_per_block == 786_432 * 16 // 4
    promised = plan.weight_bytes + plan.kv_bytes + plan.temporary_bytes + plan.reserve_bytes
    promised += plan.transfer_bytes
    assert promised <= plan.budget_bytes
    assert plan.budget_bytes - promised < plan.bytes_per_block * plan.planes or (
        plan.num_blocks == plan.useful_blocks
    )
    stats = gpu.memory_stats()
    assert stats["peak_bytes_in_use"] <= stats["bytes_limit"]
    print(dataclasses.asdict(plan), stats)


def test_large_model_answers_the_same_twice_and_nothing_is_copied(large, gpu):
    prompts = [[i + 1] * (40 * i + 3) for i in range(12)]

    def run():
        for i, prompt in enumerate(prompts):
            threshold = 0.6 if i % 2 else 1.0
            params = SamplingParams(max_tokens=12 + i, exit_threshold=threshold)
            large.core.add_request(str(i), prompt, params)
        outputs = {}
        while large.core.has_unfinished_requests():
            outputs |= {output.request_id: output for output in large.core.step()}
        return {key: (o.token_ids, o.exit_depths) for key, o in outputs.items()}

    address = large.runner.state.kv.pool.unsafe_buffer_pointer()
    assert run() == run()
    assert large.runner.state.kv.pool.unsafe_buffer_pointer() == address
    assert large.programs.late_compiles == 0


def test_in_steady_state_the_next_batch_is_submitted_before_the_last_one_is_done(large):
    """Invariant 4: nothing is read while the device could go on, nothing compiles, no idle gap."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    for i in range(12):
        large.core.add_request(str(i), [i + 1] * 200, params)
    submit, ready, last = large.runner.submit, [], []

    def watched(batch):
        if batch.stage is Stage.TOKENS and last:
            ready.append(last[0].results.is_ready())
        ticket = submit(batch)
        last[:] = [ticket] if batch.stage is Stage.TOKENS else []
        return ticket

    large.runner.submit = watched
    try:
        with jax.transfer_guard_device_to_host("disallow"):
            while large.core.has_unfinished_requests():
                large.core.step()
    finally:
        large.runner.submit = submit
    assert len(ready) >= 50
    print(f"{sum(ready)} of {len(ready)} batches were done when the next was submitted")
    assert sum(ready) <= 0.1 * len(ready)
    assert large.programs.late_compiles == 0


@pytest.mark.parametrize(
    "kind",
    [
        Kind.PREFILL,
        Kind.RECURRENT,
        Kind.MIXED,
        Kind.BOUNDARY_GREEDY,
        Kind.TOKEN_GREEDY,
        Kind.SAVE,
        Kind.RESTORE,
    ],
)
def test_temporaries_do_not_depend_on_the_pool(kind):
    """Invariant 2 for the kernels that write in place."""
    spec = build_engine("roomy").programs.spec
    sizes = []
    for pages in (64, 256):
        shape = dataclasses.replace(spec.shape, num_pages=pages)
        buckets = Buckets((4,), (16,), mixed=True, transfers=True)
        one = Programs(dataclasses.replace(spec, shape=shape), buckets, jax.devices()[0])
        sizes.append(one.get(kind, one.buckets.of(kind)[0]).memory_analysis().temp_size_in_bytes)
    assert sizes[0] == sizes[1]
