"""The small trained model that is installed with the package, known by its name."""

import importlib.resources
from pathlib import Path

NAME = "ouro-tiny"


def packaged_folder() -> Path:
    """Where it lies (in Hugging Face's layout), whether or not it was installed."""
    return Path(str(importlib.resources.files("rlt_jax") / "assets" / NAME))
