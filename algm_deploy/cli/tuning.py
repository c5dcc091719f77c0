"""The `tune` command: thresholds and merge positions from data."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algm_deploy.cli.settings import percent
from algm_deploy.errors import GateError, RecipeError

if TYPE_CHECKING:
    from algm_deploy.bundle import Bundle
    from algm_deploy.evaluation.datasets import Dataset
    from algm_deploy.recipes import Recipe
    from algm_deploy.tuning.findings import Finding
    from algm_deploy.tuning.objective import Aim, Goal


def tune(options: argparse.Namespace) -> int:
    """Thresholds and merge positions from data, as a new recipe."""
    from algm_deploy.bundle import Bundle
    from algm_deploy.report.tuning import finding_text, write_finding
    from algm_deploy.tuning.recipe_file import write_recipe

    bundle = Bundle.open(options.bundle)
    if options.output.suffix != ".toml" or not options.output.parent.is_dir():
        raise RecipeError(f"expected a .toml file in a folder that exists as --output, got {options.output}")
    find = _rule if options.rule else _objective if options.objective else _positions
    finding = find(bundle, options)
    print(finding_text(finding))
    bundle.record("tuning", finding.title, finding.record)
    print(f"\n{write_finding(finding, bundle.recipe.name, options.output.with_suffix('.html'))}")
    if finding.recipe is None:
        return GateError.exit_code
    print(write_recipe(finding.recipe, (f"By algm-deploy tune: {finding.title}.", *finding.lines), options.output))
    return 0


def _rule(bundle: Bundle, options: argparse.Namespace) -> Finding:
    from algm_deploy.deployment import find_images
    from algm_deploy.tuning.findings import find_by_rule
    from algm_deploy.tuning.similarity import Picture, pictures_of

    layers = (1,) if options.layers == "first" else tuple(range(1, bundle.recipe.network.depth + 1))
    if options.images:
        pictures = [Picture(path) for path in find_images(options.images)]
        return find_by_rule(bundle, pictures, layers, "photos without labels")
    dataset = _tuning_data(bundle, options, options.split)
    return find_by_rule(bundle, pictures_of(dataset), layers, f"{dataset.name} {dataset.split}")


def _objective(bundle: Bundle, options: argparse.Namespace) -> Finding:
    from algm_deploy.deployment import evaluate_bundle
    from algm_deploy.signature import CLAP_THRESHOLD, GBM_THRESHOLD
    from algm_deploy.timing.protocols import check_verified
    from algm_deploy.tuning.findings import find_threshold
    from algm_deploy.tuning.objective import default_candidates
    from algm_deploy.tuning.search import steps

    def evaluate(dataset: Dataset, thresholds: Mapping[str, float] | None) -> dict[str, Any]:
        given = thresholds or {}
        tau, gbm = given.get(CLAP_THRESHOLD, options.tau), given.get(GBM_THRESHOLD)
        record = evaluate_bundle(bundle, options.runtime, dataset, tau, gbm, merge=thresholds is not None).record()
        if timed and thresholds and dataset is tuning:
            record |= _throughput(bundle, options, dataset, tau, gbm)
        return record

    timed = options.objective == "throughput"
    if timed:
        check_verified(bundle, options.runtime)
    tuning, held_out = _tuning_splits(bundle, options)
    base = _recipe_to_tune(bundle, options)
    references = {"dense": lambda: evaluate(tuning, None), "clap": lambda: evaluate(tuning, {GBM_THRESHOLD: inf})}
    goal = _goal(options, tuning, references)
    candidates = steps(*options.range) if options.range else default_candidates(base.merging, options.knob)
    return find_threshold(base, options.knob, goal, candidates, evaluate, tuning, held_out)


def _throughput(
    bundle: Bundle, options: argparse.Namespace, dataset: Dataset, tau: float | None, gbm: float | None
) -> dict[str, Any]:
    """Pictures a second of the merging network alone, in batches of different pictures of a data set; and if steady."""
    from algm_deploy.deployment import bench_bundle
    from algm_deploy.signature import CLAP_THRESHOLD, GBM_THRESHOLD
    from algm_deploy.timing.protocols import usual_request
    from algm_deploy.tuning.objective import STABLE, THROUGHPUT

    given = {CLAP_THRESHOLD: tau, GBM_THRESHOLD: gbm}
    thresholds = {name: value for name, value in given.items() if value is not None}
    paths = [sample.image_path for sample in dataset.samples]
    batch = min(bundle.recipe.max_batch, len(paths))
    request = replace(usual_request(bundle.recipe, "mixed", None, batch, thresholds=thresholds), variants=("merged",))
    (row,) = bench_bundle(bundle, options.runtime, paths, request)
    return {name: row.record[name] for name in (THROUGHPUT, STABLE)}


def _positions(bundle: Bundle, options: argparse.Namespace) -> Finding:
    from algm_deploy.recipes import DENSE
    from algm_deploy.tuning.findings import find_positions
    from algm_deploy.tuning.positions import PlanEvaluator

    tuning, held_out = _tuning_splits(bundle, options)
    base = _recipe_to_tune(bundle, options)
    evaluate_plan = PlanEvaluator(bundle)
    plans = {"dense": DENSE, "clap": replace(base.merging, gbm_layers=())}
    goal = _goal(options, tuning, {name: partial(evaluate_plan, plan, tuning) for name, plan in plans.items()})
    return find_positions(evaluate_plan, base, options.count, goal, tuning, held_out)


def _recipe_to_tune(bundle: Bundle, options: argparse.Namespace) -> Recipe:
    from algm_deploy.tuning.objective import tuned_recipe

    return bundle.recipe if options.tau is None else tuned_recipe(bundle.recipe, "tau", options.tau)


def _goal(
    options: argparse.Namespace, tuning: Dataset, references: Mapping[str, Callable[[], Mapping[str, Any]]]
) -> Goal:
    """What to reach; for `reference` the mIoU of one of `references`, of another bundle, or a number, less --drop."""
    from algm_deploy.bundle import Bundle
    from algm_deploy.deployment import evaluate_bundle
    from algm_deploy.tuning.objective import Goal
    from algm_deploy.tuning.search import miou_of

    aim: Aim = options.objective or "reference"
    if aim == "best":
        return Goal(aim)
    if aim in ("gmacs", "throughput"):
        if options.target is None:
            raise RecipeError(f"expected --target for --objective {aim}: multiply-adds of a window in 10^9, or img/s")
        return Goal(aim, options.target)
    if options.reference in references:
        miou = miou_of(references[options.reference]())
    elif (folder := Path(options.reference)).is_dir():
        miou = miou_of(evaluate_bundle(Bundle.open(folder), options.runtime, tuning, merge=False).record())
    else:
        miou = percent(options.reference)
    return Goal(aim, miou - options.drop)


def _tuning_splits(bundle: Bundle, options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Photos to choose on and photos to report on: two splits, or without --held-out the halves of one."""
    from algm_deploy.tuning.objective import halves

    if options.held_out is None:
        return halves(_tuning_data(bundle, options, options.split))
    return _tuning_data(bundle, options, options.split), _tuning_data(bundle, options, options.held_out)


def _tuning_data(bundle: Bundle, options: argparse.Namespace, split: str | None) -> Dataset:
    from algm_deploy.errors import DatasetError
    from algm_deploy.evaluation.datasets import open_dataset

    if options.data is None:
        raise DatasetError("expected --data with the root folder of a labelled data set, got none")
    dataset = open_dataset(options.dataset or bundle.recipe.protocol.dataset, options.data, split, options.slice)
    if options.limit and options.limit < len(dataset.samples):
        dataset = replace(dataset.subset(options.limit), split=f"{dataset.split}-{options.limit}")
    return dataset
