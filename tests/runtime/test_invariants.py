"""Invariants 2 and 3 on the real runner: donation aliases, nothing compiles after warm-up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.assembly import plan_buckets
from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.engine.types import Stage
from rlt_jax.models.ouro import DTypePolicy
from rlt_jax.runtime import compilation
from rlt_jax.runtime.compilation import Buckets, LateCompileError, Programs
from rlt_jax.runtime.device_state import abstract_state, tree_bytes
from rlt_jax.runtime.programs import Kind
from rlt_jax.sampling_params import SamplingParams
from tests.support import SHAPES, build_engine, drive, random_work, watch

ADAPTIVE = SamplingParams(max_tokens=45, exit_threshold=0.6, temperature=0.7, seed=1)
FULL_DEPTH = SamplingParams(max_tokens=45)
STAGED = {"mode": "mixed", "wavefront_chunked_prefill": True}
# Shapes and scheduling.
ENGINES = [*((shape, {}) for shape in SHAPES), ("tight", STAGED)]


def mixed_work():
    """Greedy and sampling rows, fixed and adaptive depth, several prompt lengths; then rows that
    run whole tokens only."""
    work = random_work(numbers=8, count=10) + random_work(
        numbers=9, count=6, temperature=0.9, seed=5, exit_threshold=0.5
    )
    return [work, random_work(numbers=10, count=3, exit_threshold=1.0, max_loops=4)]


def run_batches(engine, name="") -> int:
    """Runs mixed_work(); the number of steps."""
    steps = 0
    for i, work in enumerate(mixed_work()):
        for j, one in enumerate(work):
            engine.core.add_request(f"{name}{i}-{j}", one.prompt, one.params)
        while engine.core.has_unfinished_requests():
            engine.core.step()
            steps += 1
    return steps


LARGEST = [kind for kind in Kind if kind not in (Kind.TOKENS_2_GREEDY, Kind.MIXED)]
# The sampler does not touch the pool, and several tokens are one after the other.
SMALLEST = [Kind.PREFILL, Kind.RECURRENT, Kind.CODA_GREEDY, Kind.BOUNDARY_GREEDY, Kind.TOKEN_GREEDY]


@pytest.mark.parametrize(
    ("shape", "kind", "end"),
    [
        *(("roomy", kind, -1) for kind in (*LARGEST, Kind.MIXED)),
        *(("roomy", kind, 0) for kind in (*SMALLEST, Kind.MIXED)),
        *(("shared", kind, -1) for kind in LARGEST),
    ],
)
def test_temporaries_do_not_depend_on_the_pool(shape, kind, end):
    """A donated buffer that is copied shows as a temporary of the pool's size."""
    mode = "mixed" if kind is Kind.MIXED else "refill"
    small = build_engine(shape, tokens_per_dispatch=4, mode=mode).programs
    pages = dataclasses.replace(small.spec.shape, num_pages=4 * small.spec.shape.num_pages)
    large = Programs(dataclasses.replace(small.spec, shape=pages), small.buckets, small.device)
    bucket = dataclasses.replace(small.buckets, transfers=True).of(kind)[end]
    temporaries = []
    for programs in (small, large):
        analysis = programs.get(kind, bucket).memory_analysis()
        temporaries.append(analysis.temp_size_in_bytes)
        spec = programs.spec
        state = abstract_state(spec.config, spec.policy, spec.shape)
        assert analysis.alias_size_in_bytes >= tree_bytes(state)
    assert temporaries[0] == temporaries[1]


@pytest.mark.parametrize(
    "kind", [Kind.PREFILL, Kind.MIXED, Kind.BOUNDARY_GREEDY, Kind.TOKEN_GREEDY]
)
def test_temporaries_do_not_depend_on_the_pool_in_bfloat16_either(kind):
    spec = build_engine("roomy").programs.spec
    one_layer = dataclasses.replace(spec.config, num_hidden_layers=1)
    policy = DTypePolicy.on("cpu", "bfloat16")
    sizes = []
    for pages in (16, 64):
        shape = dataclasses.replace(spec.shape, num_pages=pages)
        small = dataclasses.replace(spec, config=one_layer, policy=policy, shape=shape)
        programs = Programs(small, Buckets((1,), (1,), mixed=True), jax.devices()[0])
        compiled = programs.get(kind, programs.buckets.of(kind)[0])
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[0] == sizes[1]


def test_a_program_that_copies_the_pool_would_be_noticed():
    """The measure itself: a gather of every page into a new order cannot be done in place."""

    def shuffle(pool):
        return pool.at[:].set(jnp.sort(pool, axis=0)[::-1] + jnp.flip(pool, 0))

    sizes = []
    for pages in (64, 256):
        pool = jax.ShapeDtypeStruct((pages, 128), jnp.float32)
        compiled = jax.jit(shuffle, donate_argnums=0).lower(pool).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] >= sizes[0] + 192 * 128 * 4


