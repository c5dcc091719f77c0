"""Multiply-adds of the parts that networks have in common, by the convention of `evaluation/flops.py`."""

from __future__ import annotations

from collections.abc import Sequence

from algm_deploy.recipe.network import Network

NORM = 5  # for an element
BILINEAR = 4  # for an element of the output
_MLP_RATIO = 4


def attention(tokens: int, dim: int) -> int:
    """Self-attention of a block, with the LayerNorm before it."""
    return NORM * tokens * dim + 4 * tokens * dim * dim + 2 * tokens * tokens * dim


def mlp(tokens: int, dim: int, hidden: int = 0) -> int:
    """The MLP of a block, with the LayerNorm before it. `hidden`: its inner width; 0 for four times `dim`."""
    return NORM * tokens * dim + 2 * tokens * dim * (hidden or _MLP_RATIO * dim)


def normalised(network: Network, levels: Sequence[int]) -> int:
    """LayerNorm of the encoder's outputs, in the encoder or by the decoder."""
    return sum(NORM * (tokens + network.prefix) * network.embed_dim for tokens in levels)


def linear_head(network: Network, levels: Sequence[int]) -> int:
    """One linear layer a token and level, after `normalised`."""
    return normalised(network, levels) + sum(levels) * network.embed_dim * network.classes
