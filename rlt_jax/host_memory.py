"""The host's memory, as far as the system tells."""

import os

_UNKNOWN = 2**32  # bytes; not every system tells


def available_bytes() -> int:
    """Bytes that nobody uses."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # there is no sysconf on Windows
        return _UNKNOWN
