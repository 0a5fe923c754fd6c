"""Checkpoints: Hugging Face safetensors folders and the Orbax folders converted from them."""

from rlt_jax.checkpoints_convert.checkpoint import Checkpoint, open_checkpoint
from rlt_jax.checkpoints_convert.errors import CheckpointError
from rlt_jax.checkpoints_convert.load import load_params

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "load_params",
    "open_checkpoint",
]
