"""What stands on a CPU where CUDA graphs are on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from algm_deploy.runners.onnxruntime import graphs
from algm_deploy.runners.onnxruntime.graphs import SegmentedSession
from algm_deploy.runners.torch.packed import MOST_GRAPHS


def opened(path: Path, library: Path) -> ort.InferenceSession:
    """A session of a graph for CUDA, with the custom operators."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class NoGraphs:
    """Stands where `Graphs` are: work is done at once, and in the sizes that graphs would have."""

    captures = 0

    def __init__(self, work_first: Callable[[], None] = lambda: None, limit: int = MOST_GRAPHS) -> None:
        self.keys: list[tuple[int, ...]] = []
        self.joining: set[tuple[int, ...]] = set()
        self.patient, self.waited = False, False
        self._work_first, self._limit = work_first, limit
        self._works: dict[tuple[int, ...], tuple[Any, Any]] = {}

    @contextmanager
    def warming(self) -> Iterator[None]:
        self.patient = False
        try:
            yield
        finally:
            self.patient = True

    @property
    def full(self) -> bool:
        return len(set(self.keys)) >= self._limit

    def run(self, key: tuple[int, ...], work: Callable[[], Any], *, joins: bool) -> Any:
        self.keys.append(key)
        self.joining |= {key} if joins else set()
        self.waited |= self.patient
        self._work_first()
        self._works[key] = work, work()
        return self._works[key][1]

    def found(self, key: tuple[int, ...]) -> tuple[Any, Any]:
        return self._works.get(key, (None, None))

    def drop(self, belongs: Callable[[tuple[int, ...]], bool]) -> None:
        self.keys = [key for key in self.keys if not belongs(key)]


class JoinedOnTheHost:
    """Stands where `Joined` are: lengths are read as the device does it."""

    def __init__(self, library: Any, device: Any, first: Callable[[], Any], switches: Any) -> None:
        self.library, self.first, self.switches, self.replays = library, first, switches, 0

    def replay(self) -> None:
        self.replays += 1
        self.first()
        for length, works in self.switches:
            (count,) = length.tolist()
            works[min((rows for rows in works if rows >= count), default=max(works))]()


def joined_on_the_host(monkeypatch: pytest.MonkeyPatch, session: SegmentedSession) -> NoGraphs:
    """Lets a session on the CPU join its segments, as on a CUDA device; its graphs."""
    made = NoGraphs()
    monkeypatch.setattr(graphs, "usable_library", lambda name: name)
    monkeypatch.setattr(graphs, "KernelLibrary", lambda path, device: (path, device))
    monkeypatch.setattr(graphs, "Joined", JoinedOnTheHost)
    monkeypatch.setattr(session, "graphs", made)
    return made
