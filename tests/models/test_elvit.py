"""ELViT equals the published code on the same weights.

`tests/data/elvit.npz` holds what Expedit-LargeScale-Vision-Transformer/Expedit-Segmenter (commit 63f4066:
mmseg/models/backbones/hourglass_vit.py with its mmseg/ops/cluster.py and mmseg/ops/reconstruction.py) gave for the two
pictures of `published/images.npz`, divided by 255, and weights made by name: its centroids, and its tokens of all
patches after the last norm, reconstructed after the last block (`location`, which the published configurations leave
out). Attention, MLP and patch embedding, which come from mmcv, were PyTorch's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from published_encoder import DATA, TOLERANCE, Encoder, published_encoder, published_images
from torch import Tensor

from algm_deploy.merging import insert_merging, merge_inputs, replay_merging, truncate
from algm_deploy.recipe.plan import MergePlan

NO_THRESHOLDS = merge_inputs(0.0, 0.0)
# What rounding in fp32 made of the published centroids, which reach 6.6: up to 12 units in the last place.
CENTROIDS = 8e-6


class Case:
    """One published result, and our network for it."""

    def __init__(self, name: str) -> None:
        with np.load(DATA / "elvit.npz") as file:
            facts = json.loads(str(file["meta"]))["cases"][name]
            self.tokens, self.clusters = (torch.from_numpy(file[f"{name}_{part}"]) for part in ("tokens", "clusters"))
        self.plan = MergePlan(
            (),
            (),
            method="elvit",
            elvit_layer=facts["layer"],
            elvit_grid=tuple(facts["grid"]),
            elvit_window=facts["window"],
            elvit_iterations=facts["iterations"],
            elvit_temperature=facts["temperature"],
            elvit_neighbours=facts["neighbours"],
        )
        self.model = published_encoder()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return published_images()


@pytest.mark.parametrize("name", ["narrow", "wide", "last"])
def test_equals_the_published_code(name: str, images: Tensor, record_property: Callable[[str, object], None]) -> None:
    """In fp64 here, so that only the rounding of theirs differs, and no processor's order of sums."""
    case, images = Case(name), images.double()
    merged = insert_merging(case.model.double(), case.plan)
    clusters: list[Tensor] = []
    merged.blocks[case.plan.elvit_layer - 1].register_forward_hook(lambda *call: clusters.append(call[2].values))
    (last,), (stage,) = merged.encoder(images, NO_THRESHOLDS)
    torch.testing.assert_close(clusters[0][:, 1:], case.clusters.double(), rtol=0, atol=CENTROIDS)
    # Weights of a norm of 1 add up to the root of their number at most.
    rounding = TOLERANCE * case.plan.elvit_neighbours**0.5
    torch.testing.assert_close(last.values[:, 1:], case.tokens.double(), rtol=0, atol=rounding)
    assert last.map.tolist() == [list(range(1, 37))] * 2
    assert stage.length.tolist() == [1 + case.clusters.shape[1]] * 2
    dense = case.model.encoder(images)[0][0].values[:, 1:]
    assert (dense - case.tokens).abs().max() > 1000 * TOLERANCE
    record_property("support", "elvit mmseg/encoder torch equals")


@pytest.mark.parametrize("change", [{"semantics": "paper"}, {"elvit_window": 5}, {"elvit_iterations": 4}], ids=str)
def test_another_setting_gives_other_tokens(change: dict[str, object], images: Tensor) -> None:
    case = Case("narrow")
    (last,), _ = insert_merging(case.model, replace(case.plan, **change)).encoder(images, NO_THRESHOLDS)
    assert (last.values[:, 1:] - case.tokens).abs().max() > 1000 * TOLERANCE


def test_forced_maps_give_the_same_tokens(images: Tensor) -> None:
    """And of another centroid in the last place others, in the patch where it stands alone."""
    case = Case("narrow")
    (last,), (stage,) = insert_merging(case.model, case.plan).encoder(images, NO_THRESHOLDS)
    replaying = replay_merging(case.model, case.plan)
    (same,), _ = replaying.encoder(images, merge_inputs(0.0, 0.0, (stage.map,)))
    torch.testing.assert_close(same.values, last.values, rtol=0, atol=TOLERANCE)
    changed = stage.map.clone()
    changed[0, 7] = 1 + (changed[0, 7] + 3) % 16
    (other,), _ = replaying.encoder(images, merge_inputs(0.0, 0.0, (changed,)))
    differs = (other.values - same.values).abs().amax(2) > 100 * TOLERANCE
    assert differs.nonzero().tolist() == [[0, 8]]


def test_another_plan_leaves_nothing_of_it(images: Tensor) -> None:
    case = Case("narrow")
    again = insert_merging(insert_merging(case.model, case.plan), replace(case.plan, elvit_layer=0))
    dense = case.model.encoder(images)[0][0].values
    assert torch.equal(again.encoder(images, NO_THRESHOLDS)[0][0].values, dense)


def test_levels_before_the_merge_stay_as_they_are(images: Tensor) -> None:
    """A decoder that reads several blocks gets all patches of each."""
    model = Encoder(0).eval().requires_grad_(False)
    model.encoder.outputs = (1, 2, 3, 4)
    plan = replace(Case("narrow").plan, elvit_layer=2)
    levels, _ = insert_merging(model, plan).encoder(images, NO_THRESHOLDS)
    dense, _ = model.encoder(images)
    assert [level.values.shape[1] for level in levels] == [36] * 4
    assert [torch.equal(a.values, b.values) for a, b in zip(levels, dense, strict=True)] == [True, False, False, False]


def test_truncated_gives_every_patch_a_row(images: Tensor) -> None:
    case = Case("narrow")
    (last,), (stage,) = truncate(case.model, {2: 17}, case.plan).encoder(images)
    assert stage.length.tolist() == [17, 17]
    assert last.values.shape[1] == 37
