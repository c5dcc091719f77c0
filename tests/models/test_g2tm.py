"""G2TM equals the published code on a whole Segmenter.

`tests/data/g2tm.npz` holds what vbercy/g2tm-segmenter (commit ec983c2: its Segmenter with
g2tm/g2tm/patch/graph_segmenter_patch.py and g2tm/g2tm/graph_merge.py) gave for the images of `vectors/net_07.npz`, one
at a time, and the weights of `vectors/mask_transformer_4x64.pth`: for every patch its row, how many there are, and
every eighth pixel of the class scores. The rows are numbered as its graph library lists a group, which nothing that
follows can tell. DropPath, which comes from timm, was none. Its linear decoder does not run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from published_encoder import DATA

from algm_deploy.merging import insert_merging, merge_inputs, replay_merging
from algm_deploy.models.scores import upsample_scores
from algm_deploy.models.segmenter import Segmenter
from algm_deploy.recipe.plan import MergePlan

# Two fp32 implementations of the whole network, as for the golden networks.
TOLERANCE = 2e-5


class Case:
    """One published result, and the plan for it."""

    def __init__(self, name: str) -> None:
        with np.load(DATA / "g2tm.npz") as file:
            facts = json.loads(str(file["meta"]))["cases"][name]
            self.logits = torch.from_numpy(file[f"{name}_logits"])
            self.groups, self.counts = file[f"{name}_groups"], file[f"{name}_counts"]
        with np.load(DATA / "vectors" / "net_07.npz") as file:
            self.images = torch.from_numpy(file["image"]).float()
        self.plan = MergePlan((), (), method="g2tm", g2tm_layer=facts["layer"], clap_threshold=facts["threshold"])


@pytest.mark.parametrize("name", ["mask", "early", "late"])
def test_equals_the_published_code(
    name: str, golden_segmenter: Callable[[str], Segmenter], record_property: Callable[[str, object], None]
) -> None:
    """As one batch, of which every image merges alone."""
    case, model = Case(name), golden_segmenter("mask_transformer")
    inputs = merge_inputs(case.plan.clap_threshold, 0.0)
    result = insert_merging(model, case.plan).eval()(case.images, inputs)
    (stage,) = result.stages
    np.testing.assert_array_equal(stage.length.numpy() - 1, case.counts)
    for ours, theirs in zip(stage.map.numpy(), case.groups, strict=True):
        same, other = (rows[:, None] == rows[None] for rows in (ours, theirs))
        np.testing.assert_array_equal(same, other)
    scores = upsample_scores(result, (8, 8), (128, 128))[:, :, ::8, ::8]
    torch.testing.assert_close(scores, case.logits, rtol=0, atol=TOLERANCE)
    dense = upsample_scores(model.eval()(case.images, inputs), (8, 8), (128, 128))[:, :, ::8, ::8]
    assert (dense - case.logits).abs().max() > 100 * TOLERANCE
    replayed = replay_merging(model, case.plan).eval()(case.images, inputs._replace(maps=(stage.map,)))
    torch.testing.assert_close(replayed.scores, result.scores, rtol=0, atol=TOLERANCE)
    record_property("support", "g2tm segmenter/mask_transformer torch equals")


@pytest.mark.parametrize("change", [{"g2tm_layer": 3}, {"clap_threshold": 2.0}], ids=str)
def test_another_setting_gives_other_scores(
    change: dict[str, float], golden_segmenter: Callable[[str], Segmenter]
) -> None:
    case = Case("mask")
    plan = replace(case.plan, **change)  # type: ignore[arg-type]
    model = insert_merging(golden_segmenter("mask_transformer"), plan).eval()
    scores = upsample_scores(model(case.images, merge_inputs(plan.clap_threshold, 0.0)), (8, 8), (128, 128))
    assert (scores[:, :, ::8, ::8] - case.logits).abs().max() > 100 * TOLERANCE
