"""The ONNX Runtime runners.

Both run the provider's own graph where `build` has added it to the bundle, else the portable one. Outputs nobody asked
for are not computed, so token maps cost nothing until they are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
import torch

from algm_deploy.bundle.records import OptimizedGraph
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.lowering.onnxruntime import (
    CUSTOM_OPERATORS,
    Provider,
    graph_file,
    stretch_file,
    write_onnxruntime_onnx,
)
from algm_deploy.lowering.writing import ONNX
from algm_deploy.native_libraries import REBUILD, find_library, require_library
from algm_deploy.runners.contract import Array, Runner
from algm_deploy.runners.onnxruntime.graphs import GraphUse, StretchedSession
from algm_deploy.runners.onnxruntime.sessions import (
    CUDA_OPTIONS,
    CUDA_PROVIDER,
    DEVICE,
    ORT_ERRORS,
    CudaSession,
    Placement,
    check_cuda,
    checked_session,
    device_options,
    numpy_dtype,
    placement,
)

LIBRARY = "ort_custom_op"
GRAPH_BYTES = 8192  # images times bytes of a token up to which CUDA graphs gain: in 16 bits 10 images of S, 4 of L


class OnnxRuntimeRunner(Runner):
    """What both providers share."""

    failures = (MemoryError, *ORT_ERRORS)
    provider: ClassVar[Provider]
    provider_name: ClassVar[str]

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self._session: ort.InferenceSession | None = None

    @classmethod
    def build(cls, bundle: Bundle, **options: Any) -> list[str]:
        """Adds the provider's graph, with custom operators where their library has been built."""
        cls._refuse(options)
        custom = find_library(LIBRARY) is not None
        counts, segments = write_onnxruntime_onnx(bundle, cls.provider, custom)
        bundle.record(OptimizedGraph(runtime=cls.runtime, rewrites=dict(counts), segments=segments))
        rewrites = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        lines = [f"{graph_file(cls.provider)}: {rewrites}"]
        wanted = CUSTOM_OPERATORS[cls.provider] - ({"label_map"} if bundle.recipe.output == "scores" else set())
        if wanted and not custom:
            steps = ", ".join(sorted(wanted))
            lines.append(f"{steps} in standard operators: `{REBUILD} {LIBRARY}`, then build again, makes it faster")
        return lines

    @property
    def graph(self) -> str:
        """The bundle's file that runs."""
        own = graph_file(self.provider)
        return own if own in self.bundle.files else ONNX

    @property
    def custom_operators(self) -> tuple[str, ...]:
        """Custom operators in that graph, by name."""
        if self.graph == ONNX:
            return ()
        return tuple(sorted(CUSTOM_OPERATORS[self.provider] & set(self._built.rewrites))) if self._built else ()

    @property
    def _built(self) -> OptimizedGraph | None:
        return self.bundle.found(OptimizedGraph, self.runtime)

    def placement(self, feeds: Mapping[str, Array]) -> Placement:
        """Runs once more, in a session of its own that records which provider executes each node."""
        path = self.bundle.file(self.graph)
        providers = self.provider_name, self._provider_options()
        return placement(path, self._session_options(), *providers, self._checked(feeds))

    def _session_options(self) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.log_severity_level = 4  # it warns about shapes that merging makes unavoidable; its errors are raised
        if self.custom_operators:
            options.register_custom_ops_library(str(require_library(LIBRARY)))
        return options

    def _provider_options(self) -> dict[str, str]:
        return {}

    def _checked_session(self, options: ort.SessionOptions) -> ort.InferenceSession:
        path = self.bundle.file(self.graph)
        return checked_session(path, options, self.provider_name, self._provider_options())

    def _open(self) -> None:
        self._session = self._checked_session(self._session_options())

    def _close(self) -> None:
        self._session = None


