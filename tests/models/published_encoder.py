"""The encoder that other projects' golden values were made with, and the pictures they were made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from named_weights import weights
from torch import Tensor

from algm_deploy.models.vit import VitNetwork
from algm_deploy.recipe.network import Network

DATA = Path(__file__).parents[1] / "data"
# Two fp32 implementations of four blocks; the tokens reach 3.
TOLERANCE = 5e-6


class Encoder(VitNetwork):
    """An encoder without a decoder."""

    def __init__(self, prefix: int) -> None:
        network = Network("segmenter", 32, 4, 2, 5, (96, 96), extra_tokens=max(0, prefix - 1))
        if not prefix:  # of a network that reads several blocks
            network = replace(network, family="setr", decoder="mla", stages=(1, 2, 3, 4))
        super().__init__(network)
        self.encoder.outputs = (4,)


def published_encoder(prefix: int = 1) -> Encoder:
    """The encoder with weights made by name."""
    model = Encoder(prefix).eval().requires_grad_(False)
    shapes = {name: tuple(value.shape) for name, value in model.encoder.state_dict().items()}
    model.encoder.load_state_dict(weights(shapes))
    return model


def published_images() -> Tensor:
    """Two pictures (2, 3, 96, 96) in 0 to 1."""
    with np.load(DATA / "published" / "images.npz") as file:
        return torch.from_numpy(file["images"]).float() / 255
