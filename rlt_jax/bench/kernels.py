"""bench kernels: each kernel alone, called as often as a model has layers in one program, so that
dispatch vanishes, against what it must move and compute."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlt_jax.assembly import choose_kernels
from rlt_jax.bench.limits import Rates, Work
from rlt_jax.bench.report import Say, number, percent
from rlt_jax.bench.roofline import best_seconds
from rlt_jax.bench.synthetic import random_array
from rlt_jax.config import CacheConfig
from rlt_jax.kernels.kv_update import finalize_kv, rotate_and_write
from rlt_jax.kernels.paged_decode import paged_decode, prepare, write_and_decode
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch, TileBatch
from rlt_jax.kernels.paged_prefill import paged_prefill
from rlt_jax.kernels.residual_norm import residual_norm
from rlt_jax.kernels.selection import Kernels
from rlt_jax.models.ouro import DTypePolicy, OuroConfig
from rlt_jax.validation import check_int, fail

# Random K/V: fewer layers where they would take more.
_POOL_BYTES = {"cpu": 2**28, "gpu": 2**32}


@dataclasses.dataclass(frozen=True)
class KernelsSpec:
    """rows, contexts: of decode, every combination. prompts of each of prompt_tokens: of prefill.
    layers: calls in one program. kernels: which implementations, as in ExecutionConfig."""

    model: OuroConfig
    dtype: str
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: int
    prompt_tokens: tuple[int, ...]
    layers: int
    cache: CacheConfig
    kernels: str = "auto"
    seed: int = 0

    def check(self) -> None:
        several = {
            "--rows": self.rows,
            "--context": self.contexts,
            "--prompt": self.prompt_tokens,
            "--prompts": (self.prompts,),
            "--layers": (self.layers,),
        }
        for flag, values in several.items():
            for value in values:
                check_int(flag, value, minimum=1)

    @property
    def planes(self) -> int:
        return self.model.total_ut_steps if self.cache.layout == "last_exited" else 1

    def policy(self, platform: str) -> DTypePolicy:
        return DTypePolicy.on(platform, self.dtype)

    def select(self, device: jax.Device) -> Kernels:
        policy = self.policy(device.platform)
        return choose_kernels(self.kernels, self.model, policy, self.cache, device)


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """One kernel in one case. kernels: what was asked for; implementation: what ran. bytes, flops:
    what a call must move and compute."""

    kernel: str
    case: str
    kernels: str
    implementation: str
    microseconds: float
    bytes: float
    flops: float
    limit_microseconds: float | None = None
    fraction: float | None = None

    def with_limit(self, rates: Rates | None) -> "KernelRow":
        if rates is None:
            return self
        limit = 1e6 * Work(self.bytes, self.flops).limit_s(rates)
        fraction = limit / self.microseconds
        return dataclasses.replace(self, limit_microseconds=limit, fraction=fraction)


def run(spec: KernelsSpec, device: jax.Device, say: Say) -> Iterator[KernelRow]:
    """Every kernel in every case. Raises ValueError when `spec.kernels` cannot run there."""
    bench = _Bench(spec, device)
    tokens = [spec.prompts * prompt for prompt in spec.prompt_tokens]
    cases: list[tuple[Callable[..., KernelRow], tuple[int, ...]]] = [
        *((bench.paged_decode, case) for case in itertools.product(spec.rows, spec.contexts)),
        *((bench.write_and_decode, case) for case in itertools.product(spec.rows, spec.contexts)),
        *((bench.paged_prefill, (prompt,)) for prompt in spec.prompt_tokens),
        *((bench.rotate_and_write, (prompt,)) for prompt in spec.prompt_tokens),
        *((bench.residual_norm, (rows,)) for rows in (*spec.rows, *tokens)),
    ]
    if spec.planes > 1:
        cases += [(bench.finalize_kv, (rows,)) for rows in spec.rows]
    with jax.default_device(device):
        for measure, case in cases:
            say(f"kernels: {measure.__name__} {case}")
            yield measure(*case)


class _Bench:
    """A method a kernel. What a loop prepares for all of its layers is not timed."""

    def __init__(self, spec: KernelsSpec, device: jax.Device):
        self.spec = spec
        self.device = device
        self.model = spec.model
        self.policy = spec.policy(device.platform)
        self.kernels = spec.select(device)
        self.on_cpu = device.platform == "cpu"
        self.pool_bytes = _POOL_BYTES.get(device.platform, 2**32)
        self.itemsize = jnp.dtype(self.policy.dtype).itemsize
        self.position_bytes = (
            2
            * self.model.num_key_value_heads
            * self.model.head_dim
            * jnp.dtype(self.policy.kv_dtype).itemsize
        )
        self._keys = (jax.random.fold_in(jax.random.key(spec.seed), i) for i in itertools.count())

    def paged_decode(self, rows: int, context: int) -> KernelRow:
        kv, tables = self._pool(rows, context)
        h, x = self.model.num_attention_heads, self.model.head_dim
        batch = self._decode_rows(kv, tables, context)
        kv = prepare(kv, batch, self.kernels)

        def step(kv, q_rhx, layer, batch):
            out = paged_decode(q_rhx, kv, layer, batch, self.kernels, self.policy.precision)
            return kv, out, ()

        seconds = self._time(step, kv, self._random(rows, h, x), [batch])
        moved = rows * context * self.position_bytes + 2 * rows * h * x * self.itemsize
        flops = 4 * rows * context * h * x
        return self._row(
            "paged_decode", _decode_case(rows, context), "decode", seconds, moved, flops
        )

    def write_and_decode(self, rows: int, context: int) -> KernelRow:
        kv, tables = self._pool(rows, context)
        h, x, c = self.model.num_attention_heads, self.model.head_dim, self._heads
        batch = self._decode_rows(kv, tables, context)
        kv = prepare(kv, batch, self.kernels)
        cos, sin = self._random(rows, x // 2), self._random(rows, x // 2)

        def step(kv, qkv_rcx, layer, batch):
            out, kv = write_and_decode(
                qkv_rcx, cos, sin, kv, layer, batch, self.kernels, self.policy.precision
            )
            return kv, qkv_rcx, out

        seconds = self._time(step, kv, self._random(rows, c, x), [batch])
        moved = (rows * context + rows) * self.position_bytes
        moved += rows * (c + h) * x * self.itemsize
        flops = 4 * rows * context * h * x
        case = _decode_case(rows, context)
        return self._row("write_and_decode", case, "decode", seconds, moved, flops)

    def paged_prefill(self, prompt: int) -> KernelRow:
        kv, tables = self._pool(self.spec.prompts, prompt)
        h, x = self.model.num_attention_heads, self.model.head_dim
        batches = self._tile_batches(kv, tables, prompt)
        tokens = self.spec.prompts * prompt

        def step(kv, q_thx, layer, batch):
            out = paged_prefill(q_thx, kv, layer, batch, self.kernels, self.policy.precision)
            return kv, out, ()

        seconds = self._time(step, kv, self._random(tokens, h, x), batches)
        moved = tokens * self.position_bytes + 2 * tokens * h * x * self.itemsize
        flops = 4 * h * x * self.spec.prompts * (prompt * (prompt + 1) // 2)
        return self._row(
            "paged_prefill", self._prefill_case(prompt), "prefill", seconds, moved, flops
        )

    def rotate_and_write(self, prompt: int) -> KernelRow:
        kv, tables = self._pool(self.spec.prompts, prompt)
        h, x, c = self.model.num_attention_heads, self.model.head_dim, self._heads
        tokens = self.spec.prompts * prompt
        places = [batch.places(kv) for batch in self._tile_batches(kv, tables, prompt)]
        cos, sin = self._random(tokens, x // 2), self._random(tokens, x // 2)

        def step(kv, qkv_tcx, layer, places):
            out, kv = rotate_and_write(qkv_tcx, cos, sin, kv, layer, places, self.kernels)
            return kv, qkv_tcx, out

        seconds = self._time(step, kv, self._random(tokens, c, x), places)
        moved = tokens * (self.position_bytes + (c + h) * x * self.itemsize)
        case = self._prefill_case(prompt)
        return self._row("rotate_and_write", case, "update", seconds, moved, 0)

    def finalize_kv(self, rows: int) -> KernelRow:
        """All layers in one call; tokens that exit at half the depth."""
        kv, tables = self._pool(rows, 1, all_layers=True)
        exit_depth = max(1, self.spec.planes // 2)
        batch = self._decode_rows(kv, tables, 1).at_depth(exit_depth)

        def step(kv, carry, layer, batch):
            kv = finalize_kv(
                kv, batch.tables_rp, batch.positions_r, batch.depths_r, batch.valid_r, self.kernels
            )
            return kv, carry, ()

        seconds = self._time(step, kv, (), [batch])
        copies = 1 + self.spec.planes - exit_depth
        moved = rows * self.model.num_hidden_layers * copies * self.position_bytes
        case = f"{rows} rows, exit {exit_depth} of {self.spec.planes}, all layers"
        return self._row("finalize_kv", case, "update", seconds, moved, 0)

    def residual_norm(self, rows: int) -> KernelRow:
        d = self.model.hidden_size
        norms = 1 + 0.1 * self._random(4, d)
        eps = self.model.rms_norm_eps

        def step(kv, carry, layer, batch):
            return kv, residual_norm(*carry, (norms, 1), (norms, 2), eps, self.kernels), ()

        carry = (self._random(rows, d), self._random(rows, d))
        seconds = self._time(step, None, carry, [None])
        moved = 4 * rows * d * self.itemsize
        return self._row("residual_norm", f"{rows} rows", "norm", seconds, moved, 0)

    @property
    def _heads(self) -> int:
        """Of a fused projection: q, k and v."""
        return self.model.num_attention_heads + 2 * self.model.num_key_value_heads

    def _prefill_case(self, prompt: int) -> str:
        return f"{self.spec.prompts} x {prompt} tokens"

    def _row(
        self, kernel: str, case: str, operation: str, seconds: float, moved: float, flops: float
    ) -> KernelRow:
        implementation = getattr(self.kernels, operation)
        name = self.spec.kernels
        return KernelRow(kernel, case, name, implementation, 1e6 * seconds, moved, flops)

    def _time(self, step: Callable, kv: PagedKV | None, carry: Any, batches: Sequence) -> float:
        """Seconds of one step(kv, carry, layer, batch) -> (kv, carry, out), of many in a program.

        Each step takes what the last one gave and every `out` is kept, so that no step is left
        out or merged with another.
        """
        pool_layers = 1 if kv is None else kv.pool.shape[0]
        inner = jax.jit(step)  # one trace for all calls

        @functools.partial(jax.jit, donate_argnums=0)
        def program(kv, carry, batches):
            kept = []
            for i in range(self.spec.layers):
                layer = jnp.int32(i // len(batches) % pool_layers)
                kv, carry, out = inner(kv, carry, layer, batches[i % len(batches)])
                kept.append(out)
            return kv, (carry, kept)

        state = [kv]

        def call():
            state[0], result = program(state[0], carry, batches)
            return state[0], result

        calls = 1 if self.on_cpu else 20
        return best_seconds(call, calls, repeats=3) / self.spec.layers

    def _random(self, *shape: int) -> jax.Array:
        return random_array(next(self._keys), shape, self.policy.dtype)

    def _pool(
        self, requests: int, positions: int, all_layers: bool = False
    ) -> tuple[PagedKV, np.ndarray]:
        """Random K/V of every plane (of one, where all would take too much), and block tables
        that scatter the requests' pages over it."""
        page, planes = self.spec.cache.block_size, self.spec.planes
        pages = -(-positions // page)
        plane_bytes = requests * pages * page * self.position_bytes  # of one layer
        most = _memory_bytes(self.device) // 2
        if plane_bytes > most:
            rule = (
                f"{requests} of them have {plane_bytes} bytes of K/V in a layer: must be <= {most}"
            )
            fail("--context or --prompt", positions, f"{rule}, half of the memory")
        layers = self.model.num_hidden_layers
        if not all_layers:
            planes = planes if planes * plane_bytes <= self.pool_bytes else 1
            fitting = self.pool_bytes // (planes * plane_bytes)
            layers = max(1, min(layers, self.spec.layers, fitting))
        shape = (
            layers,
            requests * pages * planes,
            2,
            self.model.num_key_value_heads,
            page,
            self.model.head_dim,
        )
        pool = random_array(next(self._keys), shape, self.policy.kv_dtype)
        order = np.random.default_rng(self.spec.seed).permutation(requests * pages)
        return PagedKV(pool, planes), order.reshape(requests, pages).astype(np.int32)

    def _decode_rows(self, kv: PagedKV, tables: np.ndarray, context: int) -> RowBatch:
        """A row of each request, at all depths by turns."""
        rows = len(tables)
        return RowBatch(
            tables_rp=jnp.asarray(tables),
            positions_r=jnp.full(rows, context - 1, jnp.int32),
            depths_r=jnp.arange(rows, dtype=jnp.int32) % kv.planes + 1,
            valid_r=jnp.ones(rows, bool),
        )

    def _tile_batches(self, kv: PagedKV, tables: np.ndarray, prompt: int) -> list[TileBatch]:
        """Whole prompts, at every depth."""
        rows = self.kernels.tile_rows
        starts = np.arange(0, prompt, rows, dtype=np.int32)
        counts = np.minimum(rows, prompt - starts).astype(np.int32)
        return [
            TileBatch(
                tables_np=jnp.asarray(np.repeat(tables, len(starts), axis=0)),
                starts_n=jnp.asarray(np.tile(starts, len(tables))),
                counts_n=jnp.asarray(np.tile(counts, len(tables))),
                depths_n=jnp.full(len(starts) * len(tables), depth, jnp.int32),
                num_rows=len(tables) * prompt,
                tile_rows=rows,
            )
            for depth in range(1, kv.planes + 1)
        ]


def _decode_case(rows: int, context: int) -> str:
    return f"{rows} rows, context {context}"


COLUMNS = ("kernel", "case", "ran", "us", "GB/s", "Tflop/s", "limit us", "fraction")


def table(rows: Sequence[KernelRow]) -> list[list[str]]:
    return [
        [
            row.kernel,
            row.case,
            row.implementation,
            number(row.microseconds),
            number(row.bytes / row.microseconds / 1e3, 1),
            number(row.flops / row.microseconds / 1e6, 1),
            number(row.limit_microseconds),
            percent(row.fraction),
        ]
        for row in rows
    ]


def _memory_bytes(device: jax.Device) -> int:
    """Of the device, or of this machine where it has none of its own."""
    stats = device.memory_stats()
    if stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
