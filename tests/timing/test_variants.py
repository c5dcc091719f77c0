"""The networks that merging is timed against."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec import structs

from algm_deploy.bundle.records import VariantOrigin
from algm_deploy.bundle.store import Bundle
from algm_deploy.merging import deployed_network, merge_inputs, truncate
from algm_deploy.models.loading import load_network
from algm_deploy.pictures.shipped import scene
from algm_deploy.timing.variants import variant_network

TOKENS = (40, 25)


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return torch.from_numpy(scene(1)[0][:128, :128].transpose(2, 0, 1)[None].copy())


@torch.inference_mode()
def test_dense_is_merging_that_merges_nothing(tiny_bundle: Bundle, image: torch.Tensor) -> None:
    model, recipe = load_network(tiny_bundle), tiny_bundle.recipe
    dense, named = variant_network(model, recipe, "dense", TOKENS)
    merged, _ = variant_network(model, recipe, "merged", TOKENS)
    assert named.merging.layers == ()
    nothing = merge_inputs(float("inf"), float("inf"))
    np.testing.assert_allclose(dense(image, nothing)[0], merged(image, nothing)[0], atol=1e-4)


@torch.inference_mode()
def test_truncated_keeps_exactly_these_tokens(tiny_bundle: Bundle, image: torch.Tensor) -> None:
    network, _ = variant_network(load_network(tiny_bundle), tiny_bundle.recipe, "truncated", TOKENS)
    scores, counts, maps = network(image.expand(2, -1, -1, -1), merge_inputs(0.0, 0.0))
    assert counts.tolist() == [[40, 25], [40, 25]]
    for kept, token_map in zip(TOKENS, maps, strict=True):
        assert sorted(set(token_map[0].tolist())) == list(range(1, 1 + kept))
    assert scores.shape == (2, 11, 128, 128)
    assert torch.isfinite(scores).all()


@torch.inference_mode()
def test_a_bundle_that_drops_tokens_deploys_a_network_that_does(tiny_bundle: Bundle, image: torch.Tensor) -> None:
    rows = tuple(zip((1, 3), (1 + count for count in TOKENS), strict=True))
    origin = VariantOrigin(name="truncated", made_from={}, rows_by_layer=rows)
    recipe = variant_network(load_network(tiny_bundle), tiny_bundle.recipe, "truncated", TOKENS)[1]
    manifest = structs.replace(tiny_bundle.manifest, variant=origin, recipe=recipe)
    _, counts, _ = deployed_network(Bundle(tiny_bundle.path, manifest))(image, merge_inputs(0.0, 0.0))
    assert counts.tolist() == [list(TOKENS)]


def test_truncating_leaves_the_network_alone(tiny_bundle: Bundle) -> None:
    model = load_network(tiny_bundle)
    truncated = truncate(model, {1: 41})
    assert type(model.blocks[0].merge) is not type(truncated.blocks[0].merge)
    assert truncated.blocks[0].mlp.fc1.weight is model.blocks[0].mlp.fc1.weight
