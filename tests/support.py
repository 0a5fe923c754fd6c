"""What engine tests share: one small model and at most four engine shapes, so that every program
is compiled once for the whole run."""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import numpy as np

from rlt_jax.assembly import Assembly, assemble
from rlt_jax.checkpoints_convert.fuse import fuse_ends, fuse_layer
from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.engine.types import RunnerOutput, SchedulerOutput
from rlt_jax.models.ouro import DTypePolicy, OuroConfig, OuroParams
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams
from tests.reference.checkpoints import random_ouro

VOCAB = 97
MAX_POSITIONS = 64


@functools.cache
def small_checkpoint() -> tuple[dict, dict]:
    """(config.json as a dict, tensors) of a model with 2 layers, GQA and 4 loops."""
    return random_ouro({"num_hidden_layers": 2, "max_position_embeddings": MAX_POSITIONS})


def fuse(config: OuroConfig, tensors: dict, dtype: str = "float32") -> OuroParams:
    """Checkpoint tensors to device parameters."""
    dtype = jax.numpy.dtype(dtype)
    layers = tuple(fuse_layer(tensors, i, dtype) for i in range(config.num_hidden_layers))
    return jax.device_put(OuroParams(layers=layers, **fuse_ends(tensors, dtype)), jax.devices()[0])


@functools.cache
def small_model() -> tuple[OuroConfig, OuroParams]:
    raw, tensors = small_checkpoint()
    config = OuroConfig.from_dict(raw)
    return config, fuse(config, tensors)


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """What decides the compiled programs; everything else about an engine may vary freely."""

    layout: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    min_row_bucket: int = 1
    min_prefill_bucket: int = 8


SHAPES = {
    # 4 requests of full context fit.
    "roomy": EngineShape("last_exited", 4, 256, 4, 24),
    # Fewer blocks than 4 requests want: they wait for each other. Here and in the next, one bucket
    # for all batches.
    "tight": EngineShape("last_exited", 8, 52, 4, 24, min_row_bucket=4, min_prefill_bucket=32),
    "shared": EngineShape("shared", 4, 64, 4, 24, min_row_bucket=4),
}


def build_engine(
    shape: EngineShape | str,
    *,
    exit_config: ExitConfig | None = None,
    eos_token_ids: tuple[int, ...] = (),
    max_in_flight: int = 2,
    tokens_per_dispatch: int = 1,
    kernels: str = "auto",
    async_scheduling: bool = False,
    exit_decision: str = "host",
    incremental_allocation: bool = False,
    watermark_ratio: float = 0.0,
    enable_prefix_caching: bool = False,
    **scheduling,
) -> Assembly:
    """An engine of one of the shapes; `scheduling` are further SchedulerConfig fields."""
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    config, params = small_model()
    return assemble(
        config,
        params,
        policy=DTypePolicy("float32"),
        device=jax.devices()[0],
        eos_token_ids=eos_token_ids,
        cache_config=CacheConfig(
            layout=shape.layout,
            block_size=shape.block_size,
            num_blocks=shape.num_blocks,
            incremental_allocation=incremental_allocation,
            watermark_ratio=watermark_ratio,
            enable_prefix_caching=enable_prefix_caching,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            **scheduling,
        ),
        exit_config=exit_config,
        execution_config=ExecutionConfig(
            min_row_bucket=shape.min_row_bucket,
            min_prefill_bucket=shape.min_prefill_bucket,
            max_in_flight=max_in_flight,
            tokens_per_dispatch=tokens_per_dispatch,
            kernels=kernels,
            async_scheduling=async_scheduling,
            exit_decision=exit_decision,
        ),
    )


@dataclasses.dataclass
class Watched:
    """What an engine's runner was given (dispatched or not) and gave back."""

    batches: list[SchedulerOutput] = dataclasses.field(default_factory=list)
    results: list[RunnerOutput] = dataclasses.field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    events: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def signals(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Of each output token, (generation, index): when the batches that read its gate were
        submitted and collected, counted in events."""
        spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
        at = {event: i for i, event in enumerate(self.events)}
        for batch in self.batches:
            span = (at["submit", batch.sequence], at["collect", batch.sequence])
            for row in batch.rows:
                if row.reads_gate:
                    token = row.generation, row.output_index + (row.exit_depth > 0)
                    spans.setdefault(token, []).append(span)
        return spans


def watch(engine: Assembly) -> Watched:
    """The batches and results of the engine from now on."""
    watched, runner = Watched(), engine.runner
    submit, collect, reset = runner.submit, runner.collect, runner.reset

    def watched_submit(batch):
        watched.batches.append(batch)
        watched.events.append(("submit", batch.sequence))
        ticket = submit(batch)
        watched.in_flight += 1
        watched.most_in_flight = max(watched.most_in_flight, watched.in_flight)
        return ticket

    def watched_collect(ticket):
        watched.in_flight -= 1
        watched.results.append(collect(ticket))
        watched.events.append(("collect", watched.results[-1].sequence))
        return watched.results[-1]

    def watched_reset():
        watched.in_flight = 0
        reset()

    runner.submit, runner.collect, runner.reset = watched_submit, watched_collect, watched_reset
    return watched


@dataclasses.dataclass(frozen=True)
class Work:
    """A request: when it arrives and when it is cancelled, counted in engine steps."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    cancel: int | None = None


def exit_bounds(mode: str, i: int) -> dict:
    """The i-th request's own, of SamplingParams, as far as the exit mode allows any."""
    if mode == "weighted":
        return {}
    min_loops, max_loops = ((1, 4), (2, 4), (1, 3))[i % 3]
    threshold = (0.3, 0.5, 0.7, 1.0)[i % 4]
    if mode == "random_lookahead":
        threshold = (0.45, 0.5, 0.55, 1.0)[i % 4]  # scores lie about one half
    return {"min_loops": min_loops, "max_loops": max_loops, "exit_threshold": threshold}


def random_work(numbers: int, count: int, **params) -> list[Work]:
    """`count` requests of varied lengths and loop bounds; `numbers` seeds their choice."""
    rng = np.random.default_rng(numbers)
    work = []
    for _ in range(count):
        prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 30)).tolist())
        fields = {
            "max_tokens": int(rng.integers(1, 20)),
            "exit_threshold": float(rng.choice([0.3, 0.5, 0.7, 1.0])),
            "min_loops": int(rng.integers(1, 3)),
            "max_loops": int(rng.integers(3, 5)),
            **params,
        }
        work.append(Work(prompt, SamplingParams(**fields)))
    return work


def drive(
    engine: Assembly, work: Iterable[Work], max_steps: int = 5000
) -> dict[str, RequestOutput]:
    """Runs all work; the last output of every request, by its number as a string.

    Also checks invariant 5: every block is free again at the end, or only cached.
    """
    core, outputs, pending = engine.core, {}, dict(enumerate(work))
    cancels = {str(i): w.cancel for i, w in pending.items() if w.cancel is not None}
    for step in range(max_steps):
        for i in [i for i, w in pending.items() if w.arrival <= step]:
            one = pending.pop(i)
            core.add_request(str(i), one.prompt, one.params)
        for request_id in [i for i, at in cancels.items() if at <= step and int(i) not in pending]:
            core.abort_request(request_id)
            del cancels[request_id]
        if not pending and not core.has_unfinished_requests():
            break
        outputs |= {output.request_id: output for output in core.step()}
    else:
        raise AssertionError(f"not done after {max_steps} steps: {core.scheduler.stats()}")
    stats = core.scheduler.stats()
    assert stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]
    assert core.scheduler.block_tables() == {}
    return outputs
