"""Segmenter (Strudel et al., ICCV 2021): plain ViT encoder with a linear or a mask-transformer decoder.

Parameter names and arithmetic follow the official implementation (rstrudel/segmenter, segm/model/). Both decoders work
on merged tokens; class scores are unmerged at the very end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.multiply_adds import NORM, attention, linear_head, mlp, normalised
from algm_deploy.models.naming import Naming, joined_tokens
from algm_deploy.models.scores import TokenScores
from algm_deploy.models.vit import Block, MergeInputs, Tokens, VitNetwork
from algm_deploy.ops._rows import wide
from algm_deploy.recipe.schema import Network, Size

DISTILLED = "encoder.dist_token"


def _unit(x: Tensor) -> Tensor:
    """Rows scaled to length one; the norm is taken in fp32, where 16-bit squares cannot overflow."""
    return F.normalize(wide(x), dim=-1).to(x.dtype)


class LinearDecoder(nn.Module):
    """One linear layer a token."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens: Tokens) -> Tensor:
        scores: Tensor = self.head(tokens.values)
        return scores


class MaskTransformer(nn.Module):
    """Class embeddings attend together with the tokens; a score is their cosine, normalised over the classes.

    Rows are [classes | tokens], so that padding stays at the end; attention does not depend on the order.
    """

    def __init__(self, dim: int, classes: int, depth: int) -> None:
        super().__init__()
        self.cls_emb = nn.Parameter(torch.zeros(1, classes, dim))
        self.proj_dec = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, max(1, dim // 64)) for _ in range(depth))
        self.decoder_norm = nn.LayerNorm(dim)
        self.proj_patch = nn.Parameter(torch.zeros(dim, dim))
        self.proj_classes = nn.Parameter(torch.zeros(dim, dim))
        self.mask_norm = nn.LayerNorm(classes)

    def forward(self, tokens: Tokens) -> Tensor:
        classes = self.cls_emb.shape[1]
        rows = [self.cls_emb.expand(tokens.values.shape[0], -1, -1), self.proj_dec(tokens.values)]
        tokens = tokens._replace(values=torch.cat(rows, 1), length=tokens.length + classes)
        for block in self.blocks:
            tokens = block(tokens)
        x = self.decoder_norm(tokens.values)
        patch, label = _unit(x[:, classes:] @ self.proj_patch), _unit(x[:, :classes] @ self.proj_classes)
        scores: Tensor = self.mask_norm(patch @ label.mT)
        return scores


class Segmenter(VitNetwork):
    """Image (B, 3, H, W), normalised, to class scores of merged tokens."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.decoder: nn.Module = (
            LinearDecoder(network.embed_dim, network.classes)
            if network.decoder == "linear"
            else MaskTransformer(network.embed_dim, network.classes, network.decoder_depth)
        )

    def forward(self, image: Tensor, inputs: MergeInputs | None = None) -> TokenScores:
        prefix = self.encoder.prefix
        (tokens,), stages = self.encoder(image, inputs)
        patches = tokens._replace(values=tokens.values[:, prefix:], length=tokens.length - prefix)
        return TokenScores(self.decoder(patches), tokens.map, prefix, stages)

    @staticmethod
    def decoder_multiply_adds(network: Network, levels: Sequence[int]) -> int:
        if network.decoder == "linear":
            return linear_head(network, levels)
        (tokens,) = levels
        dim, classes = network.embed_dim, network.classes
        rows = tokens + classes
        blocks = network.decoder_depth * (attention(rows, dim) + mlp(rows, dim))
        projections = tokens * dim * dim + rows * dim * dim
        scores = tokens * classes * dim + NORM * tokens * classes
        return normalised(network, levels) + projections + blocks + NORM * rows * dim + scores

    @staticmethod
    def namings(network: Network) -> tuple[Naming, ...]:
        """The official names are ours; a DeiT's distillation token stands alone, and its classifiers play no part."""
        tokens = {"encoder.cls_token": 1, DISTILLED: network.extra_tokens}
        return (
            Naming(
                project="rstrudel/segmenter",
                mark="encoder.",
                decoders=("mask_transformer", "linear"),
                names={"": ""},
                made=joined_tokens(network.embed_dim, tokens),
                unused=("encoder.head.", "encoder.head_dist."),
                positioned=network.prefix,
                resized=resized_positions,
                square=False,
            ),
        )


def resized_positions(patches: Tensor, old: Size, new: Size) -> Tensor:
    """Position embeddings (1, N, D) of one grid at another: bilinear with align_corners=False, as the published code
    does at run time (segm/model/utils.py)."""
    grid = patches.mT.reshape(1, -1, *old)
    return F.interpolate(grid, size=new, mode="bilinear", align_corners=False).flatten(2).mT
