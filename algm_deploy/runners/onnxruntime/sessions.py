"""Sessions of ONNX Runtime: one provider or an error, PyTorch tensors in and out on CUDA, CUDA graphs."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from onnxruntime.capi import onnxruntime_pybind11_state

from algm_deploy.bundle.signature import Signature
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.runners.contract import Array, Placement
from algm_deploy.runners.graphs import give_back, take_stream
from algm_deploy.runners.turns import alone, between_captures, wait_for

LIBRARY = "ort_custom_op"

# Its errors share no base class.
ORT_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in vars(onnxruntime_pybind11_state).values() if isinstance(kind, type) and issubclass(kind, Exception)
)


def checked_session(
    path: Path, options: ort.SessionOptions, provider: str, provider_options: dict[str, str]
) -> ort.InferenceSession:
    """A session on this provider.

    Raises:
        BundleError: ONNX Runtime cannot load the graph.
        RuntimeUnavailableError: it fell back to another provider.
    """
    if provider == CUDA_PROVIDER and hasattr(ort, "preload_dlls"):  # since 1.21
        # Finds the CUDA libraries that came with PyTorch.
        ort.preload_dlls()
    try:
        # One on CUDA waits for the whole device.
        with between_captures() if provider == CUDA_PROVIDER else nullcontext():
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
        if provider == CUDA_PROVIDER:
            wait_for()  # see `CudaSession.close`
    ran = [e["args"] for e in events if e.get("cat") == "Node" and "provider" in e.get("args", {})]
    nodes = Counter(args["provider"] for args in ran)
    return Placement(dict(nodes), sum(args["op_name"].startswith("Memcpy") for args in ran))


# --- CUDA ------------------------------------------------------------------------------------------------------------

CUDA_PROVIDER = "CUDAExecutionProvider"
CUDA_OPTIONS = {
    # Products of fp32 numbers, such as similarities, need all their bits.
    "use_tf32": "0",
    # The other mode keeps sums over a row in 16 bits.
    "enable_skip_layer_norm_strict_mode": "1",
    # The exhaustive search repeats itself for every new batch size, for the one convolution there is.
    "cudnn_conv_algo_search": "HEURISTIC",
    # Flash (1), memory-efficient (2) and plain (16) attention. ONNX Runtime's own choice on Hopper, cuDNN, makes a plan
    # for every token count it has not met, and merging gives nearly every photo a count of its own.
    "sdpa_kernel": "19",
}
# For a graph without products of fp32 numbers. The usual option keeps convolutions in 16 bits off tensor cores too.
# Where cuDNN has others, they are slow: 1.9 ms for one layer of a single SETR-PUP picture. Where it has none, ONNX
# Runtime prints an error of cudnn_frontend and plans once more, without the option.
TENSOR_CORES = {"use_tf32": "1"}
# The same and cuDNN's (8), which goes before the others wherever it can. By name: without the option ONNX Runtime takes
# cuDNN's by itself only since a late release, and only on Hopper and later.
CUDNN_ATTENTION = {"sdpa_kernel": "27"}


def device_options(index: int) -> dict[str, str]:
    """Provider options for a CUDA device. None for the first, as ONNX Runtime 1.26 and later warn of any `device_id`:
    they look for a plugin of that device before they take the provider they have."""
    return {"device_id": str(index)} if index else {}


def check_cuda() -> None:
    """Raises RuntimeUnavailableError unless ONNX Runtime has the CUDA provider and a device is there."""
    if CUDA_PROVIDER not in ort.get_available_providers():
        raise RuntimeUnavailableError(
            f"the installed package onnxruntime {ort.__version__} has no CUDA provider: uninstall it, then "
            "`pip install onnxruntime-gpu`"
        )
    if not torch.cuda.is_available():
        raise RuntimeUnavailableError("expected a CUDA device for onnxruntime-cuda, PyTorch finds none")


def check_cudnn_attention(device: torch.device) -> None:
    """Raises RuntimeUnavailableError unless cuDNN has an attention here that ONNX Runtime takes."""
    version: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    capability = torch.cuda.get_device_capability(device)
    if version < 90300 or capability < (8, 0):
        raise RuntimeUnavailableError(
            "expected cuDNN 9.3 and a GPU of compute capability 8.0, or later ones, for cuDNN's attention, got cuDNN "
            f"{version} and {'.'.join(map(str, capability))}"
        )


def numpy_dtype(tensor: torch.Tensor) -> np.dtype[Any]:
    """NumPy's dtype of the same name."""
    return np.dtype(str(tensor.dtype).removeprefix("torch."))


