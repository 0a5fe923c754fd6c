"""Invariants 2 and 3 on the real runner: donation aliases, nothing compiles after warm-up."""

import dataclasses

import jax
import pytest

from rlt_jax.assembly import plan_buckets
from rlt_jax.config import CacheConfig, ExecutionConfig, SchedulerConfig
from rlt_jax.models.ouro import DTypePolicy
from rlt_jax.runtime import compilation
from rlt_jax.runtime.compilation import Buckets, LateCompileError, Programs
from rlt_jax.runtime.programs import Kind
from rlt_jax.sampling_params import SamplingParams
from tests.support import SHAPES, build_engine, drive, random_work

MANY = SamplingParams(max_tokens=60, exit_threshold=0.6, temperature=0.7, seed=1)


def mixed_work():
    """Greedy and sampling rows, fixed and adaptive depth, several prompt lengths."""
    return random_work(numbers=8, count=10) + random_work(
        numbers=9, count=6, temperature=0.9, seed=5, exit_threshold=0.5
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_temporaries_do_not_depend_on_the_pool_for_any_program(shape):
    """A donated buffer that is copied shows as a temporary of the pool's size."""
    small = build_engine(shape).programs
    pages = dataclasses.replace(small.spec.shape, num_pages=4 * small.spec.shape.num_pages)
    large = Programs(dataclasses.replace(small.spec, shape=pages), small.buckets, small.device)
    for programs in (small, large):
        programs.warm_up()
    for key in small.all_keys():
        sizes = [p.get(*key).memory_analysis().temp_size_in_bytes for p in (small, large)]
        assert sizes[0] == sizes[1], key


@pytest.mark.parametrize("kind", Kind)
def test_temporaries_do_not_depend_on_the_pool_in_bfloat16_either(kind):
    spec = dataclasses.replace(
        build_engine("roomy").programs.spec, policy=DTypePolicy.on("cpu", "bfloat16")
    )
    sizes = []
    for pages in (16, 64):
        shape = dataclasses.replace(spec.shape, num_pages=pages)
        one = Programs(
            dataclasses.replace(spec, shape=shape), Buckets((1,), (1,)), jax.devices()[0]
        )
        compiled = one.get(kind, one.buckets.of(kind)[0])
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kv_pool_stays_at_its_address_over_200_steps(shape):
    engine = build_engine(shape)
    core = engine.core
    address = engine.runner.state.kv.pool.unsafe_buffer_pointer()
    for i in range(4):
        core.add_request(str(i), [i + 1, 2, 3], MANY)
    for step in range(200):
        if not core.has_unfinished_requests():
            core.add_request(f"more {step}", [5] * 17, MANY)
        core.step()
        assert engine.runner.state.kv.pool.unsafe_buffer_pointer() == address, step


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_compiles_in_a_run_of_200_steps_after_warm_up(shape, monkeypatch):
    monkeypatch.setattr(compilation, "late_compile_is_error", True)
    engine = build_engine(shape)
    engine.programs.warm_up()
    drive(engine, mixed_work())  # the first fetches and transfers of a process may compile
    compiles = []

    def listen(event, *_, **__):
        if "backend_compile" in event:
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        steps = 0
        for round_ in range(20):
            work = mixed_work()
            before = engine.core.scheduler.stats()
            assert before["running"] == 0
            for i, one in enumerate(work):
                engine.core.add_request(f"{round_}-{i}", one.prompt, one.params)
            while engine.core.has_unfinished_requests():
                engine.core.step()
                steps += 1
            if steps >= 200:
                break
        assert steps >= 200
        assert compiles == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert engine.programs.late_compiles == 0


def test_one_executable_per_program_and_bucket_at_most_40():
    engine = build_engine("roomy")
    engine.programs.warm_up()
    keys = engine.programs.all_keys()
    assert engine.programs.compiled == set(keys)
    assert len(set(keys)) == len(keys) <= 40
    assert engine.programs.get(*keys[0]) is build_engine("roomy").programs.get(*keys[0])


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_default_settings_need_at_most_40_executables(platform, layout):
    buckets = plan_buckets(
        CacheConfig(layout=layout),
        SchedulerConfig().resolve(platform),
        ExecutionConfig().resolve(platform),
    )
    assert sum(len(buckets.of(kind)) for kind in Kind) <= 40


def test_a_compile_after_warm_up_is_counted_warned_of_and_an_error_in_tests(monkeypatch, caplog):
    shape = dataclasses.replace(SHAPES["shared"], num_blocks=60)
    programs = build_engine(shape).programs
    monkeypatch.setattr(programs, "all_keys", lambda: [(Kind.PRELUDE, 1)])
    programs.warm_up()
    programs.get(Kind.PRELUDE, 1)
    assert programs.late_compiles == 0
    programs.get(Kind.PRELUDE, 2)
    assert programs.late_compiles == 1
    assert "prelude_2 was compiled after warm-up" in caplog.text
    monkeypatch.setattr(compilation, "late_compile_is_error", True)
    with pytest.raises(LateCompileError, match="prelude_4"):
        programs.get(Kind.PRELUDE, 4)


@pytest.mark.parametrize("shape", SHAPES)
def test_device_block_tables_mirror_the_scheduler(shape):
    engine = build_engine(shape)
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
