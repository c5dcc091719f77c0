"""Who may use the CUDA devices of this process while a CUDA graph is captured.

ONNX Runtime captures in the mode in which an allocation, a copy or the end of a session in any thread is an error that
breaks the graph, and where it comes from a destructor aborts the process. PyTorch captures in the mode that forbids
them to the capturing thread alone. So what ONNX Runtime does on a device it does alone; the torch runtime works beside
itself, but not beside ONNX Runtime.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock that one thread holds alone, as often as it likes, or many share."""

    def __init__(self) -> None:
        self._turn = threading.Condition(threading.RLock())
        self._sharing = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until nobody else has a turn. Not inside `shared`."""
        with self._turn:
            self._turn.wait_for(lambda: not self._sharing)
            yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Waits until no other thread has its turn alone."""
        with self._turn:
            self._sharing += 1
        try:
            yield
        finally:
            with self._turn:
                self._sharing -= 1
                self._turn.notify_all()


DEVICE = Turns()
"""Of all CUDA devices: a capture on one forbids allocations on all."""

_CAPTURE = threading.RLock()  # one at a time in a process


@contextmanager
def capturing() -> Iterator[None]:
    """Around a capture: Python collects no garbage meanwhile, whose destructors may free memory of a device."""
    with _CAPTURE:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
