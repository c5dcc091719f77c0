"""Multiply-adds of a network on one window, from its shape and the tokens that were left after each merge.

The convention is that of the published figures (fvcore): one multiply-add of a matrix product or convolution counts 1,
LayerNorm 5 per element, bilinear upsampling 4 per output element; softmax, GELU, biases, additions and the cosine
similarities of CLAP's windows count nothing. Batch norms are part of their convolutions here and count nothing either.
The published tables call these multiply-adds "GFLOPs"; in floating-point operations a multiply-add is two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from algm_deploy.errors import PlanError
from algm_deploy.recipe.schema import MergePlan, Network

_NORM = 5
_BILINEAR = 4
_MLP_RATIO = 4


@dataclass(frozen=True)
class MultiplyAdds:
    """Multiply-adds of one window by part; `merging` is the product of similarities of GBM or ToMe."""

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
    counts = _counts(plan, patches, tokens_after_merge)
    encoder, merging, leaving = _encoder(network, plan, counts, patches)
    levels = [leaving[layer] for layer in network.stages or (network.encoder_depth,)]
    if plan.method == "tome":  # which unmerges in front of the decoder
        levels = [patches] * len(levels)
    height, width = network.image_size
    return MultiplyAdds(
        patch_embedding=patches * network.embed_dim * 3 * network.patch_size**2,
        encoder=encoder,
        merging=merging,
        decoder=_DECODERS[network.decoder](network, levels),
        upsampling=_BILINEAR * (network.queries or network.classes) * height * width,
    )


def _counts(plan: MergePlan, patches: int, tokens_after_merge: Sequence[int]) -> dict[int, int]:
    """Tokens left by merging layer, checked."""
    chain = [patches, *tokens_after_merge]
    if len(tokens_after_merge) != len(plan.layers) or sorted(chain, reverse=True) != chain or min(chain) < 1:
        raise PlanError(
            f"expected a token count from {patches} downwards for each merging layer {plan.layers}, "
            f"got {list(tokens_after_merge)}"
        )
    return dict(zip(plan.layers, tokens_after_merge, strict=True))


def _encoder(network: Network, plan: MergePlan, counts: dict[int, int], tokens: int) -> tuple[int, int, dict[int, int]]:
    """Encoder and merging multiply-adds, and the patch tokens that leave each block.

    Merging sits between attention and MLP. The outputs are normalised, in the encoder or by the decoder.
    """
    encoder = merging = 0
    leaving = {}
    for layer in range(1, network.encoder_depth + 1):
        encoder += _attention(tokens + network.prefix, network.embed_dim)
        if layer in counts and plan.merge_in(layer) != "clap":
            sequence = tokens + network.prefix
            # ToMe compares the mean over heads of keys.
            width = network.embed_dim // (network.heads if plan.method == "tome" else 1)
            merging += (sequence - sequence // 2) * (sequence // 2) * width
        leaving[layer] = tokens = counts.get(layer, tokens)
        encoder += _mlp(tokens + network.prefix, network.embed_dim)
    return encoder, merging, leaving


def _attention(tokens: int, dim: int) -> int:
    projections = 4 * tokens * dim * dim
    return _NORM * tokens * dim + projections + 2 * tokens * tokens * dim


def _mlp(tokens: int, dim: int) -> int:
    return _NORM * tokens * dim + 2 * _MLP_RATIO * tokens * dim * dim


def _normalised(network: Network, levels: Sequence[int]) -> int:
    """LayerNorm of the encoder's outputs."""
    return sum(_NORM * (tokens + network.prefix) * network.embed_dim for tokens in levels)


def _mask_transformer(network: Network, levels: Sequence[int]) -> int:
    (tokens,) = levels
    dim, classes = network.embed_dim, network.classes
    rows = tokens + classes
    blocks = network.decoder_depth * (_attention(rows, dim) + _mlp(rows, dim))
    projections = tokens * dim * dim + rows * dim * dim
    scores = tokens * classes * dim + _NORM * tokens * classes
    return _normalised(network, levels) + projections + blocks + _NORM * rows * dim + scores


def _linear(network: Network, levels: Sequence[int]) -> int:
    return _normalised(network, levels) + sum(levels) * network.embed_dim * network.classes


def _up_head(network: Network, levels: Sequence[int]) -> int:
    """SETR's convolutions on every patch, the grid doubled in front of each but the first."""
    convs, kernel = (4, 9) if network.decoder == "pup" else (1, 1)
    cells, width = network.grid[0] * network.grid[1], network.decoder_dim
    total = _normalised(network, levels) + cells * kernel * network.embed_dim * width
    for _ in range(convs - 1):
        cells *= 4
        total += _BILINEAR * cells * width + cells * kernel * width * width
    total += cells * width * network.classes
    return total + (_BILINEAR * 16 * cells * network.classes if network.decoder == "naive_mmseg" else 0)


def _mla(network: Network, levels: Sequence[int]) -> int:
    cells, width, half = network.grid[0] * network.grid[1], network.decoder_dim, network.decoder_dim // 2
    level = cells * (network.embed_dim * width + 9 * (width * width + width * half + half * half))
    joined = len(levels) * half
    if network.decoder == "mla_mmseg":
        scores = cells * joined * network.classes + _BILINEAR * 16 * cells * network.classes
    else:
        scores = _BILINEAR * 16 * cells * joined + 16 * cells * 9 * joined * network.classes
    return _normalised(network, levels) + len(levels) * level + scores


def _atm(network: Network, levels: Sequence[int]) -> int:
    """SegViT: class queries attend to the tokens of each level; then one product of masks and classes at full size."""
    dim, classes = network.decoder_dim, network.classes
    total = classes * dim * (classes + 1) + classes * classes * network.image_size[0] * network.image_size[1]
    for tokens in levels:
        cross = 2 * (classes + tokens) * dim * dim + 2 * classes * tokens * dim + _NORM * classes * dim
        layers = network.decoder_depth * (_attention(classes, dim) + cross + _mlp(classes, dim))
        total += tokens * network.embed_dim * dim + _NORM * tokens * dim + layers
    return total


def _queries(network: Network, levels: Sequence[int]) -> int:
    """EoMT: the last blocks with queries in front of the tokens, the heads, masks at up to a quarter of the size."""
    (tokens,) = levels
    dim, queries = network.embed_dim, network.queries
    rows = queries + tokens + network.prefix
    total = network.decoder_depth * (_attention(rows, dim) + _mlp(rows, dim)) + _NORM * rows * dim
    total += queries * dim * (network.classes + 1) + 3 * queries * dim * dim
    cells = network.grid[0] * network.grid[1]
    for _ in range(max(1, int(math.log2(network.patch_size)) - 2)):
        cells *= 4
        total += cells * dim * (dim + 9 + _NORM)
    height, width = network.image_size
    return total + queries * dim * cells + queries * network.classes * height * width


_DECODERS: dict[str, Callable[[Network, Sequence[int]], int]] = {
    "mask_transformer": _mask_transformer,
    "linear": _linear,
    "linear_ms": _linear,
    "queries": _queries,
    "naive": _up_head,
    "naive_mmseg": _up_head,
    "pup": _up_head,
    "mla": _mla,
    "mla_mmseg": _mla,
    "atm": _atm,
}
