"""Keeps freed arrays from staying with the process."""

import contextlib
import ctypes
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MIB = 2**20


@contextlib.contextmanager
def return_freed_memory() -> Iterator[None]:
    """Inside, every array above 1 MiB goes back to the system as soon as it is freed.

    By default glibc raises that bound to 32 MiB as it goes and keeps smaller blocks in each
    thread's heap: reading item after item with Orbax's threads then grows by hundreds of MiB
    without end. Afterwards the bounds are those that glibc arrives at by itself. Does nothing
    under another libc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, 1 * _MIB)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
        mallopt(_M_TRIM_THRESHOLD, 64 * _MIB)
