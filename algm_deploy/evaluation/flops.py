"""Multiply-adds of a network on one window, from its shape and the tokens that were left after each merge.

The convention is that of the published figures (fvcore): one multiply-add of a matrix product or convolution counts 1,
LayerNorm 5 per element, bilinear upsampling 4 per output element; softmax, GELU, biases, additions and the cosine
similarities of CLAP's windows and of G2TM's neighbours count nothing. Batch norms are part of their convolutions here
and count nothing either.
The published tables call these multiply-adds "GFLOPs"; in floating-point operations a multiply-add is two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from algm_deploy.errors import PlanError
from algm_deploy.models.loading import network_class
from algm_deploy.models.multiply_adds import BILINEAR, NORM, attention, mlp
from algm_deploy.models.policy import policy_multiply_adds
from algm_deploy.ops.cts import MEMBERS
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import Merge, MergePlan, fresh_merges


@dataclass(frozen=True)
class MultiplyAdds:
    """Multiply-adds of one window by part.

    `merging` is the product of similarities of GBM, ToMe or MPM, what ELViT or EViT multiplies to choose and to
    restore, CTS's policy network and the embedding of superpatches, or DToP's auxiliary heads.
    """

    patch_embedding: int
    encoder: int
    merging: int
    decoder: int
    upsampling: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.patch_embedding + self.encoder + self.merging + self.decoder + self.upsampling

    @property
    def gmacs(self) -> float:
        """Multiply-adds in 10^9, comparable with the published "GFLOPs"."""
        return self.total / 1e9

    @property
    def gflops(self) -> float:
        """Floating-point operations in 10^9, two per multiply-add."""
        return 2 * self.gmacs


def multiply_adds(network: Network, plan: MergePlan, tokens_after_merge: Sequence[int] = ()) -> MultiplyAdds:
    """Counts one window; `tokens_after_merge` holds the patch tokens (cls excluded) left after each of `plan.layers`.

    Raises:
        PlanError: not one count per merging layer, or counts that grow.
    """
    patches = network.grid[0] * network.grid[1]
    counts = _counts(plan, network, tokens_after_merge)
    encoder, merging, leaving = _encoder(network, plan, counts, patches)
    levels = [leaving[layer] for layer in network.stages or (network.encoder_depth,)]
    if plan.row.restores:
        merging += sum(COSTS[plan.row.merge].restore(network, left) for left in levels if left < patches)
        levels = [patches] * len(levels)
    height, width = network.image_size
    return MultiplyAdds(
        patch_embedding=patches * network.embed_dim * 3 * network.patch_size**2,
        encoder=encoder,
        merging=merging,
        decoder=network_class(network).decoder_multiply_adds(network, levels),
        upsampling=BILINEAR * (network.queries or network.classes) * height * width,
    )


def _counts(plan: MergePlan, network: Network, tokens_after_merge: Sequence[int]) -> dict[int, int]:
    """Tokens left by merging layer, checked."""
    patches, fresh = network.grid[0] * network.grid[1], fresh_merges(plan, network)
    before = [patches if all_there else left for all_there, left in zip(fresh, (0, *tokens_after_merge), strict=False)]
    grown = any(not 1 <= left <= most for most, left in zip(before, tokens_after_merge, strict=False))
    if len(tokens_after_merge) != len(plan.layers) or grown:
        raise PlanError(
            f"expected a token count from {patches} downwards for each merging layer {plan.layers}, "
            f"got {list(tokens_after_merge)}"
        )
    return dict(zip(plan.layers, tokens_after_merge, strict=True))


def _encoder(network: Network, plan: MergePlan, counts: dict[int, int], tokens: int) -> tuple[int, int, dict[int, int]]:
    """Encoder and merging multiply-adds, and the patch tokens that leave each block.

    Merging sits between attention and MLP, around each of them, or before or after the block. The outputs are
    normalised, in the encoder or by the decoder.
    """
    encoder = merging = 0
    leaving, patches, parts = {}, tokens, plan.row.parts
    for layer in range(1, network.encoder_depth + 1):
        if layer > 1 and layer in (start for start, _ in network.groups):
            if plan.between_groups == "unmerge":
                tokens = patches
            elif tokens < patches:
                merging += patches * network.embed_dim
        if layer in counts and not plan.row.lasting:
            both, similarities = _around(network, counts[layer], tokens)
            encoder, merging, leaving[layer] = encoder + both, merging + similarities, tokens
            continue
        left = counts.get(layer, tokens)
        if layer in counts:
            merging += COSTS[plan.merge_in(layer)].merge(network, plan, tokens, left)
        encoder += attention((left if "start" in parts else tokens) + network.prefix, network.embed_dim)
        encoder += mlp((tokens if "end" in parts else left) + network.prefix, network.embed_dim, network.mlp_width)
        leaving[layer] = tokens = left
    return encoder, merging, leaving


def _around(network: Network, left: int, patches: int) -> tuple[int, int]:
    """Multiply-adds of a block whose attention and MLP run on `left` patch tokens, and of what merging compares there.

    Norms and residuals are those of all rows.
    """
    rows = left + network.prefix
    both = attention(rows, network.embed_dim) + mlp(rows, network.embed_dim, network.mlp_width)
    return both + 2 * NORM * (patches - left) * network.embed_dim, 2 * _similarities(network, patches)


def _clustering(network: Network, plan: MergePlan, patches: int) -> int:
    """Multiply-adds of ELViT's clustering: distances and means in each iteration, and the distances to restore by."""
    return (2 * plan.elvit_iterations + 1) * patches * math.prod(plan.elvit_grid) * network.embed_dim


