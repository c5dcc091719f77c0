"""ViT-Adapter: what merges in one group of blocks and what reaches the next, by every method; what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from named_weights import weights
from torch import Tensor

from algm_deploy.errors import CheckpointError, RecipeError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.merging import insert_merging, merge_inputs, replay_merging, truncate
from algm_deploy.models.checkpoints.reading import Checkpoint
from algm_deploy.models.checkpoints.weights import checkpoint_shapes, state_dict_for
from algm_deploy.models.loading import network_module
from algm_deploy.models.scores import GridScores
from algm_deploy.models.vit_adapter import VitAdapter
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, BetweenGroups, MergePlan, fresh_merges
from algm_deploy.recipe.schema import Protocol, Recipe

NETWORK = Network(
    "vit_adapter",
    *(32, 6, 2, 5, (64, 96)),
    decoder="upernet",
    decoder_dim=8,
    stages=(2, 4, 5, 6),
    adapter_heads=2,
    adapter_dim=16,
)
# Positions are those of a square picture in training.
SHAPES = checkpoint_shapes(NETWORK) | {"backbone.pos_embed": (1, 26, 32)}
BUDGETS = MergePlan((1,), (2, 3, 6), clap="budget", clap_budget=2, gbm="budget", gbm_budget=0.25)
INPUTS = merge_inputs(0.9, 1.0)


@pytest.fixture(scope="module")
def model() -> VitAdapter:
    state = state_dict_for(NETWORK, Checkpoint(Path("x.pth"), weights(SHAPES), None, ()))
    found = network_module(NETWORK, state.state_dict, torch.float32)
    assert isinstance(found, VitAdapter)
    return found


@pytest.fixture(scope="module")
def exact(model: VitAdapter) -> VitAdapter:
    """The same network in fp64: how far another is from it shows what rounding does to this one."""
    found = network_module(NETWORK, model.state_dict(), torch.float64)
    assert isinstance(found, VitAdapter)
    return found


def replayed(model: VitAdapter, plan: MergePlan, images: Tensor, scores: GridScores) -> Tensor:
    """Scores of a network whose merges are those that `scores` came from."""
    maps = tuple(stage.map for stage in scores.stages)
    found: Tensor = replay_merging(model, plan)(images, INPUTS._replace(maps=maps)).scores
    return found


def assert_rounded(found: Tensor, baseline: Tensor, true: Tensor) -> None:
    """No further from fp64 than twice as far as the baseline in fp32 is."""
    noise = (baseline - true).abs().max()
    assert 0 < noise < 1e-3 * true.abs().max()
    assert (found - true).abs().max() <= 2 * noise


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Two pictures, the lower half of the second of one colour."""
    pictures = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    pictures[1, :, 32:] = 0.5
    return pictures


def rows(model: VitAdapter, plan: MergePlan, images: Tensor) -> tuple[GridScores, list[int]]:
    """Scores, and the rows that enter each block's attention."""
    entering: list[int] = []
    merged = insert_merging(model, plan)
    for block in merged.blocks:
        block.register_forward_pre_hook(lambda _, given: entering.append(given[0].values.shape[1]))
    return merged(images, INPUTS), entering


@torch.inference_mode()
@pytest.mark.parametrize(
    ("between", "left", "entering"),
    [
        ("unmerge", [18, 13, 18, 18], [24, 18, 24, 18, 24, 24]),
        ("remerge", [18, 13, 10, 7], [24, 18, 13, 10, 10, 10]),
    ],
)
def test_a_group_starts_with_every_patch_or_with_what_had_merged(
    model: VitAdapter, exact: VitAdapter, images: Tensor, between: BetweenGroups, left: list[int], entering: list[int]
) -> None:
    plan = replace(BUDGETS, between_groups=between)
    scores, seen = rows(model, plan, images)
    assert seen == entering
    assert [stage.length.tolist() for stage in scores.stages] == [[count] * 2 for count in left]
    assert multiply_adds(NETWORK, plan, left).encoder < multiply_adds(NETWORK, DENSE).encoder
    # What a runtime decided is merged again as it did.
    true = replayed(exact, plan, images.double(), scores)
    assert_rounded(replayed(model, plan, images, scores), scores.scores, true)


