"""Fills the merge slots of a network: with the operators of a plan, with recorded decisions, or to drop tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

import algm_deploy.ops  # noqa: F401  registers torch.ops.algm
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import PlanError
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import load_network
from algm_deploy.models.mask2former import MaskedLayer
from algm_deploy.models.vit import SLOTS, Block, KeepTokens, MergeInputs, Model, Tokens, VitNetwork, share_parameters
from algm_deploy.ops._rows import merge_rows, row_of, sum_rows, wide
from algm_deploy.ops.clap import rows_left
from algm_deploy.ops.elvit import elvit_centroids, nearest, restoring_weights, squared_distances
from algm_deploy.ops.evit import evit_record, evit_rows
from algm_deploy.ops.gbm import most_joins
from algm_deploy.ops.tome import most_merges
from algm_deploy.recipe.schema import DENSE, MergePlan, Network, Recipe, Size, fresh_merges, merged_parts


class Clap(nn.Module):
    """CLAP in a merge slot; `budget` windows merge where that is the rule, whatever the inputs."""

    def __init__(self, plan: MergePlan, grid: Size, prefix: int, budget: int = 0) -> None:
        super().__init__()
        self.plan, self.grid, self.prefix, self.budget = plan, grid, prefix, budget

    @property
    def attributes(self) -> tuple[Any, ...]:
        """The operator's, in its order."""
        plan = self.plan
        places = self.grid, plan.window, self.prefix
        return *places, plan.semantics, plan.batch, plan.order, plan.clap, self.budget

    @property
    def decides(self) -> bool:
        """Whether the picture decides how many merge."""
        return self.plan.clap != "budget"

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        threshold = inputs.clap if inputs is not None and self.decides else None
        values, size, map, length = torch.ops.algm.clap(tokens.values, tokens.size, threshold, *self.attributes)
        return Tokens(values, size, map, length, padded=self.decides and self.plan.batch == "per_image")


class Gbm(nn.Module):
    """GBM in a merge slot; the published code divides the standard deviation by the 1-based layer.

    `budget` tokens merge where that is the rule, whatever the inputs.
    """

    def __init__(self, plan: MergePlan, layer: int, prefix: int, budget: int = 0) -> None:
        super().__init__()
        self.plan, self.layer, self.prefix, self.budget = plan, layer, prefix, budget

    @property
    def attributes(self) -> tuple[Any, ...]:
        """The operator's, in its order."""
        plan = self.plan
        return self.prefix, plan.gbm, float(self.layer), plan.semantics, plan.batch, self.budget

    @property
    def decides(self) -> bool:
        """Whether the picture decides how many merge."""
        return self.plan.gbm != "budget"

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        threshold = inputs.gbm if inputs is not None and self.decides else None
        values, size, map, length = torch.ops.algm.gbm(*tokens[:4], threshold, *self.attributes)
        return Tokens(values, size, map, length, padded=self.decides and self.plan.batch == "per_image")


class Tome(nn.Module):
    """ToMe in a merge slot that is handed the keys to compare."""

    def __init__(self, r: int, prefix: int) -> None:
        super().__init__()
        self.r, self.prefix = r, prefix

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        assert tokens.keys is not None
        values, size, map = torch.ops.algm.tome(*tokens[:3], tokens.keys, self.r, self.prefix)
        return tokens._replace(values=values, size=size, map=map, length=tokens.length - self.r)


class Unmerge(nn.Module):
    """Every patch gets its token back, between encoder and decoder: the decoder does not know of ToMe."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        patches = torch.ops.algm.unmerge(tokens.values, tokens.map, 0)
        values = torch.cat([tokens.values[:, : self.prefix], patches], 1) if self.prefix else patches
        return every_patch(values, tokens)


def every_patch(values: Tensor, tokens: Tokens) -> Tokens:
    """Values (B, P + N, C) of the prefix and every patch as the sequence that `tokens` were before all merges."""
    patches = tokens.map.shape[1]
    rows = torch.arange(values.shape[1] - patches, values.shape[1], device=values.device)
    return Tokens(
        values,
        size=tokens.size.new_ones(values.shape[:2]),
        map=rows.expand_as(tokens.map),
        length=torch.full_like(tokens.length, values.shape[1]),
        padded=False,
    )


class Remerge(nn.Module):
    """Between groups of blocks: what had merged in the last one merges again."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, every: Tokens, left: Tokens) -> Tokens:
        """Every patch as it enters the group, and the tokens that the last group left, to the tokens that enter it."""
        values = torch.ops.algm.remerge(every.values, left.map, left.size, self.prefix)
        return left._replace(values=values, keys=None)


