"""Fills the merge slots of a network: with the operators of a plan, or with recorded decisions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import algm_deploy.ops  # noqa: F401  registers torch.ops.algm
from algm_deploy.errors import PlanError
from algm_deploy.models.vit import KeepTokens, MergeInputs, Model, Tokens, share_parameters
from algm_deploy.ops._rows import merge_rows, row_of, sum_rows
from algm_deploy.recipes import MergePlan, Size


class Clap(nn.Module):
    """CLAP in a merge slot."""

    def __init__(self, plan: MergePlan, grid: Size, prefix: int) -> None:
        super().__init__()
        self.plan, self.grid, self.prefix = plan, grid, prefix

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        plan = self.plan
        values, size, map, length = torch.ops.algm.clap(
            tokens.values,
            tokens.size,
            inputs.clap,
            self.grid,
            plan.window,
            self.prefix,
            plan.semantics,
            plan.batch,
            plan.order,
        )
        return Tokens(values, size, map, length, padded=plan.batch == "per_image")


class Gbm(nn.Module):
    """GBM in a merge slot; the published code divides the standard deviation by the 1-based layer."""

    def __init__(self, plan: MergePlan, layer: int, prefix: int) -> None:
        super().__init__()
        self.plan, self.layer, self.prefix = plan, layer, prefix

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        plan = self.plan
        values, size, map, length = torch.ops.algm.gbm(
            *tokens[:4], inputs.gbm, self.prefix, plan.gbm_mode, float(self.layer), plan.semantics, plan.batch
        )
        return Tokens(values, size, map, length, padded=plan.batch == "per_image")


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


def insert_merging(model: Model, plan: MergePlan) -> Model:
    """A copy of `model` that merges as `plan` says; parameters are shared, `model` is unchanged.

    Raises:
        PlanError: a layer the network does not have, or a window larger than its patch grid.
    """
    merged = share_parameters(model)
    encoder = merged.encoder
    _check_plan(plan, len(merged.blocks), encoder.grid)
    for block in merged.blocks:
        block.merge = KeepTokens()
    for layer in plan.clap_layers:
        merged.blocks[layer - 1].merge = Clap(plan, encoder.grid, encoder.prefix)
    for layer in plan.gbm_layers:
        merged.blocks[layer - 1].merge = Gbm(plan, layer, encoder.prefix)
    return merged


def replay_merging(model: Model, plan: MergePlan) -> Model:
    """A copy of `model` that merges where `plan` does, by the token maps handed in with `MergeInputs.maps`."""
    replaying = insert_merging(model, plan)
    for index, layer in enumerate(plan.layers):
        weighted = plan.semantics != "paper" or layer in plan.clap_layers
        replaying.blocks[layer - 1].merge = Replay(index, replaying.encoder.prefix, weighted)
    return replaying


def merge_inputs(
    clap: float, gbm: float, maps: tuple[Tensor, ...] = (), device: str | torch.device = "cpu"
) -> MergeInputs:
    """Thresholds as the fp32 scalars the operators take."""
    return MergeInputs(torch.tensor(clap, device=device), torch.tensor(gbm, device=device), maps)


def _check_plan(plan: MergePlan, depth: int, grid: Size) -> None:
    if plan.layers and plan.layers[-1] > depth:
        raise PlanError(
            f"the plan merges in layer {plan.layers[-1]}, the network has {depth}: choose layers 1 to {depth}"
        )
    if plan.clap_layers and (plan.window[0] > grid[0] or plan.window[1] > grid[1]):
        raise PlanError(
            f"a CLAP window of {plan.window[0]}x{plan.window[1]} patches does not fit a grid of {grid[0]}x{grid[1]}"
        )
