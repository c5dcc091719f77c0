"""A network whose shapes no picture changes, as one CUDA graph for each batch size.

It is the modules as they are; without the graph the host would launch each of their many small kernels.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from algm_deploy.models.deployed import Deployed
from algm_deploy.models.vit import MergeInputs
from algm_deploy.runners.graphs import Graphs

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
        # By pictures that fit: batches up to a power of two share them, or all sizes would add up.
        self._images: dict[int, Tensor] = {}
        self._results: dict[int, list[Tensor]] = {}
        self._turn = threading.Lock()

    def run(self, image: Tensor) -> list[Tensor]:
        """Labels or scores, token counts and token maps of images (B, 3, H, W), in memory of their own."""
        count, fitting = len(image), _fitting(len(image))
        with self._turn:
            if fitting not in self._images:
                self._images[fitting] = image.new_empty(fitting, *image.shape[1:], device=self._device)
            self._images[fitting][:count].copy_(image)
            self.graphs.run((count,), lambda: self._compute(count, fitting))
            return [one[:count].clone() for one in self._results[fitting]]

    def _compute(self, count: int, fitting: int) -> None:
        """Results into memory that stays where it is, as a graph needs it."""
        tail, counts, maps = self._network(self._images[fitting][:count], self._inputs)
        made = [tail, counts, *maps]
        if fitting not in self._results:
            self._results[fitting] = [one.new_empty(fitting, *one.shape[1:]) for one in made]
        for target, one in zip(self._results[fitting], made, strict=True):
            target[:count].copy_(one)


def _fitting(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
