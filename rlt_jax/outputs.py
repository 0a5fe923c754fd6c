"""What a user gets back for one request."""

import dataclasses

from rlt_jax.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds, None until they are known; how often the request was preempted.

    queue_time: from arrival to admission. time_to_first_token: from arrival.
    time_per_output_token: mean over the tokens after the first.
    """

    queue_time: float | None = None
    time_to_first_token: float | None = None
    time_per_output_token: float | None = None
    preemptions: int = 0


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request's tokens so far. `exit_depths[i]` is the loop that output token i came from.

    `sampling_params` is what was really used: seed and loop bounds filled in. `logprobs` is
    None unless asked for; otherwise as long as `token_ids`. `num_cached_tokens`: of the prompt,
    those whose K/V was there already. `error` is set when finish_reason is "error".
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    exit_depths: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finished: bool
    finish_reason: str | None
    sampling_params: SamplingParams
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    error: str | None = None
