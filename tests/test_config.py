"""The engine configs: what each field allows, and that every error names field, value and rule."""

import dataclasses
import json
import re

import pytest

from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig

CONFIGS = [CacheConfig, SchedulerConfig, ExitConfig, ExecutionConfig]
INF, NAN = float("inf"), float("nan")

POSITIVE = ([1, 7], [0, -1, 1.0, "1", True, [1]], "must be an integer >= 1")
OPTIONAL_POSITIVE = ([None, *POSITIVE[0]], POSITIVE[1], "must be an integer >= 1")


def choice(*allowed):
    bad = [None, "", allowed[0].upper(), 1, [allowed[0]]]
    return allowed, bad, "must be one of " + ", ".join(map(repr, allowed))


ADAPTIVE_MODES = ["ouro", "ouro_delayed", "random_lookahead"]

# Of each field: values that it takes, values that it refuses, and the rule that the error gives.
FIELDS = {
    (CacheConfig, "num_blocks"): OPTIONAL_POSITIVE,
    (CacheConfig, "block_size"): (POSITIVE[0], [None, *POSITIVE[1]], POSITIVE[2]),
    (CacheConfig, "layout"): choice("last_exited", "shared"),
    (CacheConfig, "gpu_memory_utilization"): (
        [1, 1.0, 0.001],
        [0, 0.0, -0.1, 1.0001, NAN, INF, "0.9", None, True],
        "must be a finite number in (0, 1]",
    ),
    (CacheConfig, "kv_cache_memory_bytes"): OPTIONAL_POSITIVE,
    (CacheConfig, "memory_reserve_bytes"): (
        [0, 2**40],
        [-1, 0.5, None, False],
        "must be an integer >= 0",
    ),
    (CacheConfig, "incremental_allocation"): ([True, False], [0, None], "must be True or False"),
    (CacheConfig, "watermark_ratio"): (
        [0, 0.0, 0.01, 0.999],
        [-0.01, 1, 1.0, NAN, "0.1", None, True],
        "must be a finite number in [0, 1)",
    ),
    (CacheConfig, "enable_prefix_caching"): ([True, False], [1, None], "must be True or False"),
    (CacheConfig, "host_memory_bytes"): (
        [None, 0, 2**40],
        [-1, 0.5, "1", True],
        "must be an integer >= 0 or None",
    ),
    (SchedulerConfig, "max_num_seqs"): OPTIONAL_POSITIVE,
    (SchedulerConfig, "max_num_batched_tokens"): OPTIONAL_POSITIVE,
    (SchedulerConfig, "mode"): choice("refill", "no_refill", "mixed"),
    (SchedulerConfig, "prefill_chunk_size"): OPTIONAL_POSITIVE,
    (SchedulerConfig, "max_prefill_batches_before_decode"): POSITIVE,
    (SchedulerConfig, "min_coda_batch_size"): POSITIVE,
    (SchedulerConfig, "policy"): choice("fcfs", "priority"),
    (SchedulerConfig, "admission_scan_limit"): POSITIVE,
    (SchedulerConfig, "max_admission_bypasses"): (
        [0, 8],
        [-1, 1.0, None, True],
        "must be an integer >= 0",
    ),
    (SchedulerConfig, "enable_preemption"): ([True, False], [1, None], "must be True or False"),
    (SchedulerConfig, "wavefront_chunked_prefill"): (
        [True, False],
        [0, None, "yes"],
        "must be True or False",
    ),
    (ExitConfig, "mode"): (
        [*ADAPTIVE_MODES, "weighted"],
        *choice(*ADAPTIVE_MODES, "trace", "weighted")[1:],
    ),
    (ExitConfig, "seed"): ([0, 2**63 - 1], [-1, 2**63, 1.5, True, None], "must be an integer >= 0"),
    (ExecutionConfig, "async_scheduling"): (
        [True, False],
        [0, None, "yes"],
        "must be True or False",
    ),
    (ExecutionConfig, "exit_decision"): choice("host", "device"),
    (ExecutionConfig, "kernels"): choice("auto", "mosaic", "triton", "reference"),
    (ExecutionConfig, "max_in_flight"): OPTIONAL_POSITIVE,
    (ExecutionConfig, "tokens_per_dispatch"): ([1, 2, 4], [3, 8], "must be 1, 2 or 4"),
    (ExecutionConfig, "compilation_cache_dir"): (
        [None, "/tmp/cache"],
        ["", 5, b"x"],
        "must be a folder's path or None",
    ),
    (ExecutionConfig, "compile_ahead"): (
        [None, True, False],
        [0, 1, "yes"],
        "must be True or False",
    ),
    (ExecutionConfig, "min_row_bucket"): ([None, 1, 2, 64], [0, 1.0, True], POSITIVE[2]),
    (ExecutionConfig, "min_prefill_bucket"): ([None, 1, 2, 64], [0, 1.0, True], POSITIVE[2]),
}
# Tested apart: it goes with mode "trace" alone.
SPECIAL = {(ExitConfig, "depths_by_request")}

