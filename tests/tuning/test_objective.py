"""Goals choose the threshold they describe, on one part of the data, and say so where none reaches them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algm_deploy.errors import DatasetError, PlanError
from algm_deploy.evaluation.datasets import Dataset, Sample
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import MergePlan
from algm_deploy.tuning.findings import Page, find_threshold
from algm_deploy.tuning.objective import (
    AIMS,
    Goal,
    default_candidates,
    halves,
    search,
    tune_threshold,
    tuned_recipe,
    worst_slice,
)

DEMO = recipe("demo")
TAUS = [0.5 + 0.005 * index for index in range(100)]


def record_of(miou: float, gmacs: float | None, split: str = "val", night: float = 0.0) -> dict[str, Any]:
    part = {"images": 2, "miou_percent": miou}
    return {
        **part,
        "dataset": "folder",
        "split": split,
        "gmacs_per_window_mean": gmacs,
        "gmacs_per_window_dense": 7.0,
        "tokens_after_clap_mean": 600.0,
        "tokens_after_gbm_mean": 400.0,
        "token_histograms": {"token_edges": [0, 512, 1024], "windows_by_merge": {"clap": [1, 3], "gbm": [4, 0]}},
        "slices": {"day": part, "night": {"images": 1, "miou_percent": miou - night}},
    }


def measure(tau: float) -> dict[str, Any]:
    """mIoU rises to 75 at 0.8 and falls to 74 at 0.99; multiply-adds rise throughout."""
    miou = 75 - 50 * (0.8 - tau) if tau < 0.8 else 75 - (tau - 0.8) / 0.19
    return record_of(miou, 10 * tau)


def test_the_reference_goal_merges_most() -> None:
    tuned = search(Goal("reference", 74), "tau", TAUS, measure)
    assert tuned.chosen is not None
    assert tuned.chosen.value == pytest.approx(0.78)


def test_the_best_goal_takes_the_top() -> None:
    tuned = search(Goal("best"), "tau", TAUS, measure)
    assert tuned.chosen is not None
    assert tuned.chosen.value == pytest.approx(0.8)


def test_the_arithmetic_goal_merges_least_within_its_budget() -> None:
    tuned = search(Goal("gmacs", 6.51), "tau", TAUS, measure)
    assert tuned.chosen is not None
    assert tuned.chosen.value == pytest.approx(0.65)
    assert [point.value for point in tuned.points] == sorted(point.value for point in tuned.points)


def test_the_throughput_goal_merges_least_that_is_fast_enough() -> None:
    def timed(tau: float) -> dict[str, Any]:
        return {**measure(tau), "throughput_img_per_s": 100 - 50 * tau}

    tuned = search(Goal("throughput", 65), "tau", TAUS, timed)
    assert tuned.chosen is not None
    assert tuned.chosen.value == pytest.approx(0.7)
    assert tuned.record()["points"][0]["throughput_img_per_s"] == 75
    assert search(Goal("throughput", 80), "tau", TAUS, timed).nearest.value == 0.5


@pytest.mark.parametrize(("goal", "nearest"), [(Goal("reference", 75.5), 0.8), (Goal("gmacs", 1), 0.5)])
def test_the_nearest_is_shown_where_nothing_qualifies(goal: Goal, nearest: float) -> None:
    tuned = search(goal, "tau", TAUS, measure)
    assert tuned.chosen is None
    assert tuned.record()["chosen"] is None
    best_measured = max(tuned.points, key=goal.nearness)
    assert tuned.nearest is best_measured
    assert tuned.nearest.value == pytest.approx(nearest)


def test_arithmetic_that_is_not_counted_cannot_be_a_goal() -> None:
    with pytest.raises(PlanError, match="multiply-adds are not counted"):
        search(Goal("gmacs", 5), "tau", TAUS, lambda tau: record_of(70, None))


def test_every_goal_says_what_it_is() -> None:
    assert len({str(Goal(aim, 5)) for aim in AIMS}) == len(AIMS)


@pytest.mark.parametrize(("knob", "plan"), [("tau", {"clap_layers": ()}), ("gbm", {"gbm_layers": ()})])
def test_a_plan_must_read_the_threshold(knob: str, plan: Mapping[str, Any]) -> None:
    dataset = dataset_of("a")
    with pytest.raises(PlanError, match="expected a plan that reads"):
        tune_threshold(replace(DEMO.merging, **plan), knob, Goal("best"), TAUS, lambda *_: measure(0.8), dataset)


def test_candidates_end_where_nothing_merges() -> None:
    assert default_candidates(MergePlan(), "tau")[-1] > 1
    assert max(default_candidates(MergePlan(), "gbm")) == 8
    assert default_candidates(MergePlan(gbm_mode="fixed"), "gbm") == default_candidates(MergePlan(), "tau")


def dataset_of(*names: str) -> Dataset:
    samples = tuple(Sample(name, Path(name), Path(name), name[0]) for name in sorted(names))
    return Dataset("folder", "val", Path(), ("x",), ((0, 0, 0),), samples, np.zeros(256, np.int16))


def test_halves_keep_neighbours_and_slices_together() -> None:
    first, second = halves(dataset_of("a1", "a2", "a3", "b1", "b2"))
    assert [sample.name for sample in first.samples] == ["a1", "a2", "b1"]
    assert [sample.name for sample in second.samples] == ["a3", "b2"]
    assert (first.split, second.split) == ("val-first-half", "val-second-half")
    with pytest.raises(DatasetError, match="others to report on"):
        halves(dataset_of("a1", "b1"))


def test_the_worst_slice_is_named() -> None:
    assert worst_slice(record_of(75, 7), record_of(74, 5, night=3)) == ("night", -4)


def test_thresholds_enter_the_recipe() -> None:
    assert tuned_recipe(DEMO, "tau", 0.9).merging == replace(DEMO.merging, clap_threshold=0.9)
    assert tuned_recipe(DEMO, "gbm", 2).merging == replace(DEMO.merging, gbm_threshold=2)


def test_a_finding_is_chosen_on_one_part_and_reported_on_the_other() -> None:
    asked: list[tuple[str, float | None]] = []

    def evaluate(dataset: Dataset, thresholds: Mapping[str, float] | None) -> dict[str, Any]:
        tau = None if thresholds is None else thresholds.get("clap_threshold", 0.797)
        asked.append((dataset.split, tau))
        night = 0 if tau is None else 10
        return {**(record_of(74.5, 7.2) if tau is None else measure(tau)), **record_part(dataset.split, night)}

    def record_part(split: str, night: float) -> dict[str, Any]:
        slices = {"day": {"images": 2, "miou_percent": 75.0}, "night": {"images": 1, "miou_percent": 70.0 - night}}
        return {"split": split, "slices": slices}

    tuning, held_out = halves(dataset_of("a1", "a2"))
    finding = find_threshold(DEMO, "tau", Goal("reference", 74.5), TAUS, evaluate, tuning, held_out)
    assert finding.recipe is not None
    chosen = finding.recipe.merging.clap_threshold
    assert chosen == pytest.approx(0.79)
    assert {tau for split, tau in asked if split == "val-second-half"} == {None, 0.797, chosen}
    assert any("where it was tuned); the weakest slice: night (-10.00 points)" in line for line in finding.page.lines)
    points, held = finding.page.tables
    assert [row[1] for row in points.rows].count("chosen") == 1
    assert points.header[4:7] == ("day", "night", "GMACs")
    assert points.rows[-1][:7] == (
        "dense",
        "",
        "74.50",
        "+0.00",
        "75.00",
        "70.00",
        "7.00",
    )  # arithmetic without merging
    assert [row[0] for row in held.rows] == ["all", "day", "night"]
    assert held.rows[2][-1] == "60.00 (-10.00)"
    assert finding.record["held_out"]["dense"]["slices"] == {"day": 75.0, "night": 70.0}


def test_a_finding_without_an_answer_has_no_recipe() -> None:
    tuning, held_out = halves(dataset_of("a1", "a2"))
    finding = find_threshold(
        DEMO,
        "tau",
        Goal("reference", 90),
        TAUS,
        lambda _, t: measure((t or {}).get("clap_threshold", 1)),
        tuning,
        held_out,
    )
    assert finding.recipe is None
    assert "no clap_threshold qualifies" in finding.page.lines[0]
    assert any("nearest" in row for row in finding.page.tables[0].rows)


def test_a_lone_candidate_that_would_qualify_is_mentioned() -> None:
    tuning, held_out = halves(dataset_of("a1", "a2"))

    def evaluate(_: Dataset, thresholds: Mapping[str, float] | None) -> dict[str, Any]:
        tau = (thresholds or {}).get("clap_threshold", 1)
        return record_of(70 if 0.5 < tau <= 0.8 else 74 if tau > 0.99 else 75 + tau * (tau > 0.8), 7)

    finding = find_threshold(DEMO, "tau", Goal("reference", 75), TAUS, evaluate, tuning, held_out)
    assert "0.5 would qualify alone" in finding.page.lines[0]
    assert "0.995 would not qualify, although larger" in finding.page.lines[0]


def test_a_whole_curve_is_measured_on_both_parts_and_drawn_by_slice() -> None:
    tuning, held_out = halves(dataset_of("a1", "a2"))
    asked: list[tuple[str, float | None]] = []

    def evaluate(dataset: Dataset, thresholds: Mapping[str, float] | None) -> dict[str, Any]:
        tau = None if thresholds is None else thresholds.get("clap_threshold", 0.8)
        asked.append((dataset.split, tau))
        return {**measure(tau or 1.0), **record_of(75, 7, dataset.split, night=0 if tau is None else 20 * (1 - tau))}

    goal = Goal("reference", 70)
    reference = "other", lambda data: record_of(76, 7, data.split)
    finding = find_threshold(DEMO, "tau", goal, [0.6, 0.7, 0.9], evaluate, tuning, held_out, reference, whole=True)
    for split in (tuning.split, held_out.split):
        assert {tau for where, tau in asked if where == split} >= {None, 0.6, 0.7, 0.9}
    tuned, held, summary = finding.page.tables
    assert [row[0] for row in held.rows] == [row[0] for row in tuned.rows] == ["0.6", "0.7", "0.9", "dense"]
    assert "reference (other)" in summary.header
    by_slice = finding.page.plots[-1]
    assert [point[1] for point in by_slice.series["night"]] == pytest.approx([-8, -6, -2])
    assert [point[1] for point in by_slice.series["day"]] == [0, 0, 0]
    facts = finding.record["held_out_points"][0]
    assert facts["miou_percent_by_slice"] == {"day": 75, "night": 67}
    assert facts["tokens_after_gbm_mean"] == 400
    assert finding.thresholds == ("clap_threshold", (0.6, 0.7, 0.9))
    assert json.dumps(Page.from_record(json.loads(json.dumps(finding.stored())))) == json.dumps(finding.page)


def test_unsteady_times_are_told() -> None:
    tuning, held_out = halves(dataset_of("a1", "a2"))

    def evaluate(_: Dataset, thresholds: Mapping[str, float] | None) -> dict[str, Any]:
        tau = (thresholds or {}).get("clap_threshold", 1.0)
        return {**measure(tau), "throughput_img_per_s": 100 - 50 * tau, "speedup": 2, "stable": tau < 0.99}

    finding = find_threshold(DEMO, "tau", Goal("throughput", 10), TAUS, evaluate, tuning, held_out)
    assert finding.page.lines[-1].startswith("times were not steady at 0.995:")
    assert finding.page.tables[0].header[-2:] == ("img/s", "times as fast")
    assert [plot.x_label for plot in finding.page.plots] == ["GMACs per window", "clap_threshold", "img/s"]