@pytest.mark.parametrize("params", [ADAPTIVE, FULL_DEPTH], ids=["adaptive", "full depth"])
@pytest.mark.parametrize(("shape", "scheduling"), ENGINES, ids=str)
def test_the_device_state_stays_at_its_addresses_over_200_steps(shape, scheduling, params):
    engine = build_engine(shape, **scheduling)
    core, watched = engine.core, watch(engine)

    def addresses():
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.runner.state)]

    before = addresses()
    for i in range(4):
        core.add_request(str(i), [i + 1, 2, 3], params)
    for step in range(200):
        if not core.has_unfinished_requests():
            core.add_request(f"more {step}", [5] * 17, params)
        core.step()
        assert addresses() == before, step
    stages = {batch.stage for batch in watched.batches}
    assert (Stage.BOUNDARY if params is ADAPTIVE else Stage.TOKENS) in stages
    assert (Stage.MIXED in stages) == bool(scheduling)
    assert watched.most_in_flight == 2


@pytest.mark.parametrize(("shape", "scheduling"), ENGINES, ids=str)
def test_nothing_compiles_in_a_run_of_200_steps_after_warm_up(shape, scheduling, monkeypatch):
    monkeypatch.setattr(compilation, "late_compile_is_error", True)
    engine = build_engine(shape, tokens_per_dispatch=4, **scheduling)
    engine.programs.warm_up()
    watched = watch(engine)
    run_batches(engine)  # the first fetches and transfers of a process may compile
    never = {Stage.SAVE, Stage.RESTORE} | (set() if scheduling else {Stage.MIXED})
    assert {batch.stage for batch in watched.batches} == set(Stage) - never
    assert {batch.num_tokens for batch in watched.batches} == {1, 4}
    compiles = []

    def listen(event, *_, **__):
        if "backend_compile" in event:
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        steps, rounds = 0, 0
        while steps < 200:
            rounds += 1
            steps += run_batches(engine, f"{rounds}-")
        assert compiles == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert engine.programs.late_compiles == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_running_every_program_without_rows_leaves_the_state_as_it_was(shape):
    mode = "refill" if shape == "shared" else "mixed"
    engine = build_engine(shape, tokens_per_dispatch=4, mode=mode)
    drive(engine, random_work(numbers=12, count=6))

    def contents():
        return [np.array(leaf).tobytes() for leaf in jax.tree.leaves(engine.runner.state)]

    before = contents()
    assert len(set(before)) >= 6 and any(before[0])
    engine.runner.run_all()
    assert contents() == before


def test_one_executable_per_program_and_bucket_at_most_40():
    engine = build_engine("roomy")
    engine.programs.warm_up()
    keys = engine.programs.all_keys()
    assert engine.programs.compiled == set(keys)
    assert len(set(keys)) == len(keys) <= 40
    assert engine.programs.get(*keys[0]) is build_engine("roomy").programs.get(*keys[0])


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({"exit_decision": "device"}, {Kind.RECURRENT, Kind.BOUNDARY_GREEDY}),
        (
            {"exit_config": ExitConfig(mode="random_lookahead", seed=1)},
            {Kind.RECURRENT, Kind.BOUNDARY_GREEDY},
        ),
        ({"exit_config": ExitConfig(mode="ouro_delayed")}, set()),
        (
            {"exit_config": ExitConfig(mode="weighted")},
            {Kind.RECURRENT, Kind.BOUNDARY_GREEDY, Kind.PREFILL, Kind.TOKEN_GREEDY},
        ),
    ],
    ids=str,
)
def test_engines_of_other_exit_modes_share_what_does_not_hang_on_them(options, own):
    plain, other = build_engine("roomy").programs, build_engine("roomy", **options).programs
    for kind in (
        Kind.SET_SLOTS,
        Kind.PREFILL,
        Kind.RECURRENT,
        Kind.CODA_GREEDY,
        Kind.BOUNDARY_GREEDY,
        Kind.TOKEN_GREEDY,
    ):
        bucket = plain.buckets.of(kind)[0]
        assert (other.get(kind, bucket) is not plain.get(kind, bucket)) == (kind in own)


