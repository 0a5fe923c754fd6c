"""The ways to run the same requests that must all give the same outputs. No jax in here."""

import dataclasses
import itertools
from collections.abc import Iterable

from rlt_jax.config import ExecutionConfig, SchedulerConfig

# By name, the SchedulerConfig fields that a mode sets.
SCHEDULING = {
    "refill": {"mode": "refill"},
    "no_refill": {"mode": "no_refill"},
}
# By name, ExecutionConfig.max_in_flight.
IN_FLIGHT = {"sync": 1, "async": 2}


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
        in_flight = IN_FLIGHT[self.in_flight]
        return dataclasses.replace(config, max_in_flight=in_flight, kernels=self.kernels)


def all_modes(scheduling: Iterable[str], kernels: Iterable[str]) -> list[Mode]:
    """Every combination; of one choice of kernels after the other."""
    return [
        Mode(name, in_flight, chosen)
        for chosen, name, in_flight in itertools.product(kernels, scheduling, IN_FLIGHT)
    ]
