"""When a decoded token leaves the loop. Loops count from 1; state resets at every token.

All arithmetic is float32, step by step, so that a device doing the same agrees to the bit.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from rlt_jax.config import ExitConfig
from rlt_jax.validation import fail

ONE = np.float32(1.0)


@dataclasses.dataclass(frozen=True)
class ExitBounds:
    """One request's limits. threshold 1, or what is 1 as a float32, is a flag for fixed depth,
    never compared.

    depths: what to replay (trace mode): per output token, the prompt's full depth first.
    """

    min_loops: int
    max_loops: int
    threshold: float
    depths: tuple[int, ...] | None = None

    @property
    def is_fixed(self) -> bool:
        return np.float32(self.threshold) == ONE or self.min_loops == self.max_loops


class ExitPolicy(Protocol):
    """lag: loops that a token still runs after the one whose signal makes it leave."""

    lag: int

    def bind(
        self,
        request_id: str,
        trace_id: str | None,
        bounds: ExitBounds,
        max_tokens: int,
        full_depth: int,
    ) -> ExitBounds:
        """Checks a new request against the policy and completes its bounds; raises ValueError."""

    def gate_loops(self, bounds: ExitBounds) -> range:
        """The loops whose signal can matter."""

    def fixed_depth(self, bounds: ExitBounds) -> int | None:
        """The depth at which every token exits, when it is known beforehand and never changes."""

    def decide(
        self,
        probability_n: np.ndarray,
        remaining_n: np.ndarray,
        loop_n: np.ndarray,
        min_loops_n: np.ndarray,
        threshold_n: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(does the signal after this loop make it leave `lag` loops later? [n] bool, remaining
        probability [n]) of n tokens whose signals are the gate's sigmoid, all float32."""


class _Adaptive:
    """Policies that a request's gate drives."""

    lag = 0

    def bind(self, request_id, trace_id, bounds, max_tokens, full_depth):
        if trace_id is not None:
            fail("trace_id", trace_id, 'has a meaning only with ExitConfig.mode = "trace"')
        return bounds

    def fixed_depth(self, bounds):
        return None if self.gate_loops(bounds) else bounds.max_loops

    def gate_loops(self, bounds):
        return range(0) if bounds.is_fixed else range(1, bounds.max_loops - self.lag)

    def decide(self, probability_n, remaining_n, loop_n, min_loops_n, threshold_n):
        """The gate is a hazard: its complement leaves the remaining probability."""
        remaining_n = remaining_n * (ONE - probability_n)
        return (loop_n >= min_loops_n) & (ONE - remaining_n >= threshold_n), remaining_n


@dataclasses.dataclass(frozen=True)
class OuroExit(_Adaptive):
    """Exit at r when r >= min_loops and 1 - prod(1 - p) >= threshold."""


@dataclasses.dataclass(frozen=True)
class OuroDelayedExit(_Adaptive):
    """The same trigger; the exit comes one loop later."""

    lag = 1


@dataclasses.dataclass(frozen=True)
class RandomLookaheadExit(_Adaptive):
    """The signal is a score for leaving after one more loop; never before loop 2."""

    lag = 1

    def gate_loops(self, bounds):
        first = max(2, bounds.min_loops) - 1
        return range(0) if bounds.is_fixed else range(first, bounds.max_loops - 1)

    def decide(self, probability_n, remaining_n, loop_n, min_loops_n, threshold_n):
        return probability_n >= threshold_n, remaining_n


@dataclasses.dataclass(frozen=True)
class TraceExit:
    """Replays recorded depths; the gate is neither computed nor read."""

    depths_by_request: Mapping[str, tuple[int, ...]]
    lag = 0

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

    def gate_loops(self, bounds):
        return range(0)

    def fixed_depth(self, bounds):
        distinct = set(bounds.depths[1:])
        return distinct.pop() if len(distinct) == 1 else None

    def decide(self, probability_n, remaining_n, loop_n, min_loops_n, threshold_n):
        return np.zeros(len(loop_n), bool), remaining_n


@dataclasses.dataclass(frozen=True)
class WeightedExit(_Adaptive):
    """Full depth; the programs weigh the loops' hidden states by the exit distribution."""

    def bind(self, request_id, trace_id, bounds, max_tokens, full_depth):
        rule = 'must be {} with ExitConfig.mode = "weighted"'
        if bounds.max_loops != full_depth:
            shown = rule.format(f"{full_depth}, the full depth,")
            fail("SamplingParams.max_loops", bounds.max_loops, shown)
        if bounds.threshold != 1:
            fail("SamplingParams.exit_threshold", bounds.threshold, rule.format(1))
        return super().bind(request_id, trace_id, bounds, max_tokens, full_depth)


def exit_policy(config: ExitConfig) -> ExitPolicy:
    if config.mode == "trace":
        return TraceExit(config.depths_by_request)
    return {
        "ouro": OuroExit,
        "ouro_delayed": OuroDelayedExit,
        "random_lookahead": RandomLookaheadExit,
        "weighted": WeightedExit,
    }[config.mode]()
