"""What this machine can do: bytes read and copied per second, flop/s of a large product."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from rlt_jax.bench.limits import Rates
from rlt_jax.bench.report import Say, number
from rlt_jax.bench.synthetic import random_array


@dataclasses.dataclass(frozen=True)
class RooflineSize:
    """read_bytes: of the array that is summed, then copied. matmul: rows and columns."""

    read_bytes: int
    matmul: int
    dtype: str
    calls: int
    repeats: int

    @classmethod
    def on(cls, platform: str, quick: bool = False) -> "RooflineSize":
        if platform == "cpu":
            return cls(2**26 if quick else 2**28, 512 if quick else 1024, "float32", 2, 3)
        return cls(2**31 if quick else 3 * 2**30, 8192, "bfloat16", 10 if quick else 20, 3)


@dataclasses.dataclass(frozen=True)
class RooflineRow:
    """rate: bytes or flops per second, the best repeat's. seconds: of one call."""

    what: str
    rate: float
    unit: str
    seconds: float
    dtype: str
    size: str


def measure(
    device: jax.Device, size: RooflineSize, say: Say, seed: int = 0, copy: bool = True
) -> list[RooflineRow]:
    """Rows "read", "copy" (unless left out) and "matmul"."""
    itemsize = jnp.dtype(size.dtype).itemsize
    keys = jax.random.split(jax.random.key(seed), 3)
    with jax.default_device(device):
        say("roofline: read bandwidth")
        x = random_array(keys[0], (size.read_bytes // itemsize // 4096, 4096), size.dtype)
        shape = f"{x.nbytes:,} bytes"
        seconds = _time(_read, (x,), size)
        rows = [RooflineRow("read", x.nbytes / seconds, "B/s", seconds, size.dtype, shape)]
        if copy:
            say("roofline: copy bandwidth")
            seconds = _time(_negate, (x,), size)
            rate = 2 * x.nbytes / seconds
            rows.append(RooflineRow("copy", rate, "B/s", seconds, size.dtype, shape))
        x.delete()
        say("roofline: matrix product")
        n = size.matmul
        a, b = (random_array(key, (n, n), size.dtype) for key in keys[1:])
        seconds = _time(_multiply, (a, b), size)
        rate = 2 * n**3 / seconds
        rows.append(RooflineRow("matmul", rate, "flop/s", seconds, size.dtype, f"{n} x {n} x {n}"))
    return rows


def measured_rates(device: jax.Device, say: Say) -> Rates:
    """A quick measurement, for the limits of another benchmark."""
    rows = measure(device, RooflineSize.on(device.platform, quick=True), say, copy=False)
    rate = {row.what: row.rate for row in rows}
    return Rates(read_bytes_per_s=rate["read"], matmul_flops_per_s=rate["matmul"])


COLUMNS = ("", "rate", "ms", "dtype", "size")


def table(rows: Sequence[RooflineRow]) -> list[list[str]]:
    return [
        [
            row.what,
            f"{number(row.rate / 1e9, 1)} G{row.unit}",
            number(1e3 * row.seconds, 3),
            row.dtype,
            row.size,
        ]
        for row in rows
    ]


@jax.jit
def _read(x):
    return jnp.sum(x.astype(jnp.float32))


@jax.jit
def _negate(x):
    return -x


@jax.jit
def _multiply(a, b):
    # On a GPU float32 would fall to TF32; bfloat16 is what is asked of it.
    return jax.lax.dot(a, b, precision=jax.lax.Precision.DEFAULT)


def _time(function: Callable, arguments: tuple, size: RooflineSize) -> float:
    """Seconds of a call: many are dispatched before the last is waited for; the best repeat."""
    return best_seconds(lambda: function(*arguments), size.calls, size.repeats)


def best_seconds(call: Callable[[], object], calls: int, repeats: int) -> float:
    """Seconds of one call(), of the best of `repeats` rounds of `calls` calls each."""
    for _ in range(3):  # the first runs warm, and record command buffers
        jax.block_until_ready(call())
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        best = min(best, (time.perf_counter() - started) / calls)
    return best
