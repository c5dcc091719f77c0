"""Choosing a threshold for an aim: ALGM* (CVPR 2024) and its relatives, on one part of the data, reported on another.

Thresholds are inputs of the network, so one bundle on one runtime gives every point. ALGM* is the smallest CLAP
threshold whose mIoU stays at or above that of a reference, usually the same network without merging.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.errors import DatasetError, PlanError
from algm_deploy.evaluation.datasets import Dataset, Sample
from algm_deploy.recipe.schema import MergePlan, Recipe
from algm_deploy.tuning.search import Curve, Point, best, first_that_keeps, miou_of, steps

Record = Mapping[str, Any]
Aim = Literal["reference", "best", "gmacs", "throughput"]
AIMS: tuple[Aim, ...] = get_args(Aim)
KNOBS = {"tau": CLAP_THRESHOLD, "gbm": GBM_THRESHOLD}
THROUGHPUT, SPEEDUP, STABLE = "throughput_img_per_s", "speedup", "stable"
NOTHING_IS_THAT_SIMILAR = 1.01
_TOKENS = re.compile(r"tokens_after_\w+_mean")

Evaluate = Callable[[Dataset, Mapping[str, float] | None], Record]
"""Evaluates the bundle that is tuned, at thresholds by input name (one left out is the bundle's); None: dense.

Where speed is asked for, the record of merged points also holds `throughput_img_per_s`, `speedup` against the dense
network timed in turns with it, and `stable`, whether these times were.
"""


@dataclass(frozen=True)
class Goal:
    """What to look for.

    reference  the candidate that merges most while its mIoU stays at or above `limit`, in percent
    best       the candidate of the best mIoU; `limit` is not used
    gmacs      the candidate that merges least while a window costs at most `limit` multiply-adds in 10^9
    throughput the candidate that merges least while the network takes at least `limit` pictures a second
    """

    aim: Aim
    limit: float = 0.0

    @property
    def by_cost(self) -> bool:
        """Whether the limit is one of cost, which falls the more is merged."""
        return self.aim in ("gmacs", "throughput")

    def meets(self, point: Point) -> bool:
        """Whether a point reaches the limit."""
        if self.aim == "gmacs":
            return _gmacs(point) <= self.limit
        return self.aim == "best" or self.nearness(point) >= self.limit

    def nearness(self, point: Point) -> float:
        """Larger for points that reach further towards the limit or beyond it."""
        if self.aim == "throughput":
            return float(point.record[THROUGHPUT])
        return -_gmacs(point) if self.aim == "gmacs" else point.miou_percent

    def __str__(self) -> str:
        return {
            "reference": f"merge most while mIoU stays at or above {self.limit:.2f} %",
            "best": "reach the best mIoU",
            "gmacs": f"merge least at no more than {self.limit:g} GMACs per window",
            "throughput": f"merge least at no less than {self.limit:g} img/s",
        }[self.aim]


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search; `chosen` is None where no candidate reaches the goal, `nearest` misses it least."""

    knob: str
    goal: Goal
    points: tuple[Point, ...]
    chosen: Point | None
    nearest: Point

    def record(self) -> dict[str, Any]:
        """JSON-able record: the goal, what was chosen, and each measured point in short."""
        return {
            "knob": self.knob,
            "goal": str(self.goal),
            "chosen": None if self.chosen is None else self.chosen.value,
            "nearest": self.nearest.value,
            "points": [{"value": p.value, **point_facts(p.record)} for p in self.points],
        }


def point_facts(record: Record) -> dict[str, Any]:
    """What a curve needs of an evaluation: mIoU as a whole and by slice, tokens, multiply-adds and, if timed, speed."""
    kept = ("miou_percent", "gmacs_per_window_mean", THROUGHPUT, SPEEDUP, STABLE)
    return {
        **{key: value for key, value in record.items() if key in kept or _TOKENS.fullmatch(key)},
        "miou_percent_by_slice": {name: part["miou_percent"] for name, part in record["slices"].items()},
    }


def search(
    goal: Goal, knob: str, candidates: Sequence[float], measure: Callable[[float], Record], whole: bool = False
) -> Tuned:
    """Looks for the goal among ascending candidates, the first of which merges most; `whole` measures them all.

    Raises:
        PlanError: a goal in multiply-adds for a network they are not known for.
    """
    # Cost rises with the candidates: seen from the end, the costly ones come first.
    curve = Curve(candidates[::-1] if goal.by_cost else candidates, measure)
    for index in range(len(candidates) if whole else 0):
        curve.at(index)
    chosen = best(curve) if goal.aim == "best" else first_that_keeps(curve, goal.meets, goal.nearness)
    return Tuned(knob, goal, tuple(curve.points), chosen, chosen or max(curve.points, key=goal.nearness))


def tune_threshold(
    plan: MergePlan,
    knob: str,
    goal: Goal,
    candidates: Sequence[float],
    evaluate: Evaluate,
    dataset: Dataset,
    whole: bool = False,
) -> Tuned:
    """Searches `tau`, CLAP's threshold, or `gbm`, GBM's multiplier or threshold; the other one stays as it is.

    Raises:
        PlanError: the plan does not have that threshold.
    """
    if not (plan.clap_layers if knob == "tau" else plan.gbm_layers):
        raise PlanError(f"expected a plan that reads {KNOBS[knob]}, got one without such a merge: export with merging")
    return search(goal, knob, candidates, lambda value: evaluate(dataset, {KNOBS[knob]: value}), whole)


def default_candidates(plan: MergePlan, knob: str) -> list[float]:
    """Similarities from 0.5 up to one that nothing reaches; multipliers of the deviation for an adaptive GBM."""
    if knob == "gbm" and plan.gbm_mode == "adaptive":
        return steps(-4, 8, 0.25)
    return [*steps(0.5, 1, 0.005), NOTHING_IS_THAT_SIMILAR]


def tuned_recipe(recipe: Recipe, knob: str, value: float) -> Recipe:
    """The recipe with another threshold."""
    return replace(recipe, merging=with_thresholds(recipe.merging, {KNOBS[knob]: value}))


def with_thresholds(plan: MergePlan, thresholds: Mapping[str, float]) -> MergePlan:
    """The plan with other thresholds, by input name."""
    given = {CLAP_THRESHOLD: plan.clap_threshold, GBM_THRESHOLD: plan.gbm_threshold, **thresholds}
    return replace(plan, clap_threshold=given[CLAP_THRESHOLD], gbm_threshold=given[GBM_THRESHOLD])


def halves(dataset: Dataset) -> tuple[Dataset, Dataset]:
    """The first and the second half of every slice, in the order of names: neighbouring frames stay together.

    Raises:
        DatasetError: a single photo cannot be both.
    """
    slices: dict[str, list[Sample]] = {}
    for sample in dataset.samples:
        slices.setdefault(sample.slice, []).append(sample)
    first = {sample.name for group in slices.values() for sample in group[: (len(group) + 1) // 2]}
    parts = [tuple(s for s in dataset.samples if (s.name in first) == early) for early in (True, False)]
    if not all(parts):
        raise DatasetError(
            f"{dataset.title}: expected photos to tune on and others to report on, got {len(dataset.samples)} in "
            f"{len(slices)} slices: take more photos, coarser slices, or another split as --held-out"
        )
    tuning, held_out = (
        replace(dataset, split=f"{dataset.split}-{which}-half", samples=samples)
        for which, samples in zip(("first", "second"), parts, strict=True)
    )
    return tuning, held_out


def check_apart(tuning: Dataset, held_out: Dataset) -> None:
    """Nothing is held out that was tuned on: no photo is in both, under the same name or as a copy.

    Raises:
        DatasetError: one is, or a photo cannot be read.
    """
    tuned = _photos_by_content(tuning)
    both = [sample.name for content, sample in _photos_by_content(held_out).items() if content in tuned]
    if both:
        raise DatasetError(
            f"expected photos in {held_out.title} that are not in {tuning.title}, which is tuned on, got {len(both)} "
            f"in both, first {both[0]}: name another split as --held-out, or leave it out to keep half of each slice "
            "back"
        )


def _photos_by_content(dataset: Dataset) -> dict[bytes, Sample]:
    photos = {}
    for sample in dataset.samples:
        try:
            with sample.image_path.open("rb") as stream:
                photos[hashlib.file_digest(stream, "sha256").digest()] = sample
        except OSError as error:
            raise DatasetError(f"{sample.image_path}: expected a photo that can be read, {error.strerror}") from error
    return photos


def worst_slice(dense: Record, merged: Record) -> tuple[str, float]:
    """The slice that loses most by merging, and its mIoU difference in points (negative: a loss)."""
    changes = {
        name: part["miou_percent"] - dense["slices"][name]["miou_percent"]
        for name, part in merged["slices"].items()
        if part["miou_percent"] is not None and dense["slices"][name]["miou_percent"] is not None
    }
    if not changes:
        return "all", miou_of(merged) - miou_of(dense)
    name = min(changes, key=lambda name: changes[name])
    return name, changes[name]


def _gmacs(point: Point) -> float:
    if point.gmacs is None:
        raise PlanError("multiply-adds are not counted for this network: tune for mIoU instead")
    return point.gmacs
