"""CUDA graphs of work that is done again and again on the same memory."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from algm_deploy.errors import ExecutionError
from algm_deploy.ops.kernel_library import KernelLibrary, Switch
from algm_deploy.runners.turns import capturing, wait_for

_LOG = logging.getLogger("algm_deploy")

# Streams that nobody uses any more. PyTorch keeps for ever what cuBLAS works in on a stream, 32 MiB on Hopper, so a
# stream is used again; never by two at a time: graphs would share that memory, and what one queues would enter what
# another captures.
_FREE: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
_TAKEN: defaultdict[torch.device, set[int]] = defaultdict(set)
_STREAMS = 32  # that PyTorch has for a device; then it hands out the first one again

Key = tuple[int, ...]
Result = TypeVar("Result")


class Graphs:
    """Captured work by key: done as it comes the first time, and captured; replayed from then on.

    Work reads and writes memory that stays where it is, and hands nothing else on. Its intermediate results lie in one
    pool that all graphs share, so that memory grows with the largest graph and not with their number; those that come
    after a capture that failed share a new one. Work that cannot be captured is done as it comes every time.

    After a warm-up (`warming`) work is captured only when it comes for the second time: a capture takes several times
    as long as the work, and what is new by then seldom comes back. Under load, captures at first sight let a queue
    grow, whose longer batches need graphs in turn.

    Graphs that became part of a `Joined` are kept by it, whatever is dropped here.

    Args:
        device: a CUDA device.
        limit: graphs kept; beyond it the one that was not needed for longest is dropped.
        allocates: the work may take memory that is not PyTorch's while it is captured, and keeps it.
    """

    def __init__(self, device: torch.device, limit: int, *, allocates: bool = False) -> None:
        self._device, self._limit = device, limit
        # Other threads may allocate memory meanwhile in either mode.
        self._mode = "relaxed" if allocates else "thread_local"
        self._graphs: OrderedDict[Key, tuple[torch.cuda.CUDAGraph | None, Any]] = OrderedDict()
        self.stream = take_stream(device)
        weakref.finalize(self, give_back, self.stream)
        self.captures = 0
        self._patient = False
        self._met: set[Key] = set()  # while patient: came once
        self._start_pool()

    def _start_pool(self) -> None:
        """From now on graphs are captured into a pool of their own."""
        pool = torch.cuda.graph_pool_handle()
        # A pool cannot be used again once its last graph is gone: this one stays.
        anchor = self._captured(lambda: torch.zeros(1, device=self._device), pool)
        self._pool, self._anchor = pool, anchor

    def __len__(self) -> int:
        return len(self._graphs)

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Around a warm-up: inside the block all work is captured when it comes first."""
        self._patient = False
        try:
            yield
        finally:
            self._patient = True

    @property
    def full(self) -> bool:
        """Whether the next capture drops a graph."""
        return len(self._graphs) >= self._limit

    def run(self, key: Key, work: Callable[[], Result], *, joins: bool = False) -> Result:
        """Does `work` on the current stream; the host does not wait for it, but where a graph is dropped.

        Args:
            key: of the work.
            work: what is captured.
            joins: the graph may become part of a `Joined`.

        Returns:
            What `work` returned the first time, memory that stays where it is; without a graph, what it returned now.
        """
        if key not in self._graphs:
            result = work()  # kernels are compiled and libraries initialised here, which a capture could not
            if self._patient and key not in self._met:
                self._met.add(key)
                return result
            while len(self._graphs) >= self._limit:
                wait_for(self._device)  # it may still run
                self._graphs.popitem(last=False)
            try:
                self._graphs[key] = self._captured(work, self._pool, joins), result
                self.captures += 1
            except RuntimeError as error:  # the result is there all the same
                self._graphs[key] = None, None
                _LOG.warning(
                    "a CUDA graph could not be captured, so each of its kernels is launched: %s", _first(error)
                )
                # PyTorch still counts its generator and this pool as being captured. A capture that succeeds, in a new
                # pool, ends that; until then drawing random numbers on the device fails.
                with suppress(RuntimeError):
                    self._start_pool()
            return result
        self._graphs.move_to_end(key)
        graph, result = self._graphs[key]
        if graph is None:
            return work()
        graph.replay()
        return result

    def drop(self, belongs: Callable[[Key], bool]) -> None:
        """Forgets the graphs with these keys, before the memory they use goes."""
        wait_for(self._device)
        for key in [key for key in self._graphs if belongs(key)]:
            del self._graphs[key]
        self._met = {key for key in self._met if not belongs(key)}

    def found(self, key: Key) -> tuple[torch.cuda.CUDAGraph | None, Any]:
        """The graph of work that was captured and is still kept, and what the work returned."""
        return self._graphs.get(key, (None, None))

    def _captured(self, work: Callable[[], object], pool: Any, joins: bool = False) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=joins)
        with capturing(), torch.cuda.stream(self.stream):
            graph.capture_begin(pool=pool, capture_error_mode=self._mode)
            try:
                work()
            finally:
                graph.capture_end()
        if joins:
            graph.instantiate()
        return graph


class Joined:
    """Graphs joined into one: the device decides by the rows of an image which comes next, and no host waits for them.

    Args:
        library: of a CUDA device.
        device: the same.
        first: the graph that comes first.
        switches: of each that comes then, a length that the device can read and the graphs by the rows they have room
            for, the last of which takes whatever the others have no room for.

    Raises:
        ExecutionError: the library or the driver joins no graphs.
    """

    def __init__(
        self,
        library: KernelLibrary,
        device: torch.device,
        first: torch.cuda.CUDAGraph,
        switches: Sequence[tuple[Tensor, Mapping[int, torch.cuda.CUDAGraph]]],
    ) -> None:
        self._library, self._kept = library, (first, switches)  # what the copies use is theirs
        chosen = [
            Switch.of(length.data_ptr(), {rows: graph.raw_cuda_graph() for rows, graph in graphs.items()})
            for length, graphs in switches
        ]
        status, self._joined = library.join(first.raw_cuda_graph(), chosen)
        if status:
            raise ExecutionError(
                "expected graphs that can be joined (by CUDA 12.8 and a driver to match, at most 256 sizes), got: "
                f"{library.status_text(status)}"
            )
        weakref.finalize(self, _free, library, self._joined, device).atexit = False

    def replay(self) -> None:
        """Launches them all on the current stream."""
        if status := self._library.launch_joined(self._joined, torch.cuda.current_stream().cuda_stream):
            raise ExecutionError(f"expected joined graphs to start, got: {self._library.status_text(status)}")


def _free(library: KernelLibrary, joined: int, device: torch.device) -> None:
    wait_for(device)  # it may still run
    library.free_joined(joined)


def take_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that is the caller's alone, as long as PyTorch has one, until `give_back`."""
    with suppress(IndexError):
        stream = _FREE[device].pop()
        wait_for(device)  # what another queued may still run
        return stream
    for _ in range(_STREAMS):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if stream.cuda_stream not in _TAKEN[device]:
            break
    _TAKEN[device].add(stream.cuda_stream)
    return stream


def give_back(stream: torch.cuda.Stream) -> None:
    """Lets others have it."""
    _FREE[stream.device].append(stream)


def _first(error: RuntimeError) -> str:
    """What an error says in its first line."""
    return next(iter(str(error).splitlines()), type(error).__name__)
