"""GBM's earliest block: what is measured is the plan, and the search obeys the network's depth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stand_ins import evaluation, trial

from algm_deploy.bundle.records import Evaluation
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli.arguments import given_settings
from algm_deploy.cli.parser import parser
from algm_deploy.deployment import evaluate
from algm_deploy.errors import BundleError, PlanError
from algm_deploy.evaluation.datasets import Dataset
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.report.tuning import tuning_page
from algm_deploy.tuning.positions import PlanEvaluator, earliest_gbm, tune_positions
from algm_deploy.tuning.search import Goal
from algm_deploy.tuning.trial import Trial

TINY = MergePlan(clap_layers=(1,), gbm_layers=(3,), clap_threshold=0.9)


def test_a_plan_in_process_is_the_bundle_with_that_plan(bundle: Bundle, dataset: Dataset) -> None:
    evaluate_plan = PlanEvaluator(bundle, progress=False)
    plan = bundle.recipe.merging
    ours = evaluate_plan(plan, dataset)
    theirs = evaluate(bundle, dataset, "torch", progress=False)
    for name in ("miou_percent", "gmacs_per_window_mean", "tokens", "slices", "thresholds", "runtime"):
        assert getattr(ours, name) == getattr(theirs, name), name
    higher = evaluate_plan(replace(plan, clap_threshold=0.99), dataset)
    assert higher.tokens[0].mean > ours.tokens[0].mean
    assert [one.merge for one in ours.tokens] == ["clap_1", "gbm_3"]
    assert not evaluate_plan(DENSE, dataset).tokens


def test_labels_cannot_be_evaluated_and_the_advice_works(labels_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"this bundle gives labels: .* export it with --scores$"):
        PlanEvaluator(labels_bundle)
    options = parser().parse_args(["export", "checkpoint", "-o", "bundle", "--scores"])
    assert given_settings(options) == {"output": "scores"}


class Table:
    """Stands for a `PlanEvaluator`: mIoU is 70 where every GBM stands at `from_layer` or later, else 60."""

    def __init__(self, from_layer: int) -> None:
        self.from_layer, self.plans = from_layer, []

    def __call__(self, plan: MergePlan, dataset: Dataset) -> Evaluation:
        self.plans.append(plan)
        kept = all(layer >= self.from_layer for layer in plan.gbm_layers)
        return evaluation(70 if kept else 60, 5, dataset.split, plan)


def given(table: Table, plan: MergePlan = TINY) -> Trial:
    return trial(table, Goal("reference", 70), by_plan=True, plan=plan)


def test_the_earliest_block_that_keeps_the_reference() -> None:
    table = Table(3)
    found = earliest_gbm(given(table, MergePlan(clap_layers=(1,), gbm_layers=(5,), clap_threshold=0.9)), 12)
    assert found.chosen is not None
    assert found.chosen.value == 3
    assert {len(plan.gbm_layers) for plan in table.plans} == {1}
    assert min(plan.gbm_layers[0] for plan in table.plans) == 2  # CLAP stands in 1


def test_the_second_block_stands_after_the_first() -> None:
    found = tune_positions(given(Table(3)), 4, 2)
    assert found.reached
    assert (found.layers, found.recipe_layers) == ((3, 4), (3,))
    assert found.title == "GBM in block 3 and 4"
    nothing = tune_positions(given(Table(9)), 4, 2)
    assert not nothing.reached
    assert len(nothing.layers) == 1


def test_every_row_tells_the_tokens_of_its_own_blocks() -> None:
    page = tuning_page(tune_positions(given(Table(2)), 4))
    assert page.tables[0].header[0] == "GBM block"
    assert page.tables[0].header[-2:] == ("tokens after CLAP", "tokens after GBM")
    assert [row[-2:] for row in page.tables[0].rows] == [("600", "400")] * 3 + [("-", "-")]
    assert page.lines[0].startswith("GBM in block 2 to merge most")
    page = tuning_page(tune_positions(given(Table(2)), 4, 2))
    assert page.tables[0].header[0] == "GBM block after 2"
    assert page.tables[0].header[-3:] == ("tokens after CLAP", "tokens after GBM 2", "tokens after GBM here")
    assert [row[-3:] for row in page.tables[0].rows] == [("600", "600", "400")] * 2 + [("-", "-", "-")]
    assert page.tables[-1].header[2:] == ("dense", "recipe (3)", "chosen (2 and 3)")
    assert list(page.plots[-1].counts) == ["CLAP", "GBM 2", "GBM 3"]
    assert tuning_page(tune_positions(given(Table(9)), 4)).lines[0].startswith("no GBM block qualifies to")


def test_there_must_be_a_block_left() -> None:
    with pytest.raises(PlanError, match="expected a block after 4 for GBM"):
        earliest_gbm(given(Table(1)), 4, (4,))


def test_tome_has_no_place_for_gbm() -> None:
    tome = MergePlan(clap_layers=(), gbm_layers=(), method="tome", tome_r=(4, 4))
    with pytest.raises(PlanError, match="got method tome"):
        tune_positions(given(Table(1), tome), 4)
