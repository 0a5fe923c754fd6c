"""The ways to run the same requests that must all give the same outputs, and what a soak turns on.
No jax in here."""

import dataclasses
import itertools
from collections.abc import Iterable

from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig

# By name, the SchedulerConfig fields that a mode sets.
SCHEDULING = {
    "refill": {"mode": "refill", "wavefront_chunked_prefill": False},
    "no_refill": {"mode": "no_refill", "wavefront_chunked_prefill": False},
    "mixed": {"mode": "mixed", "wavefront_chunked_prefill": False},
    "wavefront": {"mode": "refill", "wavefront_chunked_prefill": True},
    "mixed_wavefront": {"mode": "mixed", "wavefront_chunked_prefill": True},
}
# By name, the ExecutionConfig fields that it sets.
IN_FLIGHT = {
    "sync": {"max_in_flight": 1, "async_scheduling": False},
    "async": {"max_in_flight": None, "async_scheduling": True},
}
# What bench soak runs with unless a flag says otherwise, by config.
SOAK = {
    CacheConfig: {"enable_prefix_caching": True, "incremental_allocation": True},
    SchedulerConfig: {
        "policy": "priority",
        "enable_preemption": True,
        "max_num_seqs": 8,
        "prefill_chunk_size": 16,
    },
    ExecutionConfig: {"compile_ahead": True},
}


@dataclasses.dataclass(frozen=True)
class Mode:
    """Keys of SCHEDULING and IN_FLIGHT, and ExecutionConfig.kernels."""

    scheduling: str
    in_flight: str
    kernels: str = "auto"

    def __str__(self) -> str:
        return f"{self.scheduling}, {self.in_flight}, {self.kernels} kernels"

    def scheduler(self, config: SchedulerConfig) -> SchedulerConfig:
        return dataclasses.replace(config, **SCHEDULING[self.scheduling])

    def execution(self, config: ExecutionConfig) -> ExecutionConfig:
        return dataclasses.replace(config, **IN_FLIGHT[self.in_flight], kernels=self.kernels)

    def check_with(self, cache: CacheConfig) -> None:
        """Raises ValueError when the K/V layout does not allow this mode."""
        self.scheduler(SchedulerConfig()).check_with(cache, ExitConfig())


def all_modes(
    scheduling: Iterable[str], kernels: Iterable[str], in_flight: Iterable[str] = IN_FLIGHT
) -> list[Mode]:
    """Every combination; of one choice of kernels after the other."""
    return [
        Mode(name, flight, chosen)
        for chosen, name, flight in itertools.product(kernels, scheduling, in_flight)
    ]


def refused_scheduling(cache: CacheConfig) -> dict[str, str]:
    """By name, what the K/V layout does not allow, and why."""
    reasons = {}
    for name in SCHEDULING:
        try:
            Mode(name, "sync").check_with(cache)
        except ValueError as error:
            reasons[name] = str(error)
    return reasons