@pytest.mark.parametrize(("platform", "count", "mixed"), [("cpu", 29, 2), ("gpu", 35, 3)])
@pytest.mark.parametrize(
    ("layout", "scheduling"),
    [
        ("last_exited", {}),
        ("shared", {}),
        ("last_exited", {"mode": "mixed"}),
        ("last_exited", {"wavefront_chunked_prefill": True}),
        ("last_exited", {"enable_preemption": True}),
        ("last_exited", {"mode": "mixed", "enable_preemption": True}),
    ],
    ids=str,
)
def test_default_settings_need_at_most_40_executables(platform, count, mixed, layout, scheduling):
    buckets = plan_buckets(
        CacheConfig(layout=layout),
        SchedulerConfig(**scheduling).resolve(platform),
        ExecutionConfig().resolve(platform),
    )
    if scheduling.keys() - {"enable_preemption"}:
        assert buckets.of(Kind.MIXED)[-1] == buckets.prompts[-1]
        count += mixed
    if "enable_preemption" in scheduling:
        assert buckets.of(Kind.SAVE) == buckets.of(Kind.RESTORE) == (1,)
        count += 2
    rows, codas = len(buckets.rows), len(buckets.of(Kind.CODA_GREEDY))
    assert codas == -(-rows // 3) and buckets.of(Kind.CODA_GREEDY)[-1] == buckets.rows[-1]
    assert sum(len(buckets.of(kind)) for kind in Kind) == count <= 40


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_only_the_program_of_the_tokens_asked_for_can_be_reached(tokens):
    programs = build_engine("tight", tokens_per_dispatch=tokens).programs
    kinds = {kind for kind, _ in programs.all_keys()}
    never = {Kind.TOKENS_2_GREEDY, Kind.TOKENS_4_GREEDY, Kind.MIXED, Kind.SAVE, Kind.RESTORE}
    several = {1: set(), 2: {Kind.TOKENS_2_GREEDY}, 4: {Kind.TOKENS_4_GREEDY}}[tokens]
    assert kinds == set(Kind) - never | several
    # Options of the scheduler do not make other programs of the rest.
    assert programs.spec == build_engine("tight").programs.spec


@pytest.mark.parametrize("options", [{"mode": "mixed"}, {"wavefront_chunked_prefill": True}])
def test_engines_that_stage_prompts_have_one_program_more_and_share_the_others(options):
    programs, others = (build_engine("roomy", **o).programs for o in (options, {}))
    more = set(programs.all_keys()) - set(others.all_keys())
    assert more == {(Kind.MIXED, 8), (Kind.MIXED, 32)}
    assert programs.spec == others.spec


def test_a_compile_after_warm_up_is_counted_warned_of_and_an_error_in_tests(monkeypatch, caplog):
    shape = dataclasses.replace(SHAPES["shared"], num_blocks=60)
    programs = build_engine(shape).programs
    monkeypatch.setattr(programs, "all_keys", lambda: [(Kind.SET_SLOTS, 8)])
    programs.warm_up()
    programs.get(Kind.SET_SLOTS, 8)
    assert programs.late_compiles == 0
    programs.get(Kind.CODA_GREEDY, 4)
    assert programs.late_compiles == 1
    assert "coda_greedy_4 was compiled after warm-up" in caplog.text
    monkeypatch.setattr(compilation, "late_compile_is_error", True)
    with pytest.raises(LateCompileError, match="coda_greedy_1"):
        programs.get(Kind.CODA_GREEDY, 1)


@pytest.mark.parametrize("incremental_allocation", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_device_block_tables_mirror_the_scheduler(shape, incremental_allocation):
    engine = build_engine(shape, incremental_allocation=incremental_allocation)
    for i, one in enumerate(random_work(numbers=10, count=6)):
        engine.core.add_request(str(i), one.prompt, one.params)
    checked = 0
    while engine.core.has_unfinished_requests():
        engine.core.step()
        device = jax.device_get(engine.runner.state.tables_sp)
        for slot, table in engine.core.scheduler.block_tables().items():
            assert tuple(device[slot][: len(table)]) == table
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("shape", ["roomy", "shared"])
def test_every_batch_has_a_result_that_shows_it_is_done(shape):
    """Without one, collect() would not wait, and nothing would bound the batches in flight."""
    engine = build_engine(shape)
    submit, tickets = engine.runner.submit, []

    def watched(batch):
        tickets.append(submit(batch))
        return tickets[-1]

    engine.runner.submit = watched
    drive(engine, random_work(numbers=8, count=10))
    assert {ticket.batch.stage for ticket in tickets} >= {Stage.PREFILL, Stage.RECURRENT}
    assert all(ticket.results.size for ticket in tickets)


@pytest.mark.parametrize("decision", ["host", "device"])
def test_a_batch_copies_one_array_to_the_host_and_none_when_nothing_is_asked(decision, monkeypatch):
    copied, wanted = [], []
    array = type(jnp.zeros(1))
    real = array.copy_to_host_async

    def counted(self):
        copied.append(self)
        return real(self)

    monkeypatch.setattr(array, "copy_to_host_async", counted)
    engine = build_engine("roomy", exit_decision=decision)
    submit = engine.runner.submit

    def watched(batch):
        before = len(copied)
        ticket = submit(batch)
        wanted.append((batch.reads_gate, batch.has_coda))
        assert copied[before:] == [ticket.results] * (batch.reads_gate or batch.has_coda)
        return ticket

    engine.runner.submit = watched
    drive(engine, random_work(numbers=8, count=10))
    assert set(wanted) == {(False, False), (False, True), (True, False), (True, True)}
