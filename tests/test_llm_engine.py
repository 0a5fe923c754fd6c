"""LLMEngine: what only it does: text, threads, ids, options."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from rlt_jax import (
    LLM,
    CacheConfig,
    ExecutionConfig,
    LLMEngine,
    SamplingParams,
    SchedulerConfig,
)
from rlt_jax.engine.types import Stage
from tests.support import watch
from tests.tiny import OPTIONS as TINY_OPTIONS

OPTIONS = {
    "cache_config": CacheConfig(num_blocks=64, block_size=8),
    "scheduler_config": SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16),
    "execution_config": ExecutionConfig(min_row_bucket=2, min_prefill_bucket=16),
}
# The device decides exits, a loop ahead of the host.
AHEAD = TINY_OPTIONS | {
    "execution_config": dataclasses.replace(
        TINY_OPTIONS["execution_config"], async_scheduling=True, exit_decision="device"
    )
}
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return LLMEngine(checkpoint, **OPTIONS)


def finish(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    return outputs


def test_text_belongs_to_the_request_even_when_its_id_was_aborted_and_reused(engine):
    engine.add_request("r", "abc", PARAMS)
    (alone,) = finish(engine)
    assert alone.text == engine.tokenizer.decode(alone.token_ids)
    engine.add_request("r", "xyz", PARAMS)
    engine.step()
    engine.abort_request("r")
    engine.add_request("r", "abc", PARAMS)
    aborted, again = finish(engine)
    assert (aborted.finish_reason, again.finish_reason) == ("abort", "length")
    assert again.text == alone.text
    assert again.token_ids == alone.token_ids


@pytest.mark.parametrize(
    "prompt",
    [np.array([5, 6, 7]), [np.int64(5), 6, np.uint8(7)], (5, 6, 7), jax.numpy.array([5, 6, 7])],
    ids=["array", "numpy integers", "tuple", "jax array"],
)
def test_token_ids_of_other_libraries_are_taken(engine, prompt):
    engine.add_request("a", [5, 6, 7], PARAMS)
    (expected,) = finish(engine)
    engine.add_request("a", prompt, PARAMS)
    (got,) = finish(engine)
    assert got.prompt_token_ids == (5, 6, 7)
    assert all(type(token) is int for token in got.prompt_token_ids)
    assert got.token_ids == expected.token_ids


def test_requests_of_several_threads_take_turns(engine):
    engine.add_request("alone", "abc", PARAMS)
    (alone,) = finish(engine)
    done, errors = {}, []

    def work(name):
        try:
            for i in range(10):
                engine.add_request(f"{name}-{i}", "abc", PARAMS)
                for output in engine.step():
                    done[output.request_id] = output
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
    assert errors == []
    assert len(done) == 40
    assert all(output.token_ids == alone.token_ids for output in done.values())


def test_a_second_thread_in_one_llm_is_refused_and_nothing_is_harmed(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = [output.token_ids for output in llm.generate(["a", "b", "c"] * 3, PARAMS)]
        results, refused = [], []

        def work():
            try:
                outputs = llm.generate(["a", "b", "c"] * 3, PARAMS)
                results.append([output.token_ids for output in outputs])
            except RuntimeError as error:
                refused.append(str(error))

        for _ in range(5):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert results and all(result == expected for result in results)
        assert all("still running" in message for message in refused)
        assert [
            output.token_ids for output in llm.generate(["a", "b", "c"] * 3, PARAMS)
        ] == expected


def test_a_second_interrupt_during_the_clean_up_does_not_lock_the_llm(checkpoint, monkeypatch):
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = llm.generate("a", PARAMS)[0].token_ids

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(llm.engine, "step", interrupted)
        monkeypatch.setattr(llm.engine, "abort_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], PARAMS)
        monkeypatch.undo()
        assert llm.engine.has_unfinished_requests()
        assert llm.generate("a", PARAMS)[0].token_ids == expected
        stats = llm.stats()
        assert stats["free_blocks"] == stats["total_blocks"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_config": {}}, "cache_config = {}: must be of type CacheConfig or None"),
        ({"exit_config": "ouro"}, "exit_config = 'ouro': must be of type ExitConfig or None"),
        ({"dtype": ""}, "dtype = '': must be one of 'float32', 'bfloat16'"),
        ({"dtype": np.dtype("float32")}, "dtype = dtype"),
        ({"device": 5}, "device = 5: must be"),
        ({"device": "tpu"}, "device = 'tpu': must be"),
        ({"device": "cpu:99"}, "device = 'cpu:99': must be"),
        ({"tokenizer": 5}, "tokenizer = 5: must be a Tokenizer, a folder or a hub id"),
        ({"total_ut_steps": 5}, "total_ut_steps = 5: must be an integer >= 1 and <= 4"),
    ],
)
def test_bad_options_name_field_value_and_rule(checkpoint, options, message):
    with pytest.raises(ValueError) as error:
        LLMEngine(checkpoint, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("params", [{}, 0, {"max_tokens": 3}])
def test_sampling_params_of_another_type_are_refused(engine, params):
    with pytest.raises(ValueError, match="sampling_params"):
        engine.add_request("a", [1], params)
    assert not engine.has_unfinished_requests()


def test_every_call_after_shutdown_says_so(checkpoint):
    engine = LLMEngine(checkpoint, **OPTIONS)
    engine.shutdown()
    engine.shutdown()
    for call in (
        engine.step,
        engine.stats,
        lambda: engine.compile_seconds,
        lambda: engine.max_executables,
        lambda: engine.abort_request("a"),
        lambda: engine.add_request("a", [1]),
    ):
        with pytest.raises(RuntimeError, match="has been shut down"):
            call()
    assert not engine.has_unfinished_requests()


def test_each_engine_can_name_its_own_compilation_cache(checkpoint, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        for name, blocks in (("one", 9), ("two", 13)):
            cache = CacheConfig(num_blocks=blocks, block_size=8, layout="shared")
            execution = ExecutionConfig(
                compilation_cache_dir=str(tmp_path / name), min_row_bucket=2, min_prefill_bucket=16
            )
            engine = LLMEngine(
                checkpoint, **{**OPTIONS, "cache_config": cache, "execution_config": execution}
            )
            engine.add_request("a", [1], SamplingParams(max_tokens=1))
            finish(engine)
            assert len(list((tmp_path / name).iterdir())) >= 3
        file = tmp_path / "file"
        file.write_text("")
        with pytest.raises(ValueError, match="compilation_cache_dir"):
            LLMEngine(checkpoint, execution_config=ExecutionConfig(compilation_cache_dir=str(file)))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        from jax.experimental.compilation_cache import compilation_cache

        compilation_cache.reset_cache()


def test_stats_tell_what_is_there_and_what_was_done(checkpoint):
    engine = LLMEngine(checkpoint, **AHEAD)
    fresh = engine.stats()
    assert {name for name in fresh if name not in LLMEngine.stats.__doc__} == set()
    assert fresh["mean_depth"] is None and fresh["batch_occupancy"] is None
    zero = ("running", "waiting", "in_flight", "output_tokens", "idle_row_loops", "late_compiles")
    assert {fresh[name] for name in zero} == {0}
    for name, threshold in (("a", 0.5), ("b", 0.6), ("c", 1.0)):
        params = SamplingParams(max_tokens=9, min_loops=1, exit_threshold=threshold)
        engine.add_request(name, [1, 2, 3], params)
    outputs, most = {}, 0
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        most = max(most, engine.stats()["in_flight"])
        assert engine.stats()["running"] <= 3
    stats = engine.stats()
    depths = [depth for output in outputs.values() for depth in output.exit_depths]
    assert stats["output_tokens"] == len(depths) == 27
    assert stats["mean_depth"] == sum(depths) / 27 < 4
    assert 0.25 <= stats["batch_occupancy"] < 1
    assert stats["idle_row_loops"] > 0
    assert most == 1  # one is collected in each step
    assert (stats["running"], stats["in_flight"]) == (0, 0)
    assert stats["executables"] >= 3


def test_stats_of_mixed_batches_count_decode_rows_and_prompts_apart(checkpoint):
    chunks = {"mode": "mixed", "prefill_chunk_size": 4, "wavefront_chunked_prefill": True}
    mixed = dataclasses.replace(TINY_OPTIONS["scheduler_config"], **chunks)
    engine = LLMEngine(checkpoint, **AHEAD | {"scheduler_config": mixed})
    watched = watch(engine._parts)
    gated = SamplingParams(max_tokens=9, min_loops=1, exit_threshold=0.5, ignore_eos=True)
    for i in range(3):
        engine.add_request(str(i), [1] * (3 + 6 * i), gated)
    outputs, staged = {}, 0
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        now = engine.stats()
        waiting = sum(now[name] for name in ("prefill", "recurrent", "coda", "held"))
        assert waiting <= now["running"] <= 3
        assert now["staged"] <= now["prefill"]
        staged = max(staged, now["staged"])
    stats, batches = engine.stats(), watched.batches
    assert staged == 3
    assert any(b.stage is Stage.MIXED and b.rows.num_decode for b in batches)
    depths = [depth for output in outputs.values() for depth in output.exit_depths]
    assert stats["mean_depth"] == sum(depths) / stats["output_tokens"] < 4
    decoding = [batch.rows.num_decode for batch in batches if batch.rows.num_decode]
    assert stats["batch_occupancy"] == sum(decoding) / (4 * len(decoding))  # one bucket, of 4
    loops = [row for b in batches for row in b.rows if row.depth and not row.size]
    needed = sum(depth for output in outputs.values() for depth in output.exit_depths[1:])
    assert stats["idle_row_loops"] == len(loops) - needed > 0
    assert (stats["running"], stats["staged"], stats["in_flight"]) == (0, 0, 0)