class G2tm(nn.Module):
    """G2TM in a merge slot. Images merge alone, so they differ in length."""

    def __init__(self, grid: Size, prefix: int) -> None:
        super().__init__()
        self.grid, self.prefix = grid, prefix

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        facts = inputs.clap, list(self.grid), self.prefix
        values, size, map, length = torch.ops.algm.g2tm(tokens.values, tokens.size, *facts)
        return Tokens(values, size, map, length, padded=True)


class Evit(nn.Module):
    """EViT in a merge slot that is handed what cls attends to: `keep` of `rows` rows stay, of `patches` at first."""

    def __init__(self, patches: int, rows: int, keep: int, prefix: int) -> None:
        super().__init__()
        self.patches, self.rows, self.keep, self.prefix = patches, rows, keep, prefix

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        assert tokens.keys is not None
        counts = self.patches, self.rows, self.keep, self.prefix
        return self.kept(tokens, *torch.ops.algm.evit(tokens.values, tokens.map, tokens.keys[..., 0], *counts))

    def kept(self, tokens: Tokens, values: Tensor, map: Tensor, decided: Tensor) -> Tokens:
        """The sequence of those rows, which comes from `tokens`. Nothing reads how many patches one stands for."""
        size, length = tokens.size.new_ones(values.shape[:2]), torch.full_like(tokens.length, values.shape[1])
        return Tokens(values, size, map, length, padded=False, decided=decided)


class EvitReplay(Evit):
    """EViT where it is recorded which rows stay, and which one each other row is restored from."""

    def __init__(self, index: int, patches: int, rows: int, keep: int, prefix: int) -> None:
        super().__init__(patches, rows, keep, prefix)
        self.index = index

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        assert inputs is not None
        assert tokens.keys is not None
        source = inputs.maps[self.index][:, : self.rows] - self.prefix
        facts = tokens.keys[..., 0], source, self.keep, self.prefix
        return self.kept(
            tokens, *evit_rows(tokens.values, tokens.map, *facts), evit_record(source, self.patches, self.prefix)
        )


class Elvit(nn.Module):
    """ELViT's clustering in the slot after a block. A row stands for as many patches as all others."""

    def __init__(self, plan: MergePlan, grid: Size, prefix: int) -> None:
        super().__init__()
        self.plan, self.grid, self.prefix = plan, grid, prefix

    @property
    def attributes(self) -> tuple[Any, ...]:
        """The operator's, in its order."""
        plan = self.plan
        rules = plan.elvit_iterations, plan.elvit_window, plan.elvit_temperature, plan.elvit_neighbours
        return list(self.grid), list(plan.elvit_grid), self.prefix, *rules, plan.semantics

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        values, map, weights = torch.ops.algm.elvit(tokens.values, *self.attributes)
        return self.clustered(tokens, values, map, weights)

    def clustered(self, tokens: Tokens, values: Tensor, map: Tensor, weights: Tensor) -> Tokens:
        """The sequence of those centroids, which comes from `tokens`."""
        rows = self.prefix + math.prod(self.plan.elvit_grid)
        size = tokens.size[:, :rows] * (math.prod(self.grid) / math.prod(self.plan.elvit_grid))
        length = torch.full_like(tokens.length, rows)
        return Tokens(values, size, map, length, padded=False, within=tokens.within, weights=weights)


