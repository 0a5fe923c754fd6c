"""Writing a whole folder or nothing: a temporary folder beside it, renamed once when complete."""

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlt_jax.checkpoints_convert.errors import CheckpointError

# Copied from the source besides the weights, where present.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)

_TEMPORARY_NAME = re.compile(r"\..+\.tmp-[0-9a-f]{8}")


def is_temporary(folder: Path) -> bool:
    """Whether the folder is one that new_folder is writing, or was when it was killed."""
    return _TEMPORARY_NAME.fullmatch(folder.resolve().name) is not None


def check_destination(destination: Path, force: bool) -> Path:
    """The absolute path of a folder that may be written there.

    Raises CheckpointError when it exists already, unless `force` and it holds a checkpoint (or
    nothing): --force must not delete a folder that was named by mistake.
    """
    destination = Path(os.path.expanduser(destination)).resolve()
    if not os.path.lexists(destination):
        return destination
    if not destination.is_dir():
        raise CheckpointError(f"{destination}: is a file; the destination must be a new folder")
    if not force:
        raise CheckpointError(f"{destination}: already exists; pass --force to replace it")
    if any(destination.iterdir()) and not _is_ouro_folder(destination):
        raise CheckpointError(
            f"{destination}: --force replaces only a checkpoint (a folder with an Ouro "
            "config.json); delete this one yourself"
        )
    return destination


def check_apart(source: Path, destination: Path) -> None:
    """Refuses a destination that is the source, or lies inside it, or holds it."""
    source = source.resolve()
    if destination == source:
        raise CheckpointError(f"{destination}: is the source itself; choose another destination")
    if destination.is_relative_to(source):
        raise CheckpointError(f"{destination}: lies inside the source {source}")
    if source.is_relative_to(destination):
        raise CheckpointError(f"{destination}: holds the source {source}")


@contextlib.contextmanager
def new_folder(destination: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary folder `.NAME.tmp-XXXXXXXX` beside `destination`, renamed to it on success.

    Everything is flushed to the disk first. On any exception, Ctrl-C included, the temporary
    folder is removed and an old destination stays as it was. OSErrors and a lack of space become
    CheckpointError.
    """
    temporary = destination.parent / f".{destination.name}.tmp-{secrets.token_hex(4)}"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(destination.parent).free
        if free < needed_bytes:
            raise CheckpointError(
                f"{destination.parent}: {free:,} bytes free on this disk: {needed_bytes:,} needed"
            )
        temporary.mkdir()
        yield temporary
        _flush(temporary)
        _publish(temporary, destination)
    except OSError as error:
        path = error.filename or destination
        raise CheckpointError(
            f"{path}: {error.strerror or error} while writing {destination}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_side_files(source: Path, destination: Path) -> None:
    """Copies config, tokenizer and chat template: contents, not links."""
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def file_sizes(folder: Path) -> dict[str, int]:
    """Every file under the folder, by relative path, to its size in bytes."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _is_ouro_folder(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_text())["model_type"] == "ouro"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _publish(temporary: Path, destination: Path) -> None:
    """Renames the complete folder into place; an old one goes only once the new one is there.

    Where the system can, the two change places in one step, so that a kill at any moment leaves
    one of them: the old one is then the temporary folder, which new_folder removes.
    """
    if destination.exists() and _exchange(temporary, destination):
        _sync(destination.parent)
        return
    old = None
    if destination.exists():
        old = destination.parent / f".{destination.name}.old-{secrets.token_hex(4)}"
        destination.rename(old)
    try:
        temporary.rename(destination)
    except BaseException:
        if old is not None:
            old.rename(destination)
        raise
    _sync(destination.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


def _exchange(one: Path, other: Path) -> bool:
    """Lets two folders change places atomically; False where the system cannot (renameat2)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = (os.fsencode(one), os.fsencode(other))
    return renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0
