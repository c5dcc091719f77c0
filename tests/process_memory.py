"""What a process of tests holds, for tests that ask whether it grows."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path


def resident() -> int:
    """Bytes of memory that are in use.

    A process that has run many tests holds hundreds of megabytes that it has freed, and its C library gives pages of
    them back or takes them again at its own time. So it is asked to give all of them back before it is measured.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    return held()


def held() -> int:
    """Bytes of memory that the process has, with those that it has freed and not given back."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown_and_kept(before: int) -> tuple[int, int]:
    """Bytes that are in use since `before`, and bytes that are free and not given back: see `resident`."""
    found, after = held(), resident()
    return after - before, found - after
