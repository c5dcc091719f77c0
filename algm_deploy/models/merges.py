"""What stands in the merge slots of a network: operators of a plan, recorded decisions, or rows that are left out.

`merging.py` puts these modules into their slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import algm_deploy.ops  # noqa: F401  registers torch.ops.algm
from algm_deploy.models.vit import MergeInputs, Tokens
from algm_deploy.ops._rows import merge_rows, row_of, sum_rows, wide
from algm_deploy.ops.clap import window_members
from algm_deploy.ops.cts import cts_rows, cts_values
from algm_deploy.ops.dtop import dtop_rows, dtop_stays
from algm_deploy.ops.elvit import elvit_centroids, nearest, restoring_weights, squared_distances
from algm_deploy.ops.evit import evit_record, evit_rows
from algm_deploy.recipe.network import Size
from algm_deploy.recipe.plan import MergePlan


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


class Mpm(nn.Module):
    """MPM in the slot after a block. Images merge alone, so they differ in length."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        values, size, map, length = torch.ops.algm.mpm(*tokens[:4], self.prefix)
        return Tokens(values, size, map, length, padded=True)


class Cts(nn.Module):
    """CTS in the slot before a block that is handed superpatches and what the policy network says of them."""

    def __init__(self, grid: Size, prefix: int, shared: int) -> None:
        super().__init__()
        self.grid, self.prefix, self.shared = grid, prefix, shared

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        assert tokens.keys is not None
        facts = list(self.grid), self.prefix, self.shared
        return self.left(tokens, *torch.ops.algm.cts(tokens.values, tokens.keys[..., 0], *facts))

    def left(self, tokens: Tokens, values: Tensor, size: Tensor, map: Tensor) -> Tokens:
        """The sequence of those rows, which comes from `tokens`."""
        return Tokens(values, size, map, torch.full_like(tokens.length, values.shape[1]), padded=False)


class CtsReplay(Cts):
    """CTS where a recorded map says which superpatches share a token: those whose patches have one row."""

    def __init__(self, index: int, grid: Size, prefix: int) -> None:
        super().__init__(grid, prefix, 0)
        self.index = index

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        assert inputs is not None
        shared = shared_superpatches(inputs.maps[self.index], self.grid)
        source, map = cts_rows(shared, self.grid, self.prefix, int(shared.sum(1).max()))
        return self.left(tokens, *cts_values(tokens.values, source, map.shape[1], self.prefix), map)


class Dtop(nn.Module):
    """DToP in the slot after a block that is handed what its auxiliary head says. Images prune alone."""

    def __init__(self, prefix: int, keep: int) -> None:
        super().__init__()
        self.prefix, self.keep = prefix, keep

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        facts = tokens.map, tokens.length, tokens.keys, inputs.clap, self.prefix, self.keep
        values, size, map, length = torch.ops.algm.dtop(tokens.values, *facts)
        return Tokens(values, size, map, length, padded=True, canvas=tokens.canvas)

    def unshortened(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        """The same in as many rows as came, those of padding zero: nothing is read back."""
        assert tokens.keys is not None
        stays = dtop_stays(tokens.keys, inputs.clap, tokens.length, self.prefix, self.keep)
        rows = dtop_rows(tokens.values, tokens.map, stays, self.prefix, tokens.values.shape[1])
        return Tokens(*rows, padded=True, canvas=tokens.canvas)


class DtopReplay(nn.Module):
    """DToP where a recorded map says which patches keep their token."""

    def __init__(self, index: int, prefix: int) -> None:
        super().__init__()
        self.index, self.prefix = index, prefix

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        stays = staying_rows(tokens.map, inputs.maps[self.index], tokens.values.shape[1], self.prefix)
        values, size, map, length = dtop_rows(tokens.values, tokens.map, stays, self.prefix)
        return Tokens(values, size, map, length, padded=True, canvas=tokens.canvas)


def staying_rows(map_in: Tensor, map_out: Tensor, rows: int, prefix: int) -> Tensor:
    """Which of so many rows stay, without the prefix (B, R), by the patch maps (B, N) before and after."""
    row = torch.where(map_in < 0, rows, map_in)  # of patches without a token, one behind all
    kept = torch.zeros(len(map_in), rows + 1, dtype=torch.bool, device=map_in.device)
    return kept.scatter(1, row, map_out >= 0)[:, prefix:rows]


def shared_superpatches(map: Tensor, grid: Size) -> Tensor:
    """Which superpatches (B, M) have one row for all their patches in a map (B, N)."""
    rows = map[:, torch.from_numpy(window_members(grid, (2, 2)))]
    return (rows == rows[..., :1]).all(2)


class Evit(nn.Module):
    """EViT in a merge slot that is handed what cls attends to: `keep` of `rows` rows stay, of `patches` at first."""

    def __init__(self, patches: int, rows: int, keep: int, prefix: int) -> None:
        super().__init__()
        self.patches, self.rows, self.keep, self.prefix = patches, rows, keep, prefix

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        return self.merged(tokens, torch.ops.algm.evit)

    def merged(self, tokens: Tokens, evit: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Tokens:
        """By `evit`, which is called as the operator."""
        assert tokens.keys is not None
        counts = self.patches, self.rows, self.keep, self.prefix
        return self.kept(tokens, *evit(tokens.values, tokens.map, tokens.keys[..., 0], *counts))

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


REPLAYS = (Replay, ElvitReplay, EvitReplay, CtsReplay, DtopReplay)
"""The modules that merge as recorded."""
