"""The ONNX Runtime runners.

Both run the provider's own graph where `build` has added it to the bundle, else the portable one. Outputs nobody asked
for are not computed, so token maps cost nothing until they are wanted.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import onnxruntime as ort
import torch
from onnxruntime.capi import onnxruntime_pybind11_state

from algm_deploy.bundle import Bundle
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.lowering.bundling import ONNX
from algm_deploy.lowering.onnxruntime import CUSTOM_OPERATORS, Provider, graph_file, write_onnxruntime_onnx
from algm_deploy.native import REBUILD, find_library, require_library
from algm_deploy.runners.contract import Array, Runner
from algm_deploy.signature import Signature

FACT = "onnxruntime"  # in the manifest: rewrites of each provider's graph
LIBRARY = "ort_custom_op"


# Its errors share no base class.
ORT_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in vars(onnxruntime_pybind11_state).values() if isinstance(kind, type) and issubclass(kind, Exception)
)


class Placement(NamedTuple):
    """Where the nodes of a run were executed: nodes by provider, and copies between host and device among them."""

    nodes: dict[str, int]
    copies: int


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
        counts = write_onnxruntime_onnx(bundle, cls.provider, custom)
        bundle.record(FACT, cls.provider, counts)
        rewrites = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        lines = [f"{graph_file(cls.provider)}: {rewrites}"]
        wanted = CUSTOM_OPERATORS[cls.provider] - ({"label_map"} if bundle.recipe.output == "scores" else set())
        if wanted and not custom:
            lines.append(
                f"merging runs in standard operators: `{REBUILD} {LIBRARY}`, then build again, makes it faster"
            )
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
        return tuple(sorted(CUSTOM_OPERATORS[self.provider] & set(self.bundle.fact(FACT)[self.provider])))

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


def checked_session(
    path: Path, options: ort.SessionOptions, provider: str, provider_options: dict[str, str]
) -> ort.InferenceSession:
    """A session on this provider; RuntimeUnavailableError where ONNX Runtime fell back to another."""
    try:
        session = ort.InferenceSession(path, options, providers=[(provider, provider_options)])
    except ORT_ERRORS as error:
        said = next(iter(str(error).splitlines()), "nothing")[:300]
        raise BundleError(
            f"{path}: expected a graph that ONNX Runtime {ort.__version__} can load, it says {said!r}: export or build "
            "it again"
        ) from error
    active = session.get_providers()
    if active[0] != provider:
        raise RuntimeUnavailableError(
            f"asked ONNX Runtime for {provider}, got {', '.join(active)}: its libraries could not be loaded "
            "(`python -c 'import onnxruntime; onnxruntime.print_debug_info()'` shows which)"
        )
    return session


def placement(
    path: Path, options: ort.SessionOptions, provider: str, provider_options: dict[str, str], feeds: dict[str, Array]
) -> Placement:
    """Where the nodes of a graph run on these feeds; a graph for single images gets the first."""
    with tempfile.TemporaryDirectory() as folder:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = checked_session(path, options, provider, provider_options)
        single = session.get_inputs()[0].shape[0] == 1
        session.run(None, feeds | ({"image": feeds["image"][:1]} if single else {}))
        events = json.loads(Path(session.end_profiling()).read_text())
    ran = [e["args"] for e in events if e.get("cat") == "Node" and "provider" in e.get("args", {})]
    nodes = Counter(args["provider"] for args in ran)
    return Placement(dict(nodes), sum(args["op_name"].startswith("Memcpy") for args in ran))


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
    """ONNX Runtime on the CUDA provider of the current device, or an error: never on the CPU instead.

    `infer_device` takes and returns tensors in device memory without a copy.
    """

    runtime = "onnxruntime-cuda"
    provider = "cuda"
    provider_name = "CUDAExecutionProvider"

    def __init__(self, bundle: Bundle) -> None:
        check_cuda()
        super().__init__(bundle)
        self._device_session: CudaSession | None = None

    def _provider_options(self) -> dict[str, str]:
        return CUDA_OPTIONS | {"device_id": str(torch.cuda.current_device())}

    def _open(self) -> None:
        self._device_session = CudaSession(self.bundle.file(self.graph), self._session_options(), self.signature)

    def _close(self) -> None:
        self._device_session = None

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
        session = self._device_session
        if session is None:
            raise RuntimeUnavailableError(f"the {self.runtime} runner is closed: use it inside a `with` block")
        image = feeds.get("image")
        if not isinstance(image, torch.Tensor) or image.device != session.device:
            raise BundleError(f"expected an image in the memory of {session.device}: use infer for arrays on the host")
        if image.is_floating_point() and self.signature.image.dtype == "float32":
            image = image.float()
        # Shape and dtype are checked on a host array without memory behind its elements.
        self._check_image(np.broadcast_to(np.zeros((), numpy_dtype(image)), tuple(image.shape)))
        wanted = tuple(outputs) if outputs is not None else tuple(t.name for t in self.signature.outputs[:2])
        self._check_outputs(wanted)
        numbers = {n: float(self._threshold(n, feeds.get(n, d))) for n, d in self.signature.defaults.items()}
        return session.run(image, numbers, wanted)

    def _infer(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        assert self._device_session is not None
        image = torch.from_numpy(feeds["image"]).to(self._device_session.device)
        numbers = {name: float(value) for name, value in feeds.items() if name != "image"}
        results = self._device_session.run(image, numbers, outputs)
        return {name: tensor.cpu().numpy() for name, tensor in results.items()}


# --- CUDA ------------------------------------------------------------------------------------------------------------

CUDA_OPTIONS = {
    "use_tf32": "0",
    # The other mode keeps sums over a row in 16 bits.
    "enable_skip_layer_norm_strict_mode": "1",
    # The exhaustive search repeats itself for every new batch size, for the one convolution there is.
    "cudnn_conv_algo_search": "HEURISTIC",
    # Flash (1), memory-efficient (2) and plain (16) attention. ONNX Runtime's own choice on Hopper, cuDNN, makes a plan
    # for every token count it has not met, and merging gives nearly every photo a count of its own.
    "sdpa_kernel": "19",
}


def check_cuda() -> None:
    """Raises RuntimeUnavailableError unless ONNX Runtime has the CUDA provider and a device is there."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise RuntimeUnavailableError(
            f"the installed package onnxruntime {ort.__version__} has no CUDA provider: uninstall it, then "
            "`pip install onnxruntime-gpu`"
        )
    if not torch.cuda.is_available():
        raise RuntimeUnavailableError("expected a CUDA device for onnxruntime-cuda, PyTorch finds none")


