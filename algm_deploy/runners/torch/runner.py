"""The torch runtime: the bundle's weights in PyTorch, on a CUDA device where there is one.

On a CUDA device networks run on packed rows, in CUDA graphs (`packed.py`). One that does not fit there runs as it is:
in one CUDA graph where no picture changes its shapes (`whole.py`), else layer by layer, and one line says why.
Everything runs as it is on a CPU. Merges and label maps are the project's own kernels where these are built.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import NotExecutedError
from algm_deploy.merging import deployed_network, merge_inputs
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.fp8 import use_fp8
from algm_deploy.models.loading import DTYPES
from algm_deploy.models.scores import upsample_scores
from algm_deploy.native_libraries import REBUILD, say_once
from algm_deploy.ops.native_kernels import LIBRARY, use_kernels
from algm_deploy.recipe.schema import Precision
from algm_deploy.runners.contract import Runner
from algm_deploy.runners.registry import FP8_SINCE
from algm_deploy.runners.torch.packed import Merged, PackedNetwork, why_not
from algm_deploy.runners.torch.tail import labels
from algm_deploy.runners.torch.whole import WholeNetwork

Made = Callable[[Bundle, torch.dtype], Deployed]


class TorchRunner(Runner):
    """Runs in the bundle's precision on a CUDA device, or on the CPU where there is none.

    fp8 needs a GPU with fp8 units; on the CPU PyTorch computes in fp32 what they would, and it does so everywhere where
    scales were measured on photos. Given a `precision` it is the reference that runs are held to: the modules as they
    are, in that precision, in PyTorch's own operators, so that no kernel of this project is on both sides of a
    comparison; on the CPU unless a device is named. `network` makes what runs of the bundle, given the dtype of its
    weights.
    """

    runtime = "torch"

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision | None = None,
        device: str | None = None,
        network: Made = deployed_network,
    ) -> None:
        super().__init__(bundle, device or (None if precision is None else "cpu"))
        self._is_reference = precision is not None
        self._precision, self._network = precision or super().precision, network
        self._model: Deployed | None = None
        self._packed: PackedNetwork | None = None
        self._whole: WholeNetwork | None = None

    @property
    def precision(self) -> Precision:
        """In what it executes the bundle."""
        return self._precision

    @property
    def execution(self) -> dict[str, str]:
        """Packed rows or plain modules, graphs that were replayed or not, and whose merges and label map."""
        if self.device.type == "cpu" or self._is_reference:
            return {"rows": "plain modules"} | self._fp8_execution
        told = {"rows": "packed" if self._packed else "plain modules"} | self._fp8_execution
        if self._packed is not None and self._packed.graphs is not None:
            told["cuda_graphs"] = str(len(self._packed.graphs))
            if self._packed.joined:
                told["a single picture"] = "one graph, no wait for a count"
        if self._whole is not None:
            told["cuda_graphs"] = str(len(self._whole.graphs))
        kernels = "the kernel library" if use_kernels() else f"PyTorch's operators (faster: {REBUILD} {LIBRARY})"
        return told | {"merges and label map": kernels}

    @property
    def captures(self) -> int:
        """As for every runner."""
        graphs = [one.graphs for one in (self._packed, self._whole) if one is not None]
        return sum(one.captures for one in graphs if one is not None)

    @property
    def _fp8_execution(self) -> dict[str, str]:
        if self.precision != "fp8":
            return {}
        return {"fp8": "on fp8 units" if self._packed else "computed in fp32"}

    def _open(self) -> None:
        measured = self.bundle.calibrated
        if self.precision == "fp8" and not measured and self.device.type == "cuda":
            self._require_fp8_units()
        self._model = self._network(self.bundle, DTYPES[self.precision]).to(self.device)
        if self.precision == "fp8" and not measured:
            use_fp8(self._model)
        if self.device.type == "cuda" and not self._is_reference:
            use_kernels()
            reason = why_not(self._model)
            if reason is not None:  # with the channels of a cell side by side maps become rows without a copy
                self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if reason is None:
                self._packed = PackedNetwork(self._model, getattr(torch, self.signature.image.dtype))
            elif self.bundle.recipe.merging.static and self.precision != "fp8":
                self._whole = WholeNetwork(self._model, merge_inputs(0.0, 0.0, device=self.device), self.device)
            else:
                slowly = ", its fp8 computed in fp32" if self.precision == "fp8" else ""
                say_once(f"torch: the network runs layer by layer{slowly}, slower than others, as {reason}")

    def _require_fp8_units(self) -> None:
        found = torch.cuda.get_device_capability(self.device)
        if found < FP8_SINCE:
            raise NotExecutedError(
                f"expected a GPU of compute capability {'.'.join(map(str, FP8_SINCE))} or newer for a bundle in fp8, "
                f"{self.device_name} has {'.'.join(map(str, found))}: use --runtime onnxruntime-cuda, which runs its "
                "weights in fp16, or export with --precision fp16"
            )

    def _warm_up(self, images: int, deadline: float) -> bool:
        with torch.inference_mode():
            if self._packed is not None:
                return self._packed.warm_up(images, deadline)
            if self._whole is None:
                return True
            if time.monotonic() >= deadline:
                return False
            image = self.signature.image
            self._whole.run(torch.zeros((images, *image.shape[1:]), dtype=getattr(torch, image.dtype)))
            return True

    def _infer(
        self, image: Tensor, thresholds: dict[str, float], outputs: Sequence[str], to: torch.device
    ) -> dict[str, Tensor]:
        with torch.inference_mode():
            return self._run(image, thresholds, outputs, to)

    def _run(
        self, image: Tensor, thresholds: dict[str, float], outputs: Sequence[str], to: torch.device
    ) -> dict[str, Tensor]:
        assert self._model is not None
        clap, gbm = (thresholds.get(name, 0.0) for name in (CLAP_THRESHOLD, GBM_THRESHOLD))
        names = [t.name for t in self.signature.outputs]
        if self._packed is not None:
            with self._packed.run(image, clap, gbm) as merged:
                made = self._makers(merged)
                found = {name: made[names.index(name)]() for name in outputs}
        elif self._whole is not None:
            results = self._whole.run(image)
            found = {name: results[names.index(name)] for name in outputs}
        else:
            tail, counts, decisions = self._model(image.to(self.device), merge_inputs(clap, gbm, device=self.device))
            # A network that drops tokens has maps that nobody names.
            found = {name: (tail, counts, *decisions)[names.index(name)] for name in outputs}
        if self.device.type == "cpu":
            _return_memory()
        return {name: tensor.to(to) for name, tensor in found.items()}

    def _makers(self, merged: Merged) -> list[Callable[[], Tensor]]:
        """What computes each output of the signature; a network that drops tokens has maps that nobody names."""
        assert self._model is not None
        network, scores = self._model.network, merged.scores
        tail = labels if self._model.output == "labels" else upsample_scores

        def counts() -> Tensor:
            if not merged.lengths:
                return torch.zeros(len(scores[0]), 0, dtype=torch.int64, device=self.device)
            return torch.stack(merged.lengths, 1) - scores.prefix

        return [lambda: tail(scores, network.grid, network.image_size), counts, *(m.clone for m in merged.maps)]

    def _close(self) -> None:
        self._model = self._packed = self._whole = None


def _return_memory() -> None:
    """Hands what is free in the heap back to the system, where the C library is glibc.

    Merging gives nearly every picture a token count of its own, so layers free blocks of ever other sizes, and glibc
    keeps them: without this a Segmenter-S grows by 1.5 MB a window.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
