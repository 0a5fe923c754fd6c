"""A request: what was asked, and what became of it."""

import dataclasses
from collections.abc import Callable, Sequence

from rlt_jax.engine.exit_policy import ExitBounds
from rlt_jax.outputs import RequestMetrics, RequestOutput
from rlt_jax.sampling_params import SamplingParams

# (tokens so far, finish reason or None) -> the text so far. Tokens only ever grow.
TextOf = Callable[[Sequence[int], str | None], str]


@dataclasses.dataclass(eq=False)
class Request:
    """Mutable; owned by the scheduler alone.

    generation: unique in the engine, never reused. slot: its place among those admitted, where its
    progress is kept (see slots.py); None before, between and after. stop_ids: tokens that end it.
    page_hashes: of the full pages of its prompt, where prefixes are cached. cached_tokens: of the
    prompt, those that were not computed. preemptions: times that it had to leave its slot. Times:
    seconds. Results: tokens, depths, logprobs.
    """

    id: str
    generation: int
    prompt: tuple[int, ...]
    params: SamplingParams
    bounds: ExitBounds
    arrived: float
    slot: int | None = None
    stop_ids: frozenset[int] = frozenset()
    page_hashes: tuple[bytes, ...] = ()
    cached_tokens: int = 0
    preemptions: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    depths: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    text_of: TextOf | None = None
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def max_positions(self) -> int:
        """The last sampled token is never fed back."""
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def output(self) -> RequestOutput:
        """What the user sees of it now."""
        per_token = None
        if len(self.tokens) > 1:
            per_token = (self.last_token - self.first_token) / (len(self.tokens) - 1)
        return RequestOutput(
            request_id=self.id,
            prompt_token_ids=self.prompt,
            token_ids=tuple(self.tokens),
            text=self.text_of(self.tokens, self.finish_reason) if self.text_of else "",
            exit_depths=tuple(self.depths),
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            finished=self.finished,
            finish_reason=self.finish_reason,
            sampling_params=self.params,
            num_cached_tokens=self.cached_tokens,
            metrics=RequestMetrics(
                queue_time=None if self.admitted is None else self.admitted - self.arrived,
                time_to_first_token=(
                    None if self.first_token is None else self.first_token - self.arrived
                ),
                time_per_output_token=per_token,
                preemptions=self.preemptions,
            ),
            error=self.error,
        )
