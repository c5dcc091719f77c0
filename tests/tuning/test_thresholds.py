"""Goals choose the threshold they describe, on one part of the data, and say so where none reaches them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import structs
from stand_ins import DEMO, dataset_of, evaluation, speed, trial

from algm_deploy.bundle.records import Aim, Candidate, Evaluation, ThresholdTuning
from algm_deploy.errors import DatasetError, ImageError, PlanError
from algm_deploy.evaluation.datasets import Dataset
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.report.tuning import tuning_page
from algm_deploy.tuning.photos import check_apart, content_of, halves
from algm_deploy.tuning.search import Goal, search
from algm_deploy.tuning.thresholds import default_values, tune_threshold
from algm_deploy.tuning.trial import miou_of

TAUS = [0.5 + 0.005 * index for index in range(100)]
TUNE = partial(tune_threshold, knob="clap_threshold", values=TAUS)


def miou_at(tau: float) -> float:
    """It rises to 75 at 0.8 and falls to 74 at 0.99."""
    return 75 - 50 * (0.8 - tau) if tau < 0.8 else 75 - (tau - 0.8) / 0.19


def candidate(tau: float) -> Candidate:
    """mIoU as above; multiply-adds rise throughout."""
    return Candidate(value=tau, miou_percent=miou_at(tau), gmacs_per_window_mean=10 * tau)


def measured(tau: float | None, dataset: Dataset) -> Evaluation:
    tau = 1.0 if tau is None else tau
    return evaluation(miou_at(tau), 10 * tau, dataset.split)


def test_the_reference_goal_merges_most() -> None:
    assert search(Goal("reference", 74), TAUS, candidate).chosen == candidate(TAUS[56])
    assert TAUS[56] == pytest.approx(0.78)


def test_the_best_goal_takes_the_top() -> None:
    chosen = search(Goal("best"), TAUS, candidate).chosen
    assert chosen is not None
    assert chosen.value == pytest.approx(0.8)


def test_the_arithmetic_goal_merges_least_within_its_budget() -> None:
    found = search(Goal("gmacs", 6.51), TAUS, candidate)
    assert found.chosen is not None
    assert found.chosen.value == pytest.approx(0.65)
    assert [point.value for point in found.candidates] == sorted(point.value for point in found.candidates)


def test_the_throughput_goal_merges_least_that_is_fast_enough() -> None:
    def timed(tau: float) -> Candidate:
        return msgspec.structs.replace(candidate(tau), throughput_img_per_s=100 - 50 * tau)

    found = search(Goal("throughput", 65), TAUS, timed)
    assert found.chosen is not None
    assert found.chosen.value == pytest.approx(0.7)
    assert found.candidates[0].throughput_img_per_s == 75
    assert search(Goal("throughput", 80), TAUS, timed).marked.value == 0.5


@pytest.mark.parametrize(("goal", "nearest"), [(Goal("reference", 75.5), 0.8), (Goal("gmacs", 1), 0.5)])
def test_the_nearest_is_marked_where_nothing_qualifies(goal: Goal, nearest: float) -> None:
    found = search(goal, TAUS, candidate)
    assert found.chosen is None
    assert found.marked is max(found.candidates, key=goal.nearness)
    assert found.marked.value == pytest.approx(nearest)


def test_arithmetic_that_is_not_counted_cannot_be_a_goal() -> None:
    with pytest.raises(PlanError, match="multiply-adds are not counted"):
        search(Goal("gmacs", 5), TAUS, lambda tau: Candidate(value=tau, miou_percent=70))


def test_every_aim_says_what_it_is() -> None:
    told = set()
    for aim in get_args(Aim):
        goal = Goal(aim, None if aim == "best" else 5)
        found = TUNE(trial(measured, goal), values=[0.5, 1], speed_of=lambda _: speed(9))
        told.add(tuning_page(found).lines[0].partition(" to ")[2].partition(":")[0])
    assert len(told) == len(get_args(Aim))


@pytest.mark.parametrize(
    ("knob", "plan"), [("clap_threshold", {"clap_layers": ()}), ("gbm_threshold", {"gbm_layers": ()})]
)
def test_a_plan_must_read_the_threshold(knob: Any, plan: Mapping[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"expected a plan that reads {knob}"):
        TUNE(trial(measured, Goal("best"), plan=replace(DEMO.merging, **plan)), knob=knob)


def test_candidates_end_where_nothing_merges() -> None:
    assert default_values(MergePlan(), "clap_threshold")[-1] > 1
    assert max(default_values(MergePlan(), "gbm_threshold")) == 8
    fixed = MergePlan(gbm="fixed")
    assert default_values(fixed, "gbm_threshold") == default_values(MergePlan(), "clap_threshold")


def test_halves_keep_neighbours_and_slices_together() -> None:
    first, second = halves(dataset_of("a1", "a2", "a3", "b1", "b2"))
    assert [sample.name for sample in first.samples] == ["a1", "a2", "b1"]
    assert [sample.name for sample in second.samples] == ["a3", "b2"]
    assert (first.split, second.split) == ("val-first-half", "val-second-half")
    with pytest.raises(DatasetError, match="others to report on"):
        halves(dataset_of("a1", "b1"))


def test_a_photo_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"absent\.png: expected a photo or its labels, got No such file"):
        content_of(tmp_path / "absent.png")
    with pytest.raises(ImageError, match="a1: expected a photo"):
        check_apart(dataset_of("a1"), dataset_of("b1"))


def test_an_evaluation_without_labels_has_no_miou() -> None:
    with pytest.raises(DatasetError, match="a folder of pictures: expected labelled pixels, got none"):
        miou_of(evaluation(None, split="all"))


def test_a_search_over_a_part_of_the_photos_is_none() -> None:
    """Photos that could not be evaluated would be missing in every figure without a word."""
    part = msgspec.structs.replace(evaluation(50.0, split="all"), failures={"a": "a.png: cut", "b": "b.png: cut"})
    with pytest.raises(DatasetError, match=r"2 cannot be \(a\.png: cut; b\.png: cut\): mend these files"):
        miou_of(part)


def test_a_threshold_is_chosen_on_one_part_and_reported_on_the_other() -> None:
    asked: list[tuple[str, float | None]] = []

    def evaluate(tau: float | None, dataset: Dataset) -> Evaluation:
        asked.append((dataset.split, tau))
        night = 70.0 if tau is None else 60.0
        miou, gmacs = (74.5, 7.2) if tau is None else (miou_at(tau), 10 * tau)
        return evaluation(miou, gmacs, dataset.split, by_slice={"day": 75.0, "night": night})

    found = TUNE(trial(evaluate, Goal("reference", 74.5)))
    chosen = found.marked.value
    assert found.reached
    assert chosen == pytest.approx(0.79)
    assert found.recipe_value == DEMO.merging.clap_threshold
    assert {tau for split, tau in asked if split == "val-second-half"} == {None, found.recipe_value, chosen}
    assert found.held_out.dense.miou_percent_by_slice == {"day": 75.0, "night": 70.0}
    assert found.held_out.dense.gmacs_per_window_mean == 7.0  # arithmetic without looking for what might merge
    page = tuning_page(found)
    assert any("where it was tuned); the weakest slice: night (-10.00 points)" in line for line in page.lines)
    points, held = page.tables
    assert [row[1] for row in points.rows].count("chosen") == 1
    assert points.header[4:7] == ("day", "night", "GMACs")
    assert points.header[7:] == ("tokens after CLAP", "tokens after GBM")
    assert points.rows[0][7:] == ("600", "400")
    assert points.rows[-1] == ("dense", "", "74.50", "+0.00", "75.00", "70.00", "7.00", "-", "-")
    assert [row[0] for row in held.rows] == ["all", "day", "night"]
    assert held.rows[2][-1] == "60.00 (-10.00)"


def test_without_an_answer_the_nearest_is_shown() -> None:
    found = TUNE(trial(measured, Goal("reference", 90)))
    assert not found.reached
    page = tuning_page(found)
    assert "no clap_threshold qualifies" in page.lines[0]
    assert any("nearest" in row for row in page.tables[0].rows)


def test_a_lone_candidate_that_would_qualify_is_mentioned() -> None:
    def evaluate(tau: float | None, dataset: Dataset) -> Evaluation:
        tau = 1.0 if tau is None else tau
        return evaluation(70 if 0.5 < tau <= 0.8 else 74 if tau > 0.99 else 75 + tau * (tau > 0.8), 7)

    line = tuning_page(TUNE(trial(evaluate, Goal("reference", 75)))).lines[0]
    assert "0.5 would qualify alone" in line
    assert "0.995 would not qualify, although larger" in line


def test_a_whole_curve_is_measured_on_both_parts_and_drawn_by_slice() -> None:
    asked: list[tuple[str, float | None]] = []

    def evaluate(tau: float | None, dataset: Dataset) -> Evaluation:
        asked.append((dataset.split, tau))
        return evaluation(
            75, 7, dataset.split, by_slice={"day": 75, "night": 75 - (0 if tau is None else 20 * (1 - tau))}
        )

    reference = "other", lambda data: evaluation(76, 7, data.split)
    given = trial(evaluate, Goal("reference", 70), reference=reference)
    found = TUNE(given, values=[0.6, 0.7, 0.9], whole=True)
    for split in (given.tuning.split, given.held_out.split):
        assert {tau for where, tau in asked if where == split} >= {None, 0.6, 0.7, 0.9}
    page = tuning_page(found)
    tuned, held, summary = page.tables
    assert [row[0] for row in held.rows] == [row[0] for row in tuned.rows] == ["0.6", "0.7", "0.9", "dense"]
    assert "reference (other)" in summary.header
    *_, by_slice, tokens = page.plots
    marks = {one.name: [y for _, y, _ in one.points] for one in by_slice.series}
    assert marks["night"] == pytest.approx([-8, -6, -2])
    assert marks["day"] == marks["all"] == [0, 0, 0]
    assert tokens.counts == {"CLAP": (1, 3), "GBM": (1, 3)}
    assert tokens.means == {"CLAP": 600, "GBM": 400}
    first = found.held_out.candidates[0]
    assert first.miou_percent_by_slice == pytest.approx({"day": 75, "night": 67})
    assert first.tokens[-1].mean == 400
    assert found.pictured == ("clap_threshold", (0.6, 0.7, 0.9))
    assert msgspec.json.decode(msgspec.json.encode(found), type=ThresholdTuning) == found


def test_tables_name_every_merge() -> None:
    plan = MergePlan(clap_layers=(1,), gbm_layers=(3, 5))

    def evaluate(plan: MergePlan, dataset: Dataset) -> Evaluation:
        return evaluation(70, 5, dataset.split, plan)

    page = tuning_page(TUNE(trial(evaluate, Goal("best"), by_plan=True, plan=plan), values=[0.8, 0.9]))
    assert page.tables[0].header[-3:] == ("tokens after CLAP", "tokens after GBM 3", "tokens after GBM 5")
    assert page.tables[0].rows[0][-3:] == ("600", "600", "400")
    assert list(page.plots[-1].counts) == ["CLAP", "GBM 3", "GBM 5"]


def test_variants_are_recorded_and_not_pictured() -> None:
    found = TUNE(trial(measured, Goal("best"), variant=("reduction=first",)))
    assert found.title == "CLAP threshold, aim: best, reduction=first"
    assert found.variant == ("reduction=first",)
    assert found.pictured is None


def test_a_table_names_what_gains_are_against() -> None:
    def timed(plan: MergePlan) -> Any:
        return structs.replace(speed(100), speedup=0.8, baseline="dense_cudnn")

    found = TUNE(trial(measured, Goal("throughput", 10)), speed_of=timed)
    assert msgspec.convert(msgspec.to_builtins(found), ThresholdTuning) == found
    assert tuning_page(found).tables[0].rows[0][-2:] == ("0.80", "dense, cuDNN attention")


def test_unsteady_times_are_told() -> None:
    def timed(plan: MergePlan) -> Any:
        return speed(100 - 50 * plan.clap_threshold, stable=plan.clap_threshold < 0.99)

    page = tuning_page(TUNE(trial(measured, Goal("throughput", 10)), speed_of=timed))
    assert page.lines[-1].startswith("times were not steady at 0.995:")
    assert page.tables[0].header[-3:] == ("img/s", "times as fast", "against")
    assert page.tables[0].rows[0][-3:] == ("75.0", "2.00", "dense")
    assert page.tables[0].rows[-1][-3:] == ("-", "-", "-")
    assert [plot.x_label for plot in page.plots[:-1]] == ["GMACs per window", "clap_threshold", "img/s"]


def test_a_plan_without_a_gain_is_told() -> None:
    """The dense network that others are told against may fail beside one of them."""

    def timed(plan: MergePlan) -> Any:
        found = structs.replace(speed(100), speedup=0.8, baseline="dense_cudnn")
        return found if plan.clap_threshold < 0.99 else structs.replace(found, speedup=None, baseline="dense")

    page = tuning_page(TUNE(trial(measured, Goal("throughput", 10)), speed_of=timed))
    said = "no gain is told at 0.995: dense, cuDNN attention, which others are told against, failed there"
    assert page.lines[-1] == said
    assert page.tables[0].rows[-2][-3:] == ("100.0", "-", "-")
