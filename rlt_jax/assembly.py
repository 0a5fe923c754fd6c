"""Puts an engine together: memory plan, device state, programs, runner, scheduler."""

import dataclasses
import itertools
import logging
import time

import jax

from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.engine.core import EngineCore
from rlt_jax.engine.exit_policy import exit_policy
from rlt_jax.engine.intake import ModelLimits
from rlt_jax.engine.kv_accounting import KVAccounting, KVGeometry
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.host_memory import available_bytes
from rlt_jax.kernels.selection import HOPPER, Kernels, select
from rlt_jax.models.ouro import DTypePolicy, OuroConfig, OuroParams
from rlt_jax.runtime.compilation import Buckets, Programs, use_compilation_cache
from rlt_jax.runtime.exits import Exits
from rlt_jax.runtime.memory_plan import MemoryPlan, plan_memory
from rlt_jax.runtime.programs import ProgramSpec, transfer_pages
from rlt_jax.runtime.runner import Runner

logger = logging.getLogger(__name__)

MAX_EXECUTABLES = 40


@dataclasses.dataclass(frozen=True)
class StartUp:
    """What it took to be ready: seconds to plan memory, to compile every program ahead, to run each
    for the first times; the number of programs compiled (0: each on its first use)."""

    plan_seconds: float
    compile_seconds: float
    first_runs_seconds: float
    executables: int


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The parts of a running engine."""

    core: EngineCore
    runner: Runner
    programs: Programs
    memory_plan: MemoryPlan
    start_up: StartUp


def assemble(
    model: OuroConfig,
    params: OuroParams,
    *,
    policy: DTypePolicy,
    device: jax.Device,
    eos_token_ids: tuple[int, ...] = (),
    cache_config: CacheConfig | None = None,
    scheduler_config: SchedulerConfig | None = None,
    exit_config: ExitConfig | None = None,
    execution_config: ExecutionConfig | None = None,
) -> Assembly:
    """Builds an engine around parameters that already lie on `device`."""
    cache = cache_config or CacheConfig()
    scheduling = (scheduler_config or SchedulerConfig()).resolve(device.platform)
    execution = (execution_config or ExecutionConfig()).resolve(device.platform)
    exits = exit_config or ExitConfig()
    execution.check_with(exits)
    scheduling.check_with(cache, exits)
    use_compilation_cache(execution.compilation_cache_dir)

    kernels = choose_kernels(execution.kernels, model, policy, cache, device)
    buckets = plan_buckets(cache, scheduling, execution)
    clock = [time.perf_counter()]
    plan = plan_memory(
        model,
        policy,
        cache,
        scheduling.max_num_seqs,
        buckets,
        device,
        kernels,
        execution.max_in_flight,
    )
    shape = plan.state_shape(scheduling.max_num_seqs, model.max_position_embeddings)
    spec = ProgramSpec(model, policy, shape, kernels, program_exits(exits, execution))
    programs = Programs(spec, buckets, device)
    count = len(programs.all_keys())
    logger.info("at most %d executables", count)
    if count > MAX_EXECUTABLES:
        logger.warning(
            "%d executables can be compiled: a larger ExecutionConfig.min_row_bucket or"
            " min_prefill_bucket makes it fewer (%d is a good limit)",
            count,
            MAX_EXECUTABLES,
        )
    clock.append(time.perf_counter())
    if execution.compile_ahead:
        programs.warm_up()
    clock.append(time.perf_counter())
    runner = Runner(params, programs)
    if execution.compile_ahead and device.platform == "gpu":
        runner.run_all()
    clock.append(time.perf_counter())
    seconds = [round(end - start, 2) for start, end in itertools.pairwise(clock)]
    start_up = StartUp(*seconds, executables=len(programs.compiled))
    logger.info("ready: %s", start_up)

    limits = ModelLimits(
        vocab_size=model.vocab_size,
        full_depth=model.total_ut_steps,
        max_positions=model.max_position_embeddings,
        eos_token_ids=eos_token_ids,
    )
    rule = exit_policy(exits)
    kv = KVAccounting(
        KVGeometry(plan.num_pages, plan.planes, plan.block_size),
        cache.incremental_allocation,
        cache.watermark_ratio,
    )
    scheduler = Scheduler(
        scheduling,
        limits,
        rule,
        kv,
        execution.tokens_per_dispatch,
        run_ahead=execution.async_scheduling,
        caches_prefixes=cache.enable_prefix_caching,
        host_pages=host_pages(cache, plan) if scheduling.enable_preemption else 0,
        pages_per_transfer=transfer_pages(spec),
    )
    core = EngineCore(scheduler, runner, limits, rule, execution.max_in_flight)
    return Assembly(core, runner, programs, plan, start_up)


def program_exits(exits: ExitConfig, execution: ExecutionConfig) -> Exits:
    """What the programs must know of exits."""
    seed = exits.seed if exits.mode == "random_lookahead" else None
    decides = execution.exit_decision == "device"
    return Exits(decides, lookahead_seed=seed, weighted=exits.mode == "weighted")


def host_pages(cache: CacheConfig, plan: MemoryPlan) -> int:
    """Logical pages for which there is host memory: CacheConfig.host_memory_bytes of it, or half
    of what is free now."""
    num_bytes = cache.host_memory_bytes
    if num_bytes is None:
        num_bytes = available_bytes() // 2
    return num_bytes // (plan.planes * plan.bytes_per_block)


def choose_kernels(
    requested: str, model: OuroConfig, policy: DTypePolicy, cache: CacheConfig, device: jax.Device
) -> Kernels:
    """The kernels that ExecutionConfig.kernels = `requested` gives a model on a device."""
    return select(
        requested,
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", HOPPER),
        dtype=policy.dtype,
        kv_dtype=policy.kv_dtype,
        head_dim=model.head_dim,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        page_size=cache.block_size,
    )


def plan_buckets(
    cache: CacheConfig, scheduling: SchedulerConfig, execution: ExecutionConfig
) -> Buckets:
    """Buckets that hold the largest batches the scheduler can make."""
    rows = min(scheduling.max_num_seqs, scheduling.max_num_batched_tokens)
    # SHARED prefills requests beside each other, position by position.
    last_exited = cache.layout == "last_exited"
    return Buckets.plan(
        rows,
        execution.min_row_bucket,
        scheduling.max_num_batched_tokens if last_exited else rows,
        execution.min_prefill_bucket if last_exited else execution.min_row_bucket,
        execution.tokens_per_dispatch,
        mixed=scheduling.stages_prompts,
        transfers=scheduling.enable_preemption,
    )
