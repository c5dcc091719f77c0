"""SETR (Zheng et al., CVPR 2021): plain ViT encoder with a naive, a progressive (PUP) or a multi-level (MLA) head.

The arithmetic is that of fudan-zvg/SETR (mmseg/models/backbones/vit.py, vit_mla.py, decode_heads/vit_up_head.py,
vit_mla_head.py). Heads are convolutional, so tokens are unmerged before them (ALGM, CVPR 2024, section 3.4); each level
of MLA by the token map of its own depth. Batch norms are folded into the convolutions when a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from algm_deploy.models.multiply_adds import BILINEAR, normalised
from algm_deploy.models.naming import Naming, dropped, mmseg_encoder
from algm_deploy.models.readout import Level, ReadNetwork, Readout, Steps
from algm_deploy.models.scores import GridScores, enlarged, on_grid
from algm_deploy.models.vit import Tokens
from algm_deploy.recipe.network import Network

EPS = 1e-6
# Convolutions of a one-level head, a side of their kernel, and what its scores are enlarged by before the last resize.
_HEADS = {"naive": (1, 1, 1), "naive_mmseg": (1, 1, 4), "pup": (4, 3, 1)}
_LEVELS = range(4)


def _conv(channels_in: int, channels_out: int, kernel: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, padding=kernel // 2)


class UpHead(nn.Module):
    """Convolutions with a ReLU each, doubling the grid between them, then class scores: naive (one) or PUP (four).

    mmsegmentation enlarges features before the last convolution; that one is pointwise, so the two commute.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        count, kernel, self.last_factor = _HEADS[network.decoder]
        width = network.decoder_dim
        self.norm = nn.LayerNorm(network.embed_dim, EPS)
        self.convs = nn.ModuleList(_conv(width if i else network.embed_dim, width, kernel) for i in range(count))
        self.score = _conv(width, network.classes, 1)

    def levels(self) -> tuple[Level, ...]:
        """The one that is read."""
        return (Level(self.norm),)

    def forward(self, levels: Sequence[Tensor], steps: Steps) -> Tensor:
        """Scores of normalised maps (B, D, rows, columns)."""
        last = len(self.convs) - 1
        for i, conv in enumerate(self.convs):
            levels = steps.rectified([conv], levels, 1 if i == last else 2, False)
        (maps,) = levels
        return enlarged(self.score(maps), self.last_factor)

    @staticmethod
    def multiply_adds(network: Network, levels: Sequence[int]) -> int:
        """Convolutions on every patch, the grid doubled before each but the first."""
        count, kernel, factor = _HEADS[network.decoder]
        cells, width = network.grid[0] * network.grid[1], network.decoder_dim
        total = normalised(network, levels) + cells * kernel**2 * network.embed_dim * width
        for _ in range(count - 1):
            cells *= 4
            total += BILINEAR * cells * width + cells * kernel**2 * width * width
        enlarged = BILINEAR * factor**2 * cells * network.classes if factor > 1 else 0
        return total + cells * width * network.classes + enlarged


class MultiLevelHead(nn.Module):
    """MLA: levels summed from the deepest upwards, convolved alone, enlarged by 4 and scored together.

    SETR itself scores the enlarged levels by 3x3, its corners aligned; mmsegmentation scores pointwise, corners not
    aligned, which commutes with enlarging.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        width, half = network.decoder_dim, network.decoder_dim // 2
        self.pointwise = network.decoder == "mla_mmseg"
        self.norms = nn.ModuleList(nn.LayerNorm(network.embed_dim, EPS) for _ in _LEVELS)
        self.laterals = nn.ModuleList(_conv(network.embed_dim, width, 1) for _ in _LEVELS)
        self.smooth = nn.ModuleList(_conv(width, width, 3) for _ in _LEVELS)
        self.narrow = nn.ModuleList(_conv(width, half, 3) for _ in _LEVELS)
        self.refine = nn.ModuleList(_conv(half, half, 3) for _ in _LEVELS)
        self.score = _conv(len(_LEVELS) * half, network.classes, 1 if self.pointwise else 3)

    def levels(self) -> tuple[Level, ...]:
        """Those that are read."""
        return tuple(Level(cast(nn.LayerNorm, norm)) for norm in self.norms)

    def forward(self, levels: Sequence[Tensor], steps: Steps) -> Tensor:
        """Scores of normalised maps (B, D, rows, columns) of every level."""
        before, behind = (1, 4) if self.pointwise else (4, 1)  # the scores
        maps = steps.rectified(self.laterals, levels, 1, True)
        for i in reversed(_LEVELS[:-1]):
            maps[i] = maps[i + 1] + maps[i]
        for convs, factor in ((self.smooth, 1), (self.narrow, 1), (self.refine, before)):
            maps = steps.rectified(convs, maps, factor, True)
        return enlarged(self.score(torch.cat(maps, 1)), behind)

    @staticmethod
    def multiply_adds(network: Network, levels: Sequence[int]) -> int:
        """Convolutions of each level on every patch, then of all levels together."""
        cells, width, half = network.grid[0] * network.grid[1], network.decoder_dim, network.decoder_dim // 2
        level = cells * (network.embed_dim * width + 9 * (width * width + width * half + half * half))
        joined = len(levels) * half
        if network.decoder == "mla_mmseg":
            scores = cells * joined * network.classes + BILINEAR * 16 * cells * network.classes
        else:
            scores = BILINEAR * 16 * cells * joined + 16 * cells * 9 * joined * network.classes
        return normalised(network, levels) + len(levels) * level + scores


def _head(network: Network) -> type[UpHead] | type[MultiLevelHead]:
    return UpHead if network.decoder in _HEADS else MultiLevelHead


class Setr(ReadNetwork):
    """Image (B, 3, H, W), normalised, to class scores on a grid."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, EPS, norm=False)
        self.decoder = _head(network)(network)

    def readout(self) -> Readout:
        return Readout(self.decoder.levels(), self._scores, unmerged=True)

    def _scores(self, levels: Sequence[Tokens], front: Tensor | None, steps: Steps) -> GridScores:
        maps = [on_grid(tokens.values, self.network.grid) for tokens in levels]
        return GridScores(self.decoder(maps, steps), self.encoder.prefix, [])

    @staticmethod
    def decoder_multiply_adds(network: Network, levels: Sequence[int]) -> int:
        return _head(network).multiply_adds(network, levels)

    @staticmethod
    def namings(network: Network) -> tuple[Naming, ...]:
        return _fudan(network), _mmseg(network)


