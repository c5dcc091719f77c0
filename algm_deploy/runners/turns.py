"""Who may use the CUDA devices of this process, and when.

The ONNX Runtime networks of one device take turns; those of several run side by side. A capture of a CUDA graph leaves
all other work alone, but for what waits for a whole device: CUDA refuses that while any stream of it is captured, and
the graph is lost.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from algm_deploy.garbage import no_collection

_LOCK = threading.Lock()
_TURNS: defaultdict[torch.device, threading.RLock] = defaultdict(threading.RLock)
_CAPTURE = threading.RLock()  # one at a time in a process


def _in_child() -> None:
    """A process that forked has locks that threads of its parent hold for ever."""
    global _LOCK, _CAPTURE
    _LOCK, _CAPTURE = threading.Lock(), threading.RLock()
    _TURNS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """A turn that no other thread has on this device, and the device the current one, also after ONNX Runtime has made
    its own that. Not inside the turn of another device."""
    with _LOCK:
        turn = _TURNS[device]
    with turn, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def capturing() -> Iterator[None]:
    """Around a capture: Python collects no garbage meanwhile, whose destructors may free memory of a device."""
    with _CAPTURE, no_collection():
        yield


@contextmanager
def between_captures() -> Iterator[None]:
    """Around what may wait for a whole device, such as opening a session of ONNX Runtime: nobody captures meanwhile."""
    with _CAPTURE:
        yield


def wait_for(device: torch.device | None = None) -> None:
    """Waits until a CUDA device, or the current one, has done all its work."""
    with between_captures():
        torch.cuda.synchronize(device)
