"""The torch runtime: the bundle's weights in PyTorch, on a CUDA device where there is one.

On a CUDA device a Segmenter runs on packed rows, in CUDA graphs (`runners/torch_packed.py`); other networks run as they
are, and so does everything on a CPU. Merges and label maps are the project's own kernels where these are built.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence

import torch

from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import RuntimeUnavailableError
from algm_deploy.merging import deployed
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import load_network
from algm_deploy.models.scores import labels_of, upsample_scores
from algm_deploy.models.vit import MergeInputs
from algm_deploy.native_libraries import REBUILD
from algm_deploy.ops.native_kernels import LIBRARY, use_kernels
from algm_deploy.runners.contract import Array, Runner
from algm_deploy.runners.torch.packed import Merged, PackedSegmenter, supports

_THRESHOLDS = (CLAP_THRESHOLD, GBM_THRESHOLD)


class TorchRunner(Runner):
    """Runs on the CUDA device that is current when it is opened, or on the CPU, in the bundle's precision.

    Given a `dtype` it is the reference that runs are held to: the modules as they are, in that precision, on the CPU,
    where no kernel of this project is on both sides of a comparison.
    """

    runtime = "torch"

    def __init__(self, bundle: Bundle, dtype: torch.dtype | None = None) -> None:
        super().__init__(bundle)
        self._dtype = dtype
        self.device = torch.device("cuda" if torch.cuda.is_available() and dtype is None else "cpu")
        self._model: Deployed | None = None
        self._packed: PackedSegmenter | None = None

    @property
    def execution(self) -> dict[str, str]:
        """Packed rows or plain modules, graphs that were replayed or not, and whose merges and label map."""
        if self.device.type == "cpu":
            return {"rows": "plain modules"}
        told = {"rows": "packed" if self._packed else "plain modules"}
        if self._packed is not None and self._packed.graphs is not None:
            told["cuda_graphs"] = str(len(self._packed.graphs))
        kernels = "the kernel library" if use_kernels() else f"PyTorch's operators (faster: {REBUILD} {LIBRARY})"
        return told | {"merges and label map": kernels}

    def _open(self) -> None:
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._model = self._network().to(self.device)
        if self.device.type == "cuda":
            use_kernels()
            if supports(self._model):
                self._packed = PackedSegmenter(self._model, getattr(torch, self.signature.image.dtype))

    def _network(self) -> Deployed:
        return deployed(load_network(self.bundle, self._dtype), self.bundle.recipe)

    def _infer(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        given: dict[str, torch.Tensor | float] = {n: float(feeds[n]) for n in feeds if n != "image"}
        image = torch.from_numpy(feeds["image"])
        given["image"] = image if self._packed else image.to(self.device)
        results = {name: tensor.cpu().numpy() for name, tensor in self.infer_device(given, outputs).items()}
        if self.device.type == "cpu":
            _return_memory()
        return results

    @torch.inference_mode()
    def infer_device(
        self, feeds: Mapping[str, torch.Tensor | float], outputs: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """`infer` on tensors of the runner's device, unchecked: results stay there, and the host may return early.

        Args:
            feeds: `image` on the device, in the signature's dtype; thresholds as numbers or scalar tensors.
            outputs: as for `infer`.
        """
        if self._model is None:
            raise RuntimeUnavailableError(f"the {self.runtime} runner is closed: use it inside a `with` block")
        clap, gbm = (feeds.get(name, self.signature.defaults.get(name, 0.0)) for name in _THRESHOLDS)
        image = feeds["image"]
        assert isinstance(image, torch.Tensor)
        names = [t.name for t in self.signature.outputs]
        wanted = list(outputs or names[:2])
        if self._packed is not None:
            with self._packed.run(image, clap, gbm) as merged:
                made = self._makers(merged)
                return {name: made[names.index(name)]() for name in wanted}
        clap, gbm = (torch.as_tensor(value, dtype=torch.float32, device=self.device) for value in (clap, gbm))
        tail, counts, maps = self._model(image, MergeInputs(clap, gbm))
        # A network that drops tokens has maps that nobody names.
        found = tail, counts, *maps
        return {name: found[names.index(name)] for name in wanted}

    def _makers(self, merged: Merged) -> list[Callable[[], torch.Tensor]]:
        """What computes each output of the signature; a network that drops tokens has maps that nobody names."""
        assert self._model is not None
        network, scores = self._model.network, merged.scores
        tail = labels_of if self._model.output == "labels" else upsample_scores
        empty = scores.map.new_zeros(len(scores.map), 0)

        def counts() -> torch.Tensor:
            return torch.stack(merged.lengths, 1) - scores.prefix if merged.lengths else empty

        return [lambda: tail(scores, network.grid, network.image_size), counts, *(m.clone for m in merged.maps)]

    def _close(self) -> None:
        self._model = self._packed = None


def _return_memory() -> None:
    """Hands what is free in the heap back to the system, where the C library is glibc.

    Merging gives nearly every picture a token count of its own, so layers free blocks of ever other sizes, and glibc
    keeps them: without this a Segmenter-S grows by 1.5 MB a window.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
