"""How people are told of a merge plan: by a short name beside others, in the list of recipes, and in a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from algm_deploy.bundle.signature import CLAP_THRESHOLD
from algm_deploy.recipe.plan import DENSE, MergePlan, Method


class Words(NamedTuple):
    """What tells of a plan of one method: beside others, given the plan it is compared with; and in a report, by a
    sentence of all merges."""

    name: Callable[[MergePlan, MergePlan], str]
    told: Callable[[MergePlan], str]


def plan_name(plan: MergePlan, reference: MergePlan) -> str:
    """Short name of a plan beside others: its threshold or budget, and where it otherwise differs from `reference`."""
    return WORDS[plan.method].name(plan, reference) if plan.layers else "dense"


def listed_merges(plan: MergePlan) -> str:
    """What merges, and where: `CLAP 1; GBM 5`, or the name of a plan of another method than ALGM."""
    if plan.method != "algm":
        return plan_name(plan, DENSE)
    kinds = {"CLAP": plan.clap_layers, "GBM": plan.gbm_layers}
    return "; ".join(f"{kind} {_joined(layers)}" for kind, layers in kinds.items() if layers)


def told_merges(plan: MergePlan) -> str:
    """What merges, where and how, of a plan that merges: `CLAP in block 1, windows of 2 x 2; GBM in block 5, fixed`."""
    return WORDS[plan.method].told(plan)


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


# --- one row a method -------------------------------------------------------------------------------------------------

_TOLD_BY_BUDGETS = ("clap", "clap_budget", "gbm_budget")


def _algm_name(plan: MergePlan, reference: MergePlan) -> str:
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


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _algm_told(plan: MergePlan) -> str:
    clap = [f"CLAP in block {layer}, windows of {_joined(plan.window, ' x ')}" for layer in plan.clap_layers]
    return "; ".join(clap + [f"GBM in block {layer}, {plan.gbm}" for layer in plan.gbm_layers])


def _counted(words: Callable[[MergePlan], str], note: Callable[[MergePlan], str] = lambda plan: "") -> Words:
    """Of a method that merges as many tokens in every picture, in the same `words` everywhere; `note`: how, for a
    report."""

    def told(plan: MergePlan) -> str:
        return "; ".join(filter(None, (f"{words(plan)}: as many tokens merge, whatever the picture", note(plan))))

    return Words(lambda plan, _: words(plan), told)


def _by_block(counts: Sequence[str], plan: MergePlan) -> str:
    """What is counted in each block, once where all that merge count alike."""
    layers = list(dict.fromkeys(plan.layers))
    merging = {counts[layer - 1] for layer in layers}
    if len(merging) != 1:
        return ", ".join(counts)
    return f"{merging.pop()} in {f'block {layers[0]}' if len(layers) == 1 else f'{len(layers)} blocks'}"


def _in_blocks(layers: Sequence[int]) -> str:
    return f"block{'s' * (len(layers) > 1)} {_joined(layers)}"


def _joined(values: Sequence[int], separator: str = ", ") -> str:
    return separator.join(map(str, values))


WORDS: dict[Method, Words] = {
    "algm": Words(_algm_name, _algm_told),
    "tome": _counted(lambda plan: f"ToMe, r {_by_block([str(r) for r in plan.tome_r], plan)}"),
    "tome_blockwise": _counted(
        lambda plan: f"ToMe, {_by_block([f'{100 * share:.3g} %' for share in plan.tome_share], plan)}, each by itself",
        lambda plan: "attention and MLP run on what is left, and then all tokens are back",
    ),
    "elvit": _counted(
        lambda plan: f"ELViT, {_joined(plan.elvit_grid, ' x ')} tokens after block {plan.elvit_layer}",
        lambda plan: (
            "each is the mean of many patches in part, and every patch is restored from its "
            f"{plan.elvit_neighbours} nearest for the decoder"
        ),
    ),
    "evit": _counted(
        lambda plan: f"EViT, {100 * plan.evit_keep:.3g} % in {_in_blocks(plan.evit_layers)}",
        lambda plan: (
            "one more holds the others, and each of those is restored from the nearest that stayed for the decoder"
        ),
    ),
    "g2tm": Words(
        lambda plan, _: f"G2TM in block {plan.g2tm_layer}, tau {plan.clap_threshold:.4g}",
        lambda plan: f"G2TM in block {plan.g2tm_layer}",
    ),
    "mpm": Words(
        lambda plan, _: f"MPM, after {_in_blocks(plan.mpm_layers)}",
        lambda plan: "; ".join(f"MPM after block {layer}" for layer in plan.mpm_layers),
    ),
    "cts": _counted(
        lambda plan: f"CTS, {plan.cts_shared} superpatches",
        lambda plan: "2x2 patches whose token is shared are chosen by a policy network",
    ),
    "dtop": Words(
        lambda plan, _: f"DToP after {_in_blocks(plan.dtop_layers)}, confidence {plan.clap_threshold:.4g}",
        lambda plan: (
            f"DToP after {_in_blocks(plan.dtop_layers)}: tokens whose class an auxiliary head is sure of leave, but "
            f"for the {plan.dtop_keep} surest of each class"
        ),
    ),
}
