"""Variants of merging that the paper (CVPR 2024) compares ALGM with. They exist in PyTorch only, to be evaluated.

Which layers merge and how large windows are is part of a merge plan; a variant says what a plan cannot: what is
compared, what becomes of a merged window, and on which side of the MLP merging takes place. Variants combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast, get_args, get_type_hints

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor, nn

from algm_deploy.errors import PlanError
from algm_deploy.models.vit import Block, KeepTokens, MergeInputs, Tokens, VitNetwork
from algm_deploy.ops._rows import merge_rows, sum_rows
from algm_deploy.ops.clap import clap_decisions, clap_rows, window_members, window_similarity
from algm_deploy.ops.gbm import gbm_decisions, gbm_rows, gbm_similarity
from algm_deploy.recipe.network import Size
from algm_deploy.recipe.plan import MergePlan

Feature = Literal["residual", "query", "key", "value"]
Reduction = Literal["mean", "first", "random", "copies"]


class Variant(Struct, frozen=True, forbid_unknown_fields=True):
    """What is done otherwise; the default is ALGM.

    clap_feature, gbm_feature  what CLAP and GBM compare: tokens after attention (published), or that attention's
                               queries, keys or values
    reduction  what a window merged by CLAP becomes: its mean, its first patch, one drawn with `seed`, or as many tokens
               as before that all hold the mean (nothing is saved then)
    after_mlp  merge after each block's MLP instead of before it
    """

    clap_feature: Feature = "residual"
    gbm_feature: Feature = "residual"
    reduction: Reduction = "mean"
    after_mlp: bool = False
    seed: Annotated[int, Meta(ge=0)] = 0

    @property
    def of_clap(self) -> bool:
        """Whether CLAP does anything otherwise."""
        return (self.clap_feature, self.reduction) != (ALGM.clap_feature, ALGM.reduction)

    @property
    def of_gbm(self) -> bool:
        """Whether GBM does anything otherwise."""
        return self.gbm_feature != ALGM.gbm_feature


ALGM = Variant()


def variant_of(settings: Sequence[str]) -> Variant:
    """The variant that texts such as `reduction=first` describe together.

    Raises:
        PlanError: an unknown key, or a value it does not take.
    """
    pairs = [setting.partition("=")[::2] for setting in settings]
    words = {"true": True, "false": False}
    try:
        given = {key: words.get(value, int(value) if value.isdecimal() else value) for key, value in pairs}
        return msgspec.convert(given, Variant)
    except msgspec.ValidationError as error:
        kinds = {name: get_args(kind) for name, kind in get_type_hints(Variant).items()}
        known = "; ".join(f"{name}={', '.join(values)}" for name, values in kinds.items() if values)
        raise PlanError(
            f"expected a variant of merging among {known}; after_mlp=true, false; seed=NUMBER, "
            f"got {', '.join(settings)!r:.80}"
        ) from error


def check_variant(plan: MergePlan, variant: Variant) -> None:
    """A variant has to change something that the plan does.

    Raises:
        PlanError: it varies CLAP or GBM, and the plan has none, or merges as ToMe does.
    """
    if plan.method != "algm" and variant != ALGM:
        raise PlanError(f"expected a plan that merges as ALGM for a variant of it, got method {plan.method}")
    for varied, layers, name in ((variant.of_clap, plan.clap_layers, "CLAP"), (variant.of_gbm, plan.gbm_layers, "GBM")):
        if varied and not layers:
            raise PlanError(f"expected a plan with {name} for a variant of it, got one without: choose a layer for it")


def apply_variant(model: VitNetwork, plan: MergePlan, variant: Variant) -> None:
    """Changes a network whose slots `insert_merging` filled for `plan`, in place, as far as the plan merges."""
    encoder = model.encoder
    for layer in plan.layers:
        block = cast(Block, model.blocks[layer - 1])
        if variant.of_clap and layer in plan.clap_layers:
            block.merge = ClapVariant(plan, encoder.grid, encoder.prefix, variant, block)
        elif variant.of_gbm and layer in plan.gbm_layers:
            block.merge = GbmVariant(plan, layer, encoder.prefix, variant, block)
        if variant.after_mlp:
            model.blocks[layer - 1] = MergeAfterMlp(block)


class Compared:
    """What a merge in a block compares: its tokens, or the queries, keys or values of the block's attention."""

    def __init__(self, feature: Feature, block: Block) -> None:
        self._part = None if feature == "residual" else ("query", "key", "value").index(feature)
        self._qkv: Tensor | None = None
        if self._part is not None:
            block.attn.qkv.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._qkv = output

    def __call__(self, values: Tensor) -> Tensor:
        """Features (B, S, D) of the tokens (B, S, D)."""
        return values if self._qkv is None or self._part is None else self._qkv.chunk(3, dim=2)[self._part]


class ClapVariant(nn.Module):
    """CLAP in a merge slot that compares or reduces otherwise."""

    def __init__(self, plan: MergePlan, grid: Size, prefix: int, variant: Variant, block: Block) -> None:
        super().__init__()
        self.plan, self.grid, self.prefix, self.variant = plan, list(grid), prefix, variant
        self.compared = Compared(variant.clap_feature, block)

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        """The merged tokens."""
        plan, values = self.plan, tokens.values
        window = list(plan.window)
        similarity = window_similarity(self.compared(values), self.grid, window, self.prefix)
        place = clap_decisions(similarity, inputs.clap, plan.semantics, plan.batch, plan.order)
        row, length = clap_rows(place, self.grid, window, self.prefix)
        rows_out = int(length.max())
        merged = merge_rows(values, self._weights(tokens.size, place), row, rows_out)
        if self.variant.reduction == "copies":
            return tokens._replace(values=merged.gather(1, row[:, :, None].expand_as(values)))
        padded = plan.batch == "per_image"
        return Tokens(merged, sum_rows(tokens.size, row, rows_out), row[:, self.prefix :], length, padded)

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


class GbmVariant(nn.Module):
    """GBM in a merge slot that compares otherwise."""

    def __init__(self, plan: MergePlan, layer: int, prefix: int, variant: Variant, block: Block) -> None:
        super().__init__()
        self.plan, self.layer, self.prefix = plan, layer, prefix
        self.compared = Compared(variant.gbm_feature, block)

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        """The merged tokens."""
        plan, values = self.plan, tokens.values
        best, match = gbm_similarity(self.compared(values), tokens.length, self.prefix, plan.semantics)
        joins = gbm_decisions(best, inputs.gbm, plan.gbm, float(self.layer), plan.semantics, plan.batch)
        row, length = gbm_rows(joins, match, tokens.length, values.shape[1], self.prefix, plan.semantics)
        rows_out = int(length.max())
        weight = torch.ones_like(tokens.size) if plan.semantics == "paper" else tokens.size
        merged = merge_rows(values, weight, row, rows_out)
        padded = plan.batch == "per_image"
        return Tokens(merged, sum_rows(tokens.size, row, rows_out), row.gather(1, tokens.map), length, padded)


class MergeAfterMlp(nn.Module):
    """A block that merges after its MLP."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.start_merge, self.merge, self.end_merge = block.start_merge, block.merge, block.end_merge
        block.merge = KeepTokens()
        self.block = block

    def forward(self, tokens: Tokens, inputs: MergeInputs | None = None) -> Tokens:
        """The tokens after the block."""
        merged: Tokens = self.merge(self.block(tokens, inputs), inputs)
        return merged
