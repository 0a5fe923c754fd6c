"""A JAX runtime for recurrent looped transformers.

`generate(prompts, model=...)` is the shortest way in; `LLM` keeps a model loaded; `LLMEngine`
is driven step by step. Importing this package does not import JAX: that waits for the first
model. Import it before JAX, or set XLA_PYTHON_CLIENT_MEM_FRACTION, to use more than the three
quarters of a GPU's memory that JAX takes by default.
"""

import os
import sys
from typing import Any

from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.llm import LLM, GenerationError, StreamIncrement, generate
from rlt_jax.outputs import RequestMetrics, RequestOutput
from rlt_jax.sampling_params import SamplingParams

if "jax" not in sys.modules:
    # JAX's own default leaves a quarter of a GPU's memory unused. It is read when JAX starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

__all__ = [
    "LLM",
    "CacheConfig",
    "ExecutionConfig",
    "ExitConfig",
    "GenerationError",
    "LLMEngine",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "StreamIncrement",
    "generate",
]


def __getattr__(name: str) -> Any:
    if name == "LLMEngine":
        from rlt_jax.llm_engine import LLMEngine

        return LLMEngine
    if name == "__version__":
        from importlib.metadata import version

        return version("rlt-jax")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
