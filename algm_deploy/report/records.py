"""Records of one or several bundles as rows, and which of them may stand side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from algm_deploy.bundle.files import WEIGHTS
from algm_deploy.bundle.records import Engine, EngineStretches, Evaluation, Parity, Speed
from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.bundle.store import Bundle
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.runners.registry import row_of

Kind = TypeVar("Kind", Parity, Evaluation, Speed)


@dataclass(frozen=True)
class Artifact:
    """What a figure was measured on: weights, merge plan with the thresholds in force, precision, output.

    A truncated network drops tokens where the plan merges them: it has a speed, but no accuracy. Neither has one that
    was timed with cuDNN's attention: what is evaluated attends as the runner does.
    """

    weights_sha256: str
    plan: MergePlan
    precision: str
    output: str
    truncated: bool = False
    cudnn_attention: bool = False


@dataclass(frozen=True)
class Measured(Generic[Kind]):
    """One record of a bundle, which its folder names, and what it was measured on."""

    bundle: str
    artifact: Artifact
    record: Kind

    @property
    def runtime(self) -> str:
        """What executed it."""
        return self.record.runtime


def may_share_row(accuracy: Artifact, speed: Artifact) -> bool:
    """Whether accuracy and speed may stand in one row: same weights, plan and precision, whatever each one's output."""
    return accuracy == replace(speed, output=accuracy.output) and not speed.truncated


def measured(bundle: Bundle, kind: type[Kind]) -> list[Measured[Kind]]:
    """The records of a kind in a bundle's manifest."""
    records: tuple[Kind, ...] = getattr(bundle.manifest, kind.section)
    return rows_of(bundle, records)


def rows_of(bundle: Bundle, records: Sequence[Kind]) -> list[Measured[Kind]]:
    """Records of a bundle as rows."""
    return [Measured(bundle.path.name, artifact_of(bundle, one), one) for one in records]


def artifact_of(bundle: Bundle, record: Parity | Evaluation | Speed) -> Artifact:
    """What a record was measured on.

    An engine may have another precision than the bundle it was built from, and a speed record tells which variant of
    the network it timed.
    """
    recipe = bundle.recipe
    variant = record.variant if isinstance(record, Speed) else "merged"
    parts = bundle.found(EngineStretches, record.runtime)
    engine = bundle.found(Engine, record.runtime) or (parts.engines[0] if parts else None)
    thresholds = {} if isinstance(record, Parity) else record.thresholds
    cudnn = variant == "dense_cudnn" or bundle.cudnn_attends
    plan = DENSE if cudnn or variant == "dense" else plan_in_force(recipe.merging, thresholds)
    precision = engine.precision if engine else row_of(record.runtime).precision_of(recipe.precision)
    weights = bundle.files[WEIGHTS].sha256
    return Artifact(weights, plan, precision, recipe.output, truncated=variant == "truncated", cudnn_attention=cudnn)


def plan_in_force(plan: MergePlan, thresholds: Mapping[str, float | str]) -> MergePlan:
    """The plan with the thresholds of a run, in fp32 as the network gets them; plans without merging are all equal.

    Thresholds may be texts, as JSON has no infinity. A merge that waits for an infinite similarity is none.
    """
    clap, gbm = (
        float(np.float32(thresholds.get(name, default)))
        for name, default in ((CLAP_THRESHOLD, plan.clap_threshold), (GBM_THRESHOLD, plan.gbm_threshold))
    )
    return plan.row.in_force(plan, clap, gbm)


def comparable(rows: Sequence[Measured[Evaluation]]) -> list[list[Measured[Evaluation]]]:
    """Evaluations grouped by what must be equal for their mIoU to be compared: all but plan, threshold and output.

    Equal are weights, precision, runtime, protocol and the pictures, as far as their number and labelled pixels tell.
    Within a group the order is from most multiply-adds, or tokens, to fewest.
    """
    groups: dict[tuple[Any, ...], list[Measured[Evaluation]]] = {}
    for row in rows:
        one = row.record
        pictures = (one.dataset, one.split, one.protocol, one.images, one.labelled_pixels)
        key = (row.artifact.weights_sha256, row.artifact.precision, row.runtime, *pictures)
        groups.setdefault(key, []).append(row)
    return [sorted(group, key=lambda row: -(row.record.gmacs_per_window_mean or 0)) for group in groups.values()]


def baseline(group: Sequence[Measured[Evaluation]]) -> Measured[Evaluation] | None:
    """The evaluation without merging in a comparable group."""
    return next((row for row in group if not row.artifact.plan.layers), None)


def joined(
    accuracy: Sequence[Measured[Evaluation]], speed: Sequence[Measured[Speed]]
) -> list[tuple[Measured[Evaluation], Measured[Speed]]]:
    """Each speed record with an accuracy that may share its row: by preference its own runtime's, on most images."""
    pairs = []
    for one in speed:
        fitting = [row for row in accuracy if may_share_row(row.artifact, one.artifact)]
        if fitting:
            pairs.append((max(fitting, key=lambda row: (row.runtime == one.runtime, row.record.images)), one))
    return pairs
