"""What a benchmark leaves behind: one JSON document, which says where it was measured."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlt_jax.validation import fail

FORMAT = 1
COMMIT_VARIABLE = "RLT_JAX_COMMIT"  # for a copy of the sources without its history

Say = Callable[[str], None]  # shows what is being done


@dataclasses.dataclass(frozen=True)
class Report:
    """command: decode, throughput, ... arguments: the whole command line. config: the model and
    each engine's configs. rows: one measurement each. rates: what limits were computed from.
    startup: seconds and counts, for each engine."""

    command: str
    arguments: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    rates: dict[str, Any] | None = None
    startup: tuple[dict[str, Any], ...] = ()

    def document(self, device: Any = None) -> dict[str, Any]:
        """The JSON document; device: where it ran (None: JAX's first)."""
        return {
            "format": FORMAT,
            "command": self.command,
            "command_line": ["rlt-jax", *self.arguments],
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "versions": versions(),
            "machine": machine(device),
            "config": self.config,
            "rates": self.rates,
            "startup": list(self.startup),
            "rows": list(self.rows),
        }


def check_output(path: str | None, flag: str = "--output") -> None:
    """Before anything is measured: can this file be written?"""
    if path is None:
        return
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        fail(flag, path, "must be a file in a folder that exists")


def write(document: dict[str, Any], path: str) -> None:
    text = json.dumps(document, indent=1, allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read(path: str) -> dict[str, Any]:
    """A document that `write` wrote. Raises ValueError naming the file and the rule."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"{path}: must be JSON that `rlt-jax bench` wrote: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise ValueError(f"{path}: must be JSON that `rlt-jax bench` wrote: it has no rows")
    if document.get("format") != FORMAT:
        found = document.get("format")
        raise ValueError(f"{path}: format = {found!r}: must be {FORMAT}, what this version writes")
    return document


def commit() -> dict[str, Any]:
    """The sources' commit where they lie in a checkout, and the installed version."""
    import rlt_jax

    root = Path(rlt_jax.__file__).resolve().parents[1]
    version = importlib.metadata.version("rlt-jax")
    found = {"version": version, "git": os.environ.get(COMMIT_VARIABLE), "dirty": None}
    if found["git"] is None and (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found["git"] = _git(root, "rev-parse", "HEAD")
            found["dirty"] = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    return found


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return {"python": platform.python_version(), **packages}


def machine(device: Any = None) -> dict[str, Any]:
    import jax

    device = device or jax.local_devices()[0]
    stats = device.memory_stats() or {}
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": len(jax.local_devices(backend=device.platform)),
        "device_memory_bytes": stats.get("bytes_limit"),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def plain(value: Any) -> Any:
    """Configs and results as what JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@contextlib.contextmanager
def progress() -> Iterator[Say]:
    """Tells what is being done, on a terminal; what libraries print goes to stderr meanwhile."""
    from rich.console import Console

    console = Console(stderr=True)
    with contextlib.redirect_stdout(sys.stderr), console.status("starting") as status:
        yield status.update


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 160
    Console(width=width, file=sys.stdout).print(table)


def startup_line(startup: dict[str, Any]) -> str:
    """What it took until an engine was ready."""
    seconds = {
        "weights": startup["load_weights_seconds"],
        "memory plan": startup["plan_seconds"],
        "compile": startup["compile_seconds"],
        "first runs": startup["first_runs_seconds"],
    }
    shown = [f"{name} {number(value)} s" for name, value in seconds.items()]
    count = startup["executables_now"] - startup["executables"]
    if count:
        total = sum(startup["compile_seconds_by_program"].values())
        shown.append(f"{count} compiled on first use, {number(total)} s in all")
    cache = startup["compilation_cache"]
    line = ", ".join(shown)
    return f"start-up: {line}; {startup['executables_now']} executables, compilation cache {cache}"


def is_figure(value: Any) -> bool:
    """Whether a value that was read can be compared and drawn."""
    return isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)


def number(value: float | None, digits: int = 2) -> str:
    """For tables: 12,345.67, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
