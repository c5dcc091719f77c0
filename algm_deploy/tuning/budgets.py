"""Choosing budgets for an aim, on some photos, reported on others, with the curve of the thresholds beside theirs.

A budget goes with a threshold: it is the share of windows and of tokens that the threshold merges on average over the
photos to choose on, merged in every picture instead. So both rules cost the same at every point. Each budget is another
network graph, so this runs in PyTorch, in process: nothing is exported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from msgspec import structs

from algm_deploy.bundle.records import BudgetTuning, Candidate, Knob, MergeTokens
from algm_deploy.errors import PlanError
from algm_deploy.recipe.network import Size
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.timing.protocols import Pace
from algm_deploy.tuning.search import Found, search
from algm_deploy.tuning.trial import Trial

LEAST = 0.0001
"""A share that rounds to nothing, where a plan has to name one."""

PacesOf = Callable[[Sequence[MergePlan]], Sequence[Pace]]
"""Times networks that merge by these plans, in turns."""


def knob_of(plan: MergePlan) -> Knob:
    """The threshold that budgets are taken from: CLAP's, or GBM's in a plan without CLAP.

    Raises:
        PlanError: the plan does not merge by thresholds.
    """
    if plan.method != "algm" or not plan.layers or plan.budgeted:
        raise PlanError(
            "expected a bundle that merges by thresholds, whose averages become budgets, got one that does not: "
            "export it without --budget and --dense"
        )
    return "clap_threshold" if plan.clap_layers else "gbm_threshold"


def budgets_like(plan: MergePlan, tokens: Sequence[MergeTokens], grid: Size) -> MergePlan:
    """The plan with budgets that merge as much as `tokens` tell of its thresholds; shares to four places.

    Several GBM layers get one share, which leaves as many tokens after the last of them.
    """
    patches = float(math.prod(grid))
    settings: dict[str, Any] = {}
    if plan.clap_layers:
        members, windows = math.prod(plan.window), (grid[0] // plan.window[0]) * (grid[1] // plan.window[1])
        left = tokens[0].mean
        settings |= {"clap": "budget", "clap_budget": _share((patches - left) / (members - 1) / windows)}
        patches = left
    if plan.gbm_layers:
        kept = (tokens[-1].mean / patches) ** (1 / len(plan.gbm_layers))
        settings |= {"gbm": "budget", "gbm_budget": _share(1 - kept)}
    return replace(plan, **settings)


def _share(exact: float) -> float:
    return min(max(round(exact, 4), LEAST), 1.0)


def tune_budget(
    trial: Trial, grid: Size, values: Sequence[float], whole: bool = False, paces_of: PacesOf | None = None
) -> BudgetTuning:
    """Searches the budgets of a network with that patch grid which go with ascending thresholds.

    `whole` measures every candidate, on both parts of the photos, instead of as many as it takes to choose. `paces_of`
    times each measured budget in turns with the threshold beside it, where times are asked for.

    Raises:
        PlanError: the plan does not merge by thresholds, or the aim is one in multiply-adds that nobody counts.
        GateError: no pixel was labelled.
    """
    knob = knob_of(trial.plan)

    def by_threshold(value: float) -> MergePlan:
        return replace(trial.plan, **{knob: value})  # type: ignore[arg-type]

    @cache
    def at(value: float) -> MergePlan:
        plan = by_threshold(value)
        return budgets_like(plan, trial.evaluate(plan, trial.tuning).tokens, grid)

    def beside(value: float, held_out: bool = False) -> Candidate:
        return trial.candidate(value, by_threshold(value), held_out=held_out)

    found = search(trial.goal, values, lambda value: trial.candidate(value, at(value)), whole)
    measured = [one.value for one in found.candidates]
    thresholds = tuple(map(beside, measured))
    if paces_of is not None:
        paces = [paces_of((at(value), by_threshold(value))) for value in measured]
        found = _timed(found, [budget for budget, _ in paces])
        thresholds = tuple(_at_pace(one, pace) for one, (_, pace) in zip(thresholds, paces, strict=True))
    return BudgetTuning(
        knob=knob,
        plan=at(found.marked.value),
        recipe_value=getattr(trial.plan, knob),
        thresholds=thresholds,
        thresholds_held_out=tuple(beside(value, True) for value in (measured if whole else [found.marked.value])),
        **trial.outcome(f"Budget, aim: {trial.goal.aim}", found, at, whole),
    )


def _timed(found: Found, paces: Sequence[Pace]) -> Found:
    """The same with the paces of its candidates."""
    timed = tuple(map(_at_pace, found.candidates, paces))
    chosen = next((one for one in timed if found.chosen and one.value == found.chosen.value), None)
    return replace(found, candidates=timed, chosen=chosen)


def _at_pace(one: Candidate, pace: Pace) -> Candidate:
    return structs.replace(one, **pace._asdict())
