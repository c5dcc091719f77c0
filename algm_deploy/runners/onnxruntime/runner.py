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
from torch import Tensor

from algm_deploy.bundle.files import ONNX
from algm_deploy.bundle.records import OptimizedGraph
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import thread_limit
from algm_deploy.errors import BundleError
from algm_deploy.lowering.onnxruntime import (
    CUSTOM_OPERATORS,
    Provider,
    write_onnxruntime_onnx,
)
from algm_deploy.native_libraries import (
    find_library,
    missing_here,
    require_library,
    say_once,
    slower_without,
    usable_library,
)
from algm_deploy.recipe.schema import Recipe
from algm_deploy.runners.contract import Array, Placement, Runner
from algm_deploy.runners.onnxruntime.graphs import SegmentedSession
from algm_deploy.runners.onnxruntime.sessions import (
    CUDA_OPTIONS,
    CUDA_PROVIDER,
    CUDNN_ATTENTION,
    LIBRARY,
    ORT_ERRORS,
    TENSOR_CORES,
    CudaSession,
    check_cuda,
    check_cudnn_attention,
    checked_session,
    device_options,
    placement,
)
from algm_deploy.runners.turns import alone

GRAPH_CHANNELS = 32768  # images times channels up to which graphs are used in 16 bits: 32 of L
GRAPH_IMAGES = 32  # and images, of any width
GRAPH_CHANNELS_FP32 = 2048  # whose products keep the device busy for longer