class OnnxRuntimeCpuRunner(OnnxRuntimeRunner):
    """ONNX Runtime on the CPU provider. A graph for single images runs once for each image of a batch."""

    runtime = "onnxruntime-cpu"
    provider = "cpu"
    provider_name = "CPUExecutionProvider"

    def _infer(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        assert self._session is not None
        options = ort.RunOptions()
        options.only_execute_path_to_fetches = True
        image = feeds["image"]
        step = 1 if self._session.get_inputs()[0].shape[0] == 1 else len(image)
        parts = [
            self._session.run(list(outputs), {**feeds, "image": image[i : i + step]}, options)
            for i in range(0, len(image), step)
        ]
        joined = parts[0] if len(parts) == 1 else [np.concatenate(part) for part in zip(*parts, strict=True)]
        return dict(zip(outputs, joined, strict=True))


class OnnxRuntimeCudaRunner(OnnxRuntimeRunner):
    """ONNX Runtime on the CUDA device that is current when it is opened, or an error: never on the CPU instead.

    `infer_device` takes and returns tensors in device memory. Batches up to `graph_images` are replayed from CUDA
    graphs, as far as there is room: at 512 x 512 for the first three sizes of batch, of the thread that opened the
    runner and the others together. `cuda_graphs` tells. Other batches are launched kernel by kernel, from weights of
    their own that are loaded when the first of them comes.
    """

    runtime = "onnxruntime-cuda"
    failures = (*OnnxRuntimeRunner.failures, RuntimeError)  # what a run with bound memory raises
    provider = "cuda"
    provider_name = CUDA_PROVIDER

    @classmethod
    def require_builder(cls) -> None:
        """What runs the graph; building it needs less, but `deploy` verifies it at once."""
        check_cuda()

    def __init__(self, bundle: Bundle) -> None:
        check_cuda()
        super().__init__(bundle)
        self._device = torch.device("cuda", 0)
        self._whole: CudaSession | None = None
        self._stretched: StretchedSession | None = None

    @property
    def stretches(self) -> int:
        """Into how many stretches the bundle's network is cut for CUDA graphs; 0 where graphs cannot be used.

        ONNX Runtime before 1.31 freed host memory that a captured graph still reads (microsoft/onnxruntime#32121).
        """
        if self.graph == ONNX or tuple(map(int, ort.__version__.split(".")[:2])) < (1, 31):
            return 0
        return self._built.segments if self._built else 0

    @cached_property
    def graph_images(self) -> int:
        """Largest batch for which CUDA graphs are used, 0 where they cannot be. With more, or wider, images the device
        is busy for longer than the host takes to launch, and rows of padding cost more than launches.
        """
        recipe = self.bundle.recipe
        row = recipe.network.embed_dim * (4 if recipe.precision == "fp32" else 2)
        return min(GRAPH_BYTES // row, recipe.max_batch) if self.stretches else 0

    @property
    def cuda_graphs(self) -> GraphUse | None:
        """What CUDA graphs have done since the runner was opened; None while they have done nothing."""
        return self._stretched.use if self._stretched is not None else None

    @property
    def execution(self) -> dict[str, str]:
        """How many CUDA graphs were captured, where batches were small enough for them."""
        use = self.cuda_graphs
        return {} if use is None else {"cuda_graphs": str(use.captured)}

    def warm_up(self, images: int = 1) -> None:
        """Captures the CUDA graphs of every token count beforehand, for batches of this many images.

        Without it each is captured when first needed, which costs that photo 5 to 10 ms, and no other thread of the
        process may allocate device memory meanwhile. Graphs are those of the calling thread, if it opened the runner,
        else those of all other threads. Nothing is done where graphs are not used, or no room is left for them: begin
        with the batch that matters most.
        """
        self._check_open()
        session = self._session_for(images)
        if isinstance(session, StretchedSession):
            session.warm_up(images)

    def placement(self, feeds: Mapping[str, Array]) -> Placement:
        """As on a CPU, on the runner's device."""
        with DEVICE, torch.cuda.device(self._device):  # ONNX Runtime leaves its device the current one
            return super().placement(feeds)

    def _provider_options(self) -> dict[str, str]:
        return CUDA_OPTIONS | device_options(self._device.index)

    def _open(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        with DEVICE:
            if self.graph_images:
                self._stretched = self._open_stretches()
            else:
                self._whole = self._open_whole()

    def _close(self) -> None:
        if self._stretched is not None:
            self._stretched.close()
        with torch.cuda.device(self._device):  # sessions that end make theirs the current one
            self._whole = self._stretched = None

    def _check_open(self) -> None:
        if not self._opened:
            raise RuntimeUnavailableError(f"the {self.runtime} runner is closed: use it inside a `with` block")

    def _session_for(self, images: int) -> CudaSession | StretchedSession:
        with DEVICE, torch.cuda.device(self._device):
            if self._stretched is not None and images <= self.graph_images and self._stretched.claim(images):
                return self._stretched
            if self._whole is None:
                self._whole = self._open_whole()
            return self._whole

    def _open_whole(self) -> CudaSession:
        path = self.bundle.file(self.graph)
        return CudaSession(path, self._session_options(), self.signature, device=self._device)

    def _open_stretches(self) -> StretchedSession:
        def open_session(index: int, chosen: dict[str, str]) -> ort.InferenceSession:
            path = self.bundle.file(stretch_file(index))
            return checked_session(path, self._session_options(), self.provider_name, self._provider_options() | chosen)

        return StretchedSession(open_session, self.stretches, self._device, self.graph_images)

    def infer_device(
        self, feeds: Mapping[str, torch.Tensor | float], outputs: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """`infer` in device memory, ordered after and before other work of the caller's current stream.

        Args:
            feeds: `image` on the runner's device, in the signature's dtype (any float type where that is float32), not
                necessarily contiguous; thresholds as numbers.
            outputs: as for `infer`.

        Raises:
            BundleError: as for `infer`, and for an image that is somewhere else.
        """
        self._check_open()
        image = feeds.get("image")
        if not isinstance(image, torch.Tensor) or image.device != self._device:
            raise BundleError(f"expected an image in the memory of {self._device}: use infer for arrays on the host")
        if image.is_floating_point() and self.signature.image.dtype == "float32":
            image = image.float()
        # Shape and dtype are checked on a host array without memory behind its elements.
        self.check_image(np.broadcast_to(np.zeros((), numpy_dtype(image)), tuple(image.shape)))
        wanted = tuple(outputs) if outputs is not None else tuple(t.name for t in self.signature.outputs[:2])
        self._check_outputs(wanted)
        numbers = {n: float(self._threshold(n, feeds.get(n, d))) for n, d in self.signature.defaults.items()}
        return self._session_for(len(image)).run(image, numbers, wanted)

    def _infer(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        image = torch.from_numpy(feeds["image"])
        numbers = {name: float(value) for name, value in feeds.items() if name != "image"}
        results = self._session_for(len(image)).run(image, numbers, outputs, torch.device("cpu"))
        return {name: tensor.numpy() for name, tensor in results.items()}
