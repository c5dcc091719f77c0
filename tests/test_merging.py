"""Networks with filled merge slots: the published results, replayed decisions, and what stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algm_deploy.errors import PlanError
from algm_deploy.merging import insert_merging, merge_inputs, replay_merging
from algm_deploy.models.scores import TokenScores, upsample_scores
from algm_deploy.models.segmenter import Segmenter
from algm_deploy.models.vit import KeepTokens
from algm_deploy.recipe.plan import DENSE, MergePlan

Golden = Callable[[str], Segmenter]
PLAN = MergePlan(clap_layers=(1,), gbm_layers=(3,), clap_threshold=0.7)
PLANS = {
    "published": PLAN,
    "paper": replace(PLAN, semantics="paper", gbm="fixed", gbm_threshold=0.8),
    "batch_min": replace(PLAN, batch="batch_min"),
    "raster": replace(PLAN, order="raster"),
    "several_gbm": replace(PLAN, gbm_layers=(2, 4)),
    "clap_only": replace(PLAN, gbm_layers=()),
    "gbm_only": replace(PLAN, clap_layers=()),
    "window_3x2": replace(PLAN, window=(3, 2)),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def normalised(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).float() / 127.5 - 1


def run(model: Segmenter, plan: MergePlan, images: Tensor, maps: tuple[Tensor, ...] = ()) -> TokenScores:
    with torch.no_grad():
        result: TokenScores = model(images, merge_inputs(plan.clap_threshold, plan.gbm_threshold, maps))
    return result


def patch_scores(result: TokenScores) -> Tensor:
    """Scores (B, N, K) of every patch."""
    scores: Tensor = torch.ops.algm.unmerge(result.scores, result.map, result.prefix)
    return scores


def counts(result: TokenScores) -> list[list[int]]:
    """Tokens behind each merge, of each image."""
    return [stage.length.tolist() for stage in result.stages]


@pytest.mark.parametrize("name", [f"net_{i:02}" for i in range(8)])
def test_golden_networks(vectors_dir: Path, golden_segmenter: Golden, name: str) -> None:
    golden = np.load(vectors_dir / f"{name}.npz")
    meta = json.loads(str(golden["meta"]))
    first, *others = meta["merge_layers"]
    plan = MergePlan((first,), tuple(others), tuple(meta["window"]), meta["tau"], batch="batch_min")
    model, image = golden_segmenter(meta["decoder"]), torch.from_numpy(golden["image"]).float()
    for network, logits in ((model, "base_logits"), (insert_merging(model, plan), "logits")):
        result = run(network, plan, image)
        full = upsample_scores(result, (8, 8), (128, 128))[:, :, ::4, ::4]
        np.testing.assert_allclose(full.numpy(), golden[logits], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(result.map.numpy() - 1, golden["token_map"])
    merged = [golden["counts"][layer - 1] for layer in meta["merge_layers"]]
    assert counts(result) == [[n] * len(image) for n in merged]


@pytest.mark.parametrize("decoder", ["mask_transformer", "linear"])
def test_an_empty_plan_changes_no_bit(golden_segmenter: Golden, blob_images: Any, decoder: str) -> None:
    model, images = golden_segmenter(decoder), normalised(blob_images(2))
    plain, empty = run(model, DENSE, images), run(insert_merging(model, DENSE), DENSE, images)
    assert torch.equal(plain.scores, empty.scores)
    assert empty.stages == []


def test_thresholds_that_merge_nothing_equal_the_dense_network(golden_segmenter: Golden, blob_images: Any) -> None:
    """In the paper's semantics both thresholds are similarities, which 1.5 excludes."""
    model, images = golden_segmenter("mask_transformer"), normalised(blob_images(2))
    plan = replace(PLANS["paper"], clap_threshold=1.5, gbm_threshold=1.5)
    result = run(insert_merging(model, plan), plan, images)
    assert counts(result) == [[65, 65], [65, 65]]
    torch.testing.assert_close(patch_scores(result), patch_scores(run(model, DENSE, images)), rtol=0, atol=2e-6)


