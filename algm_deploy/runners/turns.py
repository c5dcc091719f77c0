"""Who may use the CUDA devices of this process while a CUDA graph is captured.

ONNX Runtime captures in the mode in which an allocation, a copy or the end of a session in any thread, on any device,
is an error that breaks the graph, and where it comes from a destructor aborts the process. PyTorch captures in the mode
that forbids them to the capturing thread alone. So all work takes a turn, many at a time, and nobody else has one while
ONNX Runtime captures. On one device its networks also take turns with each other; on several they run side by side.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from algm_deploy.garbage import no_collection


class Turns:
    """Turns that many threads have at once, those of one device that one has at a time, and captures without others."""

    def __init__(self) -> None:
        self._change = threading.Condition(threading.Lock())
        self._working = self._waiting = 0  # turns, and captures that wait for them to end
        self._mine = threading.local()
        self._of: defaultdict[torch.device, threading.RLock] = defaultdict(threading.RLock)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Waits until nobody captures or is about to. A thread may ask again within its turn."""
        if getattr(self._mine, "turn", False):
            yield
            return
        with self._change:
            self._change.wait_for(lambda: not self._waiting)
            self._working += 1
        self._mine.turn = True
        try:
            yield
        finally:
            self._mine.turn = False
            with self._change:
                self._working -= 1
                self._change.notify_all()

    @contextmanager
    def alone(self, device: torch.device) -> Iterator[None]:
        """A turn that no other thread has on this device, and the device the current one, also after ONNX Runtime has
        made its own that. Not inside the turn of another device."""
        with self._change:
            lock = self._of[device]
        with lock, self.shared(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Inside a turn, in its thread or one that works for it: waits until all other turns end or capture too."""
        with self._change:
            self._working -= 1
            self._waiting += 1
            self._change.notify_all()
            try:
                self._change.wait_for(lambda: not self._working)
                with capturing():
                    yield
            finally:
                self._waiting -= 1
                self._working += 1
                self._change.notify_all()


DEVICES = Turns()
"""Of all CUDA devices: a capture on one forbids allocations on all."""

_CAPTURE = threading.RLock()  # one at a time in a process


@contextmanager
def capturing() -> Iterator[None]:
    """Around a capture: Python collects no garbage meanwhile, whose destructors may free memory of a device."""
    with _CAPTURE, no_collection():
        yield
