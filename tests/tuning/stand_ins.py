"""Evaluations that nobody measured, for searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from algm_deploy.bundle.records import Evaluation, Figures, MergeTokens, Speed, TokenHistograms
from algm_deploy.bundle.signature import merge_names
from algm_deploy.evaluation.datasets import Dataset, Sample
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import Protocol
from algm_deploy.tuning.photos import halves
from algm_deploy.tuning.search import Goal
from algm_deploy.tuning.trial import Evaluate, Trial

DEMO = recipe("demo")
PATCHES = 1024


def dataset_of(*names: str) -> Dataset:
    """A data set of photos that are not there; their slice is the first letter of their name."""
    samples = tuple(Sample(name, Path(name), Path(name), name[0]) for name in sorted(names))
    return Dataset("folder", "val", Path(), ("x",), ((0, 0, 0),), samples, np.zeros(256, np.int16))


def evaluation(
    miou: float | None,
    gmacs: float | None = 5.0,
    split: str = "val",
    plan: MergePlan = DEMO.merging,
    by_slice: Mapping[str, float | None] | None = None,
) -> Evaluation:
    """Three photos, 600 tokens after the first merge and 400 after the last one."""
    names = merge_names(plan)
    parts = by_slice if by_slice is not None else {"day": miou, "night": miou}
    return Evaluation(
        runtime="none",
        dataset="folder",
        split=split,
        protocol=Protocol("folder", 128, 128, 96),
        images=3,
        miou_percent=miou,
        pixel_accuracy_percent=miou,
        gmacs_per_window_mean=gmacs,
        gmacs_per_window_dense=None if gmacs is None else 7.0,
        tokens=tuple(MergeTokens(merge=name, mean=400 if name is names[-1] else 600) for name in names),
        token_histograms=TokenHistograms(
            token_edges=(0, PATCHES / 2, PATCHES), windows_by_merge=dict.fromkeys(names, (1, 3))
        ),
        slices={
            name: Figures(images=1 + (name == "day"), miou_percent=part, pixel_accuracy_percent=None)
            for name, part in parts.items()
        },
    )


def speed(throughput: float, stable: bool = True) -> Speed:
    """A network that takes so many pictures a second."""
    return Speed(
        runtime="none",
        variant="merged",
        protocol="mixed",
        batch=1,
        stable=stable,
        throughput_img_per_s=throughput,
        speedup=2.0,
    )


def trial(
    evaluate: Callable[[float | None, Dataset], Evaluation] | Evaluate,
    goal: Goal,
    by_plan: bool = False,
    **facts: object,
) -> Trial:
    """A trial on the demo's plan and two photos. `evaluate` gets CLAP's threshold, None where nothing merges."""

    def at(plan: MergePlan, dataset: Dataset) -> Evaluation:
        return evaluate(None if plan == DENSE else plan.clap_threshold, dataset)

    plan = facts.pop("plan", DEMO.merging)
    return Trial(evaluate if by_plan else at, plan, goal, *halves(dataset_of("a1", "a2")), **facts)