# ---------------------------------------------------------------------------------------------------- checkpoint keys


def _fudan(network: Network) -> Naming:
    """fudan-zvg/SETR."""
    names = {"encoder.": "backbone."}
    mla = network.decoder not in _HEADS
    if mla:
        level = "backbone.mla.mla_p{}".format
        names |= {f"decoder.norms.{i}.": f"backbone.norm_{i}." for i in _LEVELS} | {
            "decoder.score.": "decode_head.cls."
        }
        convs = {f"decoder.laterals.{i}": (f"{level(i + 2)}_1x1.0", f"{level(i + 2)}_1x1.1") for i in _LEVELS}
        convs |= {f"decoder.smooth.{i}": (f"{level(i + 2)}.0", f"{level(i + 2)}.1") for i in _LEVELS}
        head = "decode_head.mlahead.head{}".format
        convs |= {f"decoder.narrow.{i}": (f"{head(i + 2)}.0", f"{head(i + 2)}.1") for i in _LEVELS}
        convs |= {f"decoder.refine.{i}": (f"{head(i + 2)}.3", f"{head(i + 2)}.4") for i in _LEVELS}
    else:
        count = _HEADS[network.decoder][0]
        names |= {"decoder.norm.": "decode_head.norm.", "decoder.score.": f"decode_head.conv_{count}."}
        convs = {f"decoder.convs.{i}": (f"decode_head.conv_{i}", f"decode_head.syncbn_fc_{i}") for i in range(count)}
    return Naming(
        project="fudan-zvg/SETR",
        mark="backbone.blocks.",
        decoders=("naive", "pup", "mla"),
        names=names,
        convs=convs,
        conv_bias=not mla,
        unused=("decode_head.conv_seg.", "auxiliary_head.", *dropped(network)),
    )


def _mmseg(network: Network) -> Naming:
    """open-mmlab/mmsegmentation, whose MLA hands its levels to the head deepest first."""
    names = mmseg_encoder(network) | {"decoder.score.": "decode_head.conv_seg."}
    mla = network.decoder not in _HEADS
    if mla:
        names |= {f"decoder.norms.{i}.": f"neck.norm.{i}." for i in _LEVELS}
        blocks = {f"decoder.laterals.{i}": f"neck.mla.channel_proj.{i}" for i in _LEVELS}
        blocks |= {f"decoder.smooth.{i}": f"neck.mla.feat_extract.{3 - i}" for i in _LEVELS}
        blocks |= {f"decoder.narrow.{i}": f"decode_head.up_convs.{3 - i}.0" for i in _LEVELS}
        blocks |= {f"decoder.refine.{i}": f"decode_head.up_convs.{3 - i}.1" for i in _LEVELS}
    else:
        names |= {"decoder.norm.": "decode_head.norm."}
        blocks = {f"decoder.convs.{i}": f"decode_head.up_convs.{i}.0" for i in range(_HEADS[network.decoder][0])}
    return Naming(
        project="mmsegmentation",
        mark="backbone.layers.",
        decoders=("naive_mmseg", "pup", "mla_mmseg"),
        names=names,
        convs={ours: (f"{block}.conv", f"{block}.bn") for ours, block in blocks.items()},
        changed={"decoder.score.weight": _levels_reversed} if mla else {},
        unused=("auxiliary_head.", *dropped(network)),
    )


def _levels_reversed(weight: Tensor) -> Tensor:
    """The input channels (K, 4 * width, ...) of the last convolution, level by level in opposite order."""
    return torch.cat(weight.chunk(len(_LEVELS), 1)[::-1], 1)
