"""Checkpoints: Hugging Face safetensors folders and the Orbax folders converted from them."""

from rlt_jax.checkpoints_convert.checkpoint import Checkpoint, open_checkpoint
from rlt_jax.checkpoints_convert.errors import CheckpointError
from rlt_jax.checkpoints_convert.fuse import unfuse
from rlt_jax.checkpoints_convert.inspect import (
    CheckpointInfo,
    inspect_checkpoint,
    render_checkpoint,
)
from rlt_jax.checkpoints_convert.load import load_params
from rlt_jax.checkpoints_convert.to_huggingface import export
from rlt_jax.checkpoints_convert.to_orbax import convert

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointInfo",
    "convert",
    "export",
    "inspect_checkpoint",
    "load_params",
    "open_checkpoint",
    "render_checkpoint",
    "unfuse",
]
