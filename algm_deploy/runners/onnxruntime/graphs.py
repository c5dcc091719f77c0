"""Batches without their launches: a network in segments, each a CUDA graph of ONNX Runtime.

In a small batch a processor takes longer to start the kernels than the device takes to run them, and in a larger one
the device waits for the first kernels of each segment. A CUDA graph starts them at once, but has fixed sizes, so the
network comes in segments (`lowering.onnxruntime_segments`): a segment ends with a merge and the row count, which the
host reads; the next one is replayed for the next multiple of `STEP` rows an image, as the merge has laid them out.

What ONNX Runtime asks for: fixed addresses, all nodes on the CUDA provider, no copies to or from the host. A graph
belongs to the thread that captured it: the thread that opened the session has its own, all others share those of one
more thread, which costs them the way there and back. A single graph cannot be dropped, so a segment captures
`MOST_GRAPHS` and launches other sizes kernel by kernel. And while one is captured, which is at the first run of a size,
no other thread of the process may allocate device memory: `warm_up` before serving from several.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import onnxruntime as ort
import torch

from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.errors import BundleError
from algm_deploy.lowering.onnxruntime_segments import LONGEST, STEP, TOGETHER
from algm_deploy.runners.onnxruntime.sessions import in_turn, numpy_dtype
from algm_deploy.runners.turns import DEVICES

MOST_GRAPHS = 200  # of one segment: six sizes of batch at 1025 rows, 33 each
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
Result = TypeVar("Result")


class GraphUse(NamedTuple):
    """Runs of segments since the session was made: sizes captured, runs replayed, runs launched kernel by kernel."""

    captured: int
    replayed: int
    launched: int


class _Step(NamedTuple):
    """A segment for one size: where its tensors are, and the graph it is kept in."""

    binding: ort.IOBinding
    options: ort.RunOptions
    captured: bool


class _Segment:
    def __init__(self, session: ort.InferenceSession) -> None:
        self.session = session
        self.inputs: dict[str, Shape] = {i.name: i.shape for i in session.get_inputs()}
        self.outputs: dict[str, Shape] = {o.name: o.shape for o in session.get_outputs()}
        self.dtypes = {v.name: _DTYPES[v.type] for v in (*session.get_inputs(), *session.get_outputs())}
        # The output that counts rows, and the token axis it is named for; the last segment has none.
        self.rows = next((name for name in self.outputs if name.startswith((LONGEST, TOGETHER))), "")
        self.axis = self.rows.removeprefix(LONGEST).removeprefix(TOGETHER)
        # The axes that decide its size.
        self.axes = sorted({d for shape in self.inputs.values() for d in shape if isinstance(d, str)})
        self.steps: dict[tuple[int, ...], _Step] = {}


class SegmentedSession:
    """The segments of a network, run one after the other.

    Args:
        open_session: makes the session of a segment, given the provider options that are wanted besides the usual.
        count: how many segments there are.
        device: a CUDA device, or the CPU, where nothing is captured.
        images: in the largest batch.

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
        self.device = device
        self._images = images
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        chosen = {}
        if self._stream is not None:
            chosen = {"user_compute_stream": str(self._stream.cuda_stream), "enable_cuda_graph": "1"}
        self._segments = [_Segment(open_session(index, chosen)) for index in range(count)]
        if not all(segment.rows for segment in self._segments[:-1]):
            raise BundleError("expected segments of this version of algm-deploy: build the bundle again")
        self._shapes = {name: shape for s in self._segments for name, shape in (s.inputs | s.outputs).items()}
        self._dtypes = {name: dtype for s in self._segments for name, dtype in s.dtypes.items()}
        self._most = _largest_axes(self._segments)
        self._claimed: set[tuple[bool, int]] = set()
        sizes = max((-(-rows // STEP) for rows in self._most.values()), default=1)
        self._most_claims = max(1, MOST_GRAPHS // sizes)
        # By images that fit: batches up to a power of two share them, or all sizes would add up.
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}
        self._thresholds: dict[str, float] = {}
        self._scalars = {
            name: torch.zeros((), device=device) for name in (CLAP_THRESHOLD, GBM_THRESHOLD) if name in self._shapes
        }
        self._use = GraphUse(0, 0, 0)
        self._owner = threading.get_ident()
        self._worker = ThreadPoolExecutor(1, "onnxruntime-graphs")

    def close(self) -> None:
        """Ends the sessions, after their work (see `CudaSession.close`), and the thread of the others."""
        self._worker.shutdown()
        try:
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._segments = []

    @property
    def outputs(self) -> list[str]:
        """Names of everything a segment writes, what one hands to the next included."""
        return [name for segment in self._segments for name in segment.outputs]

    @property
    def use(self) -> GraphUse:
        """What was captured and replayed so far."""
        return self._use

    def claim(self, images: int) -> bool:
        """Whether batches of this many images have graphs in the calling thread; they get them while there is room."""
        key = (threading.get_ident() == self._owner, images)
        if len(self._claimed) < self._most_claims:
            self._claimed.add(key)
        return key in self._claimed

    def run(
        self,
        image: torch.Tensor,
        thresholds: Mapping[str, float],
        outputs: Sequence[str],
        to: torch.device | None = None,
    ) -> dict[str, torch.Tensor]:
        """As `CudaSession.run`."""
        with DEVICES.alone(self.device):
            axes, where = {"batch": len(image)}, to or self.device
            results = {
                name: torch.empty(self._resolved(name, axes), dtype=self._dtypes[name], device=where)
                for name in outputs
            }
            with in_turn(self._stream):
                self._in_thread(self._run, image, thresholds, results)
        return results

    def warm_up(self, images: int = 1, deadline: float = math.inf) -> bool:
        """Captures every size that photos can lead to, for the calling thread, so that its later runs are all alike.

        Args:
            images: of the batches that will come.
            deadline: by `time.monotonic()`; no capture begins after it.

        Returns:
            Whether all was done before the deadline.
        """
        with DEVICES.alone(self.device):
            return self._in_thread(self._capture_all, images, deadline)

    def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Runs `work` where the graphs of the calling thread are, on the session's stream."""
        if threading.get_ident() == self._owner:
            return self._on_stream(work, *arguments)
        return self._worker.submit(self._on_stream, work, *arguments).result()

    def _on_stream(self, work: Callable[..., Result], *arguments: Any) -> Result:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            return work(*arguments)

    # --- in one of the two threads -----------------------------------------------------------------------------------

    @torch.inference_mode()  # or it may not write results that the caller made in this mode
    def _run(self, image: torch.Tensor, thresholds: Mapping[str, float], results: dict[str, torch.Tensor]) -> None:
        axes = self._enter(image, thresholds)
        for segment in self._segments:
            self._step(segment, axes)
            if segment.rows:
                axes[segment.axis] = self._rows_for(segment, axes)
        for name, result in results.items():
            result.copy_(self._view(name, axes))

    @torch.inference_mode()
    def _capture_all(self, images: int, deadline: float) -> bool:
        if time.monotonic() >= deadline:
            return False
        shape = self._resolved("image", {"batch": images})
        axes = self._enter(torch.zeros(shape, dtype=self._dtypes["image"]), _MERGE_ALL)
        for segment, following in pairwise(self._segments):
            self._step(segment, axes)
            fewest, most = self._rows_for(segment, axes), self._most[segment.axis]
            for rows in [*range(fewest, most, STEP), most]:
                if time.monotonic() >= deadline:
                    return False
                axes[segment.axis] = rows
                self._step(following, axes)
            axes[segment.axis] = fewest
        self._step(self._segments[-1], axes)
        return True

    def _enter(self, image: torch.Tensor, thresholds: Mapping[str, float]) -> dict[str, int]:
        """Puts the inputs where the segments read them; returns the axes known so far."""
        axes = {"batch": len(image)}
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
        """Rows of an image for the segment behind this one: what its merge counted, and no more than a step above."""
        if self._stream is not None:
            self._stream.synchronize()
        counted = int(self._buffers[self._fitting(axes)][segment.rows])
        if segment.rows.startswith(TOGETHER):
            counted = -(-counted // axes["batch"])
        return min(-(-counted // STEP) * STEP, self._most[segment.axis])

    def _step(self, segment: _Segment, axes: Mapping[str, int]) -> None:
        key = (threading.get_ident() == self._owner, *(axes[axis] for axis in segment.axes))
        step = segment.steps.get(key)
        if step is None:
            step = segment.steps[key] = self._bound(segment, axes)
            self._use = self._use._replace(captured=self._use.captured + step.captured)
            with DEVICES.capture():
                segment.session.run_with_iobinding(step.binding, step.options)
        else:
            segment.session.run_with_iobinding(step.binding, step.options)
        kind = "replayed" if step.captured else "launched"
        self._use = self._use._replace(**{kind: getattr(self._use, kind) + 1})

    def _bound(self, segment: _Segment, axes: Mapping[str, int]) -> _Step:
        binding = segment.session.io_binding()
        device = (self.device.type, self.device.index or 0)
        tensors = self._buffers[self._fitting(axes)]
        for shapes, bind in ((segment.inputs, binding.bind_input), (segment.outputs, binding.bind_output)):
            for name, shape in shapes.items():
                dtype = numpy_dtype(tensors[name]).type
                bind(name, *device, dtype, _sizes(shape, axes), tensors[name].data_ptr())
        captured = self._stream is not None and sum(step.captured for step in segment.steps.values()) < MOST_GRAPHS
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(len(segment.steps) + 1) if captured else "-1")
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return _Step(binding, options, captured)

    def _resolved(self, name: str, axes: Mapping[str, int]) -> list[int]:
        return _sizes(self._shapes[name], axes)

    def _view(self, name: str, axes: Mapping[str, int]) -> torch.Tensor:
        shape = self._resolved(name, axes)
        return self._buffers[self._fitting(axes)][name][: math.prod(shape)].view(shape)

    def _fitting(self, axes: Mapping[str, int]) -> int:
        """Images that the buffers of a batch are made for: the next power of two, or the most there are."""
        images = axes["batch"]
        return max(images, min(1 << (images - 1).bit_length(), self._images))


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
