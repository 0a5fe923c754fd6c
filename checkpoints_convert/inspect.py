"""What a checkpoint is, without reading its weights: the data of `rlt-jax inspect`."""

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from rlt_jax.checkpoints_convert.checkpoint import open_checkpoint
from rlt_jax.checkpoints_convert.orbax_folder import OrbaxFolder
from rlt_jax.checkpoints_convert.tensors import DTYPES, expected_tensors, parameter_count
from rlt_jax.models.ouro_config import OuroConfig


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """kind: "huggingface" or "orbax". stored_bytes: of the tensors. dtypes: dtype to its number of
    tensors. kv_bytes_per_token: KV layout to bytes, in kv_dtype. converted_from, converter: of an
    Orbax folder only.
    """

    path: Path
    kind: str
    config: OuroConfig
    tensor_count: int
    parameter_count: int
    stored_bytes: int
    dtypes: Mapping[str, int]
    kv_dtype: str
    kv_bytes_per_token: Mapping[str, int]
    converted_from: str | None = None
    converter: str | None = None


def inspect_checkpoint(path: str | Path) -> CheckpointInfo:
    """Reads headers, config and manifest only. Raises CheckpointError as open_checkpoint does."""
    checkpoint = open_checkpoint(path)
    tensors = checkpoint.tensors.values()
    main_dtype = collections.Counter()
    for info in tensors:
        main_dtype[info.dtype] += info.nbytes
    # The runtime computes in float32 or bfloat16 only.
    kv_dtype = "float32" if main_dtype.most_common(1)[0][0] == "float32" else "bfloat16"
    manifest = checkpoint.manifest if isinstance(checkpoint, OrbaxFolder) else None
    return CheckpointInfo(
        path=checkpoint.folder,
        kind=checkpoint.kind,
        config=checkpoint.config,
        tensor_count=len(expected_tensors(checkpoint.config)),
        parameter_count=parameter_count(checkpoint.config),
        stored_bytes=sum(info.nbytes for info in tensors),
        dtypes=collections.Counter(info.dtype for info in tensors),
        kv_dtype=kv_dtype,
        kv_bytes_per_token=kv_bytes_per_token(checkpoint.config, kv_dtype),
        converted_from=manifest.source if manifest else None,
        converter=f"rlt-jax {manifest.converter_version}" if manifest else None,
    )


def kv_bytes_per_token(config: OuroConfig, dtype: str) -> dict[str, int]:
    """Each KV layout to the bytes that one token occupies on a GPU: K and V at every layer, and
    with last_exited at every depth too. (On a CPU K/V is always float32.)"""
    plane = config.kv_bytes_per_position(DTYPES[dtype].itemsize)
    return {"last_exited": plane * config.total_ut_steps, "shared": plane}


def render_checkpoint(info: CheckpointInfo) -> RenderableType:
    """Two rich tables: the checkpoint and its config."""
    summary = Table(title=str(info.path), show_header=False, title_justify="left")
    summary.add_row("kind", info.kind)
    summary.add_row("tensors", f"{info.tensor_count:,}")
    summary.add_row("parameters", f"{info.parameter_count:,}")
    summary.add_row("bytes", f"{info.stored_bytes:,}")
    summary.add_row("dtypes", ", ".join(f"{name} x {n}" for name, n in info.dtypes.items()))
    for layout, size in info.kv_bytes_per_token.items():
        summary.add_row(f"KV bytes per token, {layout}", f"{size:,} ({info.kv_dtype})")
    if info.converted_from is not None:
        summary.add_row("converted from", info.converted_from)
        summary.add_row("converter", info.converter)
    config = Table(title="config", show_header=False, title_justify="left")
    for field in dataclasses.fields(info.config):
        config.add_row(field.name, str(getattr(info.config, field.name)))
    return Group(summary, config)
