"""From what a user asks to a Request, or an error that names the field, the value and the rule."""

import dataclasses
import secrets
from collections.abc import Iterable, Sequence

from rlt_jax.engine.exit_policy import ExitBounds, ExitPolicy
from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.request import Request
from rlt_jax.sampling_params import MAX_SEED, SamplingParams
from rlt_jax.validation import check_int, fail, plain_number


@dataclasses.dataclass(frozen=True)
class ModelLimits:
    """What the engine must know of a model. full_depth: loops of a prompt token."""

    vocab_size: int
    full_depth: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


def make_request(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    generation: int,
    arrived: float,
    limits: ModelLimits,
    policy: ExitPolicy,
    kv: KVAccounting,
    trace_id: str | None = None,
) -> Request:
    """Checks everything and fills in what was left open (seed, loop bounds)."""
    if not isinstance(request_id, str) or not request_id:
        fail("request_id", request_id, "must be a non-empty string")
    if not isinstance(params, SamplingParams):
        fail("sampling_params", params, "must be a SamplingParams")
    prompt = _check_prompt(prompt, limits)
    params = _resolve(params, limits)
    positions = len(prompt) + params.max_tokens - 1
    if positions > limits.max_positions:
        fail(
            "SamplingParams.max_tokens",
            params.max_tokens,
            f"prompt ({len(prompt)} tokens) + max_tokens - 1 must be <= {limits.max_positions},"
            " the model's context",
        )
    if kv.cost(positions) > kv.total_blocks:
        fail(
            "SamplingParams.max_tokens",
            params.max_tokens,
            f"prompt ({len(prompt)} tokens) + max_tokens - 1 = {positions} positions need"
            f" {kv.cost(positions)} KV blocks, the pool has {kv.total_blocks}",
        )
    bounds = ExitBounds(params.min_loops, params.max_loops, params.exit_threshold)
    if trace_id is not None and (not isinstance(trace_id, str) or not trace_id):
        fail("trace_id", trace_id, "must be a non-empty string")
    bounds = policy.bind(request_id, trace_id, bounds, params.max_tokens, limits.full_depth)
    return Request(request_id, generation, prompt, params, bounds, arrived)


def _check_prompt(prompt: Sequence[int], limits: ModelLimits) -> tuple[int, ...]:
    if isinstance(prompt, (str, bytes, bytearray)) or not isinstance(prompt, Iterable):
        fail("prompt", prompt, "must be a list of token ids")
    tokens = tuple(prompt)
    if not tokens:
        fail("prompt", prompt, "must have at least one token")
    # As a whole first: a prompt can have thousands of tokens, and decoding waits meanwhile.
    if set(map(type, tokens)) != {int}:
        tokens = tuple(map(plain_number, tokens))
    if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        for i, token in enumerate(tokens):
            check_int(f"prompt[{i}]", token, minimum=0, maximum=limits.vocab_size - 1)
    return tokens


def _resolve(params: SamplingParams, limits: ModelLimits) -> SamplingParams:
    depth = limits.full_depth
    check_int("SamplingParams.max_loops", params.max_loops, minimum=1, maximum=depth, optional=True)
    max_loops = params.max_loops or depth
    check_int(
        "SamplingParams.min_loops", params.min_loops, minimum=1, maximum=max_loops, optional=True
    )
    for i, token in enumerate(params.stop_token_ids):
        check_int(
            f"SamplingParams.stop_token_ids[{i}]", token, minimum=0, maximum=limits.vocab_size - 1
        )
    return dataclasses.replace(
        params,
        min_loops=params.min_loops or min(2, max_loops),
        max_loops=max_loops,
        seed=secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed,
    )
