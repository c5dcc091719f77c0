"""The `tune` command: thresholds and merge positions from data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algm_deploy.cli.settings import percent
from algm_deploy.errors import GateError, PlanError, RecipeError

if TYPE_CHECKING:
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.evaluation.datasets import Dataset
    from algm_deploy.recipe.schema import MergePlan, Recipe
    from algm_deploy.report.gallery import Example
    from algm_deploy.tuning.ablations import Variant
    from algm_deploy.tuning.findings import Finding, Reference
    from algm_deploy.tuning.objective import Aim, Goal, Record

PICTURED = 3  # photos of the held-out part on a page


def tune(options: argparse.Namespace) -> int:
    """Thresholds and merge positions from data, as a new recipe."""
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.report.tuning import finding_text, write_finding
    from algm_deploy.tuning.recipe_file import write_recipe

    bundle = Bundle.open(options.bundle)
    if options.output.suffix != ".toml" or not options.output.parent.is_dir():
        raise RecipeError(f"expected a .toml file in a folder that exists as --output, got {options.output}")
    _check_variant(options)
    kinds = {"rule": _rule, "attention": _attention, "objective": _objective, "positions": _positions}
    finding = next(find for name, find in kinds.items() if getattr(options, name))(bundle, options)
    if options.variant:  # a recipe cannot say so
        finding = replace(finding, title=f"{finding.title}, {', '.join(options.variant)}", recipe=None)
    print(finding_text(finding))
    bundle.record("tuning", finding.title, finding.stored())
    examples = _pictures(bundle, options, finding)
    print(f"\n{write_finding(finding, bundle.recipe.name, options.output.with_suffix('.html'), examples)}")
    if finding.recipe is not None:
        comments = (f"By algm-deploy tune: {finding.title}.", *finding.page.lines)
        print(write_recipe(finding.recipe, comments, options.output))
    return 0 if finding.reached else GateError.exit_code


def _rule(bundle: Bundle, options: argparse.Namespace) -> Finding:
    from algm_deploy.pictures.sources import find_images
    from algm_deploy.tuning.findings import find_by_rule
    from algm_deploy.tuning.similarity import Picture, pictures_of

    layers = (1,) if options.layers == "first" else tuple(range(1, bundle.recipe.network.encoder_depth + 1))
    if options.images:
        pictures = [Picture(path) for path in find_images(options.images)]
        return find_by_rule(bundle, pictures, layers, "photos without labels")
    dataset = _tuning_data(bundle, options, options.split, options.limit)
    return find_by_rule(bundle, pictures_of(dataset), layers, dataset.title)


def _attention(bundle: Bundle, options: argparse.Namespace) -> Finding:
    from algm_deploy.tuning.findings import find_attention

    plan = _recipe_to_tune(bundle, options).merging
    return find_attention(bundle, plan, _tuning_data(bundle, options, options.split, options.limit))


def _objective(bundle: Bundle, options: argparse.Namespace) -> Finding:
    from algm_deploy.bundle.signature import GBM_THRESHOLD
    from algm_deploy.timing.protocols import check_verified
    from algm_deploy.tuning.findings import find_threshold
    from algm_deploy.tuning.objective import default_candidates
    from algm_deploy.tuning.search import steps

    if _timed(options):
        check_verified(bundle, options.runtime)
    tuning, held_out = _tuning_splits(bundle, options)
    base = _recipe_to_tune(bundle, options)
    evaluate = _Evaluator(bundle, base.merging, options, tuning)
    points = {"dense": None, "clap": {GBM_THRESHOLD: inf}}
    references = {name: partial(evaluate, thresholds=point) for name, point in points.items()}
    goal, reference = _goal(options, tuning, references)
    if options.values:
        candidates = sorted(set(options.values))
        if not all(map(isfinite, candidates)):
            raise RecipeError(f"expected finite --values, got {candidates}: above 1 CLAP merges nothing")
    else:
        candidates = steps(*options.range) if options.range else default_candidates(base.merging, options.knob)
    return find_threshold(
        base, options.knob, goal, candidates, evaluate, tuning, held_out, reference, whole=options.curve
    )


class _Evaluator:
    """Evaluates a bundle at thresholds, each point once; says what it measured."""

    def __init__(self, bundle: Bundle, plan: MergePlan, options: argparse.Namespace, tuning: Dataset) -> None:
        self._bundle, self._plan, self._options, self._tuning = bundle, plan, options, tuning
        self._known: dict[tuple[Dataset, frozenset[tuple[str, float]] | None], dict[str, Any]] = {}

    def __call__(self, dataset: Dataset, thresholds: Mapping[str, float] | None) -> Record:
        key = dataset, None if thresholds is None else frozenset(thresholds.items())
        if key not in self._known:
            self._known[key] = self._measured(dataset, thresholds)
            given = ", ".join(f"{name} {value:g}" for name, value in (thresholds or {}).items())
            _tell(dataset, given or "dense", self._known[key])
        return self._known[key]

    def _measured(self, dataset: Dataset, thresholds: Mapping[str, float] | None) -> dict[str, Any]:
        from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
        from algm_deploy.deployment import evaluate
        from algm_deploy.recipe.schema import DENSE
        from algm_deploy.tuning.objective import with_thresholds
        from algm_deploy.tuning.positions import PlanEvaluator

        options = self._options
        if options.variant:
            plan = DENSE if thresholds is None else with_thresholds(self._plan, thresholds)
            return dict(PlanEvaluator(self._bundle, _variant(options, self._plan))(plan, dataset))
        given = thresholds or {}
        tau = None if thresholds is None else given.get(CLAP_THRESHOLD, options.tau)
        gbm = given.get(GBM_THRESHOLD)
        record = evaluate(self._bundle, dataset, options.runtime, tau=tau, gbm=gbm, dense=thresholds is None).record()
        if thresholds and dataset is self._tuning and _timed(options):
            record |= _throughput(self._bundle, options, dataset, tau, gbm)
        return record


def _tell(dataset: Dataset, point: str, record: Record) -> None:
    """One line about a point as soon as it is known: a search takes long."""
    from algm_deploy.tuning.search import miou_of

    gmacs = record["gmacs_per_window_mean"]
    cost = "" if gmacs is None or point == "dense" else f", {gmacs:.2f} GMACs per window"
    print(f"{dataset.title}, {point}: mIoU {miou_of(record):.2f} %{cost}", file=sys.stderr, flush=True)


def _throughput(
    bundle: Bundle, options: argparse.Namespace, dataset: Dataset, tau: float | None, gbm: float | None
) -> dict[str, Any]:
    """Pictures a second of the merging network, in batches of different pictures of a data set, in turns with dense."""
    from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
    from algm_deploy.deployment import bench
    from algm_deploy.timing.protocols import usual_request
    from algm_deploy.tuning.objective import SPEEDUP, STABLE, THROUGHPUT

    given = {CLAP_THRESHOLD: tau, GBM_THRESHOLD: gbm}
    thresholds = {name: value for name, value in given.items() if value is not None}
    paths = [sample.image_path for sample in dataset.samples]
    batch = min(bundle.recipe.max_batch, len(paths))
    request = usual_request(bundle.recipe, "mixed", None, batch, thresholds=thresholds)
    rows = bench(bundle, options.runtime, images=paths, protocol=replace(request, variants=("dense", "merged")))
    (merged,) = (row for row in rows if row.variant == "merged")
    return {name: merged[name] for name in (THROUGHPUT, SPEEDUP, STABLE)}


def _positions(bundle: Bundle, options: argparse.Namespace) -> Finding:
    from algm_deploy.recipe.schema import DENSE
    from algm_deploy.tuning.findings import find_positions
    from algm_deploy.tuning.positions import PlanEvaluator

    tuning, held_out = _tuning_splits(bundle, options)
    base = _recipe_to_tune(bundle, options)
    measure = PlanEvaluator(bundle, _variant(options, base.merging))

    def evaluate_plan(plan: MergePlan, dataset: Dataset) -> Record:
        record = measure(plan, dataset)
        _tell(dataset, f"CLAP {plan.clap_layers}, GBM {plan.gbm_layers}" if plan.layers else "dense", record)
        return record

    plans = {"dense": DENSE, "clap": replace(base.merging, gbm_layers=())}
    references = {name: partial(evaluate_plan, plan) for name, plan in plans.items()}
    goal, reference = _goal(options, tuning, references)
    return find_positions(evaluate_plan, base, options.count, goal, tuning, held_out, reference)


def _timed(options: argparse.Namespace) -> bool:
    return bool(options.time) or options.objective == "throughput"


def _variant(options: argparse.Namespace, plan: MergePlan) -> Variant:
    """What --variant asks for.

    Raises:
        PlanError: a setting that does not exist, or one of a merge that the plan does not have.
    """
    from algm_deploy.tuning.ablations import check_variant, variant_of

    variant = variant_of(options.variant)
    check_variant(plan, variant)
    return variant


def _check_variant(options: argparse.Namespace) -> None:
    """Variants are networks of their own, which no exported graph contains."""
    if not options.variant or options.positions:
        return
    if options.rule or options.attention:
        raise PlanError("expected --objective or --positions with --variant: nothing else evaluates merging otherwise")
    if options.runtime != "torch" or _timed(options):
        raise PlanError(
            f"expected --runtime torch and no times with --variant, got {options.runtime}: variants of merging exist "
            "in PyTorch only, to be evaluated; graphs and engines merge as ALGM does"
        )


def _recipe_to_tune(bundle: Bundle, options: argparse.Namespace) -> Recipe:
    from algm_deploy.tuning.objective import tuned_recipe

    return bundle.recipe if options.tau is None else tuned_recipe(bundle.recipe, "tau", options.tau)


def _goal(
    options: argparse.Namespace, tuning: Dataset, references: Mapping[str, Callable[[Dataset], Record]]
) -> tuple[Goal, Reference | None]:
    """What to reach: for `reference` the mIoU of one of `references`, of another bundle, or a number, less --drop.

    And that reference, where it is an evaluation that nothing else shows.
    """
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.deployment import evaluate
    from algm_deploy.tuning.objective import Goal
    from algm_deploy.tuning.search import miou_of

    aim: Aim = options.objective or "reference"
    if aim == "best":
        return Goal(aim), None
    if aim in ("gmacs", "throughput"):
        if options.target is None:
            raise RecipeError(f"expected --target for --objective {aim}: multiply-adds of a window in 10^9, or img/s")
        return Goal(aim, options.target), None
    name = options.reference
    if name in references:
        measure = references[name]
    elif (folder := Path(name)).is_dir():
        name, other = f"dense {folder.name}", Bundle.open(folder)

        def measure(dataset: Dataset) -> Record:
            return evaluate(other, dataset, options.runtime, dense=True).record()
    else:
        return Goal(aim, percent(name) - options.drop), None
    goal = Goal(aim, miou_of(measure(tuning)) - options.drop)
    return goal, None if name == "dense" else (name, measure)


def _pictures(bundle: Bundle, options: argparse.Namespace, finding: Finding) -> list[Example]:
    """A few photos of the held-out part at the thresholds of a finding; also written as one picture."""
    from algm_deploy.bundle.files import write_atomically
    from algm_deploy.report.gallery import draw_thresholds, labelled_photos, threshold_sheet

    if finding.thresholds is None or options.variant:
        return []
    photos = labelled_photos(_tuning_splits(bundle, options)[1], PICTURED)
    examples = draw_thresholds(bundle, options.runtime, photos, *finding.thresholds)
    target = options.output.with_suffix(".png")
    with write_atomically(target) as path:
        threshold_sheet(examples, f"{bundle.recipe.name}: what merges").save(path)
    print(f"\n{target}")
    return examples


def _tuning_splits(bundle: Bundle, options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Photos to choose on and photos to report on: two splits, or without --held-out the halves of one."""
    from algm_deploy.tuning.objective import check_apart, halves

    tuning = _tuning_data(bundle, options, options.split, options.limit)
    if options.held_out is None:
        return halves(tuning)
    held_out = _tuning_data(bundle, options, options.held_out, options.held_out_limit or options.limit)
    check_apart(tuning, held_out)
    return tuning, held_out


def _tuning_data(bundle: Bundle, options: argparse.Namespace, split: str | None, limit: int | None) -> Dataset:
    from algm_deploy.errors import DatasetError
    from algm_deploy.evaluation.datasets import open_dataset

    if options.data is None:
        unlabelled = ", or --images with photos" if options.rule else ""
        raise DatasetError(f"expected --data with the root folder of a labelled data set{unlabelled}, got none")
    dataset = open_dataset(options.dataset or bundle.recipe.protocol.dataset, options.data, split, options.slice)
    return dataset.subset(limit) if limit else dataset
