"""How many KV blocks fit: read off the compiled programs, not off a trial run."""

import dataclasses
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from rlt_jax.config import CacheConfig
from rlt_jax.kernels.selection import REFERENCE, Kernels
from rlt_jax.models.ouro import DTypePolicy, OuroConfig, abstract_params
from rlt_jax.runtime.compilation import Buckets, compile_program
from rlt_jax.runtime.device_state import StateShape, abstract_state, tree_bytes
from rlt_jax.runtime.programs import Kind, ProgramSpec
from rlt_jax.runtime.transfers import abstract_content

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The terms of the plan, in bytes, and what came of it.

    source: "num_blocks", "kv_cache_memory_bytes", "cpu_default" or "device_memory". num_blocks
    counts the blocks of every depth; num_pages = num_blocks // planes is what requests share.
    useful_blocks: enough for max_num_seqs full contexts. window_rows: of StateShape.
    transfer_bytes: for pages on their way to the host or back, in every batch in flight at worst.
    """

    source: str
    num_blocks: int
    num_pages: int
    planes: int
    block_size: int
    bytes_per_block: int
    useful_blocks: int
    kv_bytes: int
    weight_bytes: int
    window_rows: int
    temporary_bytes: int | None = None
    transfer_bytes: int | None = None
    budget_bytes: int | None = None
    reserve_bytes: int | None = None

    def state_shape(self, num_slots: int, max_positions: int) -> StateShape:
        return StateShape(
            num_slots=num_slots,
            num_pages=self.num_pages,
            planes=self.planes,
            block_size=self.block_size,
            table_width=min(-(-max_positions // self.block_size), self.num_pages),
            window_rows=self.window_rows,
        )


def plan_memory(
    config: OuroConfig,
    policy: DTypePolicy,
    cache: CacheConfig,
    num_slots: int,
    buckets: Buckets,
    device: jax.Device,
    kernels: Kernels = REFERENCE,
    max_in_flight: int = 1,
) -> MemoryPlan:
    """Sizes the KV pool. max_in_flight: batches. Raises ValueError when not even one page fits."""
    last_exited = cache.layout == "last_exited"
    planes = config.total_ut_steps if last_exited else 1
    # There whether batches are mixed or not: one set of programs serves all engines of a size.
    window = planes * buckets.prompts[-1] if last_exited else 0
    itemsize = jnp.dtype(policy.kv_dtype).itemsize
    block_bytes = cache.block_size * config.kv_bytes_per_position(itemsize)
    useful = -(-config.max_position_embeddings // cache.block_size) * planes * num_slots
    weights = tree_bytes(abstract_params(config, policy))
    terms: dict[str, int] = {}
    if cache.num_blocks is not None:
        source, blocks = "num_blocks", cache.num_blocks
    elif cache.kv_cache_memory_bytes is not None:
        source = "kv_cache_memory_bytes"
        blocks = min(useful, cache.kv_cache_memory_bytes // block_bytes)
    elif device.platform == "cpu":
        source, blocks = "cpu_default", min(useful, CPU_POOL_BYTES // block_bytes)
    else:
        source = "device_memory"
        width = -(-config.max_position_embeddings // cache.block_size)
        shape = StateShape(num_slots, 1, planes, cache.block_size, width, window)
        spec = ProgramSpec(config, policy, shape, kernels)
        terms = _device_terms(spec, cache, buckets, device, max_in_flight)
        taken = terms["temporary_bytes"] + terms["transfer_bytes"] + terms["reserve_bytes"]
        blocks = min(useful, (terms["budget_bytes"] - weights - taken) // block_bytes)
    if blocks < planes:
        raise ValueError(
            f"the KV pool holds {max(blocks, 0)} blocks (source: {source}, {block_bytes} bytes"
            f" each): must be >= {planes}, one token page at every depth"
        )
    pages = blocks // planes
    return MemoryPlan(
        source=source,
        num_blocks=pages * planes,
        num_pages=pages,
        planes=planes,
        block_size=cache.block_size,
        bytes_per_block=block_bytes,
        useful_blocks=useful,
        kv_bytes=pages * planes * block_bytes,
        weight_bytes=weights,
        window_rows=window,
        **terms,
    )


def _device_terms(
    spec: ProgramSpec,
    cache: CacheConfig,
    buckets: Buckets,
    device: jax.Device,
    max_in_flight: int,
) -> dict[str, int]:
    """Budget, temporaries, transfers and reserve of a device with memory of its own.

    The largest buckets are compiled with a pool of one page, that of `spec`: temporaries do not
    depend on the pool's size. The state's other arrays count among the temporaries.
    """
    kinds = (Kind.PREFILL, Kind.MIXED, Kind.BOUNDARY_SAMPLE, Kind.TOKEN_SAMPLE)
    kinds += (Kind.SAVE, Kind.RESTORE)

    def analyse(kind: Kind):
        return compile_program(kind, buckets.of(kind)[-1], spec, device).memory_analysis()

    with ThreadPoolExecutor() as pool:
        analyses = list(pool.map(analyse, filter(buckets.of, kinds)))
    temporaries = max(a.temp_size_in_bytes for a in analyses)
    state = abstract_state(spec.config, spec.policy, spec.shape)
    rest_of_state = tree_bytes(state) - tree_bytes(state.kv)
    content = tree_bytes(abstract_content(state)) if buckets.transfers else 0
    limit = device.memory_stats()["bytes_limit"]
    in_use = device.memory_stats()["bytes_in_use"]  # the weights lie there already
    others = max(0, in_use - tree_bytes(abstract_params(spec.config, spec.policy)))
    wanted = int(cache.gpu_memory_utilization * _total_memory(device))
    if wanted > limit:
        logger.warning(
            "JAX's allocator may take %d bytes of the %d that gpu_memory_utilization = %s allows:"
            " set XLA_PYTHON_CLIENT_MEM_FRACTION, or import rlt_jax before jax",
            limit,
            wanted,
            cache.gpu_memory_utilization,
        )
    budget = min(limit, wanted)
    return {
        "temporary_bytes": temporaries + rest_of_state,
        "transfer_bytes": max_in_flight * content,
        "budget_bytes": budget - others,
        "reserve_bytes": cache.memory_reserve_bytes,
    }


def _total_memory(device: jax.Device) -> int:
    """The device's whole memory: JAX gives only the allocator's limit, a known share of it."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    share = float(next(filter(None, map(os.environ.get, names)), 0.75))
    return int(device.memory_stats()["bytes_limit"] / share)
