"""Making, closing and sharing an LLM; the one that rlt_jax.generate() keeps; what is imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlt_jax
from rlt_jax import LLM, CacheConfig
from rlt_jax.llm_engine import LLMEngine
from tests.tiny import ADAPTIVE, OPTIONS

PROMPTS = ["Hello", "the quick brown fox", "é", "a b"]


def answers(outputs):
    """What must not depend on how the requests were run."""
    return [(o.prompt_token_ids, o.token_ids, o.text, o.exit_depths) for o in outputs]


# An LLM


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate("a"),
        lambda llm: llm.stream("a"),
        lambda llm: llm.chat([{"role": "user", "content": "x"}]),
        lambda llm: llm.stream_chat([{"role": "user", "content": "x"}]),
        lambda llm: llm.encode_chat([{"role": "user", "content": "x"}]),
        lambda llm: llm.stats(),
        lambda llm: llm.engine,
        lambda llm: llm.__enter__(),
    ],
    ids=["generate", "stream", "chat", "stream_chat", "encode_chat", "stats", "engine", "with"],
)
def test_a_closed_llm_says_so(closed_llm, use):
    with pytest.raises(RuntimeError, match="LLM: it is closed"):
        use(closed_llm)


@pytest.fixture(scope="module")
def closed_llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        pass
    llm.close()  # again is harmless
    return llm


@pytest.mark.parametrize("taken", [0, 1])
def test_a_stream_of_a_closed_llm_says_so(checkpoint, taken):
    llm = LLM(checkpoint, **OPTIONS)
    stream = llm.stream("a", ADAPTIVE)
    assert len([next(stream) for _ in range(taken)]) == taken
    llm.close()
    with pytest.raises(RuntimeError, match="LLM: it is closed"):
        next(stream)


def test_startup_times_name_the_phases(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        assert {"import", "load weights"} < set(llm.startup_times)
    assert all(seconds >= 0 for seconds in llm.startup_times.values())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": ""}, "LLM.model = '': must be a checkpoint's folder or its hub id"),
        ({"model": None}, "LLM.model = None: must be a checkpoint's folder or its hub id"),
        ({"cache_config": {}}, "cache_config = {}: must be of type CacheConfig or None"),
        ({"scheduler_config": 1}, "scheduler_config = 1: must be of type SchedulerConfig or None"),
        ({"exit_config": "ouro"}, "exit_config = 'ouro': must be of type ExitConfig or None"),
        ({"execution_config": CacheConfig()}, "execution_config = CacheConfig"),
        ({"speculative_config": 1}, "LLM.speculative_config = 1: must be None"),
        ({"dtype": "int8"}, "dtype = 'int8': must be"),
        ({"device": "abacus"}, "device = 'abacus': must be"),
        ({"total_ut_steps": 5}, "total_ut_steps = 5: must be"),
    ],
)
def test_bad_options_name_field_value_and_rule(checkpoint, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(**{"model": checkpoint, **options})


def test_total_ut_steps_bounds_every_depth(checkpoint):
    with LLM(checkpoint, total_ut_steps=2, **OPTIONS) as llm:
        (output,) = llm.generate("Hello", ADAPTIVE)
    assert output.exit_depths[0] == 2
    assert max(output.exit_depths) == 2


# rlt_jax.generate


@pytest.fixture
def engines(monkeypatch):
    """Every engine made meanwhile; the model that generate() keeps is dropped before and after."""
    rlt_jax.llm._close_last()
    made, init = [], LLMEngine.__init__

    def watched(engine, *args, **kwargs):
        init(engine, *args, **kwargs)
        made.append(engine)

    monkeypatch.setattr(LLMEngine, "__init__", watched)
    yield made
    rlt_jax.llm._close_last()


def closed(engine):
    try:
        engine.step()
    except RuntimeError:
        return True
    return False


def test_generate_answers_as_an_llm_and_keeps_the_model(checkpoint, engines):
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = answers(llm.generate(PROMPTS, ADAPTIVE))
    engines.clear()
    for _ in range(2):
        outputs = rlt_jax.generate(PROMPTS, checkpoint, ADAPTIVE, **OPTIONS)
        assert answers(outputs) == expected
    equal = {**OPTIONS, "cache_config": CacheConfig(num_blocks=256)}
    (output,) = rlt_jax.generate("a", model=checkpoint, request_ids=["x"], **equal)
    assert output.request_id == "x"
    assert len(engines) == 1


def test_without_a_model_the_packaged_one_answers(checkpoint, engines, monkeypatch):
    where = "rlt_jax.checkpoints_convert.checkpoint.packaged_folder"
    monkeypatch.setattr(where, lambda: Path(checkpoint))
    expected = answers(rlt_jax.generate("a", checkpoint, ADAPTIVE, **OPTIONS))
    assert answers(rlt_jax.generate("a", sampling_params=ADAPTIVE, **OPTIONS)) == expected
    with LLM(**OPTIONS) as llm:
        assert answers(llm.generate("a", ADAPTIVE)) == expected


def test_generate_with_other_options_closes_the_model_it_kept(checkpoint, engines):
    rlt_jax.generate("a", checkpoint, **OPTIONS)
    rlt_jax.generate("a", checkpoint, total_ut_steps=2, **OPTIONS)
    assert [closed(engine) for engine in engines] == [True, False]


def test_generate_with_a_wrong_option_keeps_the_model(checkpoint, engines):
    rlt_jax.generate("a", checkpoint, **OPTIONS)
    with pytest.raises(TypeError, match="cache_confg"):
        rlt_jax.generate("a", checkpoint, cache_confg=None)
    rlt_jax.generate("a", checkpoint, **OPTIONS)
    assert len(engines) == 1


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    ).stdout


def test_a_plain_script_needs_no_main_guard(checkpoint):
    code = f"import rlt_jax; print(len(rlt_jax.generate('a', {str(checkpoint)!r})[0].token_ids))"
    assert run_python(code).strip().isdecimal()


def test_importing_the_package_imports_nothing_heavy():
    heavy = ("jax", "numpy", "tokenizers", "jinja2", "rich")
    names = "LLM, generate, SamplingParams, CacheConfig, RequestOutput, StreamIncrement"
    code = (
        f"from rlt_jax import {names}; import sys; print([m for m in {heavy} if m in sys.modules])"
    )
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize("name", rlt_jax.__all__)
def test_every_public_name_is_there(name):
    assert getattr(rlt_jax, name).__name__ == name
    assert name in dir(rlt_jax)


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = rlt_jax.nope
