"""Which records may stand side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from algm_deploy.bundle.records import Evaluation, Speed, TokenHistograms
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import Protocol
from algm_deploy.report.plans import plan_name
from algm_deploy.report.records import (
    Artifact,
    Measured,
    baseline,
    comparable,
    joined,
    may_share_row,
    plan_in_force,
)
from algm_deploy.report.tables import joined_table

PLAN = MergePlan(clap_threshold=0.875)
HERE = Artifact("ab" * 32, PLAN, "fp16", "scores")
PROTOCOL = Protocol("d", 512, 512, 480)


def accuracy(artifact: Artifact = HERE, runtime: str = "torch", **figures: Any) -> Measured[Evaluation]:
    usual = {"images": 3, "miou_percent": 50.0, "pixel_accuracy_percent": 60.0, "dataset": "d", "split": "val"}
    histograms = TokenHistograms(token_edges=(0.0, 64.0), windows_by_merge={})
    known = {**usual, "protocol": PROTOCOL, "labelled_pixels": 9, "token_histograms": histograms, **figures}
    return Measured("bundle", artifact, Evaluation(runtime=runtime, **known))


def speed(artifact: Artifact = HERE, runtime: str = "torch", **figures: Any) -> Measured[Speed]:
    known = {"variant": "merged", "protocol": "latency", "batch": 1, "stable": True, **figures}
    return Measured("bundle", artifact, Speed(runtime=runtime, **known))


def test_the_output_may_differ() -> None:
    assert may_share_row(HERE, HERE)
    assert may_share_row(HERE, replace(HERE, output="labels"))


@pytest.mark.parametrize(
    "other",
    [
        replace(HERE, weights_sha256="cd" * 32),
        replace(HERE, precision="fp32"),
        replace(HERE, plan=DENSE),
        replace(HERE, plan=replace(PLAN, clap_threshold=0.9)),
        replace(HERE, plan=replace(PLAN, gbm_layers=(7,))),
        replace(HERE, plan=replace(PLAN, order="raster")),
        replace(HERE, plan=replace(PLAN, semantics="paper")),
        replace(HERE, truncated=True),
        replace(HERE, cudnn_attention=True),
    ],
    ids=["weights", "precision", "dense", "threshold", "layer", "order", "semantics", "truncated", "attention"],
)
def test_weights_plan_and_precision_may_not(other: Artifact) -> None:
    assert not may_share_row(HERE, other)
    with pytest.raises(ValueError, match="do not share a row"):
        joined_table([(accuracy(), speed(other))])


def test_a_joined_row_names_both_outputs_and_runtimes() -> None:
    fast = speed(replace(HERE, output="labels"), "tensorrt", throughput_img_per_s=913.26, batch=32, device="H100")
    table = joined_table([(accuracy(miou_percent=50.125), fast)])
    (line,) = table.rows
    assert {"torch, scores", "tensorrt, labels", "50.12", "913.3", "32", "H100", "fp16"} <= set(line)


def test_speed_takes_the_accuracy_of_its_own_runtime() -> None:
    other, own = accuracy(runtime="torch", images=9), accuracy(runtime="onnxruntime-cpu", images=3)
    timed = speed(replace(HERE, output="labels"), "onnxruntime-cpu")
    assert joined([other, own], [timed]) == [(own, timed)]
    assert joined([other], [timed]) == [(other, timed)]
    assert joined([accuracy(replace(HERE, precision="fp32"))], [timed]) == []


def test_thresholds_in_force_make_the_plan() -> None:
    assert plan_in_force(PLAN, {"clap_threshold": 0.5}) == replace(PLAN, clap_threshold=0.5)
    # What a runtime got is fp32: a threshold from a recipe and the same one from a run are equal.
    assert plan_in_force(replace(PLAN, clap_threshold=0.9319), {}) == plan_in_force(PLAN, {"clap_threshold": 0.9319})


def test_infinite_thresholds_merge_nothing() -> None:
    off = {"clap_threshold": "inf", "gbm_threshold": "inf"}
    assert plan_in_force(PLAN, off) == DENSE == plan_in_force(replace(DENSE, clap_threshold=0.3), {})
    only = plan_in_force(PLAN, {"clap_threshold": "inf"})
    assert (only.clap_layers, only.gbm_layers) == ((), (5,))
    assert not may_share_row(replace(HERE, plan=only), replace(HERE, plan=DENSE))


def test_plans_are_named_by_threshold_and_by_what_differs() -> None:
    assert plan_name(PLAN, PLAN) == "tau 0.875"
    assert plan_name(DENSE, PLAN) == "dense"
    assert (
        plan_name(replace(PLAN, order="raster", gbm_layers=(7, 9)), PLAN) == "tau 0.875, gbm_layers 7+9, order raster"
    )
    assert plan_name(replace(PLAN, clap_layers=()), replace(PLAN, clap_layers=())) == "GBM only, x 1"


def evaluated(plan: MergePlan, gmacs: float, **changes: Any) -> Measured[Evaluation]:
    return accuracy(replace(HERE, plan=plan), gmacs_per_window_mean=gmacs, **changes)


def test_only_equal_conditions_are_compared() -> None:
    merged, dense = evaluated(PLAN, 20.0), evaluated(DENSE, 38.0)
    (group,) = comparable([merged, dense])
    assert group == [dense, merged]  # most arithmetic first
    assert baseline(group) is dense
    assert baseline([merged]) is None
    for change in (
        {"images": 4},
        {"split": "test"},
        {"dataset": "e"},
        {"protocol": replace(PROTOCOL, window=640)},
        {"labelled_pixels": 8},
    ):
        assert len(comparable([merged, evaluated(DENSE, 38.0, **change)])) == 2


def test_a_recipes_own_plan_is_in_force_by_default() -> None:
    plan = recipe("segmenter_vit_s16_camvid").merging
    assert plan_in_force(plan, {}).clap_threshold == pytest.approx(0.9319, abs=1e-7)
