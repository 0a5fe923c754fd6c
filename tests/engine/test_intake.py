"""Bad requests are refused by field, value and rule, before anything changes."""

import dataclasses

import pytest

from rlt_jax.config import ExitConfig
from rlt_jax.sampling_params import SamplingParams
from tests.support import SHAPES, build_engine


@pytest.mark.parametrize(
    ("request_id", "prompt", "params", "message"),
    [
        ("", [1], {}, "request_id = ''"),
        (7, [1], {}, "request_id = 7"),
        ("a", [], {}, "prompt = .*at least one token"),
        ("a", "text", {}, "prompt = 'text': must be a list of token ids"),
        ("a", [1, 97], {}, r"prompt\[1\] = 97: must be an integer >= 0 and <= 96"),
        ("a", [-1], {}, r"prompt\[0\] = -1"),
        ("a", [True], {}, r"prompt\[0\] = True"),
        ("a", [1.0], {}, r"prompt\[0\] = 1.0"),
        ("a", [1], {"max_loops": 5}, "max_loops = 5: must be an integer >= 1 and <= 4"),
        ("a", [1], {"min_loops": 5}, "min_loops = 5: must be an integer >= 1 and <= 4"),
        ("a", [1], {"stop_token_ids": (3, 97)}, r"stop_token_ids\[1\] = 97"),
        ("a", [1] * 60, {"max_tokens": 6}, r"max_tokens = 6: .*<= 64, the model's context"),
        ("a", [1], {"max_tokens": 65}, "max_tokens = 65"),
    ],
)
def test_bad_requests_name_field_value_and_rule(request_id, prompt, params, message):
    core = build_engine("roomy").core
    with pytest.raises(ValueError, match=message):
        core.add_request(request_id, prompt, SamplingParams(**params))
    assert not core.has_unfinished_requests()


def test_sampling_params_must_be_sampling_params():
    with pytest.raises(ValueError, match=r"sampling_params = \{'max_tokens': 3\}"):
        build_engine("roomy").core.add_request("a", [1], {"max_tokens": 3})


def test_a_request_larger_than_the_pool_names_needed_and_available_blocks():
    tiny = dataclasses.replace(SHAPES["roomy"], num_blocks=11)  # two whole pages of 4 planes
    core = build_engine(tiny).core
    with pytest.raises(ValueError, match="9 positions need 12 KV blocks, the pool has 8"):
        core.add_request("a", [1, 2], SamplingParams(max_tokens=8))
    core.add_request("a", [1, 2], SamplingParams(max_tokens=7))


def test_an_unfinished_id_cannot_be_added_again():
    core = build_engine("roomy").core
    core.add_request("a", [1], SamplingParams())
    with pytest.raises(ValueError, match="request_id = 'a'"):
        core.add_request("a", [2], SamplingParams())


def test_open_fields_are_filled_in_and_reported():
    core = build_engine("roomy").core
    core.add_request("a", [1], SamplingParams(max_tokens=1))
    core.add_request("b", [1], SamplingParams(max_tokens=1, max_loops=1))
    outputs = {}
    while core.has_unfinished_requests():
        outputs |= {output.request_id: output for output in core.step()}
    a, b = outputs["a"].sampling_params, outputs["b"].sampling_params
    assert (a.min_loops, a.max_loops) == (2, 4)
    assert (b.min_loops, b.max_loops) == (1, 1)
    assert 0 <= a.seed < 2**63
    assert a.seed != b.seed


def test_a_reported_seed_gives_the_same_tokens_again():
    def run(**params):
        core = build_engine("roomy").core
        core.add_request("a", [1, 2, 3], SamplingParams(temperature=1.0, max_tokens=12, **params))
        while core.has_unfinished_requests():
            for output in core.step():
                last = output
        return last

    first = run()
    assert run(seed=first.sampling_params.seed).token_ids == first.token_ids
    assert run().token_ids != first.token_ids


def test_trace_requests_are_checked_on_admission():
    core = build_engine(
        "roomy", exit_config=ExitConfig(mode="trace", depths_by_request={"a": [4, 2]})
    ).core
    with pytest.raises(ValueError, match=r"depths_by_request\['b'\]"):
        core.add_request("b", [1], SamplingParams(max_tokens=2))
    core.add_request("a", [1], SamplingParams(max_tokens=2))
