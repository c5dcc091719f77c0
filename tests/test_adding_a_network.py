"""A network is added by one module, one row and one recipe: here one that the package does not know."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export, parity_windows
from algm_deploy.errors import BundleError, RecipeError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.models.checkpoints.weights import checkpoint_shapes
from algm_deploy.parity.chain import verify
from algm_deploy.recipe.families import Architecture, register, unregister
from algm_deploy.recipe.plan import DENSE
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import Recipe
from algm_deploy.report.published import Published, published_beside

MODULE = """
from torch import nn

from algm_deploy.models.multiply_adds import normalised
from algm_deploy.models.naming import Naming
from algm_deploy.models.scores import GridScores, to_grid
from algm_deploy.models.vit import VitNetwork


class Head(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.prefix, self.grid = network.prefix, network.grid
        self.score = nn.Conv2d(network.embed_dim, network.classes, 3, padding=1)

    def forward(self, levels):
        tokens = levels[-1]
        patches = to_grid(tokens.values[:, self.prefix :], tokens.map, self.prefix, self.grid)
        return self.score(patches)


class Toy(VitNetwork):
    def __init__(self, network):
        super().__init__(network)
        self.decoder = Head(network)

    def forward(self, image, inputs=None):
        levels, stages = self.encoder(image, inputs)
        return GridScores(self.decoder(levels), self.encoder.prefix, stages)

    @staticmethod
    def decoder_multiply_adds(network, levels):
        rows, columns = network.grid
        return normalised(network, levels) + 9 * rows * columns * network.embed_dim * network.classes

    @staticmethod
    def namings(network):
        names = {"encoder.": "vit.", "decoder.score.": "head.conv."}
        return (Naming(project="toy", mark="vit.", decoders=("smooth",), names=names),)
"""
ROW = Architecture(family="toy", decoder="smooth", network="toy_network:Toy", published="Toy", stages=2)
RECIPE = """\
schema = 1
[network]
family = "toy"
decoder = "smooth"
embed_dim = 16
depth = 3
heads = 2
classes = 5
image_size = [64, 64]
stages = [1, 3]
[merging]
clap_layers = [1]
gbm_layers = [2]
clap_threshold = 0.8
[protocol]
dataset = "camvid"
short_side = 64
window = 64
stride = 64
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recipe]:
    """The recipe of the new network, which is known as long as the test runs."""
    (tmp_path / "toy_network.py").write_text(MODULE)
    (tmp_path / "toy.toml").write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)
    register(ROW)
    yield recipe(str(tmp_path / "toy.toml"))
    unregister(ROW)
    sys.modules.pop("toy_network", None)


@pytest.fixture
def bundle(toy: Recipe, tmp_path: Path) -> Bundle:
    torch.manual_seed(0)
    shapes = checkpoint_shapes(toy.network)
    assert {"vit.cls_token", "vit.blocks.2.mlp.fc2.bias", "head.conv.weight"} <= set(shapes)
    state = {
        key: torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) / shape[-1] ** 0.5
        for key, shape in shapes.items()
    }
    torch.save({"state_dict": state}, tmp_path / "toy.pth")
    return export(tmp_path / "toy.pth", tmp_path / "bundle", str(tmp_path / "toy.toml"), {"max_batch": 2}).bundle


def test_it_is_exported_and_verified_and_unknown_once_it_is_taken_back(bundle: Bundle, tmp_path: Path) -> None:
    report = verify(bundle, "onnxruntime-cpu", parity_windows(bundle.recipe, [], 2), progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    assert report.passed
    unregister(ROW)
    try:
        unknown = "expected segmenter or .* as network.family, got 'toy'"
        with pytest.raises(RecipeError, match=unknown):
            recipe(str(tmp_path / "toy.toml"))
        with pytest.raises(BundleError, match=unknown):
            Bundle.open(bundle.path)
    finally:
        register(ROW)


def test_it_has_multiply_adds_and_published_rows(toy: Recipe) -> None:
    toy = replace(toy, network=replace(toy.network, embed_dim=384, depth=12, stages=(6, 12)))
    assert multiply_adds(toy.network, DENSE).decoder == 2 * 5 * 17 * 384 + 9 * 16 * 384 * 5
    small, other = (Published(name, "ViT-S/16", "camvid", "none", True, "", 64) for name in ("Toy", "Segmenter"))
    assert published_beside(toy, [small, other]) == (small,)