def numpy_dtype(tensor: torch.Tensor) -> np.dtype[Any]:
    """NumPy's dtype of the same name."""
    return np.dtype(str(tensor.dtype).removeprefix("torch."))


class CudaSession:
    """A graph on the current CUDA device, on a stream of its own, with PyTorch tensors in and out by address.

    Args:
        path: graph whose outputs all have the static shapes of `signature`, batch apart.
        options: session options.
        signature: names, dtypes and shapes of the outputs.
        provider_options: of the CUDA provider, instead of those of `CUDA_OPTIONS`.

    Raises:
        RuntimeUnavailableError: ONNX Runtime could not use the device.
    """

    def __init__(
        self, path: Path, options: ort.SessionOptions, signature: Signature, provider_options: Mapping[str, str] = {}
    ) -> None:
        check_cuda()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._outputs = {t.name: t for t in signature.outputs}
        self._lock = threading.Lock()  # one stream, one run at a time
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._scalars: dict[float, torch.Tensor] = {}
        if hasattr(ort, "preload_dlls"):  # since 1.21: finds the CUDA libraries that came with PyTorch
            ort.preload_dlls()
        chosen = {"device_id": str(self.device.index), "user_compute_stream": str(self._stream.cuda_stream)}
        self._session = checked_session(
            path, options, "CUDAExecutionProvider", {**CUDA_OPTIONS, **provider_options, **chosen}
        )
        self._inputs = {i.name for i in self._session.get_inputs()}
        self._run_options = ort.RunOptions()
        self._run_options.only_execute_path_to_fetches = True
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(
        self, image: torch.Tensor, thresholds: Mapping[str, float], outputs: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """One run between the past and the future work of the caller's current stream; the host may return before it.

        Inputs that the graph does not have are left out.
        """
        tensors = {"image": image.contiguous(), **{n: self._scalar(v) for n, v in thresholds.items()}}
        binding = self._session.io_binding()
        for name in self._inputs & set(tensors):
            tensor = tensors[name]
            binding.bind_input(
                name, "cuda", self.device.index, numpy_dtype(tensor).type, tuple(tensor.shape), tensor.data_ptr()
            )
        results = {name: self._empty(name, len(image)) for name in outputs}
        for name, tensor in results.items():
            binding.bind_output(
                name, "cuda", self.device.index, numpy_dtype(tensor).type, tuple(tensor.shape), tensor.data_ptr()
            )
        caller = torch.cuda.current_stream(self.device)
        with self._lock:
            self._stream.wait_stream(caller)
            self._session.run_with_iobinding(binding, self._run_options)
            caller.wait_stream(self._stream)
        return results

    def _empty(self, name: str, images: int) -> torch.Tensor:
        output = self._outputs[name]
        return torch.empty(images, *output.shape[1:], dtype=getattr(torch, output.dtype), device=self.device)

    def _scalar(self, value: float) -> torch.Tensor:
        if value not in self._scalars:
            self._scalars[value] = torch.tensor(value, dtype=torch.float32, device=self.device)
        return self._scalars[value]
