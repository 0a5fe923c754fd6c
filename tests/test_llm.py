"""LLM, generate() and streaming over the real engine and a tiny random checkpoint."""

import dataclasses
import gc
import re
import shutil

import numpy as np
import pytest

from rlt_jax import (
    LLM,
    ExitConfig,
    GenerationError,
    SamplingParams,
    SchedulerConfig,
)
from rlt_jax.engine.types import BatchError
from rlt_jax.inputs import check_prompts
from rlt_jax.runtime.runner import Runner
from tests.tiny import ADAPTIVE, OPTIONS

PROMPTS = ["Hello", "the quick brown fox", "é", "a b"]


@pytest.fixture(scope="module")
def shared_llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm):
    """The shared LLM; whatever a test did to it, nothing may be left in it."""
    yield shared_llm
    assert_empty(shared_llm)


def assert_empty(llm):
    stats = llm.stats()
    assert not llm.engine.has_unfinished_requests()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["free_blocks"] == stats["total_blocks"] == 256


def answers(outputs):
    """What must not depend on how the requests were run."""
    return [(o.prompt_token_ids, o.token_ids, o.text, o.exit_depths) for o in outputs]


# generate


@pytest.fixture(scope="module")
def alone(shared_llm):
    """The answer to each of PROMPTS, run by itself."""
    return [shared_llm.generate(prompt, ADAPTIVE)[0] for prompt in PROMPTS]


def test_one_prompt_gives_a_list_of_one_complete_output(llm):
    (output,) = llm.generate("Hello", dataclasses.replace(ADAPTIVE, logprobs=0))
    assert output.finished and output.finish_reason == "length"
    assert len(output.token_ids) == len(output.exit_depths) == len(output.logprobs) == 12
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert list(output.prompt_token_ids) == llm.tokenizer.encode("Hello")
    assert output.exit_depths[0] == 4
    assert set(output.exit_depths) > {4}  # some token really left early


def test_many_prompts_answer_in_order_as_each_alone(llm, alone):
    assert answers(llm.generate(PROMPTS, ADAPTIVE)) == answers(alone)
    assert answers(llm.generate(PROMPTS[::-1], ADAPTIVE)) == answers(alone[::-1])


def test_token_ids_answer_as_their_text(llm, alone):
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert answers(llm.generate(ids, ADAPTIVE)) == answers(alone)
    assert answers(llm.generate(ids[0], ADAPTIVE)) == answers(alone[:1])
    assert answers(llm.generate(np.array(ids[1]), ADAPTIVE)) == answers(alone[1:2])
    assert answers(llm.generate([PROMPTS[0], ids[1]], ADAPTIVE)) == answers(alone[:2])


def test_a_stop_id_leaves_no_batch_in_flight(llm):
    """The token after it is on the device already when it is read."""
    full_depth = SamplingParams(max_tokens=12, ignore_eos=True)
    whole = llm.generate(PROMPTS[0], full_depth)[0].token_ids
    at = next(i for i in range(3, 12) if whole[i] not in whole[:i])
    stopping = dataclasses.replace(full_depth, stop_token_ids=(whole[at],))
    for _ in range(2):
        (output,) = llm.generate(PROMPTS[0], stopping)
        assert (output.token_ids, output.finish_reason) == (whole[: at + 1], "stop")
        assert_empty(llm)
        *_, last = llm.stream(PROMPTS[0], stopping)
        assert last.output.token_ids == whole[: at + 1]
        assert_empty(llm)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_sampling_params(llm):
    counts = [9, 1, 5]  # the last finishes before the first
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in counts]
    outputs = llm.generate(PROMPTS[:3], params)
    assert [len(output.token_ids) for output in outputs] == counts


def test_outputs_carry_the_request_ids(llm):
    outputs = llm.generate(["a", "b"], request_ids=["y", "x"])
    assert [output.request_id for output in outputs] == ["y", "x"]
    assert llm.generate("a", request_ids="z")[0].request_id == "z"


def test_request_ids_count_from_0_in_every_call(llm):
    for _ in range(2):
        assert [output.request_id for output in llm.generate(["a", "b"])] == ["0", "1"]


