"""SamplingParams: what each field allows, and that every error names field, value and rule."""

import dataclasses

import pytest

from rlt_jax.sampling_params import SamplingParams

INF, NAN = float("inf"), float("nan")
OPTIONAL_LOOPS = ([None, 1, 9], [0, -1, 2.0, "2", True], "must be an integer >= 1 or None")

# Of each field: values that it takes, values that it refuses, and the rule that the error gives.
FIELDS = {
    "max_tokens": ([1, 10**6], [0, -1, 1.0, "1", True, None], "must be an integer >= 1"),
    "temperature": (
        [0, 0.0, 1e-6, 2],
        [-0.1, NAN, INF, "1", None, True],
        "must be a finite number >= 0",
    ),
    "top_p": (
        [1, 1.0, 1e-6],
        [0, 0.0, -1, 1.01, NAN, "1", None, True],
        "must be a finite number in (0, 1]",
    ),
    "top_k": ([-1, 1, 2**31 - 1], [-2, 2**31, 1.0, None, True], "must be an integer >= -1 and <="),
    "seed": (
        [None, 0, 2**32, 2**63 - 1],
        [-1, 2**63, 1.0, "1", True],
        "must be an integer >= 0 and <= 9223372036854775807 or None",
    ),
    "min_loops": OPTIONAL_LOOPS,
    "max_loops": OPTIONAL_LOOPS,
    "exit_threshold": (
        [0, 0.5, 1, 1.0],
        [-0.01, 1.01, NAN, "1", None, True],
        "must be a finite number in [0, 1]",
    ),
    "ignore_eos": ([True, False], [0, 1, None, "no"], "must be True or False"),
    "stop_token_ids": ([(), (0, 5)], [None, 5, "5", {5}], "must be a list of token ids"),
    "logprobs": ([None, 0], [-1, 1, 0.0, False], "must be 0 (the output tokens' own) or None"),
    "priority": ([0, -5, 2**70], [1.0, "1", None, True], "must be an integer"),
    "cache_salt": ([None, "a"], ["", 5, b"a", True], "must be a non-empty string or None"),
}

GOOD = [(field, value) for field, (good, _, _) in FIELDS.items() for value in good]
BAD = [(field, value, rule) for field, (_, bad, rule) in FIELDS.items() for value in bad]


def test_every_field_is_in_the_table():
    assert set(FIELDS) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("field, value", GOOD, ids=repr)
def test_a_field_takes_what_it_allows(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize("field, value, rule", BAD, ids=repr)
def test_an_error_names_the_field_the_value_and_the_rule(field, value, rule):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    assert str(error.value).startswith(f"SamplingParams.{field} = {value!r}: ")
    assert rule in str(error.value)


def test_top_k_zero_is_neither_all_nor_some():
    with pytest.raises(ValueError, match=r"top_k = 0: must be -1 \(all\) or >= 1"):
        SamplingParams(top_k=0)


def test_min_loops_may_not_exceed_max_loops():
    assert SamplingParams(min_loops=3, max_loops=3).min_loops == 3
    with pytest.raises(ValueError, match=r"min_loops = 4: must be <= max_loops = 3"):
        SamplingParams(min_loops=4, max_loops=3)


@pytest.mark.parametrize("token", [-1, 1.0, "1", True, None])
def test_a_bad_stop_token_is_pointed_at(token):
    with pytest.raises(ValueError) as error:
        SamplingParams(stop_token_ids=[5, token])
    assert f"SamplingParams.stop_token_ids[1] = {token!r}: must be an integer >= 0" in str(
        error.value
    )


def test_stop_tokens_become_a_tuple_that_the_caller_cannot_change():
    tokens = [5]
    params = SamplingParams(stop_token_ids=tokens)
    tokens.append(6)
    assert params.stop_token_ids == (5,)


def test_the_defaults_are_greedy_full_depth_and_16_tokens():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.exit_threshold) == (16, 0.0, 1.0)
    assert (params.min_loops, params.max_loops, params.seed, params.logprobs) == (None,) * 4


def test_params_are_frozen_hashable_values():
    params = SamplingParams(max_tokens=3, stop_token_ids=[1])
    same = SamplingParams(max_tokens=3, stop_token_ids=(1,))
    assert params == same != SamplingParams()
    assert len({params, same}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 4


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_every_field_has_help_for_the_command_line():
    for field in dataclasses.fields(SamplingParams):
        assert len(field.metadata["help"]) > 5