def test_parameters_are_shared_and_the_original_stays(golden_segmenter: Golden) -> None:
    model = golden_segmenter("mask_transformer")
    merged = insert_merging(model, PLAN)
    assert [p.data_ptr() for p in merged.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert all(isinstance(block.merge, KeepTokens) for block in model.blocks)
    filled = [index + 1 for index, block in enumerate(merged.blocks) if not isinstance(block.merge, KeepTokens)]
    assert filled == [1, 3]
    assert merged.state_dict().keys() == model.state_dict().keys()


def test_a_second_plan_replaces_the_first(golden_segmenter: Golden) -> None:
    again = insert_merging(insert_merging(golden_segmenter("linear"), PLAN), replace(PLAN, gbm_layers=(4,)))
    filled = [index + 1 for index, block in enumerate(again.blocks) if not isinstance(block.merge, KeepTokens)]
    assert filled == [1, 4]


@pytest.mark.parametrize("plan", [p for p in PLANS.values() if p.batch == "per_image"])
def test_an_image_of_a_batch_equals_itself_alone(golden_segmenter: Golden, blob_images: Any, plan: MergePlan) -> None:
    model, images = insert_merging(golden_segmenter("mask_transformer"), plan), normalised(blob_images(3))
    together = run(model, plan, images)
    assert any(len(set(stage)) > 1 for stage in counts(together))  # some image is padded
    for index in range(3):
        alone = run(model, plan, images[index : index + 1])
        assert counts(alone) == [[stage[index]] for stage in counts(together)]
        assert torch.equal(alone.map[0], together.map[index])
        torch.testing.assert_close(patch_scores(alone)[0], patch_scores(together)[index], rtol=0, atol=2e-6)


def test_batch_min_gives_all_images_the_smallest_count(golden_segmenter: Golden, blob_images: Any) -> None:
    plan = PLANS["batch_min"]
    model, images = golden_segmenter("mask_transformer"), normalised(blob_images(3))
    shared = counts(run(insert_merging(model, plan), plan, images))
    alone = counts(run(insert_merging(model, PLAN), PLAN, images))
    assert shared[0] == [max(alone[0])] * 3
    assert len(set(shared[1])) == 1


@every_plan
@pytest.mark.parametrize("decoder", ["mask_transformer", "linear"])
def test_replaying_its_own_maps_gives_the_same_scores(
    golden_segmenter: Golden, blob_images: Any, plan: MergePlan, decoder: str
) -> None:
    model, images = golden_segmenter(decoder), normalised(blob_images(3))
    decided = run(insert_merging(model, plan), plan, images)
    replayed = run(replay_merging(model, plan), DENSE, images, tuple(stage.map for stage in decided.stages))
    assert counts(replayed) == counts(decided)
    assert max(counts(decided)[-1]) < 65
    torch.testing.assert_close(patch_scores(replayed), patch_scores(decided), rtol=0, atol=2e-6)


def test_replaying_other_maps_changes_the_scores(golden_segmenter: Golden, blob_images: Any) -> None:
    model, images = golden_segmenter("mask_transformer"), normalised(blob_images(2))
    maps = tuple(stage.map for stage in run(insert_merging(model, PLAN), PLAN, images).stages)
    right = patch_scores(run(replay_merging(model, PLAN), PLAN, images, maps))
    swapped = patch_scores(run(replay_merging(model, PLAN), PLAN, images, tuple(m.flip(0) for m in maps)))
    assert (right - swapped).abs().amax() > 0.1


def test_token_order_does_not_matter_to_the_scores(golden_segmenter: Golden, blob_images: Any) -> None:
    """CLAP alone: the order of merged windows moves rows, not patches. (Behind GBM it decides who may join whom.)"""
    model, images = golden_segmenter("mask_transformer"), normalised(blob_images(2))
    results = []
    for order in ("published", "raster"):
        plan = replace(PLANS["clap_only"], order=order)
        results.append(run(insert_merging(model, plan), plan, images))
    assert not torch.equal(results[0].map, results[1].map)
    torch.testing.assert_close(patch_scores(results[0]), patch_scores(results[1]), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (MergePlan((1,), (5,)), "layer 5, the network has 4"),
        (MergePlan((1,), (), window=(9, 2)), "9x2 patches does not fit a grid of 8x8"),
        (MergePlan((1,), (), window=(2, 9)), "2x9 patches does not fit a grid of 8x8"),
    ],
)
def test_plans_that_do_not_fit(golden_segmenter: Golden, plan: MergePlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        insert_merging(golden_segmenter("linear"), plan)


def test_a_window_does_not_matter_without_clap(golden_segmenter: Golden) -> None:
    insert_merging(golden_segmenter("linear"), MergePlan((), (2,), window=(9, 9)))


@pytest.mark.parametrize("plan", [PLANS["published"], PLANS["paper"]], ids=["code", "paper"])
def test_a_training_step_reaches_every_parameter(golden_segmenter: Golden, blob_images: Any, plan: MergePlan) -> None:
    model = golden_segmenter("mask_transformer").requires_grad_()
    merged = insert_merging(model, plan)
    images, target = normalised(blob_images(2)), torch.arange(2 * 64).reshape(2, 64) % 11
    optimizer = torch.optim.SGD(merged.parameters(), lr=1e-3)

    def loss() -> Tensor:
        result = merged(images, merge_inputs(plan.clap_threshold, plan.gbm_threshold))
        return torch.nn.functional.cross_entropy(patch_scores(result).flatten(0, 1), target.flatten())

    before = loss()
    before.backward()
    silent = [name for name, p in merged.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert silent == []
    optimizer.step()
    assert loss() < before
    assert torch.equal(model.encoder.cls_token, merged.encoder.cls_token)
