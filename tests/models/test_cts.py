"""CTS equals the published code on a whole Segmenter.

`tests/data/cts.npz` holds what tue-mps/cts-segmenter (commit e236188: segm/model/segmenter.py and policy_net.py on the
efficientnet_lite0 of timm 0.4.12) gave for the two pictures of `published/images.npz`, or their left part, divided by
255, and weights made by name, those of the policy network's convolutions times 1.5, which keeps its answers apart: the
logits of the policy network, for every patch its row, and every eighth pixel of the class scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from named_weights import weights
from published_encoder import DATA, published_images

from algm_deploy.merging import insert_merging, merge_inputs, replay_merging, truncate
from algm_deploy.models.loading import network_module, parameter_shapes
from algm_deploy.models.scores import upsample_scores
from algm_deploy.models.segmenter import Segmenter
from algm_deploy.models.vit import KeepTokens
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan

# Two fp32 implementations of the whole network, as for the golden networks.
TOLERANCE = 2e-5
NO_THRESHOLDS = merge_inputs(0.0, 0.0)


class Case:
    """One published result, and our network and plan for it."""

    def __init__(self, name: str) -> None:
        with np.load(DATA / "cts.npz") as file:
            facts = json.loads(str(file["meta"]))["cases"][name]
            self.logits = torch.from_numpy(file[f"{name}_logits"])
            self.policy, self.map = file[f"{name}_policy"], file[f"{name}_map"]
        width, decoder = facts["width"], facts["decoder"]
        depth = int(decoder == "mask_transformer")
        self.network = Network("segmenter", 64, 3, 2, 7, (96, width), decoder=decoder, decoder_depth=depth, policy=True)
        self.images = published_images()[..., :width]
        self.plan = MergePlan((), (), method="cts", cts_shared=facts["shared"])
        self.model = network_module(self.network, self._weights(), torch.float32)

    def _weights(self) -> dict[str, torch.Tensor]:
        (naming,) = Segmenter.namings(self.network)
        shapes = parameter_shapes(self.network)
        found = weights(naming.expected(shapes))
        for key, value in found.items():
            if key.startswith("policy_net.") and value.ndim == 4:
                value *= 1.5
        return dict(naming.translated(found, shapes))


@pytest.fixture(scope="module")
def few() -> Case:
    return Case("few")


@pytest.mark.parametrize("name", ["few", "many", "linear"])
def test_equals_the_published_code(name: str, record_property: Callable[[str, object], None]) -> None:
    case = Case(name)
    found = insert_merging(case.model, case.plan)(case.images, NO_THRESHOLDS)
    score = case.policy[:, 1] - case.policy[:, 0]
    ours = case.model.encoder.policy(case.images).numpy()
    np.testing.assert_allclose(ours, score.reshape(ours.shape), rtol=0, atol=TOLERANCE * np.abs(score).max())
    (stage,) = found.stages
    np.testing.assert_array_equal(stage.map.numpy() - 1, case.map)
    logits = upsample_scores(found, case.network.grid, case.network.image_size)[..., ::8, ::8]
    torch.testing.assert_close(logits, case.logits, rtol=0, atol=TOLERANCE)
    record_property("support", f"cts segmenter/{case.network.decoder} torch equals")


def test_another_number_gives_other_scores(few: Case) -> None:
    other = insert_merging(few.model, replace(few.plan, cts_shared=4))(few.images, NO_THRESHOLDS)
    logits = upsample_scores(other, few.network.grid, few.network.image_size)[..., ::8, ::8]
    assert (logits - few.logits).abs().max() > 1000 * TOLERANCE


def test_what_was_told_gives_the_same_tokens(few: Case) -> None:
    """And other superpatches other ones."""
    (last,), (stage,) = insert_merging(few.model, few.plan).encoder(few.images, NO_THRESHOLDS)
    replaying = replay_merging(few.model, few.plan).encoder
    (same,), (again,) = replaying(few.images, merge_inputs(0.0, 0.0, (stage.map,)))
    assert torch.equal(same.values, last.values)
    assert torch.equal(again.map, stage.map)
    (swapped,), _ = replaying(few.images, merge_inputs(0.0, 0.0, (stage.map.flip(0),)))
    assert (swapped.values - last.values).abs().amax() > 1000 * TOLERANCE


def test_another_plan_leaves_nothing_of_it(few: Case) -> None:
    again = insert_merging(insert_merging(few.model, few.plan), DENSE)
    nowhere = insert_merging(few.model, replace(few.plan, cts_shared=0))
    assert {type(one.blocks[0].start_merge) for one in (again, nowhere)} == {KeepTokens}
    dense = few.model.encoder(few.images)[0][0].values
    assert all(torch.equal(one.encoder(few.images)[0][0].values, dense) for one in (again, nowhere))


def test_truncated_needs_no_policy(few: Case) -> None:
    (last,), (stage,) = truncate(few.model, {1: 20}, few.plan).encoder(few.images)
    assert stage.length.tolist() == [20, 20]
    assert last.values.shape[1] == 20
