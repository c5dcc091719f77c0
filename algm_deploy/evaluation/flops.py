"""Multiply-adds of a Segmenter on one window, from its shape and the tokens that were left after each merge.

The convention is that of the published figures (fvcore): one multiply-add of a matrix product or convolution counts 1,
LayerNorm 5 per element, bilinear upsampling 4 per output element; softmax, GELU, biases, additions and the cosine
similarities of CLAP's windows count nothing. The published tables call these multiply-adds "GFLOPs"; in floating-point
operations a multiply-add is two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from algm_deploy.errors import PlanError, RecipeError
from algm_deploy.recipes import MergePlan, Network

_NORM = 5
_BILINEAR = 4
_MLP_RATIO = 4
_PREFIX = 1


@dataclass(frozen=True)
class MultiplyAdds:
    """Multiply-adds of one window by part; `merging` is GBM's product of similarities."""

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
        RecipeError: the network is not a Segmenter.
        PlanError: not one count per merging layer, or counts that grow.
    """
    if network.family != "segmenter" or network.decoder not in ("mask_transformer", "linear"):
        raise RecipeError(
            f"multiply-adds are known for segmenter networks, got {network.family} with {network.decoder}"
        )
    patches = network.grid[0] * network.grid[1]
    counts = _counts(plan, patches, tokens_after_merge)
    encoder, merging, tokens = _encoder(network, plan, counts, patches)
    decoder = _mask_transformer(network, tokens) if network.decoder == "mask_transformer" else _linear(network, tokens)
    height, width = network.image_size
    return MultiplyAdds(
        patch_embedding=patches * network.embed_dim * 3 * network.patch_size**2,
        encoder=encoder,
        merging=merging,
        decoder=decoder,
        upsampling=_BILINEAR * network.classes * height * width,
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


def _encoder(network: Network, plan: MergePlan, counts: dict[int, int], tokens: int) -> tuple[int, int, int]:
    """Encoder and merging multiply-adds, and the tokens that leave. Merging sits between attention and MLP."""
    encoder = merging = 0
    for layer in range(1, network.depth + 1):
        encoder += _attention(tokens + _PREFIX, network.embed_dim)
        if layer in plan.gbm_layers:
            sequence = tokens + _PREFIX
            merging += (sequence - sequence // 2) * (sequence // 2) * network.embed_dim
        tokens = counts.get(layer, tokens)
        encoder += _mlp(tokens + _PREFIX, network.embed_dim)
    return encoder + _NORM * (tokens + _PREFIX) * network.embed_dim, merging, tokens


def _attention(tokens: int, dim: int) -> int:
    projections = 4 * tokens * dim * dim
    return _NORM * tokens * dim + projections + 2 * tokens * tokens * dim


def _mlp(tokens: int, dim: int) -> int:
    return _NORM * tokens * dim + 2 * _MLP_RATIO * tokens * dim * dim


def _mask_transformer(network: Network, tokens: int) -> int:
    dim, classes = network.embed_dim, network.classes
    rows = tokens + classes
    blocks = network.decoder_depth * (_attention(rows, dim) + _mlp(rows, dim))
    projections = tokens * dim * dim + rows * dim * dim
    return projections + blocks + _NORM * rows * dim + tokens * classes * dim + _NORM * tokens * classes


def _linear(network: Network, tokens: int) -> int:
    return tokens * network.embed_dim * network.classes
