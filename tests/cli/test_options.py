"""Command-line flags: one for every config field, and the configs that they make."""

import contextlib
import dataclasses
import io
import re

import pytest

from rlt_jax import CacheConfig, ExecutionConfig, ExitConfig, SamplingParams, SchedulerConfig
from rlt_jax.cli import build_parser
from rlt_jax.cli_options import ENGINE_CONFIGS, config_from_flags, engine_options, flag_name

CONFIGS = [*ENGINE_CONFIGS.values(), SamplingParams]
FIELDS = [(config, field.name) for config in CONFIGS for field in dataclasses.fields(config)]

# Every field with what is typed for it and what the config then holds.
TYPED = {
    (CacheConfig, "num_blocks"): (["5"], 5),
    (CacheConfig, "block_size"): (["32"], 32),
    (CacheConfig, "layout"): (["shared"], "shared"),
    (CacheConfig, "gpu_memory_utilization"): (["0.5"], 0.5),
    (CacheConfig, "kv_cache_memory_bytes"): (["1000"], 1000),
    (CacheConfig, "memory_reserve_bytes"): (["0"], 0),
    (CacheConfig, "incremental_allocation"): ([], True),
    (CacheConfig, "watermark_ratio"): (["0.25"], 0.25),
    (CacheConfig, "enable_prefix_caching"): ([], True),
    (CacheConfig, "host_memory_bytes"): (["1000"], 1000),
    (SchedulerConfig, "max_num_seqs"): (["3"], 3),
    (SchedulerConfig, "max_num_batched_tokens"): (["64"], 64),
    (SchedulerConfig, "mode"): (["no_refill"], "no_refill"),
    (SchedulerConfig, "prefill_chunk_size"): (["16"], 16),
    (SchedulerConfig, "max_prefill_batches_before_decode"): (["2"], 2),
    (SchedulerConfig, "min_coda_batch_size"): (["2"], 2),
    (SchedulerConfig, "policy"): (["priority"], "priority"),
    (SchedulerConfig, "admission_scan_limit"): (["5"], 5),
    (SchedulerConfig, "max_admission_bypasses"): (["0"], 0),
    (SchedulerConfig, "wavefront_chunked_prefill"): ([], True),
    (SchedulerConfig, "enable_preemption"): ([], True),
    (ExitConfig, "mode"): (["trace", "--depths-by-request", '{"0": [4]}'], "trace"),
    (ExitConfig, "depths_by_request"): (['{"0": [4, 1]}', "--exit-mode=trace"], {"0": (4, 1)}),
    (ExitConfig, "seed"): (["5"], 5),
    (ExecutionConfig, "async_scheduling"): ([], True),
    (ExecutionConfig, "exit_decision"): (["device"], "device"),
    (ExecutionConfig, "kernels"): (["reference"], "reference"),
    (ExecutionConfig, "max_in_flight"): (["3"], 3),
    (ExecutionConfig, "tokens_per_dispatch"): (["4"], 4),
    (ExecutionConfig, "compilation_cache_dir"): (["/tmp/cache"], "/tmp/cache"),
    (ExecutionConfig, "compile_ahead"): ([], True),
    (ExecutionConfig, "min_row_bucket"): (["2"], 2),
    (ExecutionConfig, "min_prefill_bucket"): (["2"], 2),
    (SamplingParams, "max_tokens"): (["7"], 7),
    (SamplingParams, "temperature"): (["0.7"], 0.7),
    (SamplingParams, "top_p"): (["0.9"], 0.9),
    (SamplingParams, "top_k"): (["-1"], -1),
    (SamplingParams, "seed"): (["9223372036854775807"], 2**63 - 1),
    (SamplingParams, "min_loops"): (["2"], 2),
    (SamplingParams, "max_loops"): (["3"], 3),
    (SamplingParams, "exit_threshold"): (["0.5"], 0.5),
    (SamplingParams, "ignore_eos"): ([], True),
    (SamplingParams, "stop_token_ids"): (["1,2", "--stop-token-ids", "3"], (1, 2, 3)),
    (SamplingParams, "logprobs"): (["0"], 0),
    (SamplingParams, "priority"): (["-3"], -3),
    (SamplingParams, "cache_salt"): (["tenant"], "tenant"),
}


def parse_generate(*arguments):
    return build_parser().parse_args(["generate", "--model=m", *arguments])


def name_case(value):
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize("config, field", FIELDS, ids=name_case)
def test_every_config_field_is_a_flag(config, field):
    typed, value = TYPED[config, field]
    options = parse_generate(flag_name(config, field), *typed)
    assert getattr(config_from_flags(config, options), field) == value
    for other in CONFIGS:
        if other is not config:
            assert config_from_flags(other, options) == other()


def test_without_flags_every_config_is_its_default():
    options = parse_generate()
    assert [config_from_flags(config, options) for config in CONFIGS] == [c() for c in CONFIGS]
    model = {"model": "m", "tokenizer": None, "dtype": None, "device": None, "total_ut_steps": None}
    configs = {name: config() for name, config in ENGINE_CONFIGS.items()}
    assert engine_options(options) == model | configs


def test_the_flags_of_the_model_reach_llm():
    flags = ["--tokenizer=t", "--dtype=bfloat16", "--device=cpu", "--total-ut-steps=2"]
    options = engine_options(parse_generate(*flags))
    model = ("model", "tokenizer", "dtype", "device", "total_ut_steps")
    assert [options[name] for name in model] == ["m", "t", "bfloat16", "cpu", 2]


@pytest.fixture(scope="module")
def help_entries():
    """Each flag's entry in `rlt-jax generate --help-all`, on one line."""
    parser = build_parser()
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        parser.parse_args(["generate", "--help-all"])
    entries = re.split(r"\n  (?=-)", out.getvalue())
    return {re.match(r"[-\w]+", entry)[0]: " ".join(entry.split()) for entry in entries[1:]}


@pytest.mark.parametrize("config, field", FIELDS, ids=name_case)
def test_the_help_tells_flag_rule_choices_and_default(help_entries, config, field):
    entry = help_entries[flag_name(config, field)]
    (described,) = (f for f in dataclasses.fields(config) if f.name == field)
    assert described.metadata["help"].replace("(None:", "(default:").rstrip(")") in entry
    for choice in described.metadata.get("choices", ()):
        assert choice in entry
    if described.default not in (None, ()) and described.default is not False:
        assert f"default: {described.default})" in entry


@pytest.mark.parametrize("flag, value", [("--ignore-eos", True), ("--no-ignore-eos", False)])
def test_a_boolean_field_has_a_flag_for_each_value(flag, value):
    assert config_from_flags(SamplingParams, parse_generate(flag)).ignore_eos is value


def test_depths_may_lie_in_a_file(tmp_path):
    file = tmp_path / "depths.json"
    file.write_text('{"0": [4, 2]}')
    options = parse_generate("--exit-mode=trace", f"--depths-by-request={file}")
    assert config_from_flags(ExitConfig, options).depths_by_request == {"0": (4, 2)}
