"""The engine on a GPU: `pytest -m gpu`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.assembly import assemble
from rlt_jax.bench.synthetic import OURO_1_4B
from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.types import Row, Rows, SchedulerOutput, SlotUpdate, Stage, Transfer
from rlt_jax.models.ouro import DTypePolicy, init_params
from rlt_jax.runtime.compilation import Buckets, Programs
from rlt_jax.runtime.device_state import StateShape
from rlt_jax.runtime.programs import Kind, ProgramSpec, transfer_pages
from rlt_jax.runtime.runner import Runner
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
            drive(engine, work)
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
        # It only asks for copies to the host; the guard is for what waits for one.
        with jax.transfer_guard_device_to_host("allow"):
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


# K/V like the large model's, in two layers; 64 MiB are 64 pages.
TRANSFERRED = dataclasses.replace(
    OURO_1_4B, num_hidden_layers=2, vocab_size=64, intermediate_size=128
)
TABLE, OTHER_TABLE = tuple(range(0, 200, 2)), tuple(range(199, 0, -2))


@pytest.fixture
def transferring(gpu, monkeypatch) -> Runner:
    """A runner that saves and restores, with a random state."""
    policy = DTypePolicy("bfloat16")
    shape = StateShape(4, num_pages=200, planes=4, block_size=16, table_width=120)
    spec = ProgramSpec(TRANSFERRED, policy, shape)
    assert transfer_pages(spec) == 64
    rng = np.random.default_rng(0)

    def random_state(abstract, sharding):
        def fill(leaf):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)
            return rng.integers(0, 2, leaf.shape).astype(leaf.dtype)

        return jax.device_put(jax.tree.map(fill, abstract), sharding)

    monkeypatch.setattr("rlt_jax.runtime.runner.init_state", random_state)
    programs = Programs(spec, Buckets((4,), (16,), transfers=True), gpu)
    kinds = [(Kind.SET_SLOTS, 8), (Kind.SAVE, 1), (Kind.RESTORE, 1)]
    monkeypatch.setattr(programs, "all_keys", lambda: kinds)
    sharding = jax.sharding.SingleDeviceSharding(gpu)
    runner = Runner(init_params(TRANSFERRED, jax.random.key(0), policy, sharding), programs)
    runner.run_all()
    return runner


def transfer_batch(stage: Stage, slot: int, table: tuple[int, ...], transfer: Transfer):
    update = SlotUpdate(slot, table, 0.0, -1, 1.0, 0)
    rows = Rows.of([Row(0, slot, 0)])
    return SchedulerOutput(0, stage, rows, (update,), transfer=transfer)


def test_a_slot_goes_to_the_host_and_comes_back_elsewhere_bit_for_bit(transferring):
    runner = transferring
    before = jax.tree.map(np.array, runner.state)
    address = runner.state.kv.pool.unsafe_buffer_pointer()
    for transfer in (Transfer(0, 64), Transfer(64, 36)):
        ticket = runner.submit(transfer_batch(Stage.SAVE, 1, TABLE, transfer))
        content = runner.collect(ticket).content
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(content)} == {"pinned_host"}
        transfer = dataclasses.replace(transfer, content=content)
        runner.collect(runner.submit(transfer_batch(Stage.RESTORE, 2, OTHER_TABLE, transfer)))
        assert runner.state.kv.pool.unsafe_buffer_pointer() == address
    after = jax.tree.map(np.array, runner.state)
    pages = [np.array(table)[:, None] * 4 + np.arange(4) for table in (TABLE, OTHER_TABLE)]
    before.kv.pool[:, pages[1]] = before.kv.pool[:, pages[0]]
    before.hidden_sd[2], before.last_token_s[2] = before.hidden_sd[1], before.last_token_s[1]
    before.exits.remaining_s[2] = before.exits.remaining_s[1]
    before.exits.left_s[2] = before.exits.left_s[1]
    for name in ("kv", "hidden_sd", "last_token_s"):
        kept, wanted = getattr(after, name), getattr(before, name)
        jax.tree.map(np.testing.assert_array_equal, kept, wanted)
    np.testing.assert_array_equal(after.exits.remaining_s, before.exits.remaining_s)
    np.testing.assert_array_equal(after.exits.left_s, before.exits.left_s)


def test_submitting_a_save_does_not_wait_for_the_copy(transferring):
    """64 MiB take the bus a millisecond or more."""
    batch = transfer_batch(Stage.SAVE, 1, TABLE, Transfer(0, 64))
    tickets, ready = [], []
    for _ in range(8):
        tickets.append(transferring.submit(batch))
        ready.append(tickets[-1].results.kv.is_ready())
    contents = [transferring.collect(ticket).content for ticket in tickets]
    assert all(content.kv.is_ready() for content in contents)
    assert sum(ready) <= 1, ready
