"""What a user can set about one request."""

import dataclasses

from rlt_jax.validation import (
    check_bool,
    check_float,
    check_int,
    fail,
    option,
    plain_number,
    plain_numbers,
)

MAX_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled, how deep its tokens may go, how urgent it is.

    Loops count from 1. `min_loops` None means min(2, max_loops, the model's depth);
    `max_loops` None means the model's depth. `exit_threshold` 1 keeps every token at
    max_loops. `logprobs` 0 returns the log probability of each emitted token, taken from the
    raw float32 logits; None returns none.
    """

    max_tokens: int = option(16, "output tokens at most")
    temperature: float = option(0.0, "0 is greedy")
    top_p: float = option(1.0, "nucleus: drop tokens once the mass before them exceeds this")
    top_k: int = option(-1, "keep the k most likely tokens and all ties of the k-th (-1: all)")
    seed: int | None = option(None, "0 .. 2^63-1 (None: drawn from the system and reported)")
    min_loops: int | None = option(
        None, "earliest loop a decoded token may exit at (None: 2, or max_loops if less)"
    )
    max_loops: int | None = option(None, "last loop of a decoded token (None: the model's depth)")
    exit_threshold: float = option(1.0, "exit probability to reach, in [0, 1]; 1: fixed depth")
    ignore_eos: bool = option(False, "go on after the end-of-sequence token")
    stop_token_ids: tuple[int, ...] = option((), "token ids that end the output")
    logprobs: int | None = option(None, "0: return the log probability of each output token")
    priority: int = option(0, 'lower is more urgent, where SchedulerConfig.policy = "priority"')
    cache_salt: str | None = option(
        None, "cached prefixes are shared only among requests of the same salt"
    )

    def __post_init__(self):
        plain_numbers(self)
        name = type(self).__name__
        check_int(f"{name}.max_tokens", self.max_tokens, minimum=1)
        check_float(f"{name}.temperature", self.temperature, ">= 0", lambda t: t >= 0)
        check_float(f"{name}.top_p", self.top_p, "in (0, 1]", lambda p: 0 < p <= 1)
        check_int(f"{name}.top_k", self.top_k, minimum=-1, maximum=2**31 - 1)
        if self.top_k == 0:
            fail(f"{name}.top_k", self.top_k, "must be -1 (all) or >= 1")
        check_int(f"{name}.seed", self.seed, minimum=0, maximum=MAX_SEED, optional=True)
        check_int(f"{name}.min_loops", self.min_loops, minimum=1, optional=True)
        check_int(f"{name}.max_loops", self.max_loops, minimum=1, optional=True)
        if None not in (self.min_loops, self.max_loops) and self.min_loops > self.max_loops:
            fail(f"{name}.min_loops", self.min_loops, f"must be <= max_loops = {self.max_loops}")
        check_float(
            f"{name}.exit_threshold", self.exit_threshold, "in [0, 1]", lambda t: 0 <= t <= 1
        )
        check_bool(f"{name}.ignore_eos", self.ignore_eos)
        if not isinstance(self.stop_token_ids, (list, tuple)):
            fail(f"{name}.stop_token_ids", self.stop_token_ids, "must be a list of token ids")
        tokens = tuple(plain_number(token) for token in self.stop_token_ids)
        for i, token in enumerate(tokens):
            check_int(f"{name}.stop_token_ids[{i}]", token, minimum=0)
        object.__setattr__(self, "stop_token_ids", tokens)
        if self.logprobs is not None and (type(self.logprobs) is not int or self.logprobs != 0):
            fail(f"{name}.logprobs", self.logprobs, "must be 0 (the output tokens' own) or None")
        check_int(f"{name}.priority", self.priority)
        if self.cache_salt is not None and (
            not isinstance(self.cache_salt, str) or not self.cache_salt
        ):
            fail(f"{name}.cache_salt", self.cache_salt, "must be a non-empty string or None")
