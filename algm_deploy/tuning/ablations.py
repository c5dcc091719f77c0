"""Variants of merging that the paper (CVPR 2024) compares ALGM with. They exist in PyTorch only, to be evaluated.

Which layers merge and how large windows are is part of a merge plan; a variant says what a plan cannot: what CLAP
compares, what becomes of a merged window, and on which side of the MLP merging takes place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from algm_deploy.errors import PlanError
from algm_deploy.models.vit import Block, KeepTokens, MergeInputs, Tokens, VitNetwork
from algm_deploy.ops._rows import merge_rows, sum_rows
from algm_deploy.ops.clap import clap_decisions, clap_rows, window_members, window_similarity
from algm_deploy.recipes import MergePlan, Size

Feature = Literal["residual", "query", "key", "value"]
Reduction = Literal["mean", "first", "random", "copies"]


@dataclass(frozen=True)
class Variant:
    """What is done otherwise; the default is ALGM.

    feature    what CLAP compares: tokens after attention (published), or that attention's queries, keys or values
    reduction  what a merged window becomes: its mean, its first patch, one drawn with `seed`, or as many tokens as
               before that all hold the mean (nothing is saved then)
    after_mlp  merge behind each block's MLP instead of before it
    """

    feature: Feature = "residual"
    reduction: Reduction = "mean"
    after_mlp: bool = False
    seed: int = 0


ALGM = Variant()


def apply_variant(model: VitNetwork, plan: MergePlan, variant: Variant) -> None:
    """Changes a network whose slots `insert_merging` filled for `plan`, in place.

    Raises:
        PlanError: a variant of CLAP for a plan without CLAP.
    """
    if (variant.feature, variant.reduction) != (ALGM.feature, ALGM.reduction):
        if not plan.clap_layers:
            raise PlanError("expected a plan with CLAP for a variant of it, got one without: choose a layer for CLAP")
        block = cast(Block, model.blocks[plan.clap_layers[0] - 1])
        block.merge = ClapVariant(plan, model.encoder.grid, model.encoder.prefix, variant, block)
    if variant.after_mlp:
        for layer in plan.layers:
            model.blocks[layer - 1] = MergeAfterMlp(cast(Block, model.blocks[layer - 1]))


class ClapVariant(nn.Module):
    """CLAP in a merge slot that compares or reduces otherwise."""

    def __init__(self, plan: MergePlan, grid: Size, prefix: int, variant: Variant, block: Block) -> None:
        super().__init__()
        self.plan, self.grid, self.prefix, self.variant = plan, list(grid), prefix, variant
        self._qkv: Tensor | None = None
        if variant.feature != "residual":
            block.attn.qkv.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._qkv = output

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        """The merged tokens."""
        plan, values = self.plan, tokens.values
        window = list(plan.window)
        similarity = window_similarity(self._compared(values), self.grid, window, self.prefix)
        place = clap_decisions(similarity, inputs.clap, plan.semantics, plan.batch, plan.order)
        row, length = clap_rows(place, self.grid, window, self.prefix)
        rows_out = int(length.max())
        merged = merge_rows(values, self._weights(tokens.size, place), row, rows_out)
        if self.variant.reduction == "copies":
            return tokens._replace(values=merged.gather(1, row[:, :, None].expand_as(values)))
        padded = plan.batch == "per_image"
        return Tokens(merged, sum_rows(tokens.size, row, rows_out), row[:, self.prefix :], length, padded)

    def _compared(self, values: Tensor) -> Tensor:
        if self._qkv is None:
            return values
        part = ("query", "key", "value").index(self.variant.feature)
        return self._qkv.chunk(3, dim=2)[part]

    def _weights(self, size: Tensor, place: Tensor) -> Tensor:
        """Weights (B, S) of rows in the token they join: 1, or 0 for all but one member of a merged window."""
        if self.variant.reduction in ("mean", "copies"):
            return size
        members = torch.as_tensor(window_members(self.grid, list(self.plan.window)))
        windows, k = members.shape
        draw = torch.Generator().manual_seed(self.variant.seed)
        kept = (
            torch.randint(k, (windows,), generator=draw) if self.variant.reduction == "random" else torch.zeros(windows)
        )
        dropped = torch.arange(k) != kept[:, None]
        weights = size.clone()
        for image in range(len(place)):
            merged = (place[image] >= 0).cpu()
            weights[image, self.prefix + members[merged][dropped[merged]].to(size.device)] = 0
        return weights


class MergeAfterMlp(nn.Module):
    """A block that merges behind its MLP."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.merge = block.merge
        block.merge = KeepTokens()
        self.block = block

    def forward(self, tokens: Tokens, inputs: MergeInputs | None = None) -> Tokens:
        """The tokens behind the block."""
        merged: Tokens = self.merge(self.block(tokens, inputs), inputs)
        return merged
