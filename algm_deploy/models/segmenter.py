"""Segmenter (Strudel et al., ICCV 2021): plain ViT encoder with a linear or a mask-transformer decoder.

Parameter names and arithmetic follow the official implementation (rstrudel/segmenter, segm/model/). Both decoders work
on merged tokens; class scores are unmerged at the very end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.auxiliary import LinearHead
from algm_deploy.models.multiply_adds import NORM, attention, linear_head, mlp, normalised
from algm_deploy.models.naming import Naming, joined_tokens
from algm_deploy.models.policy import PolicyNet, convs
from algm_deploy.models.readout import Joining, Level, ReadNetwork, Readout, Steps
from algm_deploy.models.scores import TokenScores
from algm_deploy.models.vit import Block, Tokens
from algm_deploy.recipe.network import Network, Size

DISTILLED = "encoder.dist_token"
AUXILIARY = "auxiliary_head"  # zbwxp/Dynamic-Token-Pruning's name, as heads of a Segmenter have no other
POLICY, _POLICY = "policy_net", "encoder.policy"  # their name of CTS's policy network, and ours


class LinearDecoder(nn.Module):
    """One linear layer a token."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, classes)

    def readout(self, prefix: int) -> Readout:
        """Of tokens after `prefix` rows."""
        return Readout((Level(rows=self.head),), partial(self._scores, prefix), skipped=prefix)

    def _scores(self, prefix: int, levels: Sequence[Tokens], front: Tensor | None, steps: Steps) -> TokenScores:
        (tokens,) = levels
        return TokenScores(tokens.values, tokens.map, prefix, [])


class MaskTransformer(nn.Module):
    """Class embeddings attend together with the tokens; a score is their cosine, normalised over the classes."""

    def __init__(self, dim: int, classes: int, depth: int) -> None:
        super().__init__()
        self.cls_emb = nn.Parameter(torch.zeros(1, classes, dim))
        self.proj_dec = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, max(1, dim // 64)) for _ in range(depth))
        self.decoder_norm = nn.LayerNorm(dim)
        self.proj_patch = nn.Parameter(torch.zeros(dim, dim))
        self.proj_classes = nn.Parameter(torch.zeros(dim, dim))
        self.mask_norm = nn.LayerNorm(classes)

    def readout(self, prefix: int) -> Readout:
        """Of tokens after `prefix` rows."""
        joining = Joining(self.cls_emb[0], self.blocks, self.decoder_norm)
        return Readout((Level(rows=self.proj_dec),), partial(self._scores, prefix), joining, prefix)

    def _scores(self, prefix: int, levels: Sequence[Tokens], classes: Tensor | None, steps: Steps) -> TokenScores:
        (tokens,) = levels
        assert classes is not None
        patch, label = steps.unit(tokens.values @ self.proj_patch), steps.unit(classes @ self.proj_classes)
        return TokenScores(steps.normed(patch @ label.mT, self.mask_norm), tokens.map, prefix, [])


class Segmenter(ReadNetwork):
    """Image (B, 3, H, W), normalised, to class scores of merged tokens."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        if network.policy:
            self.encoder.policy = PolicyNet()
        for layer in network.auxiliary:
            head = LinearHead(network.prefix, network.embed_dim, network.classes)
            self.encoder.blocks[layer - 1].auxiliary = head
        self.decoder: LinearDecoder | MaskTransformer = (
            LinearDecoder(network.embed_dim, network.classes)
            if network.decoder == "linear"
            else MaskTransformer(network.embed_dim, network.classes, network.decoder_depth)
        )

    def readout(self) -> Readout:
        return self.decoder.readout(self.encoder.prefix)

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
    def auxiliary_multiply_adds(network: Network, tokens: int) -> int:
        return LinearHead.multiply_adds(tokens, network.embed_dim, network.classes)

    @staticmethod
    def namings(network: Network) -> tuple[Naming, ...]:
        """The official names are ours; a DeiT's distillation token stands alone, and its classifiers play no part.

        CTS's policy network stands beside the encoder there, and so do auxiliary heads, which no project publishes.
        """
        tokens = {"encoder.cls_token": 1, DISTILLED: network.extra_tokens}
        heads = {
            f"encoder.blocks.{layer - 1}.auxiliary.": f"{AUXILIARY}.{i}." for i, layer in enumerate(network.auxiliary)
        }
        return (
            Naming(
                project="rstrudel/segmenter",
                mark="encoder.",
                decoders=("mask_transformer", "linear"),
                names={"": "", f"{_POLICY}.head.": f"{POLICY}.head.", **heads},
                convs=convs(_POLICY, f"{POLICY}.backbone") if network.policy else {},
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
