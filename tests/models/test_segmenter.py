"""Segmenter: both decoders on merged and padded tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from official_files import official_shapes

from algm_deploy.models.checkpoints.weights import checkpoint_shapes
from algm_deploy.models.loading import parameter_shapes
from algm_deploy.models.readout import read
from algm_deploy.models.scores import TokenScores, upsample_scores
from algm_deploy.models.segmenter import Segmenter
from algm_deploy.models.vit import Tokens
from algm_deploy.recipe.network import Network

Golden = Callable[[str], Segmenter]


@pytest.mark.parametrize("decoder", ["mask_transformer", "linear"])
@pytest.mark.parametrize(("dim", "depth", "heads"), [(192, 12, 3), (384, 12, 6), (768, 12, 12), (1024, 24, 16)])
def test_parameters_have_the_official_names_and_shapes(decoder: str, dim: int, depth: int, heads: int) -> None:
    """ViT-T, S, B and L, and on a DeiT, whose distillation token stands alone in checkpoints."""
    network = Network("segmenter", dim, depth, heads, 150, (512, 512), decoder=decoder)
    assert parameter_shapes(network) == checkpoint_shapes(network) == official_shapes(network)
    distilled = replace(network, extra_tokens=1)
    assert checkpoint_shapes(distilled) == official_shapes(distilled)


@pytest.mark.parametrize("decoder", ["mask_transformer", "linear"])
def test_padding_does_not_reach_the_scores(golden_segmenter: Golden, decoder: str) -> None:
    torch.manual_seed(0)
    values, length = torch.randn(2, 9, 64), torch.tensor([9, 4])
    patch_row = torch.zeros(2, 64, dtype=torch.int64)
    model: Any = golden_segmenter(decoder).decoder
    tokens = Tokens(values, torch.ones(2, 9), patch_row, length, padded=True)
    alone = Tokens(values[1:, :4], torch.ones(1, 4), patch_row[1:], length[1:], padded=False)
    together, single = (read(model.readout(0), [given], []).scores for given in (tokens, alone))
    torch.testing.assert_close(together[1, :4], single[0], rtol=0, atol=2e-6)


def test_mask_scores_are_normalised_over_classes(golden_segmenter: Golden) -> None:
    """Undoing the affine part of the last normalisation leaves mean 0 and variance 1 over the classes."""
    model: Any = golden_segmenter("mask_transformer").decoder
    values = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    tokens = Tokens(values, torch.ones(1, 5), torch.zeros(1, 64).long(), torch.tensor([5]), padded=False)
    scores = read(model.readout(0), [tokens], []).scores
    plain = (scores - model.mask_norm.bias) / model.mask_norm.weight
    torch.testing.assert_close(plain.mean(-1), torch.zeros(1, 5), rtol=0, atol=1e-5)
    torch.testing.assert_close(plain.var(-1, unbiased=False), torch.ones(1, 5), rtol=0, atol=5e-3)


def test_upsampling_unmerges_first() -> None:
    scores = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])  # two tokens, two classes
    patch_row = torch.tensor([[1, 2, 2, 1]])  # prefix 1
    full = upsample_scores(TokenScores(scores, patch_row, 1, []), (2, 2), (8, 6))
    maps = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]], [[0.0, 2.0], [2.0, 0.0]]]])
    expected = F.interpolate(maps, size=(8, 6), mode="bilinear", align_corners=False)
    assert torch.equal(full, expected)
