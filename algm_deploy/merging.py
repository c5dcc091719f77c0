"""Fills the merge slots of a network: with the operators of a plan, with recorded decisions, or to drop tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import PlanError
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import load_network
from algm_deploy.models.mask2former import MaskedLayer
from algm_deploy.models.merges import (
    Clap,
    Cts,
    CtsReplay,
    Elvit,
    ElvitReplay,
    Evit,
    EvitReplay,
    G2tm,
    Gbm,
    KeepAsMany,
    KeepFirst,
    Mpm,
    Remerge,
    Replay,
    ReplayChoice,
    Restore,
    Tome,
    Unmerge,
)
from algm_deploy.models.vit import SLOTS, Block, KeepTokens, MergeInputs, Model, VitNetwork, share_parameters
from algm_deploy.ops.clap import rows_left
from algm_deploy.ops.gbm import most_joins
from algm_deploy.ops.tome import most_merges
from algm_deploy.recipe.schema import DENSE, MergePlan, Network, Recipe, Size, fresh_merges, merged_parts


def insert_merging(model: Model, plan: MergePlan) -> Model:
    """A copy of `model` that merges as `plan` says; parameters are shared, `model` is unchanged.

    Raises:
        PlanError: a layer the network does not have, or a window larger than its patch grid.
    """
    merged = share_parameters(model)
    encoder = merged.encoder
    _check_plan(plan, len(merged.blocks), encoder.grid)
    encoder.outlet = KeepTokens()
    encoder.shares = plan.method == "cts" and bool(plan.layers)
    if merged.network.architecture.adapter:
        encoder.outlet = Unmerge(encoder.prefix)
        encoder.regroup = Remerge(encoder.prefix) if plan.between_groups == "remerge" else KeepTokens()
    for block in cast(Iterable[Block], merged.blocks):
        block.proportional = block.weighs = False
        for slot in SLOTS.values():
            setattr(block, slot, KeepTokens())
    fresh = fresh_merges(plan, merged.network)
    budgets = merge_budgets(plan, encoder.grid, encoder.prefix, fresh)
    for layer in plan.clap_layers:
        merged.blocks[layer - 1].merge = Clap(plan, encoder.grid, encoder.prefix, budgets.get(layer, 0))
    for layer in plan.gbm_layers:
        merged.blocks[layer - 1].merge = Gbm(plan, layer, encoder.prefix, budgets.get(layer, 0))
    if plan.method == "elvit":
        _fill(merged, plan, lambda _: Elvit(plan, encoder.grid, encoder.prefix))
        encoder.outlet = Restore(encoder.prefix)
    elif plan.method == "g2tm":
        _fill(merged, plan, lambda _: G2tm(encoder.grid, encoder.prefix))
    elif plan.method == "mpm" and plan.layers:
        _fill(merged, plan, lambda _: Mpm(encoder.prefix))
        encoder.outlet = Unmerge(encoder.prefix)
    elif plan.method == "cts":
        _fill(merged, plan, lambda _: Cts(encoder.grid, encoder.prefix, plan.cts_shared))
    elif plan.method == "evit" and plan.layers:
        _fill_evit(merged, plan, lambda _, *counts: Evit(*counts))
        encoder.outlet = Unmerge(encoder.prefix)
    elif plan.counts_in:
        merges = tome_merges(plan, encoder.grid[0] * encoder.grid[1], encoder.prefix, fresh)
        _fill(merged, plan, lambda index: Tome(merges[plan.layers[index]], encoder.prefix))
    if plan.method == "tome" and plan.layers:
        count_sizes(merged)
    return merged


def _fill(model: VitNetwork, plan: MergePlan, merge: Callable[[int], nn.Module]) -> None:
    """Puts a module, given the index of the merge, into every slot in which the plan merges."""
    for index, (layer, part) in enumerate(plan.places):
        setattr(model.blocks[layer - 1], SLOTS[part], merge(index))


def _fill_evit(model: VitNetwork, plan: MergePlan, merge: Callable[..., nn.Module]) -> None:
    """The same for EViT: the module is made of the index, patches, rows, how many of them stay, and prefix."""
    encoder = model.encoder
    patches = encoder.grid[0] * encoder.grid[1]
    counts = plan.evit_counts(patches)
    _fill(model, plan, lambda index: merge(index, patches, *counts[plan.layers[index]], encoder.prefix))
    for layer in plan.layers:
        cast(Block, model.blocks[layer - 1]).weighs = True


def deployed(model: VitNetwork, recipe: Recipe, rows: Mapping[int, int] = {}) -> Deployed:
    """The network with the recipe's merging and the deployed inputs and outputs, in evaluation mode.

    With `rows` it drops tokens instead, as `truncate` does.
    """
    plan = recipe.merging
    filled = truncate(model, rows, plan) if rows else insert_merging(model, plan)
    return Deployed(filled, recipe.network, recipe.output).eval()


def deployed_network(bundle: Bundle, dtype: torch.dtype | None = None, quantize: bool = True) -> Deployed:
    """The network that a bundle deploys, in the bundle's precision or in `dtype`; `quantize` as for `load_network`.

    One that drops tokens has no merge plan for it: the manifest tells how many rows it keeps.
    """
    variant = bundle.manifest.variant
    return deployed(
        load_network(bundle, dtype, quantize), bundle.recipe, dict(variant.rows_by_layer) if variant else {}
    )


def merges_in(plan: MergePlan, layer: int, network: Network) -> int:
    """How many tokens or windows merge in a layer where the plan says it: with ToMe, or by a budget; else 0."""
    fresh = fresh_merges(plan, network)
    if plan.merge_in(layer) == "tome":
        return tome_merges(plan, network.grid[0] * network.grid[1], network.prefix, fresh)[layer]
    return merge_budgets(plan, network.grid, network.prefix, fresh).get(layer, 0)


def tome_merges(plan: MergePlan, patches: int, prefix: int, fresh: Sequence[bool] = ()) -> dict[int, int]:
    """By layer, how many of `patches` tokens ToMe merges: as published, at most half of those that are left.

    Blockwise, that many in attention and again in the MLP, as all come back in between. `fresh`: of every merge,
    whether all patches reach it; without it that is the first one.
    """
    merges, left = {}, patches
    for index, layer in enumerate(plan.layers):
        if plan.method == "tome_blockwise":
            merges[layer] = min(int((prefix + patches) * plan.tome_share[layer - 1]), most_merges(patches, 0))
        else:
            left = patches if any(fresh[index : index + 1]) else left
            merges[layer] = min(plan.tome_r[layer - 1], most_merges(left, 0))
            left -= merges[layer]
    return merges


def merge_budgets(plan: MergePlan, grid: Size, prefix: int, fresh: Sequence[bool] = ()) -> dict[int, int]:
    """By layer with the rule `budget`, how many windows or tokens merge there: no more than there are.

    `fresh` as for `tome_merges`.
    """
    budgets = {}
    patches = grid[0] * grid[1]
    for index, layer in enumerate(plan.layers if plan.method == "algm" else ()):
        patches = grid[0] * grid[1] if any(fresh[index : index + 1]) else patches
        if layer in plan.clap_layers and plan.clap == "budget":
            windows = (grid[0] // plan.window[0]) * (grid[1] // plan.window[1])
            budgets[layer] = _counted(plan.clap_budget, windows, windows)
            patches = rows_left(grid, plan.window, 0, budgets[layer])
        elif layer in plan.gbm_layers and plan.gbm == "budget":
            most = most_joins(prefix + patches, prefix, plan.semantics)
            budgets[layer] = _counted(plan.gbm_budget, patches, most)
            patches -= budgets[layer]
    return budgets


def _counted(budget: int | float, of: int, most: int) -> int:
    """A count as it is, a share rounded to the nearest one."""
    return min(budget if isinstance(budget, int) else math.floor(budget * of + 0.5), most)


def count_sizes(merged: VitNetwork) -> None:
    """What ToMe changes beside the merges, in place: attention counts patches, and the decoder gets all of them."""
    for block in cast(Iterable[Block], merged.blocks):
        block.proportional = True
    merged.encoder.outlet = Unmerge(merged.encoder.prefix)


def replay_merging(model: Model, plan: MergePlan) -> Model:
    """A copy of `model` that merges where `plan` does, by the token maps handed in with `MergeInputs.maps`.

    Where its queries choose cells to attend to, they take those of `MergeInputs.masks`.
    """
    replaying = insert_merging(model, plan)
    choosing = (module for module in replaying.modules() if isinstance(module, MaskedLayer))
    for index, layer in enumerate(choosing):
        layer.choose = ReplayChoice(index)
    prefix, grid = replaying.encoder.prefix, replaying.encoder.grid
    if plan.method == "elvit":
        _fill(replaying, plan, lambda index: ElvitReplay(index, plan, grid, prefix))
        return replaying
    if plan.method == "cts":
        _fill(replaying, plan, lambda index: CtsReplay(index, grid, prefix))
        return replaying
    if plan.method == "evit":
        _fill_evit(replaying, plan, EvitReplay)
        return replaying
    plain = plan.mpm_layers or (plan.gbm_layers if plan.semantics == "paper" else ())
    _fill(replaying, plan, lambda index: Replay(index, prefix, weighted=plan.layers[index] not in plain))
    return replaying


def truncate(model: Model, rows: Mapping[int, int], plan: MergePlan = DENSE) -> Model:
    """A copy of `model` that keeps the first `rows[layer]` rows, prefix counted, in each of these 1-based layers.

    Of `plan` it keeps what is no merge: with ToMe, attention by sizes and a decoder that gets every patch; blockwise,
    that attention and MLP give every row a result; with ELViT, EViT and MPM, that the decoder gets every
    patch; where something needs every patch between groups of blocks, that it gets them, and how many go on from there.
    """
    truncated, method = share_parameters(model), plan.method
    if truncated.network.architecture.adapter:
        truncated.encoder.outlet = Unmerge(truncated.encoder.prefix)
        truncated.encoder.regroup = KeepAsMany() if plan.between_groups == "remerge" else KeepTokens()
    for layer, count in rows.items():
        for part in merged_parts(method):
            setattr(truncated.blocks[layer - 1], SLOTS[part], KeepFirst(count, truncated.encoder.prefix))
    if method == "tome":
        count_sizes(truncated)
    elif method in ("elvit", "evit", "mpm"):
        truncated.encoder.outlet = Unmerge(truncated.encoder.prefix)
    return truncated


def merge_inputs(
    clap: float,
    gbm: float,
    maps: tuple[Tensor, ...] = (),
    device: str | torch.device = "cpu",
    masks: tuple[Tensor, ...] = (),
) -> MergeInputs:
    """Thresholds as the fp32 scalars the operators take."""
    return MergeInputs(torch.tensor(clap, device=device), torch.tensor(gbm, device=device), maps, masks)


def _check_plan(plan: MergePlan, depth: int, grid: Size) -> None:
    if plan.layers and plan.layers[-1] > depth:
        raise PlanError(
            f"the plan merges in layer {plan.layers[-1]}, the network has {depth}: choose layers 1 to {depth}"
        )
    if plan.clap_layers and (plan.window[0] > grid[0] or plan.window[1] > grid[1]):
        raise PlanError(
            f"a CLAP window of {plan.window[0]}x{plan.window[1]} patches does not fit a grid of {grid[0]}x{grid[1]}"
        )
