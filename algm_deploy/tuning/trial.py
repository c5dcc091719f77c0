"""What a search is given - a network, a goal, photos to choose on and others to report on - and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from algm_deploy.bundle.records import Candidate, Evaluation, HeldOut, Point, Speed, TunedOn
from algm_deploy.errors import DatasetError
from algm_deploy.evaluation.datasets import Dataset
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.tuning.photos import check_all_measured
from algm_deploy.tuning.search import Found, Goal
from algm_deploy.wording import dataset_title

Evaluate = Callable[[MergePlan, Dataset], Evaluation]
"""Evaluates the network that is tuned with a merge plan, thresholds included; with `DENSE` it merges nothing."""


@dataclass(frozen=True)
class Trial:
    """What a search is given.

    `plan` is that of today. `reference` is the name of what the goal was taken from and how to evaluate that, where it
    is neither the dense network nor a number. `variant` tells how `evaluate` merges otherwise than ALGM.
    """

    evaluate: Evaluate
    plan: MergePlan
    goal: Goal
    tuning: Dataset
    held_out: Dataset
    reference: tuple[str, Callable[[Dataset], Evaluation]] | None = None
    variant: tuple[str, ...] = ()

    def candidate(
        self, value: float, plan: MergePlan, speed: Speed | None = None, *, held_out: bool = False
    ) -> Candidate:
        """A candidate on the photos to choose on, or on those held out. Errors as `miou_of`."""
        return _candidate(value, self.evaluate(plan, self.held_out if held_out else self.tuning), speed)

    def outcome(
        self, title: str, found: Found, at: Callable[[float], MergePlan], whole: bool = False
    ) -> dict[str, Any]:
        """The fields of a `SearchTuning`, after measuring on the photos that were held out.

        `at` gives the plan of a candidate; `whole` measures every candidate on those photos as well.
        """
        marked, candidates = at(found.marked.value), found.candidates if whole else ()
        return {
            "title": ", ".join((title, *self.variant)),
            "aim": found.goal.aim,
            "limit": found.goal.limit,
            "reached": found.chosen is not None,
            "marked": found.marked,
            "token_histograms": self.evaluate(marked, self.tuning).token_histograms,
            "reference": self.reference[0] if self.reference else None,
            "variant": self.variant,
            "tuned_on": TunedOn(**_photos(self.evaluate(DENSE, self.tuning)), candidates=found.candidates),
            "held_out": HeldOut(
                **_photos(self.evaluate(DENSE, self.held_out)),
                recipe=Point(**_figures(self.evaluate(self.plan, self.held_out))),
                marked=Point(**_figures(self.evaluate(marked, self.held_out))),
                reference=Point(**_figures(self.reference[1](self.held_out))) if self.reference else None,
                candidates=tuple(self.candidate(p.value, at(p.value), held_out=True) for p in candidates),
            ),
        }


def miou_of(evaluation: Evaluation) -> float:
    """mIoU in percent.

    Raises:
        DatasetError: images could not be evaluated, or none has a labelled pixel.
    """
    title = dataset_title(evaluation.dataset, evaluation.split)
    check_all_measured(title, list(evaluation.failures.values()))
    if evaluation.miou_percent is None:
        raise DatasetError(f"{title}: expected labelled pixels, got none, so there is no mIoU to tune for")
    return evaluation.miou_percent


def _candidate(value: float, evaluation: Evaluation, speed: Speed | None = None) -> Candidate:
    timed = ("throughput_img_per_s", "speedup", "baseline", "stable") if speed else ()
    return Candidate(value=value, **_figures(evaluation), **{name: getattr(speed, name) for name in timed})


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    """The fields of a `Point`."""
    return {
        "miou_percent": miou_of(evaluation),
        "miou_percent_by_slice": {name: part.miou_percent for name, part in evaluation.slices.items()},
        "gmacs_per_window_mean": evaluation.gmacs_per_window_mean,
        "tokens": evaluation.tokens,
    }


def _photos(dense: Evaluation) -> dict[str, Any]:
    """The fields of a `TunedOn`, at the arithmetic of a network that does not look for something to merge."""
    point = Point(**_figures(dense))
    return {
        "dataset": dense.dataset,
        "split": dense.split,
        "images": dense.images,
        "images_by_slice": {name: part.images for name, part in dense.slices.items()},
        "dense": structs.replace(point, gmacs_per_window_mean=dense.gmacs_per_window_dense, tokens=()),
    }