GOOD = [(*key, value) for key, (good, _, _) in FIELDS.items() for value in good]
BAD = [(*key, value, rule) for key, (_, bad, rule) in FIELDS.items() for value in bad]


def name_case(value):
    return value.__name__ if isinstance(value, type) else repr(value)


def test_every_field_is_in_the_table():
    fields = {(config, field.name) for config in CONFIGS for field in dataclasses.fields(config)}
    assert set(FIELDS) | SPECIAL == fields


@pytest.mark.parametrize("config, field, value", GOOD, ids=name_case)
def test_a_field_takes_what_it_allows(config, field, value):
    assert getattr(config(**{field: value}), field) == value


@pytest.mark.parametrize("config, field, value, rule", BAD, ids=name_case)
def test_an_error_names_the_field_the_value_and_the_rule(config, field, value, rule):
    with pytest.raises(ValueError) as error:
        config(**{field: value})
    assert str(error.value).startswith(f"{config.__name__}.{field} = {value!r}: ")
    assert rule in str(error.value)


@pytest.mark.parametrize("value", [0, -1, 1.0, "4", True, None])
def test_tokens_per_dispatch_is_a_positive_integer(value):
    rule = f"ExecutionConfig.tokens_per_dispatch = {value!r}: must be an integer >= 1"
    with pytest.raises(ValueError, match=re.escape(rule)):
        ExecutionConfig(tokens_per_dispatch=value)


@pytest.mark.parametrize("field", ["min_row_bucket", "min_prefill_bucket"])
@pytest.mark.parametrize("value", [3, 6, 100])
def test_buckets_are_powers_of_two(field, value):
    with pytest.raises(ValueError, match=f"ExecutionConfig.{field} = {value}: .* power of two"):
        ExecutionConfig(**{field: value})


def test_num_blocks_and_kv_bytes_exclude_each_other():
    rule = r"CacheConfig\.kv_cache_memory_bytes = 5: cannot be set together with num_blocks"
    with pytest.raises(ValueError, match=rule):
        CacheConfig(num_blocks=1, kv_cache_memory_bytes=5)


def test_prefixes_are_not_cached_in_the_shared_layout():
    rule = r'CacheConfig\.enable_prefix_caching = True: needs layout = "last_exited"'
    with pytest.raises(ValueError, match=rule):
        CacheConfig(enable_prefix_caching=True, layout="shared")


# The exit trace.


def test_trace_depths_become_tuples_that_the_caller_cannot_change():
    depths = {"a": [4, 2, 3]}
    config = ExitConfig(mode="trace", depths_by_request=depths)
    depths["a"].append(1)
    depths["b"] = [1]
    assert config.depths_by_request == {"a": (4, 2, 3)}


