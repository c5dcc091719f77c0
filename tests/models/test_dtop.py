"""DToP equals the published code on a whole SegViT, and on a Segmenter what its parts promise.

`tests/data/dtop.npz` holds what zbwxp/Dynamic-Token-Pruning (commit 2baefff: backbone/vit_prune.py and
decode_heads/prune_head.py on mmsegmentation's encoder layers) gave for the two pictures of `published/images.npz`,
divided by 255, and weights made by name, but for three: `class_embed` has a tenth of its weights and the biases 3 and
-3, a sixth of that in the first head, and the queries and keys of masks twice theirs. So heads are surer the later they
come, and of some tokens more than of others. It holds for every patch whether its token had left after each head, and
every fourth pixel of the class scores. In `dense` the threshold is 1, and nothing leaves.
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
from toys import deployed_toy, toy

from algm_deploy.merging import insert_merging, merge_inputs, replay_merging, truncate
from algm_deploy.models.loading import network_module, parameter_shapes
from algm_deploy.models.readout import read
from algm_deploy.models.scores import GridScores, TokenScores, upsample_scores
from algm_deploy.models.segvit import SegvitPrune
from algm_deploy.models.vit import KeepTokens
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan

# Two fp32 implementations of the whole network; scores are probabilities.
TOLERANCE = 5e-6
COMPARED = "multihead_attn.q.weight", "multihead_attn.k.weight"


class Case:
    """One published result, and our network and plan for it."""

    def __init__(self, name: str) -> None:
        with np.load(DATA / "dtop.npz") as file:
            case = json.loads(str(file["meta"]))["cases"][name]
            self.scores, self.left = torch.from_numpy(file[f"{name}_scores"]), file[f"{name}_left"]
        self.network = Network(
            *("segvit", 32, 4, 2, case["classes"], (96, 96), 8, "prune"),
            decoder_depth=2,
            decoder_dim=16,
            decoder_heads=4,
            auxiliary=(2, 3),
        )
        self.tau = case["threshold"]
        self.plan = MergePlan((), (), method="dtop", dtop_layers=(2, 3), clap_threshold=self.tau)
        self.images, self.inputs = published_images(), merge_inputs(self.tau, 0.0)
        (naming,) = SegvitPrune.namings(self.network)
        shapes = parameter_shapes(self.network)
        found = weights(naming.expected(shapes))
        for key in found:
            if key.endswith("class_embed.weight"):
                found[key] *= 0.1
                first = key.startswith("auxiliary_head.0.")
                found[key.replace("weight", "bias")] = torch.tensor([3.0, -3.0]) / (6 if first else 1)
            elif key.endswith(COMPARED):
                found[key] *= 2
        self.model = network_module(self.network, dict(naming.translated(found, shapes)), torch.float32)

    def sampled(self, scores: GridScores | TokenScores) -> torch.Tensor:
        return upsample_scores(scores, self.network.grid, self.network.image_size)[..., ::4, ::4]


@pytest.fixture(scope="module")
def few() -> Case:
    return Case("few")


@pytest.mark.parametrize("name", ["few", "many", "dense"])
@torch.inference_mode()
def test_equals_the_published_code(name: str, record_property: Callable[[str, object], None]) -> None:
    case = Case(name)
    found = insert_merging(case.model, case.plan)(case.images, case.inputs)
    for stage, left in zip(found.stages, case.left, strict=True):
        np.testing.assert_array_equal(stage.map.numpy() < 0, left)
        assert stage.length.tolist() == (~left).sum(1).tolist()
    torch.testing.assert_close(case.sampled(found), case.scores, rtol=0, atol=TOLERANCE)
    if name == "dense":
        torch.testing.assert_close(case.sampled(case.model(case.images)), case.scores, rtol=0, atol=TOLERANCE)
    record_property("support", "dtop segvit/prune torch equals")


@torch.inference_mode()
def test_another_number_that_stays_gives_other_scores(few: Case) -> None:
    other = insert_merging(few.model, replace(few.plan, dtop_keep=1))(few.images, few.inputs)
    assert (few.sampled(other) - few.scores).abs().max() > 100 * TOLERANCE


@torch.inference_mode()
def test_what_was_told_gives_the_same_scores(few: Case) -> None:
    """And other tokens other ones."""
    found = insert_merging(few.model, few.plan)(few.images, few.inputs)
    maps = tuple(stage.map for stage in found.stages)
    replaying = replay_merging(few.model, few.plan)
    again = replaying(few.images, merge_inputs(0.0, 0.0, maps))
    assert torch.equal(again.scores, found.scores)
    assert all(torch.equal(stage.map, map) for stage, map in zip(again.stages, maps, strict=True))
    swapped = replaying(few.images, merge_inputs(0.0, 0.0, tuple(map.flip(0) for map in maps)))
    assert (few.sampled(swapped) - few.scores).abs().max() > 100 * TOLERANCE


@torch.inference_mode()
def test_another_plan_leaves_nothing_of_it(few: Case) -> None:
    again = insert_merging(insert_merging(few.model, few.plan), DENSE)
    assert not any(block.judged or type(block.end_merge) is not KeepTokens for block in again.blocks)
    assert torch.equal(again(few.images).scores, few.model(few.images).scores)


@torch.inference_mode()
def test_truncated_asks_no_head(few: Case) -> None:
    found = truncate(few.model, {2: 100, 3: 50}, few.plan)(few.images)
    assert [stage.length.tolist() for stage in found.stages] == [[100, 100], [50, 50]]


@torch.inference_mode()
def test_scores_of_a_segmenter_are_those_of_whoever_saw_a_patch_last() -> None:
    """Tokens that left have the scores of their head, the others those of the decoder that saw the others alone."""
    network, _ = toy("segmenter", "mask_transformer")
    network = replace(network, auxiliary=(1,), depth=2)
    plan = MergePlan((), (), method="dtop", dtop_layers=(1,), dtop_keep=1, clap_threshold=0.3)
    model = deployed_toy(network, plan).model
    image, inputs = torch.rand(1, 3, *network.image_size) * 255, merge_inputs(0.3, 0.0)
    found = model(image, inputs)
    (stage,) = found.stages
    left = stage.map[0] < 0
    assert 0 < left.sum() < len(left)
    first = model.blocks[0](model.encoder.embed(image), inputs)
    assert first.canvas is not None
    torch.testing.assert_close(found.scores[0, left], first.canvas[0, left], rtol=0, atol=0)
    last = model.blocks[1](first, inputs)
    values, rows = model.encoder.norm(last.values), torch.arange(1, last.values.shape[1])[None]
    alone = read(model.readout(), [last._replace(values=values, map=rows, canvas=None)], [])
    torch.testing.assert_close(found.scores[0, ~left], alone.scores[0], rtol=0, atol=1e-6)
