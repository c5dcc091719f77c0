"""EViT equals the published code on the same weights.

`tests/data/evit.npz` holds what Expedit-LargeScale-Vision-Transformer/Expedit-Segmenter (commit 63f4066:
mmseg/models/backbones/evit.py with its mmseg/ops/reconstruction.py) gave for the two pictures of
`published/images.npz`, one at a time as it demands, divided by 255, and weights made by name: the patches that stay
in each merge, and its tokens of all patches after the last norm, restored from the nearest. MLP and patch embedding,
which come from mmcv, were PyTorch's.
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
from algm_deploy.models.vit import KeepTokens, Merged
from algm_deploy.recipe.plan import DENSE, MergePlan

NO_THRESHOLDS = merge_inputs(0.0, 0.0)


class Case:
    """One published result, and our network for it."""

    def __init__(self, name: str) -> None:
        with np.load(DATA / "evit.npz") as file:
            facts = json.loads(str(file["meta"]))["cases"][name]
            self.tokens = torch.from_numpy(file[f"{name}_tokens"])
            self.kept = [file[f"{name}_kept_{layer}"] for layer in facts["layers"]]
        self.plan = MergePlan((), (), method="evit", evit_layers=tuple(facts["layers"]), evit_keep=facts["keep"])
        self.model = published_encoder()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return published_images()


def kept(stages: list[Merged]) -> list[np.ndarray]:
    """The patches that stay in each merge, ascending; 100 stands for the sum that the first one made, and so on."""
    origins = [np.arange(36)] * 2
    found = []
    for index, stage in enumerate(stages):
        rows = np.arange(len(origins[0]))
        stays = [origin[told[rows] - 1 == rows] for origin, told in zip(origins, stage.map.numpy(), strict=True)]
        found.append(np.stack([np.sort(one) for one in stays]))
        origins = [np.append(one, 100 + index) for one in stays]
    return found


@pytest.mark.parametrize("name", ["three", "one", "deep"])
def test_equals_the_published_code(name: str, images: Tensor, record_property: Callable[[str, object], None]) -> None:
    case = Case(name)
    (last,), stages = insert_merging(case.model, case.plan).encoder(images, NO_THRESHOLDS)
    for ours, theirs in zip(kept(stages), case.kept, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    torch.testing.assert_close(last.values[:, 1:], case.tokens, rtol=0, atol=TOLERANCE)
    assert last.map.tolist() == [list(range(1, 37))] * 2
    dense = case.model.encoder(images)[0][0].values[:, 1:]
    assert (dense - case.tokens).abs().max() > 1000 * TOLERANCE
    record_property("support", "evit mmseg/encoder torch equals")


@pytest.mark.parametrize("change", [{"evit_keep": 0.6}, {"evit_layers": (1, 2)}], ids=str)
def test_another_setting_gives_other_tokens(change: dict[str, object], images: Tensor) -> None:
    case = Case("three")
    (last,), _ = insert_merging(case.model, replace(case.plan, **change)).encoder(images, NO_THRESHOLDS)
    assert (last.values[:, 1:] - case.tokens).abs().max() > 1000 * TOLERANCE


def test_what_was_told_gives_the_same_tokens(images: Tensor) -> None:
    """And other rows that stay, or another one to restore a patch from, other tokens."""
    case = Case("three")
    (last,), stages = insert_merging(case.model, case.plan).encoder(images, NO_THRESHOLDS)
    replaying = replay_merging(case.model, case.plan)
    told = [stage.map for stage in stages]
    (same,), again = replaying.encoder(images, merge_inputs(0.0, 0.0, tuple(told)))
    torch.testing.assert_close(same.values, last.values, rtol=0, atol=TOLERANCE)
    assert all(torch.equal(a, b.map) for a, b in zip(told, again, strict=True))
    left = next(row for row in range(36) if told[0][0, row] != row + 1)
    other = told[0].clone()
    other[0, left] = next(row for row in told[0][0].unique().tolist() if row != told[0][0, left])
    (changed,), _ = replaying.encoder(images, merge_inputs(0.0, 0.0, (other, *told[1:])))
    differs = (changed.values - same.values).abs().amax(2) > 100 * TOLERANCE
    assert differs.nonzero().tolist() == [[0, left + 1]]


def test_another_plan_leaves_nothing_of_it(images: Tensor) -> None:
    case = Case("three")
    again = insert_merging(insert_merging(case.model, case.plan), DENSE)
    nowhere = insert_merging(case.model, replace(case.plan, evit_layers=()))
    assert {type(one.encoder.outlet) for one in (again, nowhere)} == {KeepTokens}
    dense = case.model.encoder(images)[0][0].values
    assert torch.equal(again.encoder(images, NO_THRESHOLDS)[0][0].values, dense)


def test_levels_before_the_merge_stay_as_they_are(images: Tensor) -> None:
    """A decoder that reads several blocks gets all patches of each."""
    model = Encoder(1).eval().requires_grad_(False)
    model.encoder.outputs = (1, 2, 3, 4)
    levels, _ = insert_merging(model, Case("one").plan).encoder(images, NO_THRESHOLDS)
    dense, _ = model.encoder(images)
    assert [level.values.shape[1] for level in levels] == [37] * 4
    assert [torch.equal(a.values, b.values) for a, b in zip(levels, dense, strict=True)] == [True, False, False, False]


def test_truncated_gives_every_patch_a_row(images: Tensor) -> None:
    case = Case("one")
    (last,), (stage,) = truncate(case.model, {2: 20}, case.plan).encoder(images)
    assert stage.length.tolist() == [20, 20]
    assert last.values.shape[1] == 37
