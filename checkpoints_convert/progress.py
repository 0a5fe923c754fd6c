"""The progress bar of conversions: bytes done of all bytes, on stderr."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextlib.contextmanager
def byte_progress(total: int, show: bool) -> Iterator[Callable[[str, int], None]]:
    """Yields advance(what_now, bytes_done)."""
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        task = progress.add_task("", total=total)

        def advance(description: str, count: int) -> None:
            progress.update(task, description=description, advance=count)

        yield advance
