"""Stretches of work during which Python collects no garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_inside = 0
_collects = True


@contextmanager
def no_collection() -> Iterator[None]:
    """No thread collects before the last that is in here leaves; then it is as before the first, after an error too.

    What nothing refers to any more is freed as ever, unless it refers to itself in a ring.
    """
    global _inside, _collects
    with _LOCK:
        if not _inside:
            _collects = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside and _collects:
                gc.enable()