@contextmanager
def in_turn(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on `stream` inside the block stands between the past and the future work of the caller's current stream."""
    if stream is None:
        yield
        return
    caller = torch.cuda.current_stream(stream.device)
    stream.wait_stream(caller)
    try:
        yield
    finally:  # behind an error too, or the caller may give memory away that is still written
        caller.wait_stream(stream)


class CudaSession:
    """A graph on a CUDA device, on a stream of its own, with PyTorch tensors in and out by address.

    Args:
        path: graph whose outputs all have the static shapes of `signature`, batch apart.
        options: session options.
        signature: names, dtypes and shapes of the outputs.
        provider_options: of the CUDA provider, instead of those of `CUDA_OPTIONS`.
        device: the current one if not given; with its index.

    Raises:
        RuntimeUnavailableError: ONNX Runtime could not use the device.
    """

    def __init__(
        self,
        path: Path,
        options: ort.SessionOptions,
        signature: Signature,
        provider_options: Mapping[str, str] = {},
        device: torch.device | None = None,
    ) -> None:
        check_cuda()
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self._outputs = {t.name: t for t in signature.outputs}
        self._stream = take_stream(self.device)
        self._thresholds: dict[str, tuple[float, torch.Tensor]] = {}  # the last one of each name, in memory that stays
        chosen = device_options(self.device.index) | {"user_compute_stream": str(self._stream.cuda_stream)}
        self._session: ort.InferenceSession | None = checked_session(
            path, options, CUDA_PROVIDER, {**CUDA_OPTIONS, **provider_options, **chosen}
        )
        self._inputs = {i.name for i in self._session.get_inputs()}
        self._run_options = ort.RunOptions()
        self._run_options.only_execute_path_to_fetches = True
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def close(self) -> None:
        """Ends the session, after its work.

        What it has queued ends with a callback that frees host memory. Where the session is gone by then, that frees
        the whole arena, which CUDA does not permit inside a callback, and ONNX Runtime aborts the process.
        """
        try:
            self._stream.synchronize()
        finally:
            with between_captures():
                self._session = None
            give_back(self._stream)

    def run(
        self,
        image: torch.Tensor,
        thresholds: Mapping[str, float],
        outputs: Sequence[str],
        to: torch.device | None = None,
    ) -> dict[str, torch.Tensor]:
        """One run between the past and the future work of the caller's current stream; the host may return before it.

        Args:
            image: (b, 3, H, W), on the device or the host.
            thresholds: those that the graph does not have are left out.
            outputs: names.
            to: device of the results, if not this one.
        """
        with alone(self.device):
            results = self._run(image, thresholds, outputs)
            return {name: tensor.to(to or self.device) for name, tensor in results.items()}

    def _run(
        self, image: torch.Tensor, thresholds: Mapping[str, float], outputs: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        tensors = {
            "image": image.to(self.device).contiguous(),
            **{n: self._scalar(n, v) for n, v in thresholds.items()},
        }
        results = {name: self._empty(name, len(image)) for name in outputs}
        written = {name: tensor for name, tensor in results.items() if tensor.numel()}  # counts of no merge are empty
        assert self._session is not None
        binding = self._session.io_binding()
        for bind, bound in (
            (binding.bind_input, {name: tensors[name] for name in self._inputs & set(tensors)}),
            (binding.bind_output, written),
        ):
            for name, tensor in bound.items():
                place = "cuda", self.device.index, numpy_dtype(tensor).type
                bind(name, *place, tuple(tensor.shape), tensor.data_ptr())
        with in_turn(self._stream):
            if written:
                self._session.run_with_iobinding(binding, self._run_options)
        return results

    def _empty(self, name: str, images: int) -> torch.Tensor:
        output = self._outputs[name]
        return torch.empty(images, *output.shape[1:], dtype=getattr(torch, output.dtype), device=self.device)

    def _scalar(self, name: str, value: float) -> torch.Tensor:
        last, scalar = self._thresholds.get(name, (None, None))
        if scalar is None or last != value:
            with torch.cuda.stream(self._stream):  # runs there may still read the last one
                scalar = torch.empty((), device=self.device) if scalar is None else scalar
                scalar.fill_(value)
            self._thresholds[name] = value, scalar
        return scalar