def test_a_trace_replays_depths_by_the_ids_that_count_from_0(checkpoint):
    depths = {"0": [4, 1, 3], "1": [4, 2, 4]}
    trace = ExitConfig(mode="trace", depths_by_request=depths)
    params = SamplingParams(max_tokens=3, min_loops=1, ignore_eos=True)
    with LLM(checkpoint, exit_config=trace, **OPTIONS) as llm:
        for _ in range(2):
            outputs = llm.generate(["a", "b"], params)
            assert [list(output.exit_depths) for output in outputs] == list(depths.values())


# generate: bad input


@pytest.mark.parametrize(
    "prompts, message",
    [
        (None, "prompts = None: must be a string, token ids, or a list"),
        (5, "prompts = 5: must be a string, token ids, or a list"),
        (b"Hello", "prompts = b'Hello': must be a string, token ids, or a list"),
        ({"prompt": "a"}, "prompts = {'prompt': 'a'}: must be a string"),
        ([1, "a"], "prompts[1] = 'a': must be an integer token id"),
        ([1, 2.0], "prompts[1] = 2.0: must be an integer token id"),
        ([True], "prompts[0] = True: must be a string or a list of token ids"),
        (["a", None], "prompts[1] = None: must be a string or a list of token ids"),
        (["a", [1, None]], "prompts[1][1] = None: must be an integer token id"),
        (["a", ""], "prompts[1]: prompt = []: must have at least one token"),
        ("", "prompt = []: must have at least one token"),
        (["a", [320]], "prompts[1]: prompt[0] = 320: must be an integer >= 0 and <= 319"),
        (
            ["a", "x" * 50],
            "prompts[1]: SamplingParams.max_tokens = 16: prompt (50 tokens) + max_tokens - 1",
        ),
        (["a", "\ud800"], "prompts[1]: text = '\\ud800': must be valid Unicode"),
    ],
)
def test_a_bad_prompt_is_pointed_at_and_nothing_runs(llm, prompts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.generate(prompts)
    assert_empty(llm)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize(
    "name, value", [("sampling_params", SamplingParams()), ("request_ids", "r")]
)
def test_a_list_of_another_length_names_both_lengths(llm, name, value, count):
    values = [f"r{i}" for i in range(count)] if value == "r" else [value] * count
    message = rf"len\({name}\) = {count}: must be the number of prompts, 2"
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], **{name: values})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params = {'max_tokens': 3}: must be a"),
        ({"sampling_params": [SamplingParams(), None]}, "sampling_params[1] = None: must be a"),
        ({"request_ids": 5}, "request_ids = 5: must be a list of strings"),
        ({"request_ids": ["a", 5]}, "request_ids[1] = 5: must be a non-empty string"),
        ({"request_ids": ["a", ""]}, "request_ids[1] = '': must be a non-empty string"),
        ({"request_ids": ["a", "a"]}, "request_ids[1] = 'a': must differ from the others"),
        (
            {"sampling_params": SamplingParams(max_loops=5)},
            "prompts[0]: SamplingParams.max_loops = 5: must be",
        ),
    ],
)
def test_bad_options_of_a_call_name_field_value_and_rule(llm, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.generate(["a", "b"], **options)
    assert_empty(llm)


def test_ids_of_a_refused_call_can_be_used_at_once(llm, alone):
    with pytest.raises(ValueError, match=r"prompts\[1\]"):
        llm.generate([PROMPTS[1], [999]], ADAPTIVE, request_ids=["a", "b"])
    outputs = llm.generate(PROMPTS[:2], ADAPTIVE, request_ids=["a", "b"])
    assert answers(outputs) == answers(alone[:2])


# generate: failures on the way


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk")])
@pytest.mark.parametrize("calls_before", [0, 1, 7])
def test_an_interrupted_call_leaves_the_engine_empty(llm, alone, monkeypatch, error, calls_before):
    submit, calls = Runner.submit, 0

    def interrupted(runner, batch):
        nonlocal calls
        calls += 1
        if calls == calls_before + 1:
            raise error
        return submit(runner, batch)

    monkeypatch.setattr(Runner, "submit", interrupted)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        llm.generate(PROMPTS, ADAPTIVE, request_ids=["a", "b", "c", "d"])
    assert calls == calls_before + 1  # what was begun is dropped, not run to its end
    assert_empty(llm)
    outputs = llm.generate(PROMPTS, ADAPTIVE, request_ids=["a", "b", "c", "d"])
    assert answers(outputs) == answers(alone)


@pytest.fixture
def second_request_fails(monkeypatch):
    """Every batch with the second request that shows up fails before it reaches the device."""
    submit, seen = Runner.submit, []

    def failing(runner, batch):
        for row in batch.rows:
            if row.generation not in seen:
                seen.append(row.generation)
            if seen.index(row.generation) == 1:
                raise BatchError("out of luck")
        return submit(runner, batch)

    monkeypatch.setattr(Runner, "submit", failing)


@pytest.fixture
def one_by_one(checkpoint):
    scheduler = SchedulerConfig(max_num_seqs=1)
    with LLM(checkpoint, **{**OPTIONS, "scheduler_config": scheduler}) as llm:
        yield llm
        assert_empty(llm)


def test_a_failed_request_is_raised_with_every_output(one_by_one, second_request_fails, alone):
    with pytest.raises(GenerationError, match="request '1': out of luck") as error:
        one_by_one.generate(PROMPTS[:3], ADAPTIVE)
    outputs = error.value.outputs
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert [output.error for output in outputs] == [None, "out of luck", None]
    assert answers(outputs[::2]) == answers(alone[:3:2])


def test_a_stream_gives_the_other_requests_before_it_raises(one_by_one, second_request_fails):
    reasons = {}
    with pytest.raises(GenerationError, match="request '1': out of luck"):
        for increment in one_by_one.stream(PROMPTS[:3], ADAPTIVE):
            if increment.finished:
                reasons[increment.request_id] = (increment.finish_reason, increment.error)
    assert reasons == {
        "0": ("length", None),
        "1": ("error", "out of luck"),
        "2": ("length", None),
    }


# stream


def test_joined_increments_equal_the_outputs(llm):
    params = dataclasses.replace(ADAPTIVE, logprobs=0)
    outputs = {output.request_id: output for output in llm.generate(PROMPTS, params)}
    ids = list(outputs)
    joined = {request_id: ["", (), (), ()] for request_id in ids}
    finished, order = {}, []
    for step in llm.stream(PROMPTS, params, request_ids=ids):
        assert step.request_id not in finished
        assert len(step.token_ids) == len(step.exit_depths) == len(step.logprobs) == 1
        new = [step.text, step.token_ids, step.exit_depths, step.logprobs]
        joined[step.request_id] = [a + b for a, b in zip(joined[step.request_id], new)]
        order.append(step.request_id)
        if step.finished:
            finished[step.request_id] = step.finish_reason
    for request_id, output in outputs.items():
        text, tokens, depths, logprobs = joined[request_id]
        assert (text, tokens, depths) == (output.text, output.token_ids, output.exit_depths)
        assert logprobs == pytest.approx(output.logprobs, abs=1e-5)
        assert finished[request_id] == output.finish_reason
    assert order != sorted(order, key=ids.index)  # the requests really ran side by side


def test_increments_carry_the_output_so_far(llm):
    tokens, text = (), ""
    for step in llm.stream("a", ADAPTIVE):
        tokens, text = tokens + step.token_ids, text + step.text
        assert (step.output.token_ids, step.output.text) == (tokens, text)
        assert step.output.finished == step.finished
    assert len(tokens) == 12


def test_without_logprobs_increments_have_none(llm):
    assert {step.logprobs for step in llm.stream("a", ADAPTIVE)} == {None}


def test_increments_are_frozen(llm):
    *_, increment = llm.stream("a", ADAPTIVE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        increment.text = ""


def test_a_stream_checks_its_input_before_it_is_iterated(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\] = 5"):
        llm.stream(["a", 5])
    with pytest.raises(ValueError, match="prompt = \\[\\]"):
        llm.stream("")


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_a_stream_early_aborts_its_requests(llm, alone, taken):
    stream = llm.stream(PROMPTS, ADAPTIVE)
    assert len([next(stream) for _ in range(taken)]) == taken
    assert llm.engine.has_unfinished_requests()
    stream.close()
    assert_empty(llm)
    assert answers(llm.generate(PROMPTS, ADAPTIVE)) == answers(alone)


def test_leaving_the_loop_of_a_stream_aborts_its_requests(llm):
    for _ in llm.stream(PROMPTS, ADAPTIVE):
        break
    gc.collect()
    assert_empty(llm)


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_another_call_during_a_stream_is_refused_and_does_no_harm(llm, alone, method):
    stream = llm.stream(PROMPTS[0], ADAPTIVE)
    tokens = next(stream).token_ids
    with pytest.raises(RuntimeError, match="is still running"):
        getattr(llm, method)("a")
    tokens += tuple(token for step in stream for token in step.token_ids)
    assert tokens == alone[0].token_ids


# chat


def test_chat_answers_the_rendered_conversation(llm):
    messages = [{"role": "user", "content": "Hi"}]
    text = llm.tokenizer.render_chat(messages)
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    expected = answers(llm.generate(ids, ADAPTIVE))
    assert text.endswith("<|im_start|>assistant\n")
    assert answers(llm.chat(messages, ADAPTIVE)) == expected
    assert answers(llm.chat([messages, messages], ADAPTIVE)) == expected * 2


def test_stream_chat_gives_what_chat_answers_step_by_step(llm):
    chats = [[{"role": "user", "content": text}] for text in ("Hi", "Ho")]
    outputs = llm.chat(chats, ADAPTIVE, request_ids=["a", "b"])
    texts = {"a": "", "b": ""}
    for step in llm.stream_chat(chats, ADAPTIVE, request_ids=["a", "b"]):
        texts[step.request_id] += step.text
    assert list(texts.values()) == [output.text for output in outputs]
    (prompt,) = {
        step.output.prompt_token_ids
        for step in llm.stream_chat(chats[0], ADAPTIVE, add_generation_prompt=False)
    }
    assert list(prompt) == llm.encode_chat(chats[0], add_generation_prompt=False)
    assert llm.encode_chat(chats[1]) == list(outputs[1].prompt_token_ids)


def test_chat_can_leave_the_generation_prompt_out(llm):
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, ADAPTIVE, add_generation_prompt=False)
    text = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("value, seen", [(None, "undefined"), (True, "True"), (False, "False")])
def test_enable_thinking_reaches_the_template(checkpoint, tmp_path, value, seen):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    template = "{{ enable_thinking if enable_thinking is defined else 'undefined' }}"
    (copy / "chat_template.jinja").write_text(template)
    with LLM(copy, **OPTIONS) as llm:
        (output,) = llm.chat([{"role": "user", "content": "x"}], enable_thinking=value)
        assert llm.tokenizer.decode(output.prompt_token_ids) == seen


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages = []: must be a non-empty list"),
        ("Hi", "messages = 'Hi': must be a non-empty list"),
        ([{"role": "user"}], "messages[0].content = None: must be a string"),
        ([[{"role": "user", "content": "x"}], []], "messages = []: must be a non-empty list"),
    ],
)
@pytest.mark.parametrize("method", ["chat", "stream_chat"])
def test_malformed_messages_are_refused(llm, method, messages, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(llm, method)(messages)


def test_a_model_without_tokenizer_takes_and_gives_token_ids_only(checkpoint, tmp_path, alone):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    with LLM(copy, **OPTIONS) as llm:
        (output,) = llm.generate(list(alone[0].prompt_token_ids), ADAPTIVE)
        assert (output.token_ids, output.text) == (alone[0].token_ids, "")
        with pytest.raises(ValueError, match="must be token ids: this model has no tokenizer"):
            llm.generate("Hello")
        with pytest.raises(ValueError, match=r"LLM\.tokenizer = None: chat\(\) needs a tokenizer"):
            llm.chat([{"role": "user", "content": "x"}])


# Prompts of other libraries.


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.array([1, 2]), np.array([4])], [[1, 2], [4]]),
        ([np.array([1]), np.array([3])], [[1], [3]]),
        (np.array([1, 2]), [[1, 2]]),
        ([np.int64(3), 4], [[3, 4]]),
    ],
)
def test_arrays_are_prompts_of_token_ids(prompts, expected):
    assert check_prompts(prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (np.array([1.0, 2.0]), "prompts[0] = "),
        ([[1.5]], "prompts[0][0] = 1.5: must be an integer token id"),
        (np.array(3), "prompts = "),
        ([True], "prompts[0] = True"),
        (bytearray(b"ab"), "prompts = "),
    ],
)
def test_what_is_no_list_of_token_ids_is_refused(prompts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_prompts(prompts)
