"""What tests of the front end share: a tiny random checkpoint's sizes, and options under which all
of them run the same few compiled programs."""

from rlt_jax import CacheConfig, ExecutionConfig, SamplingParams, SchedulerConfig

TINY = {"hidden": 32, "layers": 2, "heads": 2, "head_dim": 16, "intermediate": 48}
OPTIONS = {
    "cache_config": CacheConfig(num_blocks=256),
    "scheduler_config": SchedulerConfig(max_num_seqs=4),
    "execution_config": ExecutionConfig(min_row_bucket=4, min_prefill_bucket=128),
}
ADAPTIVE = SamplingParams(max_tokens=12, exit_threshold=0.5, ignore_eos=True)