def largest_batch_in_graphs(recipe: Recipe) -> int:
    """Up to how many images CUDA graphs are used for. With more, or wider, images the device is busy for longer than
    the host takes to launch. Where the plan says how many tokens are left one graph serves, and all batches are
    replayed, but for those of full-size scores, which would lie in memory twice.
    """
    if recipe.merging.static and recipe.output == "labels":
        return recipe.max_batch
    most = GRAPH_CHANNELS if recipe.precision in ("fp16", "fp8") else GRAPH_CHANNELS_FP32
    return min(most // recipe.network.embed_dim, GRAPH_IMAGES, recipe.max_batch)


class OnnxRuntimeRunner(Runner):
    """What both providers share."""

    failures = (MemoryError, *ORT_ERRORS)
    target: ClassVar[Provider]
    provider: ClassVar[str]

    @classmethod
    def build(cls, bundle: Bundle, **options: Any) -> list[str]:
        """Adds the provider's graph, with custom operators where their library has been built."""
        row, gpu = cls.row(), cls.target == "cuda"
        row.check_precision(bundle.recipe.precision, bundle.calibrated)
        custom = (usable_library(LIBRARY) if gpu else find_library(LIBRARY)) is not None
        row.check_options(options)
        written = write_onnxruntime_onnx(
            bundle, cls.target, custom, row.own, row.segments, own_attention=not bundle.cudnn_attends
        )
        bundle.record(OptimizedGraph(runtime=cls.runtime, **written._asdict()))
        rewrites = ", ".join(f"{count} {name}" for name, count in sorted(written.rewrites.items()))
        lines = [f"{row.own}: {rewrites}"]
        if cls._gains(bundle) and not custom:
            lines.append(f"{slower_without(LIBRARY, gpu)}, then build again")
        return lines

    @classmethod
    def _gains(cls, bundle: Bundle) -> bool:
        """Whether the bundle's network has steps that custom operators do faster."""
        recipe = bundle.recipe
        absent = {"label_map", "mask_labels"} if recipe.output == "scores" else set()
        if not recipe.network.architecture.adapter:
            absent.add("deformable_attention")
        return bool(CUSTOM_OPERATORS[cls.target] - absent)

    @property
    def custom_operators(self) -> tuple[str, ...]:
        """Custom operators in the graph that runs, by name."""
        return tuple(sorted(CUSTOM_OPERATORS[self.target] & set(self._built.rewrites))) if self._built else ()

    @property
    def _built(self) -> OptimizedGraph | None:
        """How the graph that runs was built, None for the portable one."""
        return None if self.executable == ONNX else self.bundle.found(OptimizedGraph, self.runtime)

    @property
    def execution(self) -> dict[str, str]:
        """That a bundle in bf16, whose graphs are fp32, is computed in fp32: with its weights, at fp32's speed."""
        return {"arithmetic": "fp32"} if self.bundle.recipe.precision == "bf16" else {}

    def placement(self, feeds: Mapping[str, Array]) -> Placement:
        """Runs once more, in a session of its own that records which provider executes each node."""
        _, thresholds = self._checked(feeds, None)
        self.check_image(image := np.asarray(feeds["image"]))
        path, options = self.bundle.file(self.executable), self._session_options()
        return placement(path, options, self.provider, self._provider_options(), _arrays(image, thresholds))

    def _session_options(self) -> ort.SessionOptions:
        if self._built and not self.custom_operators and self._gains(self.bundle):
            then = "then build the bundle again"
            if not missing_here(LIBRARY, self.runtime, then, self.target == "cuda"):
                say_once(f"{self.executable} was built without the library {LIBRARY}: built again, it is faster")
        options = ort.SessionOptions()
        options.log_severity_level = 4  # it warns about shapes that merging makes unavoidable; its errors are raised
        if self.custom_operators:
            options.register_custom_ops_library(str(require_library(LIBRARY)))
        if self.bundle.recipe.precision == "int8":
            # Where shapes are fixed, it makes a Gemm of a product and its bias before products in int8 are looked for,
            # and a Gemm is computed in fp32.
            options.add_session_config_entry("optimization.disable_specified_optimizers", "MatMulAddFusion")
        return options

    def _provider_options(self) -> dict[str, str]:
        return {}

    def _open_session(self, file: str, options: Mapping[str, str] = {}) -> ort.InferenceSession:
        chosen = {**self._provider_options(), **options}
        return checked_session(self.bundle.file(file), self._session_options(), self.provider, chosen)


class OnnxRuntimeCpuRunner(OnnxRuntimeRunner):
    """ONNX Runtime on the CPU provider. A graph for single images runs once for each image of a batch.

    `threads`: how many compute a network, the caller's among them; by default those of OMP_NUM_THREADS, else as many as
    there are cores that the process may use.
    """

    runtime = "onnxruntime-cpu"
    target = "cpu"
    provider = "CPUExecutionProvider"
    _session: ort.InferenceSession | None = None

    def __init__(self, bundle: Bundle, device: str | None = None, threads: int | None = None) -> None:
        super().__init__(bundle, device)
        self._threads = threads or thread_limit()

    def _session_options(self) -> ort.SessionOptions:
        options = super()._session_options()
        options.intra_op_num_threads = self._threads or 0
        return options

    def _open(self) -> None:
        self._session = self._open_session(self.executable)

    def _infer(
        self, image: Tensor, thresholds: dict[str, float], outputs: Sequence[str], to: torch.device
    ) -> dict[str, Tensor]:
        assert self._session is not None
        options = ort.RunOptions()
        options.only_execute_path_to_fetches = True
        feeds = _arrays(image.numpy(), thresholds)
        step = 1 if self._session.get_inputs()[0].shape[0] == 1 else len(image)
        parts = [
            self._session.run(list(outputs), {**feeds, "image": feeds["image"][i : i + step]}, options)
            for i in range(0, len(image), step)
        ]
        joined = parts[0] if len(parts) == 1 else [np.concatenate(part) for part in zip(*parts, strict=True)]
        return {name: torch.from_numpy(value) for name, value in zip(outputs, joined, strict=True)}

    def _close(self) -> None:
        self._session = None


class OnnxRuntimeCudaRunner(OnnxRuntimeRunner):
    """ONNX Runtime on a CUDA device, or an error: never on the CPU instead.

    Batches up to `graph_images` are replayed from CUDA graphs. Others are launched kernel by kernel, from weights of
    their own that are loaded when the first of them comes.
    """

    runtime = "onnxruntime-cuda"
    failures = (*OnnxRuntimeRunner.failures, RuntimeError)  # what a run with bound memory raises
    target = "cuda"
    provider = CUDA_PROVIDER

    @classmethod
    def require_builder(cls) -> None:
        """What runs the graph; building it needs less, but `deploy` verifies it at once."""
        check_cuda()

    def __init__(self, bundle: Bundle, device: str | None = None) -> None:
        super().__init__(bundle, device)
        check_cuda()
        self._whole: CudaSession | None = None
        self._segmented: SegmentedSession | None = None

    @property
    def segments(self) -> int:
        """Into how many segments the bundle's network is cut for CUDA graphs; 0 where graphs cannot be used.

        ONNX Runtime before 1.31 freed host memory that a captured graph still reads (microsoft/onnxruntime#32121).
        """
        recent = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 31)
        return self._built.segments if recent and self._built else 0

    @cached_property
    def graph_images(self) -> int:
        """Largest batch for which CUDA graphs are used, 0 where they cannot be."""
        return largest_batch_in_graphs(self.bundle.recipe) if self.segments else 0

    @property
    def execution(self) -> dict[str, str]:
        """How many CUDA graphs there are, where batches are small enough for them, and which batches are one graph; or
        that every operator is launched, where the network is not there in segments."""
        told = super().execution
        if self._whole is not None and self._segmented is None:
            told["launched"] = "operator by operator"
        if self._segmented is not None and self._segmented.graphs is not None:
            told["cuda_graphs"] = str(len(self._segmented.graphs))
            if (only := self._segmented.only) is not None:
                told["launched"] = f"batches of other sizes than {only}, as plans of convolutions are for one"
            if joined := self._segmented.joined:
                told[f"batches of {', '.join(map(str, joined))}"] = "one graph, no wait for a count"
        return told

    @property
    def captures(self) -> int:
        """As for every runner."""
        graphs = None if self._segmented is None else self._segmented.graphs
        return 0 if graphs is None else graphs.captures

    def _warm_up(self, images: int, deadline: float) -> bool:
        """Captures the CUDA graphs of every token count, and joins them into one.

        Without it each is captured when first needed, which costs that photo 5 to 10 ms, and the host waits behind
        every merge. Nothing is done where graphs are not used, or no room is left for them: begin with the batch that
        matters most, which is also the only one in graphs where the network convolves.
        """
        session = self._session_for(images)
        return not isinstance(session, SegmentedSession) or session.warm_up(images, deadline)

    def placement(self, feeds: Mapping[str, Array]) -> Placement:
        """As on a CPU, on the runner's device."""
        with alone(self.device):
            return super().placement(feeds)

    def _provider_options(self) -> dict[str, str]:
        return CUDA_OPTIONS | self._chosen | device_options(self.device.index)

    @property
    def _chosen(self) -> dict[str, str]:
        """What the provider is told for this graph instead of the usual."""
        attention = CUDNN_ATTENTION if self.bundle.cudnn_attends else {}
        return attention | (TENSOR_CORES if self._built and self._built.multiplies_fp32 is False else {})

    def _check_attention(self) -> None:
        """A network that is there for cuDNN's attention runs with it or not at all."""
        if not self.bundle.cudnn_attends:
            return
        if not self._built or not self._built.rewrites.get("attention"):
            raise BundleError(
                f"expected a graph with attention that can be left to cuDNN, {self.executable} has none: run "
                f"`{self.build_command}`"
            )
        check_cudnn_attention(self.device)

    def _open(self) -> None:
        self._check_attention()
        with alone(self.device):
            if self.graph_images:
                self._segmented = self._open_segments()
            else:
                self._whole = self._open_whole()

    def _close(self) -> None:
        with alone(self.device):
            for session in (self._whole, self._segmented):
                if session is not None:
                    session.close()
            self._whole = self._segmented = None

    def _session_for(self, images: int) -> CudaSession | SegmentedSession:
        with alone(self.device):
            self._check_open()  # another thread may have closed it meanwhile
            if self._segmented is not None and self._segmented.accepts(images):
                return self._segmented
            if self._whole is None:
                self._whole = self._open_whole()
            return self._whole

    def _open_whole(self) -> CudaSession:
        path = self.bundle.file(self.executable)
        return CudaSession(path, self._session_options(), self.signature, self._chosen, self.device)

    def _open_segments(self) -> SegmentedSession:
        names = str(self.row().segments)

        def open_session(index: int, chosen: dict[str, str]) -> ort.InferenceSession:
            return self._open_session(names.replace("*", str(index)), chosen)

        return SegmentedSession(open_session, self.segments, self.device, self.graph_images)

    def _infer(
        self, image: Tensor, thresholds: dict[str, float], outputs: Sequence[str], to: torch.device
    ) -> dict[str, Tensor]:
        return self._session_for(len(image)).run(image, thresholds, outputs, to)


def _arrays(image: Array, thresholds: Mapping[str, float]) -> dict[str, Array]:
    return {"image": image, **{name: np.array(value, np.float32) for name, value in thresholds.items()}}
