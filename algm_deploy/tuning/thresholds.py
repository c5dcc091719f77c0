"""Choosing a threshold for an aim: ALGM* (CVPR 2024) and its relatives, on some photos, reported on others.

Thresholds are inputs of the network, so one bundle on one runtime gives every point. ALGM* is the smallest CLAP
threshold whose mIoU stays at or above that of a reference, usually the same network without merging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from algm_deploy.bundle.records import Candidate, Knob, Speed, ThresholdTuning
from algm_deploy.bundle.signature import CLAP_THRESHOLD, threshold_defaults
from algm_deploy.errors import PlanError
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.tuning.search import Found, search, steps
from algm_deploy.tuning.trial import Trial

NOTHING_IS_THAT_SIMILAR = 1.01


def tune_threshold(
    trial: Trial,
    knob: Knob,
    values: Sequence[float],
    speed_of: Callable[[MergePlan], Speed] | None = None,
    whole: bool = False,
) -> ThresholdTuning:
    """Searches the threshold `knob` among ascending values; the plan's other one stays as it is.

    `speed_of` times the merging network in turns with the dense one, where times are asked for. `whole` measures every
    candidate, on both parts of the photos, instead of as many as it takes to choose.

    Raises:
        PlanError: the plan does not have that threshold, or the aim is one in multiply-adds that nobody counts.
        GateError: no pixel was labelled.
    """
    if knob not in threshold_defaults(trial.plan):
        raise PlanError(f"expected a plan that reads {knob}, got one without such a merge: export with merging")

    def at(value: float) -> MergePlan:
        return replace(trial.plan, **{knob: value})  # type: ignore[arg-type]

    def measure(value: float) -> Candidate:
        return trial.candidate(value, at(value), speed_of(at(value)) if speed_of else None)

    found = search(trial.goal, values, measure, whole)
    name = "CLAP" if knob == CLAP_THRESHOLD else "GBM"
    return ThresholdTuning(
        pictured=None if trial.variant else (knob, _pictured(found)),  # no runtime can show a variant
        knob=knob,
        recipe_value=getattr(trial.plan, knob),
        **trial.outcome(f"{name} threshold, aim: {trial.goal.aim}", found, at, whole),
    )


def default_values(plan: MergePlan, knob: Knob) -> list[float]:
    """Similarities from 0.5 up to one that nothing reaches; multipliers of the deviation for an adaptive GBM."""
    if knob != CLAP_THRESHOLD and plan.gbm == "adaptive":
        return steps(-4, 8, 0.25)
    return [*steps(0.5, 1, 0.005), NOTHING_IS_THAT_SIMILAR]


def _pictured(found: Found) -> tuple[float, ...]:
    """The value that merges most, the one that is marked, and the one that merges least, or one between."""
    values = [one.value for one in found.candidates]
    shown = {values[0], found.marked.value, values[-1]}
    return tuple(sorted(shown if len(shown) > 2 else shown | {values[len(values) // 2]}))