@pytest.mark.parametrize(
    "mode, depths",
    [("trace", None), ("ouro", {"a": [4]})],
)
def test_depths_are_given_with_mode_trace_and_only_then(mode, depths):
    expected = f'ExitConfig.depths_by_request = {depths!r}: must be given with mode "trace" and'
    with pytest.raises(ValueError, match=re.escape(expected)):
        ExitConfig(mode=mode, depths_by_request=depths)


@pytest.mark.parametrize(
    "depths, message",
    [
        ([("a", [1])], "depths_by_request = [('a', [1])]: must map request ids to"),
        ({"": [1]}, "depths_by_request = '': request ids must be non-empty strings"),
        ({5: [1]}, "depths_by_request = 5: request ids must be non-empty strings"),
        ({"a": []}, "depths_by_request['a'] = []: must be a non-empty list"),
        ({"a": 4}, "depths_by_request['a'] = 4: must be a non-empty list"),
        ({"a": [4, 0]}, "depths_by_request['a'][1] = 0: must be an integer >= 1"),
        ({"a": [4, 2.0]}, "depths_by_request['a'][1] = 2.0: must be an integer >= 1"),
    ],
)
def test_bad_depths_are_pointed_at(depths, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ExitConfig(mode="trace", depths_by_request=depths)


# Options of the reference runtime.


@pytest.mark.parametrize(
    "option, replacement",
    [
        ("static_buffers", "preallocated"),
        ("pad_to_power_of_two", "buckets"),
        ("multi_stream", "one compute stream"),
        ("cuda_graphs", "command buffers"),
        ("cuda_graph_max_batch_size", "command buffers"),
        ("cuda_graph_max_graphs", "command buffers"),
        ("cuda_graph_memory_reserve_bytes", "CacheConfig.memory_reserve_bytes"),
    ],
)
@pytest.mark.parametrize("value", [True, False, 3])
def test_an_option_without_counterpart_says_what_replaced_it(option, replacement, value):
    with pytest.raises(ValueError, match=replacement) as error:
        ExecutionConfig(**{option: value})
    assert str(error.value).startswith(f"ExecutionConfig.{option} = {value!r}: ")


@pytest.mark.parametrize("config", CONFIGS)
def test_an_unknown_option_is_an_error(config):
    with pytest.raises(TypeError, match="no_such_option"):
        config(no_such_option=1)


# As values.

OTHER_VALUES = {
    CacheConfig: {"num_blocks": 8, "layout": "shared"},
    SchedulerConfig: {"max_num_seqs": 2},
    ExitConfig: {"mode": "trace", "depths_by_request": {"a": [4, 1], "b": [4]}},
    ExecutionConfig: {"compile_ahead": True},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_configs_are_frozen(config):
    instance = config()
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(instance, field.name, None)


@pytest.mark.parametrize("config", CONFIGS)
def test_equal_configs_hash_alike_and_different_ones_differ(config):
    values = OTHER_VALUES[config]
    copies = [config(**values), config(**json.loads(json.dumps(values)))]
    assert copies[0] == copies[1] != config()
    assert len({*copies, config(), config()}) == 2


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_has_help_for_the_command_line(config):
    for field in dataclasses.fields(config):
        assert len(field.metadata["help"]) > 5


# What None stands for.


@pytest.mark.parametrize("platform, seqs, tokens", [("cpu", 8, 128), ("gpu", 128, 2048)])
def test_scheduler_defaults_depend_on_the_platform(platform, seqs, tokens):
    resolved = SchedulerConfig().resolve(platform)
    assert resolved == SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, prefill_chunk_size=tokens
    )


def test_resolving_keeps_what_was_set():
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64, prefill_chunk_size=16)
    assert config.resolve("gpu") == config
    execution = ExecutionConfig(
        max_in_flight=4, min_row_bucket=2, min_prefill_bucket=2, compile_ahead=False
    )
    assert execution.resolve("gpu") == execution


def test_a_chunk_never_exceeds_the_batch():
    config = SchedulerConfig(max_num_batched_tokens=64, prefill_chunk_size=100)
    assert config.resolve("cpu").prefill_chunk_size == 64


