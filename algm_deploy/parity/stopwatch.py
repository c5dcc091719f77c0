"""Where the time of a verification goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds of wall-clock time by part. What a part does within another counts as its own alone, so parts add up.

    What a GPU still has to do when a part ends counts where it is waited for.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """By part, in the order in which parts were first begun."""
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within it time counts as that of `name`; an error ends the part like anything else."""
        self._turn()
        self._seconds.setdefault(name, 0.0)
        self._running.append(name)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def _turn(self) -> None:
        """Gives the time that went by to the part that runs."""
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] += now - self._since
        self._since = now
