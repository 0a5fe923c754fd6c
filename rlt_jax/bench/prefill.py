"""bench prefill: prompts only, against the rate of large products."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from rlt_jax.bench.driver import BenchEngine, Configs, peak_bytes, random_prompts
from rlt_jax.bench.limits import Rates, Work, prefill_attention_flops, prefill_matmuls
from rlt_jax.bench.report import Say, number, percent
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import check_int, fail


@dataclasses.dataclass(frozen=True)
class PrefillSpec:
    """requests, prompts (lengths): every combination is measured `repeats` times."""

    requests: tuple[int, ...]
    prompts: tuple[int, ...]
    repeats: int = 3
    seed: int = 0

    def check(self, model: BenchModel) -> None:
        longest = model.config.max_position_embeddings
        for requests in self.requests:
            check_int("--requests", requests, minimum=1)
        for prompt in self.prompts:
            check_int("--prompt", prompt, minimum=1, maximum=longest)
        check_int("--repeats", self.repeats, minimum=1)


@dataclasses.dataclass(frozen=True)
class PrefillRow:
    """One case. seconds: of the median repeat, from the first request's submission to the last
    prompt's end. matmul_flops: all products with weights; the limit is that of these alone.
    limit_with_attention_tokens_per_s: that of both."""

    requests: int
    prompt: int
    layout: str
    kernels: str
    seconds: float
    all_seconds: tuple[float, ...]
    tokens_per_s: float
    matmul_flops: float
    attention_flops: float
    read_bytes: float
    peak_bytes: int
    limit_tokens_per_s: float | None = None
    limit_with_attention_tokens_per_s: float | None = None
    fraction: float | None = None

    def with_limit(self, rates: Rates | None) -> "PrefillRow":
        if rates is None:
            return self
        tokens = self.requests * self.prompt
        limit = tokens / Work(self.read_bytes, self.matmul_flops).limit_s(rates)
        both = Work(self.read_bytes, self.matmul_flops + self.attention_flops)
        return dataclasses.replace(
            self,
            limit_tokens_per_s=limit,
            limit_with_attention_tokens_per_s=tokens / both.limit_s(rates),
            fraction=self.tokens_per_s / limit,
        )


def prepare(spec: PrefillSpec, model: BenchModel, configs: Configs) -> Configs:
    return configs.fitted(model, max(spec.requests), max(spec.prompts))


def run(spec: PrefillSpec, engine: BenchEngine, say: Say) -> Iterator[PrefillRow]:
    for prompt in spec.prompts:
        for requests in spec.requests:
            say(f"prefill: {requests} prompts of {prompt} tokens")
            yield _measure(spec, engine, requests, prompt)


def _measure(spec: PrefillSpec, engine: BenchEngine, requests: int, prompt: int) -> PrefillRow:
    model, configs, plan = engine.model, engine.configs, engine.parts.memory_plan
    pages = -(-prompt // plan.block_size) * plan.planes
    if pages > plan.num_blocks:
        fail("--prompt", prompt, f"needs {pages} KV blocks, the pool has {plan.num_blocks}")
    rng = np.random.default_rng(spec.seed)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    seconds = []
    for _ in range(1 + spec.repeats):  # the first one warms up
        prompts = random_prompts(model.config, requests, prompt, rng)
        started = time.perf_counter()
        engine.run(prompts, params)
        seconds.append(time.perf_counter() - started)
    median = statistics.median_low(seconds[1:])
    work = prefill_matmuls(model.config, model.policy, requests, prompt)
    return PrefillRow(
        requests=requests,
        prompt=prompt,
        layout=configs.cache.layout,
        kernels=configs.execution.kernels,
        seconds=median,
        all_seconds=tuple(seconds[1:]),
        tokens_per_s=requests * prompt / median,
        matmul_flops=work.flops,
        attention_flops=prefill_attention_flops(model.config, requests, prompt),
        read_bytes=work.read_bytes,
        peak_bytes=peak_bytes(model.device),
    )


COLUMNS = ("requests", "prompt", "layout", "kernels", "ms", "tok/s", "Tflop", "limit", "fraction")


def table(rows: Sequence[PrefillRow]) -> list[list[str]]:
    return [
        [
            str(row.requests),
            f"{row.prompt:,}",
            row.layout,
            row.kernels,
            number(1e3 * row.seconds),
            number(row.tokens_per_s, 0),
            number((row.matmul_flops + row.attention_flops) / 1e12, 3),
            number(row.limit_tokens_per_s, 0),
            percent(row.fraction),
        ]
        for row in rows
    ]
