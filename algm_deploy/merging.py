"""Fills the merge slots of a network: with the operators of a plan, with recorded decisions, or to drop tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

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
    Dtop,
    DtopReplay,
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
from algm_deploy.recipe.network import Network, Size
from algm_deploy.recipe.plan import DENSE, Merge, MergePlan, fresh_merges
from algm_deploy.recipe.schema import Recipe


def insert_merging(model: Model, plan: MergePlan) -> Model:
    """A copy of `model` that merges as `plan` says; parameters are shared, `model` is unchanged.

    Raises:
        PlanError: a layer the network does not have, or a window larger than its patch grid.
    """
    merged = share_parameters(model)
    encoder = merged.encoder
    _check_plan(plan, len(merged.blocks), encoder.grid)
    encoder.outlet, encoder.shares = KeepTokens(), False
    if merged.network.architecture.adapter:
        encoder.outlet = Unmerge(encoder.prefix)
        encoder.regroup = Remerge(encoder.prefix) if plan.between_groups == "remerge" else KeepTokens()
    for block in cast(Iterable[Block], merged.blocks):
        block.proportional = block.weighs = block.judged = False
        for slot in SLOTS.values():
            setattr(block, slot, KeepTokens())
    if plan.layers:
        _prepare(merged, plan)
    _fill(merged, plan, lambda kind: KINDS[kind].merge)
    return merged


def _prepare(model: VitNetwork, plan: MergePlan) -> None:
    """What the merges of a plan need beside them: what they compare, and that the decoder gets every patch."""
    encoder, row = model.encoder, plan.row
    encoder.shares = row.compares == "policy"
    if row.compares == "keys":
        count_patches(model)
    for layer in plan.layers:
        block = cast(Block, model.blocks[layer - 1])
        block.weighs, block.judged = row.compares == "cls", row.compares == "auxiliary"
    if row.restores:
        encoder.outlet = KINDS[row.merge].outlet(encoder.prefix)


def _fill(model: VitNetwork, plan: MergePlan, of: Callable[[Merge], Fills]) -> None:
    """Puts modules into every slot in which the plan merges; `of` tells what makes those of a merge."""
    for index, (layer, part) in enumerate(plan.places):
        setattr(model.blocks[layer - 1], SLOTS[part], of(plan.merge_in(layer))(plan, model.network, index))


def deployed(model: VitNetwork, recipe: Recipe, rows: Mapping[int, int] = {}) -> Deployed:
    """The network with the recipe's merging and the deployed inputs and outputs, in evaluation mode.

    With `rows` it drops tokens instead, as `truncate` does.
    """
    plan = recipe.merging
    filled = truncate(model, rows, plan) if rows else insert_merging(model, plan)
    return Deployed(filled, recipe.network, recipe.output).eval()


def deployed_network(
    bundle: Bundle, dtype: torch.dtype | None = None, quantize: bool = True, attention: bool = False
) -> Deployed:
    """The network that a bundle deploys, in the bundle's precision or in `dtype`; the rest as for `load_network`.

    One that drops tokens has no merge plan for it: the manifest tells how many rows it keeps.
    """
    variant = bundle.manifest.variant
    model = load_network(bundle, dtype, quantize, attention)
    return deployed(model, bundle.recipe, dict(variant.rows_by_layer) if variant else {})


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
        if not plan.row.lasting:
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
    for index, layer in enumerate(plan.layers):
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


def count_patches(model: VitNetwork) -> None:
    """Makes attention count the patches of every token, in place, and hand on its keys."""
    for block in cast(Iterable[Block], model.blocks):
        block.proportional = True


def replay_merging(model: Model, plan: MergePlan) -> Model:
    """A copy of `model` that merges where `plan` does, by the token maps handed in with `MergeInputs.maps`.

    Where its queries choose cells to attend to, they take those of `MergeInputs.masks`.
    """
    replaying = insert_merging(model, plan)
    choosing = (module for module in replaying.modules() if isinstance(module, MaskedLayer))
    for index, layer in enumerate(choosing):
        layer.choose = ReplayChoice(index)
    _fill(replaying, plan, lambda kind: KINDS[kind].replay)
    return replaying


def truncate(model: Model, rows: Mapping[int, int], plan: MergePlan = DENSE) -> Model:
    """A copy of `model` that keeps the first `rows[layer]` rows, prefix counted, in each of these 1-based layers.

    Of `plan` it keeps what is no merge: with ToMe, attention by sizes, and blockwise that attention and MLP give every
    row a result; that the decoder gets every patch, where it does; where something needs every patch between groups of
    blocks, that it gets them, and how many go on from there.
    """
    truncated, row = share_parameters(model), plan.row
    encoder = truncated.encoder
    if truncated.network.architecture.adapter:
        encoder.outlet = Unmerge(encoder.prefix)
        encoder.regroup = KeepAsMany() if plan.between_groups == "remerge" else KeepTokens()
    for layer, count in rows.items():
        for part in row.parts:
            setattr(truncated.blocks[layer - 1], SLOTS[part], KeepFirst(count, encoder.prefix))
    if row.compares == "keys":
        count_patches(truncated)
    if row.restores:
        encoder.outlet = Unmerge(encoder.prefix)
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


# --- what merges in a slot --------------------------------------------------------------------------------------------

Fills = Callable[[MergePlan, Network, int], nn.Module]
"""Of a plan, a network and the index of a merge the module for its slot."""


class Kind(NamedTuple):
    """What makes the modules of a merge and of its replay, and, where the decoder gets every patch, that gives it."""

    merge: Fills
    replay: Fills
    outlet: type[Unmerge | Restore] = Unmerge


def _clap(plan: MergePlan, network: Network, index: int) -> Clap:
    return Clap(plan, network.grid, network.prefix, merges_in(plan, plan.layers[index], network))


def _gbm(plan: MergePlan, network: Network, index: int) -> Gbm:
    layer = plan.layers[index]
    return Gbm(plan, layer, network.prefix, merges_in(plan, layer, network))


def _tome(plan: MergePlan, network: Network, index: int) -> Tome:
    return Tome(merges_in(plan, plan.layers[index], network), network.prefix)


def _replay(weighted: Callable[[MergePlan], bool] = lambda plan: True) -> Fills:
    """A replay of token maps; `weighted`: a token counts by the patches it stands for."""
    return lambda plan, network, index: Replay(index, network.prefix, weighted(plan))


def _evit_counts(plan: MergePlan, network: Network, index: int) -> tuple[int, int, int, int]:
    """Patches, rows, how many of them stay, and prefix."""
    patches = network.grid[0] * network.grid[1]
    return patches, *plan.evit_counts(patches)[plan.layers[index]], network.prefix


KINDS: dict[Merge, Kind] = {
    "clap": Kind(_clap, _replay()),
    "gbm": Kind(_gbm, _replay(lambda plan: plan.semantics != "paper")),
    "tome": Kind(_tome, _replay()),
    "elvit": Kind(
        lambda plan, network, _: Elvit(plan, network.grid, network.prefix),
        lambda plan, network, index: ElvitReplay(index, plan, network.grid, network.prefix),
        Restore,
    ),
    "evit": Kind(
        lambda plan, network, index: Evit(*_evit_counts(plan, network, index)),
        lambda plan, network, index: EvitReplay(index, *_evit_counts(plan, network, index)),
    ),
    "g2tm": Kind(lambda plan, network, _: G2tm(network.grid, network.prefix), _replay()),
    "mpm": Kind(lambda plan, network, _: Mpm(network.prefix), _replay(lambda plan: False)),
    "cts": Kind(
        lambda plan, network, _: Cts(network.grid, network.prefix, plan.cts_shared),
        lambda plan, network, index: CtsReplay(index, network.grid, network.prefix),
    ),
    "dtop": Kind(
        lambda plan, network, _: Dtop(network.prefix, plan.dtop_keep),
        lambda plan, network, index: DtopReplay(index, network.prefix),
    ),
}
