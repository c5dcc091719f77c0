"""Batches without their launches: a network in segments, each a CUDA graph, and all of them joined into one.

In a small batch a processor takes longer to start the kernels than the device takes to run them, and in a larger one
the device waits for the first kernels of each segment. A CUDA graph starts them at once, but has fixed sizes, so the
network comes in segments (`lowering.onnxruntime_segments`): a segment ends with a merge and the row count; the next one
runs on the rows of an image, rounded up to a multiple of `_Segment.step`. The host reads the count and replays the
graph of that size; once there are graphs of all sizes (`warm_up`), they are joined into one, in which the device picks
the next segment, and the host waits for nothing.

The graphs are this project's own, captured around a run of each session: those of ONNX Runtime belong to the thread
that captured them, cannot be dropped, and cannot be joined. What a run must be so that it can be captured: fixed
addresses, all nodes on the CUDA provider, no copies to or from the host.

Where a network convolves, a session is for batches of one size. cuDNN compiles kernels for some plans of convolutions,
such as depthwise ones in fp32, and ONNX Runtime keeps the plan of the last size alone. A graph of another size would
start kernels that are gone, and the process would end by a segmentation fault (seen with 1.31 on an H200).
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import onnxruntime as ort
import torch

from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.errors import BuildError, BundleError, ExecutionError, RuntimeUnavailableError
from algm_deploy.lowering.onnxruntime_segments import CONVOLUTIONS, FINE_STEP, LONGEST, STEP, TOGETHER
from algm_deploy.native_libraries import REBUILD, require_library, say_once, usable_library
from algm_deploy.ops import native_kernels
from algm_deploy.ops.kernel_library import KernelLibrary
from algm_deploy.runners.graphs import Graphs, Joined, Key
from algm_deploy.runners.onnxruntime.sessions import LIBRARY, in_turn, numpy_dtype
from algm_deploy.runners.turns import alone, between_captures

_LOG = logging.getLogger("algm_deploy")

MOST_GRAPHS = 1024  # batches of 1, 2, 4, ... 32 pictures with two merges and up to 48 x 48 patches have 903 at most
MANY_IMAGES = 8  # from so many on, rows of padding cost more than a coarse step spares of the warm-up
FINE_SIZES = 128  # about as many of a segment at most, where steps are finer; 256 can be joined
WORKSPACE_BYTES = 32 << 20  # what NVIDIA advises for Hopper; others need less
# Every window and every row merges.
_MERGE_ALL = {CLAP_THRESHOLD: -2.0, GBM_THRESHOLD: -1e6}
_DTYPES = {
    "tensor(bool)": torch.bool,  # masks of rows
    "tensor(uint8)": torch.uint8,
    "tensor(int32)": torch.int32,
    "tensor(int64)": torch.int64,
    "tensor(float16)": torch.float16,
    "tensor(float)": torch.float32,
}

Shape = Sequence[int | str]


class _Segment:
    def __init__(self, number: int, session: ort.InferenceSession) -> None:
        self.number, self.session = number, session
        self.inputs: dict[str, Shape] = {i.name: i.shape for i in session.get_inputs()}
        self.outputs: dict[str, Shape] = {o.name: o.shape for o in session.get_outputs()}
        self.dtypes = {v.name: _DTYPES[v.type] for v in (*session.get_inputs(), *session.get_outputs())}
        # The output that counts rows, and the token axis it is named for; the last segment has none.
        self.rows = next((name for name in self.outputs if name.startswith((LONGEST, TOGETHER))), "")
        self.axis = self.rows.removeprefix(LONGEST).removeprefix(TOGETHER)
        # Segments of earlier versions do not tell.
        self.convolves = session.get_modelmeta().custom_metadata_map.get(CONVOLUTIONS) != "0"
        self.token_axes = sorted({d for s in self.inputs.values() for d in s if isinstance(d, str)} - {"batch"})

    def key(self, axes: Mapping[str, int]) -> Key:
        """Of its work in one size: images first."""
        return (axes["batch"], self.number, *(axes[axis] for axis in self.token_axes))

    @property
    def ragged(self) -> bool:
        """Whether images lie one behind the other behind its merge."""
        return self.rows.startswith(TOGETHER)

    def step(self, images: int, most: int) -> int:
        """By how many rows an image the sizes of the segment behind it differ; `most`: rows of the largest. Fewer where
        many images lie one behind the other: they pay more for padding."""
        if not self.ragged or images < MANY_IMAGES:
            return STEP
        fine = -(-(most // FINE_SIZES) // FINE_STEP) * FINE_STEP
        return min(max(fine, FINE_STEP), STEP)

    def sizes(self, images: int, fewest: int, most: int) -> list[int]:
        """Rows of an image that the segment behind it has graphs for."""
        return [*range(fewest, most, self.step(images, most)), most]

    def room(self, axes: Mapping[str, int]) -> int:
        """What its count may be for the segment behind it, of this size, to have room."""
        return axes[self.axis] * (axes["batch"] if self.ragged else 1)


class SegmentedSession:
    """The segments of a network, run one after the other.

    Args:
        open_session: makes the session of a segment, given the provider options that are wanted besides the usual.
        count: how many segments there are.
        device: a CUDA device, or the CPU, where nothing is captured.
        images: in the largest batch.

    Attributes:
        only: where the network convolves, how many images batches have.

    Raises:
        BundleError: segments of an earlier version, whose merges lay rows out in another way.
    """

    def __init__(
        self,
        open_session: Callable[[int, dict[str, str]], ort.InferenceSession],
        count: int,
        device: torch.device,
        images: int,
    ) -> None:
        self.device, self._images = device, images
        self.graphs = Graphs(device, MOST_GRAPHS, allocates=True) if device.type == "cuda" else None
        self._stream = None if self.graphs is None else self.graphs.stream
        self._segments: list[_Segment] = []
        self._workspace: _Workspace | None = None
        self._joined: dict[int, Joined] = {}  # by images
        self._refused: set[int] = set()  # images of batches that the driver does not join
        self.only: int | None = None
        try:
            self._open(open_session, count)
        except BaseException:
            self.close()
            raise

    def _open(self, open_session: Callable[[int, dict[str, str]], ort.InferenceSession], count: int) -> None:
        chosen = {} if self._stream is None else {"user_compute_stream": str(self._stream.cuda_stream)}
        for index in range(count):
            self._segments.append(_Segment(index, open_session(index, chosen)))
        if not all(segment.rows for segment in self._segments[:-1]):
            raise BundleError(
                "expected segments of this version of algm-deploy: build the bundle again (`algm-deploy build BUNDLE "
                "--runtime onnxruntime-cuda`)"
            )
        if self._stream is not None:
            self._workspace = _Workspace(self._stream)
        self._shapes = {name: shape for s in self._segments for name, shape in (s.inputs | s.outputs).items()}
        self._dtypes = {name: dtype for s in self._segments for name, dtype in s.dtypes.items()}
        self._most = _largest_axes(self._segments)
        # By images that fit: batches up to a power of two share them, or all sizes would add up.
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}
        self._thresholds: dict[str, float] = {}
        with self._on_stream():  # which fills them later
            self._scalars = {
                name: torch.zeros((), device=self.device)
                for name in (CLAP_THRESHOLD, GBM_THRESHOLD)
                if name in self._shapes
            }

    def close(self) -> None:
        """Ends the sessions, after their work (see `CudaSession.close`), and gives their stream back last."""
        try:
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._joined = {}
            if self.graphs is not None:
                self.graphs.drop(lambda _: True)
            with between_captures():
                self._segments = []
            self._workspace = None
            self.graphs = self._stream = None

    @property
    def outputs(self) -> list[str]:
        """Names of everything a segment writes, what one hands to the next included."""
        return [name for segment in self._segments for name in segment.outputs]

    @property
    def joined(self) -> list[int]:
        """How many images the batches have that are one graph, however many segments there are."""
        return sorted(self._joined)

    def accepts(self, images: int) -> bool:
        """Whether batches of so many images may come. Where the network convolves, who asks first decides for all."""
        if images > self._images:
            return False
        if self.only is None and any(segment.convolves for segment in self._segments):
            self.only = images
        return self.only in (None, images)

    def run(
        self,
        image: torch.Tensor,
        thresholds: Mapping[str, float],
        outputs: Sequence[str],
        to: torch.device | None = None,
    ) -> dict[str, torch.Tensor]:
        """As `CudaSession.run`."""
        with alone(self.device):
            self._check_open()
            axes, where = {"batch": len(image)}, to or self.device
            results = {
                name: torch.empty(self._resolved(name, axes), dtype=self._dtypes[name], device=where)
                for name in outputs
            }
            with in_turn(self._stream), self._on_stream(), torch.inference_mode():
                self._run(image, thresholds, results)
        return results

    def warm_up(self, images: int = 1, deadline: float = math.inf) -> bool:
        """Captures every size that photos can lead to, and joins them.

        Nothing more is captured once there is no room.

        Args:
            images: of the batches that will come.
            deadline: by `time.monotonic()`; no capture begins after it.

        Returns:
            Whether all was done before the deadline.
        """
        with alone(self.device):
            self._check_open()
            warming = nullcontext() if self.graphs is None else self.graphs.warming()
            with self._on_stream(), torch.inference_mode(), warming:
                return images in self._joined or self._capture_all(images, deadline)

    def _check_open(self) -> None:
        if not self._segments:
            raise RuntimeUnavailableError("the network was closed by another thread while this one waited for its turn")

    def _on_stream(self) -> torch.cuda.StreamContext | nullcontext[None]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    # --- in a turn, on the session's stream ---------------------------------------------------------------------------

    def _run(self, image: torch.Tensor, thresholds: Mapping[str, float], results: dict[str, torch.Tensor]) -> None:
        axes = self._enter(image, thresholds)
        joined = self._joined.get(len(image))
        if joined is not None:
            joined.replay()
        else:
            for segment in self._segments:
                self._step(segment, axes)
                if segment.rows:
                    axes[segment.axis] = self._rows_for(segment, axes)
        for name, result in results.items():
            result.copy_(self._view(name, axes))

    def _capture_all(self, images: int, deadline: float) -> bool:
        shape = self._resolved("image", {"batch": images})
        axes = self._enter(torch.zeros(shape, dtype=self._dtypes["image"]), _MERGE_ALL)
        sizes, choices = [axes], []
        for segment in self._segments:
            for axes in reversed(sizes):  # the smallest comes last, and leaves what everything merged into
                full = self.graphs is not None and self.graphs.full
                if full or time.monotonic() >= deadline:
                    return full
                self._step(segment, axes)
            if segment.rows:
                fewest, most = self._rows_for(segment, axes), self._most[segment.axis]
                sizes = [axes | {segment.axis: rows} for rows in segment.sizes(images, fewest, most)]
                choices.append(sizes)
        self._join(images, choices)
        return True

    def _join(self, images: int, choices: Sequence[Sequence[Mapping[str, int]]]) -> None:
        """Joins the graphs of batches of so many images; `choices`: sizes of every segment but the first.

        Nothing is joined where a segment also reads rows of an earlier merge, as SegViT's last one does in fp32: the
        last count alone would pick its size.
        """
        if self.graphs is None or not choices or images in self._refused:
            return
        if any(after.token_axes != [before.axis] for before, after in pairwise(self._segments)):
            return
        path = usable_library(native_kernels.LIBRARY)
        if path is None:
            say_once(
                f"onnxruntime-cuda: the host waits behind every merge, but not with: {REBUILD} {native_kernels.LIBRARY}"
            )
            return
        first, _ = self.graphs.found(self._segments[0].key({"batch": images}))
        switches = []
        for (before, segment), sizes in zip(pairwise(self._segments), choices, strict=True):
            found = {before.room(size): self.graphs.found(segment.key(size))[0] for size in sizes}
            graphs = {room: graph for room, graph in found.items() if graph is not None}
            if first is None or len(graphs) < len(sizes):
                return  # one could not be captured, as was said then
            switches.append((self._buffers[self._fitting({"batch": images})][before.rows], graphs))
        assert first is not None
        try:
            self._joined[images] = Joined(KernelLibrary(path, "cuda"), self.device, first, switches)
        except ExecutionError as error:
            self._refused.add(images)
            _LOG.warning("batches of %d wait for the host behind every merge: %s", images, error)

    def _enter(self, image: torch.Tensor, thresholds: Mapping[str, float]) -> dict[str, int]:
        """Puts the inputs where the segments read them; returns the axes known so far."""
        axes = {"batch": len(image)}
        if not self.accepts(len(image)):
            raise ValueError(f"expected {self.only or f'at most {self._images}'} images, got {len(image)}")
        fitting = self._fitting(axes)
        if fitting not in self._buffers:
            self._buffers[fitting] = {name: self._buffer(name, fitting) for name in self._shapes}
        self._view("image", axes).copy_(image)
        for name, scalar in self._scalars.items():
            if self._thresholds.get(name) != thresholds[name]:
                scalar.fill_(thresholds[name])
                self._thresholds[name] = thresholds[name]
        return axes

    def _buffer(self, name: str, images: int) -> torch.Tensor:
        """Memory for the largest form of a tensor. Row counts are written to page-locked memory of the host."""
        if name in self._scalars:
            return self._scalars[name].reshape(1)
        size = max(1, math.prod(self._resolved(name, self._most | {"batch": images})))  # an empty one has no address
        if name.startswith((LONGEST, TOGETHER)):
            return torch.zeros(size, dtype=torch.int64, pin_memory=self._stream is not None)
        return torch.zeros(size, dtype=self._dtypes[name], device=self.device)

    def _rows_for(self, segment: _Segment, axes: Mapping[str, int]) -> int:
        """Rows of an image for the segment behind this one: what its merge counted, and less than a step above."""
        if self._stream is not None:
            self._stream.synchronize()
        counted = int(self._buffers[self._fitting(axes)][segment.rows])
        if segment.ragged:
            counted = -(-counted // axes["batch"])
        most = self._most[segment.axis]
        step = segment.step(axes["batch"], most)
        return min(-(-counted // step) * step, most)

    def _step(self, segment: _Segment, axes: Mapping[str, int]) -> None:
        work = partial(self._launch, segment, axes)
        if self.graphs is None:
            work()
        else:
            self.graphs.run(segment.key(axes), work, joins=len(self._segments) > 1)

    def _launch(self, segment: _Segment, axes: Mapping[str, int]) -> None:
        """Runs a segment from and to where its tensors are, kernel by kernel."""
        binding = segment.session.io_binding()
        device = (self.device.type, self.device.index or 0)
        tensors = self._buffers[self._fitting(axes)]
        for shapes, bind in ((segment.inputs, binding.bind_input), (segment.outputs, binding.bind_output)):
            for name, shape in shapes.items():
                dtype = numpy_dtype(tensors[name]).type
                bind(name, *device, dtype, _sizes(shape, axes), tensors[name].data_ptr())
        options = ort.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        segment.session.run_with_iobinding(binding, options)

    def _resolved(self, name: str, axes: Mapping[str, int]) -> list[int]:
        return _sizes(self._shapes[name], axes)

    def _view(self, name: str, axes: Mapping[str, int]) -> torch.Tensor:
        shape = self._resolved(name, axes)
        return self._buffers[self._fitting(axes)][name][: math.prod(shape)].view(shape)

    def _fitting(self, axes: Mapping[str, int]) -> int:
        """Images that the buffers of a batch are made for: the next power of two, or the most there are."""
        images = axes["batch"]
        return max(images, min(1 << (images - 1).bit_length(), self._images))


class _Workspace:
    """Memory in which cuBLAS works on a stream where ONNX Runtime's products are captured.

    Without it cuBLAS takes some of its own in each graph, and such a graph cannot become part of another. Nothing is
    lent where ONNX Runtime's cuBLAS is not found, which one line says.

    Raises:
        BuildError: the library of the custom operators was built without CUDA.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        library = ctypes.CDLL(str(require_library(LIBRARY)))
        try:
            lend = library.algm_lend_workspace
        except AttributeError as error:
            raise BuildError(
                f"expected the library {LIBRARY} with operators of the CUDA provider, it has none: {REBUILD} {LIBRARY} "
                "with nvcc"
            ) from error
        provider = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
        try:  # the provider is loaded; what it is linked with is found through it
            loaded = ctypes.CDLL(str(provider), mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
            set_workspace = ctypes.cast(loaded.cublasSetWorkspace_v2, ctypes.c_void_p)
        except (OSError, AttributeError):
            say_once(f"onnxruntime-cuda: large batches wait for the host, as {provider.name} shows no cuBLAS")
            return
        self._memory = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=stream.device)
        place, lent = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(self._memory.data_ptr())
        lend(place, lent, ctypes.c_size_t(WORKSPACE_BYTES), set_workspace)
        weakref.finalize(self, lend, place, None, ctypes.c_size_t(0), None)


def _sizes(shape: Shape, axes: Mapping[str, int]) -> list[int]:
    return [axes[d] if isinstance(d, str) else d for d in shape]


def _largest_axes(segments: Sequence[_Segment]) -> dict[str, int]:
    """The most rows that every token axis can have: as many as go into its merge."""
    most: dict[str, int] = {}
    for before, after in pairwise(segments):
        for name in before.outputs.keys() & after.inputs.keys():
            for made, taken in zip(before.outputs[name], after.inputs[name], strict=True):
                if made != taken:
                    most[str(taken)] = most[made] if isinstance(made, str) else made
    return most