@pytest.mark.parametrize("tokens, chunk", [(None, 32), (64, 16), (1, 1)])
def test_a_wavefront_has_room_for_four_chunks(tokens, chunk):
    config = SchedulerConfig(max_num_batched_tokens=tokens, wavefront_chunked_prefill=True)
    assert config.resolve("cpu").prefill_chunk_size == chunk


STAGED = {
    "mode = 'mixed'": {"mode": "mixed"},
    "wavefront_chunked_prefill = True": {"wavefront_chunked_prefill": True},
}


@pytest.mark.parametrize("shown", STAGED)
def test_loops_of_a_prompt_one_at_a_time_need_a_plane_per_depth(shown):
    scheduling = SchedulerConfig(**STAGED[shown])
    scheduling.check_with(CacheConfig(), ExitConfig())
    rule = f'SchedulerConfig.{shown}: needs CacheConfig.layout = "last_exited"'
    with pytest.raises(ValueError, match=re.escape(rule)):
        scheduling.check_with(CacheConfig(layout="shared"), ExitConfig())


@pytest.mark.parametrize("shown", STAGED)
def test_weighted_exits_need_all_loops_of_a_token_at_once(shown):
    rule = f'SchedulerConfig.{shown}: does not go with ExitConfig.mode = "weighted"'
    with pytest.raises(ValueError, match=re.escape(rule)):
        SchedulerConfig(**STAGED[shown]).check_with(CacheConfig(), ExitConfig(mode="weighted"))


@pytest.mark.parametrize("mode", ["refill", "no_refill"])
def test_whole_prompts_go_with_every_layout_and_exit_mode(mode):
    weighted = ExitConfig(mode="weighted")
    SchedulerConfig(mode=mode).check_with(CacheConfig(layout="shared"), weighted)


def test_no_refill_refuses_the_wavefront():
    rule = 'SchedulerConfig.wavefront_chunked_prefill = True: needs mode = "refill" or "mixed"'
    with pytest.raises(ValueError, match=re.escape(rule)):
        SchedulerConfig(mode="no_refill", wavefront_chunked_prefill=True)


@pytest.mark.parametrize(
    "platform, rows, prompt_tokens, ahead, in_flight",
    [("cpu", 1, 16, False, 2), ("gpu", 8, 128, True, 3)],
)
def test_execution_defaults_depend_on_the_platform(platform, rows, prompt_tokens, ahead, in_flight):
    resolved = ExecutionConfig().resolve(platform)
    assert (resolved.min_row_bucket, resolved.min_prefill_bucket) == (rows, prompt_tokens)
    assert resolved.compile_ahead is ahead
    assert (resolved.max_in_flight, resolved.tokens_per_dispatch) == (in_flight, 1)
    assert resolved.kernels == "auto"


@pytest.mark.parametrize("mode", ["ouro_delayed", "random_lookahead", "weighted"])
def test_a_device_decides_by_the_ouro_rule_alone(mode):
    with pytest.raises(ValueError, match=r"ExecutionConfig.exit_decision = 'device': .*host"):
        ExecutionConfig(exit_decision="device").check_with(ExitConfig(mode=mode))


def test_asynchronous_ouro_on_the_host_is_refused_and_the_error_names_the_alternative():
    with pytest.raises(ValueError) as error:
        ExecutionConfig(async_scheduling=True).check_with(ExitConfig())
    assert str(error.value).startswith("ExecutionConfig.async_scheduling = True: ")
    assert 'exit_decision = "device"' in str(error.value)
    for execution, mode in (
        (ExecutionConfig(async_scheduling=True, exit_decision="device"), "ouro"),
        (ExecutionConfig(exit_decision="device"), "ouro"),
        (ExecutionConfig(async_scheduling=True), "ouro_delayed"),
        (ExecutionConfig(async_scheduling=True), "random_lookahead"),
    ):
        execution.check_with(ExitConfig(mode=mode))
