"""Budgets are taken from what thresholds merge on average, and both rules are reported beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from stand_ins import DEMO, dataset_of, evaluation
from test_tune import tune

from algm_deploy.bundle.records import BudgetTuning, Evaluation, MergeTokens
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import verify
from algm_deploy.errors import PlanError
from algm_deploy.evaluation.datasets import Dataset
from algm_deploy.merging import merge_budgets
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import recipe
from algm_deploy.report.plots import Scatter
from algm_deploy.report.tuning import tuning_page
from algm_deploy.timing.protocols import Pace
from algm_deploy.tuning.budgets import PacesOf, budgets_like, knob_of, tune_budget
from algm_deploy.tuning.photos import halves
from algm_deploy.tuning.search import Goal
from algm_deploy.tuning.trial import Trial

GRID = (32, 32)
BY_TAU = {0.7: (424.0, 318.0), 0.8: (724.0, 543.0), 0.9: (1024.0, 1024.0)}  # tokens after CLAP and GBM


def measured(plan: MergePlan, dataset: Dataset) -> Evaluation:
    """Budgets gain a point over thresholds where they were tuned and two on other photos; less merging gains more."""
    if plan == DENSE:
        return evaluation(75.0, 9.0, dataset.split)
    if not plan.budgeted:
        tokens, miou = BY_TAU[plan.clap_threshold], 70 + plan.clap_threshold
    else:
        left = 1024 - 3 * 256 * plan.clap_budget
        tokens = left, left * (1 - plan.gbm_budget)
        miou = 72 - plan.clap_budget + dataset.split.endswith("second-half")
    found = evaluation(miou, tokens[1] / 100, dataset.split)
    names = [one.merge for one in found.tokens]
    return msgspec.structs.replace(
        found, tokens=tuple(MergeTokens(merge=name, mean=mean) for name, mean in zip(names, tokens, strict=True))
    )


def tuned(goal: Goal, whole: bool = False, paces_of: PacesOf | None = None) -> BudgetTuning:
    trial = Trial(measured, DEMO.merging, goal, *halves(dataset_of("a1", "a2")))
    trial = replace(trial, plan=replace(trial.plan, clap_threshold=0.8))
    return tune_budget(trial, GRID, sorted(BY_TAU), whole, paces_of)


def test_budgets_merge_what_the_threshold_merges_on_average() -> None:
    plan = MergePlan(gbm_layers=(5, 7))
    tokens = [MergeTokens(merge=name, mean=mean) for name, mean in (("a", 694.0), ("b", 600.0), ("c", 512.5))]
    found = budgets_like(plan, tokens, GRID)
    assert (found.clap, found.gbm, found.clap_budget) == ("budget", "budget", 0.4297)
    merges = merge_budgets(found, GRID, 1)
    assert merges[1] == 110
    assert 694 - merges[5] - merges[7] == pytest.approx(512.5, abs=1)


def test_of_nothing_a_budget_merges_nothing() -> None:
    tokens = [MergeTokens(merge=name, mean=1024.0) for name in ("clap_1", "gbm_5")]
    assert set(merge_budgets(budgets_like(MergePlan(), tokens, GRID), GRID, 1).values()) == {0}


def test_a_plan_without_clap_goes_by_gbm() -> None:
    plan = MergePlan(clap_layers=())
    found = budgets_like(plan, [MergeTokens(merge="gbm_5", mean=768.0)], GRID)
    assert (found.clap, found.gbm_budget) == ("threshold", 0.25)
    assert (knob_of(plan), knob_of(MergePlan())) == ("gbm_threshold", "clap_threshold")


@pytest.mark.parametrize("plan", [DENSE, MergePlan(clap="budget", clap_budget=0.4, gbm="budget", gbm_budget=0.2)])
def test_a_plan_without_thresholds_has_no_averages(plan: MergePlan) -> None:
    with pytest.raises(PlanError, match="expected a bundle that merges by thresholds"):
        knob_of(plan)


def test_both_rules_are_told_at_equal_cost() -> None:
    found = tuned(Goal("reference", 71.3), whole=True)
    assert found.reached
    assert found.marked.value == 0.8  # 0.7 merges 78 % of the windows
    assert (found.plan.clap_budget, found.plan.gbm_budget) == (0.3906, 0.25)
    assert found.recipe_value == 0.8
    assert [one.value for one in found.thresholds_held_out] == [0.7, 0.8, 0.9]
    assert msgspec.json.decode(msgspec.json.encode(found), type=BudgetTuning) == found
    page = tuning_page(found)
    assert page.lines[0].startswith(
        "budget of 39.1 % of the windows, 25 % of the tokens, as much as clap_threshold 0.8 merges on average, to "
    )
    assert page.lines[-1].endswith("+0.81 points where it was tuned, +1.81 held out")
    both = page.tables[-2:]
    assert [row[0] for row in both[0].rows] == ["0.7", "0.8", "0.9"]
    assert both[1].rows[1][1] == "72.61 (+1.81)"
    assert both[0].rows[1][-2:] == ("5.43", "5.43")
    names = [one.name for one in page.plots[0].series]
    assert names[-2:] == ["by threshold, tuned on", "by threshold, held out"]


def test_times_of_both_rules_stand_beside_their_arithmetic() -> None:
    def paces_of(plans: Sequence[MergePlan]) -> list[Pace]:
        """A budget takes 4 ms where all merge and 10 ms where nothing does, its threshold a tenth more."""
        budget, threshold = plans
        assert budget.budgeted
        assert not threshold.budgeted
        ms = 10 - 6 * budget.clap_budget
        return [Pace(1e3 / one, 10 / one, stable=True) for one in (ms, 1.1 * ms)]

    found = tuned(Goal("reference", 71.3), whole=True, paces_of=paces_of)
    ms = 10 - 6 * 0.3906
    assert found.marked.speedup == pytest.approx(10 / ms)
    assert found.marked in found.tuned_on.candidates
    assert [one.throughput_img_per_s for one in found.thresholds][1] == pytest.approx(1e3 / ms / 1.1)
    page = tuning_page(found)
    here, there = page.tables[-2:]
    assert here.header[-2:] == ("ms a picture", "ms by threshold")
    assert here.rows[1][-2:] == ("7.66", "8.42")
    assert "ms by threshold" not in there.header  # times are taken where it was tuned
    _, time, *others = page.plots
    assert isinstance(time, Scatter)
    assert [one.name for one in time.series][1:] == ["chosen", "by threshold, tuned on"]
    assert time.series[0].points[-1] == (pytest.approx(10.0), found.tuned_on.dense.miou_percent, "dense")
    assert "throughput" not in " ".join(one.caption for one in others)


def test_without_a_whole_curve_one_threshold_is_held_out() -> None:
    found = tuned(Goal("reference", 99))
    assert not found.reached
    assert [one.value for one in found.thresholds_held_out] == [found.marked.value]
    page = tuning_page(found)
    assert "no clap_threshold of equal cost qualifies" in page.lines[0]
    assert len(page.tables[-1].rows) == 1


def test_the_command_writes_a_recipe_with_budgets(
    bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "budget.toml"
    flags = ("--drop", "100", "--values", "0.8,0.95", "--curve", "--time")
    assert tune("budget", bundle, output, *flags, data=photos) == 2
    assert "expected a bundle that was verified on torch" in capsys.readouterr().err
    assert tune("budget", bundle, output, *flags, "--variant", "reduction=random", data=photos) == 2
    assert "expected no --time with --variant" in capsys.readouterr().err
    assert verify(bundle, "torch", count=1, progress=False).passed
    assert tune("budget", Bundle.open(bundle.path), output, *flags, data=photos) == 0
    merging = recipe(str(output)).merging
    assert (merging.clap, merging.gbm) == ("budget", "budget")
    record = next(one for one in Bundle.open(bundle.path).manifest.tunings if isinstance(one, BudgetTuning))
    assert record.plan == merging
    for budget, threshold in zip(record.tuned_on.candidates, record.thresholds, strict=True):
        assert budget.speedup
        assert threshold.speedup
        assert budget.throughput_img_per_s != threshold.throughput_img_per_s
        for ours, theirs in zip(budget.tokens, threshold.tokens, strict=True):
            assert ours.min == ours.max
            assert ours.mean == pytest.approx(theirs.mean, abs=2)
    told = capsys.readouterr()
    assert "which is the paper's rule" in told.out
    assert "budget " in told.err
    assert "by threshold, held out" in output.with_suffix(".html").read_text()
    picture = output.with_suffix(".svg").read_text()
    for text in ("accuracy against arithmetic", "accuracy against time in PyTorch", "by threshold, tuned on"):
        assert f">{text}</text>" in picture
    assert tune("budget", bundle, output, "--tau", "0.9", "--aim", "best", data=photos) == 2
    assert "is searched for its clap_threshold" in capsys.readouterr().err
