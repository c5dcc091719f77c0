"""The torch runtime: the bundle's weights in PyTorch's eager mode, on a CUDA device where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from algm_deploy.bundle import Bundle
from algm_deploy.errors import RuntimeUnavailableError
from algm_deploy.lowering.bundling import deployed, load_network
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.vit import MergeInputs
from algm_deploy.runners.contract import Array, Runner
from algm_deploy.signature import CLAP_THRESHOLD, GBM_THRESHOLD

_THRESHOLDS = (CLAP_THRESHOLD, GBM_THRESHOLD)


class TorchRunner(Runner):
    """Runs on the first CUDA device, or on the CPU; in the bundle's precision, or in `dtype`."""

    runtime = "torch"

    def __init__(self, bundle: Bundle, dtype: torch.dtype | None = None) -> None:
        super().__init__(bundle)
        self._dtype = dtype
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: Deployed | None = None

    def _open(self) -> None:
        self._model = self._network().to(self.device)

    def _network(self) -> Deployed:
        return deployed(load_network(self.bundle, self._dtype), self.bundle.recipe)

    def _infer(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        given = {name: torch.tensor(value, device=self.device) for name, value in feeds.items()}
        return {name: tensor.cpu().numpy() for name, tensor in self.infer_device(given, outputs).items()}

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
        given = {name: feeds.get(name, self.signature.defaults.get(name, 0.0)) for name in _THRESHOLDS}
        clap, gbm = (torch.as_tensor(given[n], dtype=torch.float32, device=self.device) for n in _THRESHOLDS)
        tail, counts, maps = self._model(feeds["image"], MergeInputs(clap, gbm))
        named_maps = maps[: len(self.signature.merges)]  # a network that drops tokens has maps that nobody names
        named = dict(zip((t.name for t in self.signature.outputs), (tail, counts, *named_maps), strict=True))
        return {name: named[name] for name in outputs or list(named)[:2]}

    def _close(self) -> None:
        self._model = None
