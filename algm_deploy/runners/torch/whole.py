"""A network whose shapes no picture changes, as one CUDA graph for each batch size.

It is the modules as they are; without the graph the host would launch each of their many small kernels.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from algm_deploy.models.deployed import Deployed
from algm_deploy.models.vit import MergeInputs
from algm_deploy.runners.torch.graphs import Graphs

LIMIT = 16  # batch sizes


class WholeNetwork:
    """Runs a network on a CUDA device; calls of several threads wait for each other.

    Args:
        network: in evaluation mode on `device`; no merge of it waits for a threshold.
    """

    def __init__(self, network: Deployed, inputs: MergeInputs, device: torch.device) -> None:
        self._network, self._inputs = network, inputs
        self.graphs = Graphs(device, LIMIT)
        self._device = device
        self._images: dict[int, Tensor] = {}
        self._results: dict[int, list[Tensor]] = {}
        self._turn = threading.Lock()

    def run(self, image: Tensor) -> list[Tensor]:
        """Labels or scores, token counts and token maps of images (B, 3, H, W), in memory of their own."""
        count = len(image)
        with self._turn:
            if count not in self._images:
                self._images[count] = torch.empty_like(image, device=self._device)
            self._images[count].copy_(image)
            self.graphs.run((count,), lambda: self._compute(count))
            return [one.clone() for one in self._results[count]]

    def _compute(self, count: int) -> None:
        """Results into memory that stays where it is, as a graph needs it."""
        tail, counts, maps = self._network(self._images[count], self._inputs)
        made = [tail, counts, *maps]
        kept = self._results.setdefault(count, [torch.empty_like(one) for one in made])
        for target, one in zip(kept, made, strict=True):
            target.copy_(one)
