"""Records of one or several bundles as rows, and which of them may stand side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Generic, TypeVar

import numpy as np

from algm_deploy.bundle.files import WEIGHTS
from algm_deploy.bundle.records import Engine, EngineStretches, Evaluation, Parity, Speed
from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.bundle.store import Bundle
from algm_deploy.recipe.schema import DENSE, MergePlan
from algm_deploy.runners.registry import row_of

Kind = TypeVar("Kind", Parity, Evaluation, Speed)


@dataclass(frozen=True)
class Artifact:
    """What a figure was measured on: weights, merge plan with the thresholds in force, precision, output.

    A truncated network drops tokens where the plan merges them: it has a speed, but no accuracy.
    """

    weights_sha256: str
    plan: MergePlan
    precision: str
    output: str
    truncated: bool = False


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
    plan = DENSE if variant == "dense" else plan_in_force(recipe.merging, thresholds)
    precision = engine.precision if engine else row_of(record.runtime).precision_of(recipe.precision)
    return Artifact(bundle.files[WEIGHTS].sha256, plan, precision, recipe.output, truncated=variant == "truncated")


def plan_in_force(plan: MergePlan, thresholds: Mapping[str, float | str]) -> MergePlan:
    """The plan with the thresholds of a run, in fp32 as the network gets them; plans without merging are all equal.

    Thresholds may be texts, as JSON has no infinity. A merge that waits for an infinite similarity is none.
    """
    if plan.row.counts_in:
        return plan if plan.layers else DENSE
    clap, gbm = (
        float(np.float32(thresholds.get(name, default)))
        for name, default in ((CLAP_THRESHOLD, plan.clap_threshold), (GBM_THRESHOLD, plan.gbm_threshold))
    )
    if plan.method == "mpm":
        return plan if plan.layers else DENSE
    if plan.method == "g2tm":
        return replace(plan, clap_threshold=clap) if plan.layers and clap < inf else DENSE
    clap_layers = plan.clap_layers if clap < inf or plan.clap == "budget" else ()
    gbm_layers = plan.gbm_layers if gbm < inf or plan.gbm == "budget" else ()
    if not clap_layers and not gbm_layers:
        return DENSE
    return replace(plan, clap_layers=clap_layers, gbm_layers=gbm_layers, clap_threshold=clap, gbm_threshold=gbm)


_TOLD_BY_BUDGETS = ("clap", "clap_budget", "gbm_budget")


def method_words(plan: MergePlan) -> str:
    """A method that merges as many tokens in every picture, in words: `ToMe, r 16 in 12 blocks`, `ToMe, 20 % in 24
    blocks, each by itself`, or block by block; `ELViT, 28 x 28 tokens after block 10`; `EViT, 70 % in blocks 4, 7`;
    `CTS, 103 superpatches`."""
    if plan.method == "elvit":
        rows, columns = plan.elvit_grid
        return f"ELViT, {rows} x {columns} tokens after block {plan.elvit_layer}"
    if plan.method == "evit":
        return f"EViT, {100 * plan.evit_keep:.3g} % in {_blocks(plan.evit_layers)}"
    if plan.method == "cts":
        return f"CTS, {plan.cts_shared} superpatches"
    return f"ToMe, {_tome_words(plan)}"


def _blocks(layers: Sequence[int]) -> str:
    """`block 4`, or `blocks 4, 7`."""
    return f"block{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def _tome_words(plan: MergePlan) -> str:
    if plan.row.lasting:
        return f"r {_by_block(list(map(str, plan.tome_r)), plan)}"
    return f"{_by_block([f'{100 * share:.3g} %' for share in plan.tome_share], plan)}, each by itself"


def _by_block(counts: Sequence[str], plan: MergePlan) -> str:
    """What is counted in each block, once where all that merge count alike."""
    layers = list(dict.fromkeys(plan.layers))
    merging = {counts[layer - 1] for layer in layers}
    if len(merging) != 1:
        return ", ".join(counts)
    return f"{merging.pop()} in " + (f"block {layers[0]}" if len(layers) == 1 else f"{len(layers)} blocks")


def budget_words(plan: MergePlan) -> str:
    """Budgets in words: `110 windows, 156 tokens`, or `43 % of the windows, 23 % of the tokens`."""
    parts = (
        (plan.clap_layers, plan.clap, plan.clap_budget, "windows"),
        (plan.gbm_layers, plan.gbm, plan.gbm_budget, "tokens"),
    )
    return ", ".join(
        f"{budget} {things}" if isinstance(budget, int) else f"{100 * budget:.3g} % of the {things}"
        for layers, rule, budget, things in parts
        if layers and rule == "budget"
    )


def plan_name(plan: MergePlan, reference: MergePlan) -> str:
    """Short name of a plan beside others: its threshold or budget, and where it otherwise differs from `reference`."""
    if not plan.layers:
        return "dense"
    if plan.row.counts_in:
        return method_words(plan)
    if plan.method == "mpm":
        return f"MPM, after {_blocks(plan.mpm_layers)}"
    if plan.method == "g2tm":
        return f"G2TM in block {plan.g2tm_layer}, tau {plan.clap_threshold:.4g}"
    if plan.budgeted:
        parts = [f"budget {budget_words(plan)}"]
    else:
        parts = [f"tau {plan.clap_threshold:.4g}"] if plan.clap_layers else [f"GBM only, x {plan.gbm_threshold:.4g}"]
    for item in fields(plan):
        value = getattr(plan, item.name)
        differs = reference.layers and value != getattr(reference, item.name)
        if differs and item.name != CLAP_THRESHOLD and item.name not in _TOLD_BY_BUDGETS and value != "budget":
            parts.append(f"{item.name} {_text(value)}")
    return ", ".join(parts)


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


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
