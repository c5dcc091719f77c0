"""The torch runtime: the bundle's weights in PyTorch's eager mode, on a CUDA device where there is one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from algm_deploy.bundle import Bundle
from algm_deploy.lowering.bundling import deployed, load_network
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.vit import MergeInputs
from algm_deploy.runners.contract import Array, Runner
from algm_deploy.signature import CLAP_THRESHOLD, GBM_THRESHOLD


class TorchRunner(Runner):
    """Runs on the first CUDA device, or on the CPU."""

    runtime = "torch"

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: Deployed | None = None

    def _open(self) -> None:
        self._model = deployed(load_network(self.bundle), self.bundle.recipe).to(self.device)

    @torch.inference_mode()
    def _infer(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        assert self._model is not None
        given = {name: torch.tensor(value, device=self.device) for name, value in feeds.items()}
        unused = torch.zeros((), device=self.device)
        inputs = MergeInputs(given.get(CLAP_THRESHOLD, unused), given.get(GBM_THRESHOLD, unused))
        tail, counts, maps = self._model(given["image"], inputs)
        named = dict(zip((t.name for t in self.signature.outputs), (tail, counts, *maps), strict=True))
        return {name: named[name].cpu().numpy() for name in outputs}

    def _close(self) -> None:
        self._model = None
