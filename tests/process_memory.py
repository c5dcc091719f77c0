"""What a process of tests holds, for tests that ask whether it grows."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from pathlib import Path

MOST_PASSES = 8  # of Python's collector: an object that a finalizer has kept alive goes in the next pass
MOST_WAITS, PAUSE_S = 40, 0.05  # two seconds in all, then what is found counts
STEADY_BYTES = 1 << 16  # a 64th of what the tests of leaks allow


def resident() -> int:
    """Bytes of memory that are in use, once they stay the same: threads of earlier tests may be giving theirs back."""
    last = _collected()
    for _ in range(MOST_WAITS):
        time.sleep(PAUSE_S)
        found = _collected()
        if abs(found - last) <= STEADY_BYTES:
            return found
        last = found
    return last


def _collected() -> int:
    """Bytes in use now.

    A process that has run many tests holds hundreds of megabytes that it has freed, and its C library gives pages of
    them back or takes them again at its own time. So it is asked to give all of them back before it is measured.
    """
    for _ in range(MOST_PASSES):
        if not gc.collect():
            break
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    return held()


def held() -> int:
    """Bytes that the process has written itself, with those that it has freed and not given back.

    Pages of programs and other files are left out: the system takes them away and brings them back as it likes, tens
    of megabytes at a time on a busy machine. Counted page by page; the count in `statm` is kept by processors and late.
    """
    found = re.findall(r"^Anonymous: *(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    return 1024 * int(found[0])


def grown_and_kept(before: int) -> tuple[int, int]:
    """Bytes that are in use since `before`, and bytes that are free and not given back: see `resident`."""
    found, after = held(), resident()
    return after - before, found - after
