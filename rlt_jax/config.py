"""What a user can set about an engine: frozen dataclasses, each checking itself.

The field names follow the reference runtime, so that its users can move over. Every field
carries its help text; the command line is generated from them.
"""

import dataclasses
import functools
from collections.abc import Mapping

from rlt_jax.validation import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    fail,
    option,
    plain_number,
    plain_numbers,
)

DTYPES = ("float32", "bfloat16")
LAYOUTS = ("last_exited", "shared")
SCHEDULER_MODES = ("refill", "no_refill", "mixed")
ADMISSION_POLICIES = ("fcfs", "priority")
EXIT_MODES = ("ouro", "ouro_delayed", "random_lookahead", "trace", "weighted")
EXIT_DECISIONS = ("host", "device")
KERNELS = ("auto", "mosaic", "triton", "reference")

MAX_INT32 = 2**31 - 1  # pages, slots and positions are int32 on the device
MAX_BUCKET = 2**16


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The paged KV pool.

    In the "last_exited" layout every token page takes one block per depth; in "shared" it
    takes one. `num_blocks` counts blocks of all depths.
    """

    num_blocks: int | None = option(None, "KV blocks in all (None: planned from the memory)")
    block_size: int = option(16, "tokens in a block")
    layout: str = option("last_exited", "KV planes: one per depth, or one shared", choices=LAYOUTS)
    gpu_memory_utilization: float = option(0.9, "share of the device memory to use, in (0, 1]")
    kv_cache_memory_bytes: int | None = option(None, "bytes of KV (None: planned)")
    memory_reserve_bytes: int = option(256 * 2**20, "bytes the memory plan leaves free")
    incremental_allocation: bool = option(
        False, "give a request blocks as its tokens come to them, in place of all on admission"
    )
    watermark_ratio: float = option(
        0.0,
        "with incremental_allocation, the share of the blocks in [0, 1) to leave free where a"
        " request joins others",
    )
    enable_prefix_caching: bool = option(
        False, "keep the K/V of full prompt pages for prompts that begin alike"
    )
    host_memory_bytes: int | None = option(
        None, "bytes of host memory for preempted requests (None: half of what is free)"
    )

    def __post_init__(self):
        plain_numbers(self)
        name = "CacheConfig.num_blocks"
        check_int(name, self.num_blocks, minimum=1, maximum=MAX_INT32, optional=True)
        check_int("CacheConfig.block_size", self.block_size, minimum=1, maximum=MAX_INT32)
        check_choice("CacheConfig.layout", self.layout, LAYOUTS)
        check_float(
            "CacheConfig.gpu_memory_utilization",
            self.gpu_memory_utilization,
            "in (0, 1]",
            lambda share: 0 < share <= 1,
        )
        name = "CacheConfig.kv_cache_memory_bytes"
        check_int(name, self.kv_cache_memory_bytes, minimum=1, optional=True)
        check_int("CacheConfig.memory_reserve_bytes", self.memory_reserve_bytes, minimum=0)
        check_bool("CacheConfig.incremental_allocation", self.incremental_allocation)
        check_float(
            "CacheConfig.watermark_ratio",
            self.watermark_ratio,
            "in [0, 1)",
            lambda ratio: 0 <= ratio < 1,
        )
        check_bool("CacheConfig.enable_prefix_caching", self.enable_prefix_caching)
        if self.enable_prefix_caching and self.layout == "shared":
            rule = (
                'needs layout = "last_exited": in "shared" later tokens read the last loop of a'
                " page at every depth"
            )
            fail("CacheConfig.enable_prefix_caching", True, rule)
        host = "CacheConfig.host_memory_bytes"
        check_int(host, self.host_memory_bytes, minimum=0, optional=True)
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            fail(name, self.kv_cache_memory_bytes, "cannot be set together with num_blocks")


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """How requests are batched.

    None means 8 sequences and 128 tokens on a CPU, 128 and 2,048 on a GPU.
    """

    max_num_seqs: int | None = option(None, "requests in the engine at once")
    max_num_batched_tokens: int | None = option(None, "rows and prompt tokens in a batch")
    mode: str = option(
        "refill",
        "refill: a finished row is replaced at once; no_refill: fill, run and empty in phases;"
        " mixed: as refill, and prompts and decode rows share batches",
        choices=SCHEDULER_MODES,
    )
    prefill_chunk_size: int | None = option(
        None,
        "prompt tokens of one request in a batch (None: max_num_batched_tokens, or a quarter of it"
        " with wavefront_chunked_prefill)",
    )
    max_prefill_batches_before_decode: int = option(
        1, "prefill batches allowed before waiting decode rows must run"
    )
    min_coda_batch_size: int = option(
        1, "rows to gather before a coda batch, while other rows can still run"
    )
    wavefront_chunked_prefill: bool = option(
        False, "run the chunks of a prompt side by side, each a loop behind the one before it"
    )
    policy: str = option(
        "fcfs",
        "who is admitted first: fcfs: whoever came first; priority: the lowest"
        " SamplingParams.priority, then whoever came first",
        choices=ADMISSION_POLICIES,
    )
    admission_scan_limit: int = option(
        64, "waiting requests to look at in a step, for those that fit"
    )
    max_admission_bypasses: int = option(
        8, "later requests that may overtake one that does not fit; then all wait for it"
    )
    enable_preemption: bool = option(
        False, "save running requests to host memory where more urgent ones need their place"
    )

    def __post_init__(self):
        plain_numbers(self)
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_size"):
            value = getattr(self, name)
            check_int(f"SchedulerConfig.{name}", value, minimum=1, maximum=MAX_INT32, optional=True)
        check_choice("SchedulerConfig.mode", self.mode, SCHEDULER_MODES)
        check_choice("SchedulerConfig.policy", self.policy, ADMISSION_POLICIES)
        for name, least in (
            ("max_prefill_batches_before_decode", 1),
            ("min_coda_batch_size", 1),
            ("admission_scan_limit", 1),
            ("max_admission_bypasses", 0),
        ):
            check_int(f"SchedulerConfig.{name}", getattr(self, name), minimum=least)
        check_bool("SchedulerConfig.enable_preemption", self.enable_preemption)
        name = "SchedulerConfig.wavefront_chunked_prefill"
        check_bool(name, self.wavefront_chunked_prefill)
        if self.wavefront_chunked_prefill and self.mode == "no_refill":
            fail(name, True, 'needs mode = "refill" or "mixed"; "no_refill" ends prompts in phases')

    @property
    def stages_prompts(self) -> bool:
        """Whether prompts may go through the loops one at a time."""
        return self.mode == "mixed" or self.wavefront_chunked_prefill

    def check_with(self, cache: CacheConfig, exits: "ExitConfig") -> None:
        """Raises ValueError where these options do not go together."""
        if not self.stages_prompts:
            return
        name, value = ("mode", self.mode)
        if self.wavefront_chunked_prefill:
            name, value = ("wavefront_chunked_prefill", True)
        if cache.layout == "shared":
            rule = (
                'needs CacheConfig.layout = "last_exited": in "shared" a prompt token ends all its'
                " loops before the next one starts"
            )
            fail(f"SchedulerConfig.{name}", value, rule)
        if exits.mode == "weighted":
            rule = (
                'does not go with ExitConfig.mode = "weighted", which runs all loops of a token in'
                " one program"
            )
            fail(f"SchedulerConfig.{name}", value, rule)

    def resolve(self, platform: str) -> "SchedulerConfig":
        """The same config with every None replaced by the platform's default."""
        seqs, tokens = (8, 128) if platform == "cpu" else (128, 2048)
        tokens = self.max_num_batched_tokens or tokens
        # A wavefront needs room for several chunks.
        chunk = max(1, tokens // 4) if self.wavefront_chunked_prefill else tokens
        return dataclasses.replace(
            self,
            max_num_seqs=self.max_num_seqs or seqs,
            max_num_batched_tokens=tokens,
            prefill_chunk_size=min(self.prefill_chunk_size or chunk, tokens),
        )


@dataclasses.dataclass(frozen=True)
class ExitConfig:
    """When a decoded token may leave the loop. Prompts always run to full depth.

    "ouro" reads the model's gate as a hazard: a token leaves when the probability of having left
    reaches its threshold. "ouro_delayed" leaves one loop later. "random_lookahead" takes the score
    of a random head, drawn from `seed`, for leaving after one more loop. "trace" replays
    `depths_by_request`: for each request id the prompt's full depth, then one depth per further
    output token. "weighted" runs every token to full depth and gives the logits that the exit
    distribution of "ouro" has in the mean.
    """

    mode: str = option("ouro", "exit policy", choices=EXIT_MODES)
    seed: int = option(0, 'of the head of mode "random_lookahead"')
    depths_by_request: Mapping[str, tuple[int, ...]] | None = option(
        None, 'depths to replay, by request id (JSON, for mode "trace")'
    )

    def __post_init__(self):
        plain_numbers(self)
        check_choice("ExitConfig.mode", self.mode, EXIT_MODES)
        check_int("ExitConfig.seed", self.seed, minimum=0, maximum=2**63 - 1)
        name = "ExitConfig.depths_by_request"
        if (self.mode == "trace") != (self.depths_by_request is not None):
            fail(name, self.depths_by_request, 'must be given with mode "trace" and only then')
        if self.depths_by_request is None:
            return
        if not isinstance(self.depths_by_request, Mapping):
            fail(name, self.depths_by_request, "must map request ids to lists of depths")
        frozen = {}
        for request_id, depths in self.depths_by_request.items():
            if not isinstance(request_id, str) or not request_id:
                fail(name, request_id, "request ids must be non-empty strings")
            if not isinstance(depths, (list, tuple)) or not depths:
                fail(f"{name}[{request_id!r}]", depths, "must be a non-empty list of depths")
            depths = tuple(plain_number(depth) for depth in depths)
            for i, depth in enumerate(depths):
                check_int(f"{name}[{request_id!r}][{i}]", depth, minimum=1)
            frozen[request_id] = depths
        object.__setattr__(self, "depths_by_request", frozen)

    def __hash__(self):
        depths = self.depths_by_request
        return hash((self.mode, self.seed, depths and tuple(sorted(depths.items()))))


# Options of the reference runtime that have no counterpart here, and what replaced each.
_REPLACED_EXECUTION_OPTIONS = {
    "static_buffers": "the device state is always preallocated and donated",
    "pad_to_power_of_two": "batches are always padded to power-of-two buckets",
    "multi_stream": "XLA runs one compute stream per device",
    "cuda_graphs": "XLA records command buffers by itself",
    "cuda_graph_max_batch_size": "XLA records command buffers by itself",
    "cuda_graph_max_graphs": "XLA records command buffers by itself",
    "cuda_graph_memory_reserve_bytes": "use CacheConfig.memory_reserve_bytes",
}


@dataclasses.dataclass(frozen=True)
class ExecutionConfig:
    """How programs are compiled and sent to the device."""

    kernels: str = option(
        "auto", "attention kernels (auto: the fastest that fit the device)", choices=KERNELS
    )
    async_scheduling: bool = option(
        False, "submit a request's next loop before the signal of its last one is read"
    )
    exit_decision: str = option(
        "host",
        'who applies the exit rule: the host, or the program itself (mode "ouro")',
        choices=EXIT_DECISIONS,
    )
    max_in_flight: int | None = option(
        None,
        "batches on the device at once; one whose content hangs on a result waits for it (None: 2"
        " on a CPU, 3 on a GPU)",
    )
    tokens_per_dispatch: int = option(
        1, "tokens that greedy full-depth requests run in one dispatch: 1, 2 or 4"
    )
    compilation_cache_dir: str | None = option(
        None, "folder that keeps compiled programs between runs (None: JAX's own setting)"
    )
    compile_ahead: bool | None = option(
        None, "compile every program before the first request (None: on a GPU only)"
    )
    min_row_bucket: int | None = option(
        None, "smallest bucket of decode rows, a power of two (None: 1 on a CPU, 8 on a GPU)"
    )
    min_prefill_bucket: int | None = option(
        None, "smallest bucket of prompt tokens, a power of two (None: 16 on a CPU, 128 on a GPU)"
    )

    def __post_init__(self):
        plain_numbers(self)
        check_choice("ExecutionConfig.kernels", self.kernels, KERNELS)
        check_bool("ExecutionConfig.async_scheduling", self.async_scheduling)
        check_choice("ExecutionConfig.exit_decision", self.exit_decision, EXIT_DECISIONS)
        name = "ExecutionConfig.max_in_flight"
        check_int(name, self.max_in_flight, minimum=1, optional=True)
        name = "ExecutionConfig.tokens_per_dispatch"
        check_int(name, self.tokens_per_dispatch, minimum=1)
        if self.tokens_per_dispatch not in (1, 2, 4):
            fail(name, self.tokens_per_dispatch, "must be 1, 2 or 4")
        if self.compilation_cache_dir is not None and (
            not isinstance(self.compilation_cache_dir, str) or not self.compilation_cache_dir
        ):
            rule = "must be a folder's path or None"
            fail("ExecutionConfig.compilation_cache_dir", self.compilation_cache_dir, rule)
        if self.compile_ahead is not None:
            check_bool("ExecutionConfig.compile_ahead", self.compile_ahead)
        for name in ("min_row_bucket", "min_prefill_bucket"):
            value = getattr(self, name)
            check_int(
                f"ExecutionConfig.{name}", value, minimum=1, maximum=MAX_BUCKET, optional=True
            )
            if value is not None and value & (value - 1):
                fail(f"ExecutionConfig.{name}", value, "must be a power of two")

    def check_with(self, exits: ExitConfig) -> None:
        """Raises ValueError where these options do not go together."""
        if self.exit_decision == "device" and exits.mode != "ouro":
            rule = f'is for ExitConfig.mode = "ouro"; with mode = {exits.mode!r} use "host"'
            fail("ExecutionConfig.exit_decision", self.exit_decision, rule)
        if self.async_scheduling and exits.mode == "ouro" and self.exit_decision == "host":
            rule = (
                'with ExitConfig.mode = "ouro" needs exit_decision = "device" (or mode = '
                '"ouro_delayed"): on the host each loop waits for the signal of the last'
            )
            fail("ExecutionConfig.async_scheduling", self.async_scheduling, rule)

    def resolve(self, platform: str) -> "ExecutionConfig":
        """The same config with the open choices replaced by the platform's defaults."""
        rows, prompts, in_flight = (1, 16, 2) if platform == "cpu" else (8, 128, 3)
        return dataclasses.replace(
            self,
            max_in_flight=self.max_in_flight or in_flight,
            compile_ahead=platform != "cpu" if self.compile_ahead is None else self.compile_ahead,
            min_row_bucket=self.min_row_bucket or rows,
            min_prefill_bucket=self.min_prefill_bucket or prompts,
        )


def _refuse_replaced_options(init):
    @functools.wraps(init)
    def checked(self, *args, **kwargs):
        for name in kwargs:
            if name in _REPLACED_EXECUTION_OPTIONS:
                rule = f"this option does not exist here: {_REPLACED_EXECUTION_OPTIONS[name]}"
                fail(f"ExecutionConfig.{name}", kwargs[name], rule)
        init(self, *args, **kwargs)

    return checked


ExecutionConfig.__init__ = _refuse_replaced_options(ExecutionConfig.__init__)
