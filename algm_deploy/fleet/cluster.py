"""Work on a Ray cluster: items go out in blocks to workers, results come back in any order, and no item is lost.

Items and results are bytes, JSON of typed records, so nothing that travels is a pickle of ours. Ray itself pickles what
it sends between the processes of a cluster: join clusters that you trust.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from algm_deploy import __version__, errors
from algm_deploy.errors import AlgmDeployError, ExecutionError, RuntimeUnavailableError

BLOCK = 32
"""Items of a block at most: what is done again when a worker dies."""

GIVEN_UP = "every worker that tried it died"
"""Why an item has no result."""

_BLOCKS_OF_A_WORKER = 4  # at least, so that all end at about the same time
_TRIES_AFTER_DEATHS = 2


class Work(Protocol):
    """What a worker does, made once in its process."""

    device_name: str

    def __call__(self, items: Sequence[bytes]) -> list[bytes]:
        """A result for each item, in their order."""


@dataclass(frozen=True)
class Cluster:
    """A joined cluster; `connected` makes it.

    Args:
        machines: how many CPUs and GPUs each has.
        workers: how many to start; None: one for each GPU, or for each CPU where a runtime uses none.
    """

    machines: tuple[tuple[int, int], ...]
    workers: int | None

    @property
    def cpus(self) -> int:
        """Of all machines."""
        return sum(cpus for cpus, _ in self.machines)

    @property
    def gpus(self) -> int:
        """Of all machines."""
        return sum(gpus for _, gpus in self.machines)

    def run(
        self, make: Callable[[], Work], items: Sequence[bytes], on_gpus: bool
    ) -> Iterator[tuple[int, bytes | None, str]]:
        """Runs `make()` on workers over all items.

        Yields, in any order, each item's index, its result, and the device that computed it. A worker that dies is
        started again with its block; the result of items whose block ended three workers is None. Few items go out in
        small blocks, so that another run over what is left finds the one at fault.

        Raises:
            AlgmDeployError: what `make` or the work raised.
            ExecutionError: workers do not start, or an error of one that nobody foresaw.
        """
        if not items:
            return
        left = set(range(len(items)))
        for index, result, device in self._results(make, items, on_gpus):
            left.remove(index)
            yield index, result, device
        for index in sorted(left):
            yield index, None, ""

    def _results(
        self, make: Callable[[], Work], items: Sequence[bytes], on_gpus: bool
    ) -> Iterator[tuple[int, bytes, str]]:
        """Those of the items whose worker lived."""
        import ray

        workers = min(self.workers or (self.gpus if on_gpus else self.cpus), len(items))
        block = max(1, min(BLOCK, len(items) // (_BLOCKS_OF_A_WORKER * workers)))
        blocks = -(-len(items) // block)
        rows = [{"index": index, "item": item} for index, item in enumerate(items)]
        data = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            _Worker,
            fn_constructor_args=(make, __version__),
            batch_size=block,
            batch_format="numpy",
            # One at a time: a block that waits for a worker that dies would lose one of its tries.
            compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
            num_cpus=self.cpus_each(workers, on_gpus),
            num_gpus=1 if on_gpus else 0,
            ray_remote_args_fn=partial(dict, max_task_retries=_TRIES_AFTER_DEATHS),
        )
        try:
            for batch in data.iter_batches(batch_size=None, batch_format="numpy"):
                for index, result, device, kind, text in zip(*(batch[name] for name in _COLUMNS), strict=True):
                    if kind:
                        raise getattr(errors, kind, ExecutionError)(str(text))
                    yield int(index), bytes(result), str(device)
        except ray.exceptions.RayError as error:
            raise _told(error) from error

    def cpus_each(self, workers: int, on_gpus: bool) -> int:
        """CPUs, and so threads, of each worker: as many as leave all of them a place, each on one machine."""
        for share in range(self.cpus // workers, 1, -1):
            places = (min(cpus // share, gpus) if on_gpus else cpus // share for cpus, gpus in self.machines)
            if sum(places) >= workers:
                return share
        return 1

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns on a machine of the cluster, on one with a GPU where there is one.

        Raises:
            AlgmDeployError: what the function raised.
            ExecutionError: it could not be called there, or raised an error that nobody foresaw.
        """
        import ray

        there = ray.remote(function).options(num_gpus=1 if self.gpus else 0, num_cpus=0)
        try:
            return ray.get(there.remote(*arguments))
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, AlgmDeployError) else _told(error)) from error


def _told(error: Exception) -> ExecutionError:
    """What is told of an error of Ray: what happened in a worker, where it knows, and not the way there."""
    cause = getattr(error, "cause", None)
    said = f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else str(error)
    return ExecutionError(
        f"expected workers that start on every machine of the cluster, Ray says {' '.join(said.split())[:300]!r}: "
        "install the same there, and run again: what is done is kept"
    )


_COLUMNS = ("index", "result", "device", "kind", "text")


class _Worker:
    """In a process of its own: makes the work, and runs it block by block.

    Errors of ours travel as a kind and a text; Ray would wrap them into traces.
    """

    def __init__(self, make: Callable[[], Work], version: str) -> None:
        self._make = make
        self._version = version

    @cached_property
    def _work(self) -> Work:
        if self._version != __version__:
            raise ExecutionError(
                f"expected algm-deploy {self._version} on every machine of the cluster, found {__version__} on one: "
                "install the same there"
            )
        return self._make()

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        count = len(block["index"])
        results, device, kind, text = [b""] * count, "", "", ""
        try:
            results = self._work([bytes(item) for item in block["item"]])
            device = self._work.device_name
        except AlgmDeployError as error:
            kind, text = type(error).__name__, str(error)
        except Exception as error:  # noqa: BLE001 - a worker would die of it, and be started again for nothing
            kind, text = ExecutionError.__name__, f"a worker failed: {type(error).__name__}: {error}"
        told = {"device": [device] * count, "kind": [kind] * count, "text": [text] * count}
        return {"index": block["index"], "result": np.array([*results, None], object)[:-1], **told}


@contextmanager
def connected(address: str, workers: int | None = None) -> Iterator[Cluster]:
    """Joins a Ray cluster for the time of the block.

    Args:
        address: `local` starts one on this machine for the time of the block; `auto` or HOST:PORT joins one that runs;
            ray://HOST:PORT is Ray's client.
        workers: as `Cluster` has them.

    Raises:
        RuntimeUnavailableError: Ray is not installed, or no cluster answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing of this package reports anything
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise RuntimeUnavailableError(
            f"expected the module {error.name} for --ray, found none: `pip install 'algm-deploy[ray]'`"
        ) from error
    own = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", **own)
    except Exception as error:  # Ray raises errors of any kind, plain ones too
        said = " ".join(str(error).split())[:200]
        raise RuntimeUnavailableError(
            f"expected a Ray cluster at {address}, Ray says {said!r}: start it, or name another address"
        ) from error
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.max_errored_blocks = -1  # a block whose worker died is missing, which `run` sees
        resources = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
        machines = tuple((int(one.get("CPU", 0)), int(one.get("GPU", 0))) for one in resources)
        yield Cluster(machines, workers)
    finally:
        ray.shutdown()