@torch.inference_mode()
def test_a_batch_that_decides_alone_is_as_each_picture(model: VitAdapter, exact: VitAdapter, images: Tensor) -> None:
    plan = MergePlan((1,), (3,), clap_threshold=0.9, between_groups="remerge")
    together, _ = rows(model, plan, images)
    assert together.stages[0].length[0] != together.stages[0].length[1]
    true = replayed(exact, plan, images.double(), together)
    for i in range(2):
        alone, _ = rows(model, plan, images[i : i + 1])
        assert_rounded(alone.scores, together.scores[i : i + 1], true[i : i + 1])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("plan", "entering"),
    [
        (MergePlan((), (), method="tome", tome_r=(6, 6, 6)), [24, 18, 24, 18, 24, 24]),
        (MergePlan((), (), method="tome", tome_r=(6, 6, 6), between_groups="remerge"), [24, 18, 12, 6, 6, 6]),
        (MergePlan((), (), method="tome_blockwise", tome_share=(0.5,) * 6), [24] * 6),
        (
            MergePlan((), (), method="elvit", elvit_layer=3, elvit_grid=(2, 3), elvit_neighbours=3),
            [24, 24, 24, 6, 24, 24],
        ),
    ],
    ids=["tome", "tome_remerged", "tome_blockwise", "elvit"],
)
def test_other_methods(model: VitAdapter, images: Tensor, plan: MergePlan, entering: list[int]) -> None:
    scores, seen = rows(model, plan, images)
    assert seen == entering
    assert scores.scores.isfinite().all()
    assert not torch.equal(scores.scores, rows(model, DENSE, images)[0].scores)


@torch.inference_mode()
@pytest.mark.parametrize(("between", "last"), [("unmerge", 24), ("remerge", 10)])
def test_truncated_keeps_as_many(model: VitAdapter, images: Tensor, between: BetweenGroups, last: int) -> None:
    entering: list[int] = []
    truncated = truncate(model, {1: 18, 3: 10}, replace(BUDGETS, between_groups=between))
    for block in truncated.blocks:
        block.register_forward_pre_hook(lambda _, given: entering.append(given[0].values.shape[1]))
    assert truncated(images).scores.isfinite().all()
    assert entering == [24, 18, {"unmerge": 24, "remerge": 18}[between], 10, last, last]


@torch.inference_mode()
def test_blocks_one_by_one_are_those_of_the_network(model: VitAdapter, images: Tensor) -> None:
    levels, _ = model.encoder(images)
    after = [tokens.values for tokens in model.encoder.run(images)]
    assert len(after) == NETWORK.depth
    for level, layer in zip(levels, NETWORK.stages, strict=True):
        assert torch.equal(level.values, after[layer - 1])


def test_which_merges_every_patch_reaches() -> None:
    assert fresh_merges(BUDGETS, NETWORK) == (True, False, True, True)
    assert fresh_merges(replace(BUDGETS, between_groups="remerge"), NETWORK) == (True, False, False, False)
    assert NETWORK.groups == ((1, 2), (3, 4), (5, 5), (6, 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": (64, 80)}, "multiples of 32"),
        ({"patch_size": 8, "image_size": (64, 64)}, r"expected network.patch_size 16"),
        ({"stages": (1, 2, 3, 4)}, "to be the last block, 6"),
        ({"adapter_heads": 3}, "network.adapter_heads to divide network.adapter_dim 16"),
        ({"adapter_heads": 0}, "expected network.adapter_heads between 1 and 8192, got 0"),
        ({"family": "setr", "decoder": "mla"}, "expected network.adapter_heads between 0 and 0, got 2"),
    ],
)
def test_impossible_networks_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        replace(NETWORK, **change)


@pytest.mark.parametrize(
    ("network", "plan"),
    [
        (NETWORK, MergePlan((), (), method="elvit", elvit_layer=3, elvit_grid=(2, 3), elvit_neighbours=3)),
        (Network("segmenter", 32, 6, 2, 5, (64, 96)), MergePlan()),
    ],
)
def test_merging_again_is_refused_where_nothing_can(network: Network, plan: MergePlan) -> None:
    with pytest.raises(RecipeError, match=r'expected merging\.between_groups = "remerge" for ViT-Adapter'):
        Recipe("x", network, replace(plan, between_groups="remerge"), Protocol("camvid", 64, 64, 64))


def test_variants_of_the_public_project_are_refused() -> None:
    state = weights(SHAPES)
    light = {key: value for key, value in state.items() if ".ffn" not in key}
    beit = state | {"backbone.blocks.0.attn.relative_position_bias_table": torch.zeros(3, 2)}
    for wrong, message in ((light, "got the light one"), (beit, "got it on BEiT")):
        with pytest.raises(CheckpointError, match=message):
            state_dict_for(NETWORK, Checkpoint(Path("x.pth"), wrong, None, ()))