def _choosing(network: Network, rows: int, kept: int) -> int:
    """Multiply-adds of EViT: what cls attends to, the distances to rows that stay, and the sum of the others."""
    left = rows - kept
    return (rows + network.prefix + left * kept + left) * network.embed_dim


def _sharing(network: Network) -> int:
    """Multiply-adds of CTS: the policy network, and every superpatch's embedding at half the size."""
    superpatches = network.grid[0] * network.grid[1] // MEMBERS
    embedding = superpatches * network.embed_dim * 3 * network.patch_size**2
    return policy_multiply_adds(network.image_size) + embedding


def _similarities(network: Network, patches: int, heads: int = 1) -> int:
    """Multiply-adds of the similarities of one half of a sequence to the other, of rows as wide as one of `heads`."""
    sequence = patches + network.prefix
    return (sequence - sequence // 2) * (sequence // 2) * (network.embed_dim // heads)


class Cost(NamedTuple):
    """Multiply-adds of a merge, by network, plan, and the patch tokens before and after it; and of restoring every
    patch from so many tokens for the decoder, where a copy of one costs none."""

    merge: Callable[[Network, MergePlan, int, int], int] = lambda network, plan, tokens, left: 0
    restore: Callable[[Network, int], int] = lambda network, left: 0


COSTS: dict[Merge, Cost] = {
    "clap": Cost(),
    "gbm": Cost(lambda network, plan, tokens, left: _similarities(network, tokens)),
    # ToMe compares the mean over heads of keys.
    "tome": Cost(lambda network, plan, tokens, left: _similarities(network, tokens, network.heads)),
    "elvit": Cost(
        lambda network, plan, tokens, left: _clustering(network, plan, tokens),
        lambda network, left: network.grid[0] * network.grid[1] * left * network.embed_dim,
    ),
    "evit": Cost(lambda network, plan, tokens, left: _choosing(network, tokens, left - 1)),
    "g2tm": Cost(),
    "mpm": Cost(lambda network, plan, tokens, left: tokens * tokens * network.embed_dim),
    "cts": Cost(lambda network, plan, tokens, left: _sharing(network)),
    "dtop": Cost(lambda network, plan, tokens, left: network_class(network).auxiliary_multiply_adds(network, tokens)),
}
