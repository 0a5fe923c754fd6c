"""When a decoded token leaves the loop. Loops count from 1; state resets at every token.

All arithmetic is float32, step by step, so that a device doing the same agrees to the bit.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from rlt_jax.config import ExitConfig
from rlt_jax.validation import fail

FULL_REMAINING = np.float32(1.0)


@dataclasses.dataclass(frozen=True)
class ExitBounds:
    """One request's limits. threshold 1 is a flag for fixed depth, never compared.

    depths: what to replay (trace mode): per output token, the prompt's full depth first.
    """

    min_loops: int
    max_loops: int
    threshold: float
    depths: tuple[int, ...] | None = None


class ExitPolicy(Protocol):
    def bind(
        self,
        request_id: str,
        trace_id: str | None,
        bounds: ExitBounds,
        max_tokens: int,
        full_depth: int,
    ) -> ExitBounds:
        """Checks a new request against the policy and completes its bounds; raises ValueError."""

    def reads_gate(self, bounds: ExitBounds, loop: int) -> bool:
        """Whether the decision after `loop` needs the gate."""

    def fixed_depth(self, bounds: ExitBounds) -> int | None:
        """The depth at which every token exits, when it is known beforehand and never changes."""

    def decide(
        self,
        bounds: ExitBounds,
        output_index: int,
        loop: int,
        remaining: np.float32,
        probability: np.float32 | None,
    ) -> tuple[bool, np.float32]:
        """(exit after this loop?, remaining probability) for the token that gives output
        `output_index`."""


@dataclasses.dataclass(frozen=True)
class OuroExit:
    """The gate is a hazard: exit at r when r >= min_loops and 1 - prod(1 - p) >= threshold."""

    def bind(self, request_id, trace_id, bounds, max_tokens, full_depth):
        if trace_id is not None:
            fail("trace_id", trace_id, 'has a meaning only with ExitConfig.mode = "trace"')
        return bounds

    def reads_gate(self, bounds, loop):
        return self.fixed_depth(bounds) is None and loop < bounds.max_loops

    def fixed_depth(self, bounds):
        fixed = bounds.threshold == 1 or bounds.min_loops == bounds.max_loops
        return bounds.max_loops if fixed else None

    def decide(self, bounds, output_index, loop, remaining, probability):
        if loop >= bounds.max_loops:
            return True, remaining
        if not self.reads_gate(bounds, loop):
            return False, remaining
        remaining = remaining * (FULL_REMAINING - np.float32(probability))
        passed = FULL_REMAINING - remaining >= np.float32(bounds.threshold)
        return bool(loop >= bounds.min_loops and passed), remaining


@dataclasses.dataclass(frozen=True)
class TraceExit:
    """Replays recorded depths; the gate is neither computed nor read."""

    depths_by_request: Mapping[str, tuple[int, ...]]

    def bind(self, request_id, trace_id, bounds, max_tokens, full_depth):
        name = request_id if trace_id is None else trace_id
        field = f"ExitConfig.depths_by_request[{name!r}]"
        depths = self.depths_by_request.get(name)
        if depths is None:
            fail(field, None, "every request needs recorded depths in trace mode")
        if len(depths) < max_tokens:
            fail(field, depths, f"must have at least max_tokens = {max_tokens} entries")
        if depths[0] != full_depth:
            fail(f"{field}[0]", depths[0], f"must be the prompt's full depth, {full_depth}")
        for i, depth in enumerate(depths[1:max_tokens], start=1):
            if not bounds.min_loops <= depth <= bounds.max_loops:
                rule = f"must be in min_loops..max_loops = {bounds.min_loops}..{bounds.max_loops}"
                fail(f"{field}[{i}]", depth, rule)
        return dataclasses.replace(bounds, depths=depths)

    def reads_gate(self, bounds, loop):
        return False

    def fixed_depth(self, bounds):
        distinct = set(bounds.depths[1:])
        return distinct.pop() if len(distinct) == 1 else None

    def decide(self, bounds, output_index, loop, remaining, probability):
        return loop >= bounds.depths[output_index], remaining


def exit_policy(config: ExitConfig) -> ExitPolicy:
    if config.mode == "trace":
        return TraceExit(config.depths_by_request)
    return OuroExit()