class Restore(nn.Module):
    """Every patch is made of the rows that were near to it, between encoder and decoder, where a merge was before."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        if tokens.weights is None:
            return tokens
        return every_patch(torch.ops.algm.elvit_restore(tokens.values, tokens.weights, self.prefix), tokens)


class ElvitReplay(Elvit):
    """ELViT's clustering where a recorded map says which centroid is the farthest that counts for each patch.

    The others that count are the nearest ones beside it: so a runtime that takes the next centroid for the last one,
    a hair farther, is followed.
    """

    def __init__(self, index: int, plan: MergePlan, grid: Size, prefix: int) -> None:
        super().__init__(plan, grid, prefix)
        self.index = index

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        assert inputs is not None
        plan, forced = self.plan, inputs.maps[self.index]
        distance, found = elvit_distances(tokens.values, plan, self.grid, self.prefix)
        last = forced[..., None] - self.prefix
        others = nearest(distance.scatter(2, last, torch.inf), plan.elvit_neighbours - 1)
        chosen = torch.cat([others, last], 2)
        weights = restoring_weights(distance, chosen, plan.elvit_temperature, plan.semantics)
        values = torch.cat([tokens.values[:, : self.prefix], found.to(tokens.values.dtype)], 1)
        return self.clustered(tokens, values, forced, weights)


def elvit_distances(values: Tensor, plan: MergePlan, grid: Size, prefix: int) -> tuple[Tensor, Tensor]:
    """Squared distances (B, N, M) of patches and the centroids (B, M, D) they become, and those; at least fp32."""
    patches = wide(values)[:, prefix:]
    rules = plan.elvit_iterations, plan.elvit_window, plan.elvit_temperature
    found = elvit_centroids(patches, grid, plan.elvit_grid, *rules)
    return squared_distances(patches, found), found


class KeepFirst(nn.Module):
    """Keeps the first `rows` rows of every image, prefix counted; patches behind them share the rows that are left."""

    def __init__(self, rows: int, prefix: int) -> None:
        super().__init__()
        self.rows, self.prefix = rows, prefix

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        kept = self.prefix + (tokens.map - self.prefix) % (self.rows - self.prefix)
        length = torch.full_like(tokens.length, self.rows)
        return Tokens(tokens.values[:, : self.rows], tokens.size[:, : self.rows], kept, length, padded=False)


class KeepAsMany(nn.Module):
    """Between groups of blocks: as many rows of every patch's sequence go on as the last group left, the first ones."""

    def forward(self, every: Tokens, left: Tokens) -> Tokens:
        return left._replace(values=every.values[:, : left.values.shape[1]], keys=None)


class Replay(nn.Module):
    """Merges as a recorded token map says instead of deciding."""

    def __init__(self, index: int, prefix: int, weighted: bool) -> None:
        super().__init__()
        self.index, self.prefix, self.weighted = index, prefix, weighted

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        forced = inputs.maps[self.index]
        length = forced.amax(1) + 1
        rows_out = int(length.max())
        row = row_of(tokens.map, forced, tokens.values.shape[1], self.prefix)
        weight = tokens.size if self.weighted else torch.ones_like(tokens.size)
        values = merge_rows(tokens.values, weight, row, rows_out)
        return Tokens(values, sum_rows(tokens.size, row, rows_out), forced, length, padded=True)


class ReplayChoice(nn.Module):
    """Queries attend to the cells that a recorded choice names instead of choosing."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, masks: Tensor, inputs: MergeInputs) -> Tensor:
        return inputs.masks[self.index] > 0


REPLAYS = (Replay, ElvitReplay, EvitReplay)
"""The modules that merge as recorded."""


def insert_merging(model: Model, plan: MergePlan) -> Model:
    """A copy of `model` that merges as `plan` says; parameters are shared, `model` is unchanged.

    Raises:
        PlanError: a layer the network does not have, or a window larger than its patch grid.
    """
    merged = share_parameters(model)
    encoder = merged.encoder
    _check_plan(plan, len(merged.blocks), encoder.grid)
    encoder.outlet = KeepTokens()
    if encoder.exchanging:
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
    elif plan.method == "evit":
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
    if plan.method == "evit":
        _fill_evit(replaying, plan, EvitReplay)
        return replaying
    plain = plan.gbm_layers if plan.semantics == "paper" else ()
    _fill(replaying, plan, lambda index: Replay(index, prefix, weighted=plan.layers[index] not in plain))
    return replaying


def truncate(model: Model, rows: Mapping[int, int], plan: MergePlan = DENSE) -> Model:
    """A copy of `model` that keeps the first `rows[layer]` rows, prefix counted, in each of these 1-based layers.

    Of `plan` it keeps what is no merge: with ToMe, attention by sizes and a decoder that gets every patch; blockwise,
    that attention and MLP give every row a result; with ELViT and EViT, that the decoder gets every
    patch; where something needs every patch between groups of blocks, that it gets them, and how many go on from there.
    """
    truncated, method = share_parameters(model), plan.method
    if truncated.encoder.exchanging:
        truncated.encoder.outlet = Unmerge(truncated.encoder.prefix)
        truncated.encoder.regroup = KeepAsMany() if plan.between_groups == "remerge" else KeepTokens()
    for layer, count in rows.items():
        for part in merged_parts(method):
            setattr(truncated.blocks[layer - 1], SLOTS[part], KeepFirst(count, truncated.encoder.prefix))
    if method == "tome":
        count_sizes(truncated)
    elif method in ("elvit", "evit"):
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
