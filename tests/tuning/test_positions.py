"""GBM's earliest block: what is measured is the plan, and the search obeys the network's depth."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import evaluate_bundle
from algm_deploy.errors import BundleError, PlanError
from algm_deploy.evaluation.datasets import Dataset, open_dataset
from algm_deploy.recipe.schema import DENSE, MergePlan
from algm_deploy.tuning.findings import find_positions
from algm_deploy.tuning.objective import Goal, halves
from algm_deploy.tuning.positions import PlanEvaluator, earliest_gbm


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    shutil.copytree(tiny_bundle.path, tmp_path / "bundle")
    return Bundle.open(tmp_path / "bundle")


@pytest.fixture
def dataset(blob_images: Callable[[int], np.ndarray], tmp_path: Path) -> Dataset:
    root = tmp_path / "photos"
    for index, pixels in enumerate(blob_images(4)):
        for kind, content in (("images", pixels.transpose(1, 2, 0)), ("labels", pixels[0] // 24)):
            path = root / kind / "day" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(content).save(path)
    names = ", ".join(f'"{index}"' for index in range(11))
    (root / "classes.json").write_text(f'{{"names": [{names}]}}')
    return open_dataset("folder", root, slice_by="folder")


def test_a_plan_in_process_is_the_bundle_with_that_plan(bundle: Bundle, dataset: Dataset) -> None:
    evaluate_plan = PlanEvaluator(bundle, progress=False)
    plan = bundle.recipe.merging
    ours = evaluate_plan(plan, dataset)
    theirs = evaluate_bundle(bundle, "torch", dataset, progress=False).record()
    keys = ("miou_percent", "gmacs_per_window_mean", "tokens_after_clap_mean", "tokens_after_gbm_mean", "slices")
    assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
    higher = evaluate_plan(replace(plan, clap_threshold=0.99), dataset)
    assert higher["tokens_after_clap_mean"] > ours["tokens_after_clap_mean"]
    assert "tokens_after_clap_mean" not in evaluate_plan(DENSE, dataset)


def test_labels_cannot_be_evaluated(bundle: Bundle) -> None:
    recipe = replace(bundle.recipe, output="labels")
    bundle.recipe = recipe
    with pytest.raises(BundleError, match="--output scores"):
        PlanEvaluator(bundle)


class Table:
    """Stands for a `PlanEvaluator`: mIoU is 70 where every GBM stands at `from_layer` or later, else 60."""

    def __init__(self, from_layer: int) -> None:
        self.from_layer, self.plans = from_layer, []

    def __call__(self, plan: MergePlan, dataset: Dataset) -> dict[str, Any]:
        self.plans.append(plan)
        kept = all(layer >= self.from_layer for layer in plan.gbm_layers)
        merges = [f"gbm_{layer}" for layer in plan.gbm_layers] if len(plan.gbm_layers) > 1 else ["gbm"]
        return {
            "miou_percent": 70.0 if kept else 60.0,
            "gmacs_per_window_mean": 5.0,
            "gmacs_per_window_dense": 7.0,
            "dataset": dataset.name,
            "split": dataset.split,
            "images": 2,
            "slices": {},
            "token_histograms": {"token_edges": [0, 64], "windows_by_merge": {merge: [2] for merge in merges}},
            **{f"tokens_after_{merge}_mean": 1.0 for merge in ("clap", *merges)},
        }


def test_the_earliest_block_that_keeps_the_reference(bundle: Bundle, dataset: Dataset) -> None:
    table = Table(3)
    plan = MergePlan(clap_layers=(1,), gbm_layers=(5,), clap_threshold=0.9)
    tuned = earliest_gbm(table, plan, 12, Goal("reference", 70), dataset)
    assert tuned.chosen is not None
    assert tuned.chosen.value == 3
    assert {len(plan.gbm_layers) for plan in table.plans} == {1}
    assert min(plan.gbm_layers[0] for plan in table.plans) == 2  # CLAP stands in 1


def test_the_second_block_stands_behind_the_first(bundle: Bundle, dataset: Dataset) -> None:
    table = Table(3)
    finding = find_positions(table, bundle.recipe, 2, Goal("reference", 70), *halves(dataset))
    assert finding.recipe is not None
    assert finding.recipe.merging == replace(bundle.recipe.merging, gbm_layers=(3, 4))
    assert "3 and 4" in finding.title
    nothing = find_positions(Table(9), bundle.recipe, 2, Goal("reference", 70), *halves(dataset))
    assert nothing.recipe is None


def test_there_must_be_a_block_left(bundle: Bundle, dataset: Dataset) -> None:
    with pytest.raises(PlanError, match="expected a block behind 4 for GBM"):
        earliest_gbm(Table(1), bundle.recipe.merging, 4, Goal("reference", 70), dataset, (4,))
