"""Choosing precision and threshold together: the fastest network that keeps a given mIoU.

Low precision and merging both cost accuracy and both save time, and a network in low precision decides otherwise than
one in fp32. So each precision gets a threshold of its own, for the same photos and the same limit, and what these
networks take decides. Photos that nothing was chosen on tell how the choice holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from algm_deploy.bundle.records import Knob, PrecisionSearch, PrecisionTuning, Speed
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import RecipeError
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.tuning.thresholds import tune_threshold
from algm_deploy.tuning.trial import Trial


@dataclass(frozen=True)
class Contender:
    """A bundle in one precision: what its search is given, and how its merging network is timed."""

    bundle: Bundle
    trial: Trial
    speed_of: Callable[[MergePlan], Speed]


def check_one_network(bundles: Sequence[Bundle]) -> None:
    """Refuses bundles that differ in more than their precision.

    Raises:
        RecipeError: they do, or two have the same.
    """
    first, *others = (bundle.recipe for bundle in bundles)
    seen = {first.precision}
    for recipe, bundle in zip(others, bundles[1:], strict=True):
        for part in ("network", "merging", "protocol", "output", "max_batch"):
            if getattr(recipe, part) != getattr(first, part):
                raise RecipeError(
                    f"expected exports of one network that differ in --precision, got another {part} in {bundle.path}: "
                    "export it with the same recipe and flags"
                )
        if recipe.precision in seen:
            raise RecipeError(
                f"expected a bundle for each precision, got two in {recipe.precision}, the second {bundle.path}: leave "
                "one out"
            )
        seen.add(recipe.precision)


def tune_precision(
    contenders: Sequence[Contender], runtime: str, knob: Knob, values: Sequence[float], whole: bool = False
) -> PrecisionTuning:
    """Searches the threshold `knob` of every contender among ascending values, and the fastest that keeps the limit.

    The contenders share the goal, which is to keep an mIoU, and the photos. `whole` as for `tune_threshold`.

    Raises:
        PlanError: the plan does not have that threshold.
        GateError: no pixel was labelled.
    """
    searches = tuple(
        PrecisionSearch(
            bundle=one.bundle.path.name,
            precision=one.bundle.recipe.precision,
            search=tune_threshold(one.trial, knob, values, one.speed_of, whole),
        )
        for one in contenders
    )
    reached = [one for one in searches if one.search.reached]
    best = (
        max(reached, key=lambda one: one.search.marked.throughput_img_per_s or 0.0)
        if reached
        else max(searches, key=lambda one: one.search.marked.miou_percent)
    )
    return PrecisionTuning(
        title="Precision and threshold", runtime=runtime, searches=searches, marked=searches.index(best)
    )
