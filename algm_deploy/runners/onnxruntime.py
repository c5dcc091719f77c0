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

from algm_deploy.bundle import Bundle
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.lowering.bundling import ONNX
from algm_deploy.lowering.onnxruntime import CUSTOM_OPERATORS, Provider, graph_file, write_onnxruntime_onnx
from algm_deploy.native import REBUILD, find_library, require_library
from algm_deploy.runners.contract import Array, Runner

FACT = "onnxruntime"  # in the manifest: rewrites of each provider's graph
LIBRARY = "ort_custom_op"


class Placement(NamedTuple):
    """Where the nodes of a run were executed: nodes by provider, and copies between host and device among them."""

    nodes: dict[str, int]
    copies: int


class OnnxRuntimeRunner(Runner):
    """What both providers share."""

    provider: ClassVar[Provider]
    provider_name: ClassVar[str]

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self._session: ort.InferenceSession | None = None

    @classmethod
    def build(cls, bundle: Bundle, **options: Any) -> list[str]:
        """Adds the provider's graph, with custom operators where their library has been built."""
        custom = find_library(LIBRARY) is not None
        counts = write_onnxruntime_onnx(bundle, cls.provider, custom)
        bundle.update({FACT: {**bundle.manifest.get(FACT, {}), cls.provider: dict(counts)}})
        rewrites = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        lines = [f"{graph_file(cls.provider)}: {rewrites}"]
        if not custom:
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
        return tuple(sorted(CUSTOM_OPERATORS & set(self.bundle.fact(FACT)[self.provider])))

    def placement(self, feeds: Mapping[str, Array]) -> Placement:
        """Runs once more, in a session of its own that records which provider executes each node."""
        with tempfile.TemporaryDirectory() as folder:
            options = self._session_options()
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "profile")
            session = self._checked_session(options)
            session.run(None, self._first_image(self._checked(feeds), session))
            events = json.loads(Path(session.end_profiling()).read_text())
        ran = [e["args"] for e in events if e.get("cat") == "Node" and "provider" in e.get("args", {})]
        nodes = Counter(args["provider"] for args in ran)
        return Placement(dict(nodes), sum(args["op_name"].startswith("Memcpy") for args in ran))

    @staticmethod
    def _first_image(feeds: dict[str, Array], session: ort.InferenceSession) -> dict[str, Array]:
        single = session.get_inputs()[0].shape[0] == 1
        return {**feeds, "image": feeds["image"][:1]} if single else feeds

    def _session_options(self) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # warnings about symbolic shapes that merging makes unavoidable
        if self.custom_operators:
            options.register_custom_ops_library(str(require_library(LIBRARY)))
        return options

    def _provider_options(self) -> dict[str, str]:
        return {}

    def _checked_session(self, options: ort.SessionOptions) -> ort.InferenceSession:
        providers = [(self.provider_name, self._provider_options())]
        session = ort.InferenceSession(self.bundle.file(self.graph), options, providers=providers)
        active = session.get_providers()
        if active[0] != self.provider_name:
            raise RuntimeUnavailableError(
                f"asked ONNX Runtime for {self.provider_name}, got {', '.join(active)}: its libraries could not be "
                "loaded (run `python -c 'import onnxruntime; onnxruntime.print_debug_info()'` to see which)"
            )
        return session

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
    """ONNX Runtime on the CUDA provider of the current device, or an error: never on the CPU instead.

    `infer_device` takes and returns tensors in device memory without a copy.
    """

    runtime = "onnxruntime-cuda"
    provider = "cuda"
    provider_name = "CUDAExecutionProvider"

    def __init__(self, bundle: Bundle) -> None:
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            raise RuntimeUnavailableError(
                f"the installed package onnxruntime {ort.__version__} has no CUDA provider: uninstall it, then "
                "`pip install onnxruntime-gpu`"
            )
        if not torch.cuda.is_available():
            raise RuntimeUnavailableError("expected a CUDA device for onnxruntime-cuda, PyTorch finds none")
        super().__init__(bundle)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._lock = threading.Lock()  # one stream, one run at a time
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._scalars: dict[float, torch.Tensor] = {}

    def _provider_options(self) -> dict[str, str]:
        return {
            "device_id": str(self.device.index),
            "user_compute_stream": str(self._stream.cuda_stream),
            "use_tf32": "0",
            # The other mode keeps sums over a row in 16 bits.
            "enable_skip_layer_norm_strict_mode": "1",
            # The exhaustive search repeats itself for every new batch size, for the one convolution there is.
            "cudnn_conv_algo_search": "HEURISTIC",
        }

    def _open(self) -> None:
        if hasattr(ort, "preload_dlls"):  # since 1.21: finds the CUDA libraries that came with PyTorch
            ort.preload_dlls()
        super()._open()

    def infer_device(
        self, feeds: Mapping[str, torch.Tensor | float], outputs: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """`infer` in device memory, ordered after and before other work of the caller's current stream.

        Args:
            feeds: `image` on this runner's device, in the signature's dtype (any float type where that is float32), not
                necessarily contiguous; thresholds as numbers.
            outputs: as for `infer`.

        Raises:
            BundleError: as for `infer`, and for an image that is somewhere else.
        """
        image = feeds["image"]
        if not isinstance(image, torch.Tensor) or image.device != self.device:
            raise BundleError(f"expected an image in the memory of {self.device}: use infer for arrays on the host")
        if image.is_floating_point() and self.signature.image.dtype == "float32":
            image = image.float()
        wanted = tuple(outputs) if outputs is not None else tuple(t.name for t in self.signature.outputs[:2])
        self._check_outputs(wanted)
        # Shape and dtype are checked on a host array without memory behind its elements.
        probe = np.broadcast_to(np.zeros((), str(image.dtype).removeprefix("torch.")), tuple(image.shape))
        self._check_image(probe)
        numbers = {n: float(self._threshold(n, feeds.get(n, d))) for n, d in self.signature.defaults.items()}
        return self._run(image.contiguous(), numbers, wanted)

    def _run(self, image: torch.Tensor, numbers: dict[str, float], outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        assert self._session is not None
        caller = torch.cuda.current_stream(self.device)
        shapes = {t.name: (len(image), *t.shape[1:]) for t in self.signature.outputs}
        dtypes = {t.name: t.dtype for t in self.signature.outputs}
        results = {n: torch.empty(shapes[n], dtype=getattr(torch, dtypes[n]), device=self.device) for n in outputs}
        binding = self._session.io_binding()
        index = self.device.index
        used = {i.name for i in self._session.get_inputs()}
        for name, tensor in {"image": image, **{n: self._scalar(v) for n, v in numbers.items()}}.items():
            if name in used:
                dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
                binding.bind_input(name, "cuda", index, dtype, tuple(tensor.shape), tensor.data_ptr())
        for name, tensor in results.items():
            binding.bind_output(name, "cuda", index, np.dtype(dtypes[name]), shapes[name], tensor.data_ptr())
        options = ort.RunOptions()
        options.only_execute_path_to_fetches = True
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        with self._lock:
            self._stream.wait_stream(caller)
            self._session.run_with_iobinding(binding, options)
            caller.wait_stream(self._stream)
        return results

    def _scalar(self, value: float) -> torch.Tensor:
        if value not in self._scalars:
            self._scalars[value] = torch.tensor(value, dtype=torch.float32, device=self.device)
        return self._scalars[value]

    def _infer(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        image = torch.from_numpy(feeds["image"]).to(self.device)
        results = self._run(image, {n: float(v) for n, v in feeds.items() if n != "image"}, outputs)
        return {name: tensor.cpu().numpy() for name, tensor in results.items()}
