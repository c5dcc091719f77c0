"""Pictures of many clients share batches, in one thread that runs the network."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from algm_deploy.errors import GateError
from algm_deploy.pictures.sliding import Pending
from algm_deploy.predictor import FAILURES_OF_A_BROKEN_RUNTIME, Predictor, batch_sizes
from algm_deploy.serving.metrics import Metrics


@dataclass(frozen=True, eq=False)
class _Job:
    picture: Pending
    thresholds: tuple[tuple[str, float], ...]
    token_maps: bool
    future: Future[Pending] = field(default_factory=Future)
    arrived: float = field(default_factory=time.perf_counter)

    def fits(self, other: _Job) -> bool:
        """Whether both can share a batch."""
        return (self.thresholds, self.token_maps) == (other.thresholds, other.token_maps)


class Batcher:
    """Takes pictures from any thread, runs them in batches, in the order in which they came.

    A batch holds pictures of the same thresholds. It starts when its windows are as many as the predictor's batch, or
    its first picture has waited for `wait_s` seconds since it came; under load none waits for company. Then it holds as
    many windows as wait, down to one of `batch_sizes`: the others are first in the next. Where a batch fails, each of
    its pictures runs again alone, so that only the one that cannot be predicted fails.

    Use it in a `with` block, which ends when all pictures that were taken are done.
    """

    def __init__(self, predictor: Predictor, wait_s: float, metrics: Metrics) -> None:
        self.predictor, self._wait_s, self._metrics = predictor, wait_s, metrics
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        metrics.waiting.set_function(self._waiting)
        self._closed = False
        self._failures = 0
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def healthy(self) -> bool:
        """Whether the runtime executes: not after several failures in a row."""
        return self._failures < FAILURES_OF_A_BROKEN_RUNTIME and self._thread.is_alive()

    def submit(self, picture: Pending, thresholds: Mapping[str, float], token_maps: bool) -> Future[Pending]:
        """The picture when it is done, or what `Predictor.run_prepared` raises. A future may be cancelled in time."""
        job = _Job(picture, tuple(sorted(thresholds.items())), token_maps)
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        return job.future

    def _waiting(self) -> int:
        """Pictures that somebody waits for and no batch has taken yet."""
        with self._changed:
            return sum(not job.future.cancelled() for job in self._jobs)

    def _work(self) -> None:
        while batch := self._next():
            self._run(batch)

    def _next(self) -> list[_Job]:
        """The jobs of the next batch; none when all is done and nothing more will come."""
        with self._changed:
            batch: list[_Job] = []
            while not batch:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                waiting = self._like_the_first()
                if not waiting:
                    if self._closed:
                        return []
                    continue
                left = waiting[0].arrived + self._wait_s - time.perf_counter()
                if _windows(waiting) >= self.predictor.batch or left <= 0 or self._closed:
                    batch = self._taken(waiting)
                else:
                    self._changed.wait(left)
        now = time.perf_counter()
        for job in batch:
            self._metrics.queue_seconds.observe(now - job.arrived)
        return batch

    def _like_the_first(self) -> list[_Job]:
        """Waiting jobs that can share a batch with the one that came first; cancelled ones vanish."""
        self._jobs = deque(job for job in self._jobs if not job.future.cancelled())
        return [job for job in self._jobs if job.fits(self._jobs[0])]

    def _taken(self, waiting: list[_Job]) -> list[_Job]:
        """Takes the first of jobs, until their windows are as many as a batch has; one cancelled meanwhile vanishes."""
        windows = min(_windows(waiting), self.predictor.batch)
        room = max(size for size in batch_sizes(self.predictor.batch) if size <= windows)
        taken: list[_Job] = []
        for job in waiting:
            if _windows(taken) >= room:
                break
            self._jobs.remove(job)
            if job.future.set_running_or_notify_cancel():
                taken.append(job)
        return taken

    def _run(self, batch: list[_Job]) -> None:
        started = time.perf_counter()
        pictures = [job.picture for job in batch]
        errors = self.predictor.run_apart(pictures, dict(batch[0].thresholds), token_maps=batch[0].token_maps)
        self._metrics.batch_seconds.observe(time.perf_counter() - started)
        self._metrics.batch_windows.observe(_windows(batch))
        for job, error in zip(batch, errors, strict=True):
            if error is None:
                self._failures = 0
                job.future.set_result(job.picture)
            else:
                self._failures += not isinstance(error, GateError)  # which a picture alone can cause
                job.future.set_exception(error)


def _windows(batch: list[_Job]) -> int:
    return sum(len(job.picture.anchors) for job in batch)
