"""Mask2Former's head (Cheng et al., CVPR 2022) for semantic segmentation, on maps of four sizes.

The arithmetic is that of baaivision/EVA and czczup/ViT-Adapter (mmseg_custom/models/plugins/
msdeformattn_pixel_decoder.py, decode_heads/mask2former_head.py) as it is evaluated, on the layers of MMCV 1.7. In the
pixel decoder the cells of the three smaller maps look at each other by deformable attention. Then queries attend to
those maps, one map a layer, the smallest first, each query to the cells where its own mask is positive: where
sigmoid(mask) >= 0.5, or to all of them where it is positive nowhere. So a mask decides, and like a merge it can be
replayed: `MaskedLayer.choose` is a slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.multiply_adds import BILINEAR, NORM
from algm_deploy.models.naming import Made
from algm_deploy.models.readout import heads_of
from algm_deploy.models.scores import on_grid, resize, scores_of_masks
from algm_deploy.models.vit import MergeInputs
from algm_deploy.models.vit_adapter import DeformableAttention
from algm_deploy.ops._rows import table, wide
from algm_deploy.recipe.network import NORM_GROUPS, Network, Size, feature_grids

_TEMPERATURE = 10000
_MLP_RATIO = 4
_EPS = 1e-5
_LEVELS = 3


def sine_positions(side: int, width: int) -> np.ndarray:
    """What tells the rows or columns (side, width) fp64 of a grid from each other.

    Sines and cosines in turn, of ever longer waves, of the place from above 0 to 2 pi.
    """
    waves = _TEMPERATURE ** (2 * (np.arange(width) // 2) / width)
    angles = 2 * math.pi * np.arange(1, side + 1)[:, None] / (side + 1e-6) / waves
    return np.where(np.arange(width) % 2 == 0, np.sin(angles), np.cos(angles))


def _positions(grid: Size, like: Tensor) -> Tensor:
    """Of every cell (h * w, D) of a grid, in dtype and width of `like` (..., D): of its row, then of its column."""
    height, width = grid
    half = like.shape[-1] // 2
    rows, columns = (table(sine_positions, (side, half), like.device, like.dtype) for side in grid)
    joined = torch.cat([rows[:, None].expand(-1, width, -1), columns.expand(height, -1, -1)], 2)
    return joined.flatten(0, 1)


def _rows(maps: Tensor) -> Tensor:
    """The cells (B, h * w, D) of maps (B, D, h, w)."""
    return maps.flatten(2).mT


class GroupNorm(nn.Module):
    """Norm of groups of channels of maps (B, C, h, w), in plain sums.

    PyTorch's own is exported as InstanceNormalization, after which ONNX Runtime's memory plan fails.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, maps: Tensor) -> Tensor:
        _, channels, height, width = maps.shape
        groups = wide(maps).reshape(-1, NORM_GROUPS, channels // NORM_GROUPS, height, width)
        centred = groups - groups.mean((2, 3, 4), keepdim=True)
        deviation = (centred.square().mean((2, 3, 4), keepdim=True) + _EPS).sqrt()
        normal = (centred / deviation).flatten(1, 2).to(maps.dtype)
        scaled: Tensor = normal * self.weight[:, None, None] + self.bias[:, None, None]
        return scaled


class NormedConv(nn.Module):
    """A convolution and a norm of groups of its channels."""

    def __init__(self, before: int, after: int, side: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, side, padding=side // 2, bias=bias)
        self.norm = GroupNorm(after)

    def forward(self, maps: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.conv(maps))
        return normed


class PixelLayer(nn.Module):
    """Cells (B, M, D) of all grids look at each other by deformable attention; norms come last."""

    def __init__(self, network: Network, grids: tuple[Size, ...]) -> None:
        super().__init__()
        dim = network.decoder_dim
        self.attn = DeformableAttention(dim, dim, network.decoder_heads, grids, grids)
        self.fc1, self.fc2 = nn.Linear(dim, _MLP_RATIO * dim), nn.Linear(_MLP_RATIO * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, cells: Tensor, places: Tensor) -> Tensor:
        """`places` (M, D) tell the cells from each other."""
        cells = self.norm1(cells + self.attn(cells + places, cells))
        changed: Tensor = self.norm2(cells + self.fc2(F.relu(self.fc1(cells))))
        return changed


class PixelDecoder(nn.Module):
    """Maps (B, D, h, w) of four sizes, the largest first, to one that masks are made of and three to look at."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        dim, width = network.embed_dim, network.decoder_dim
        self.grids = feature_grids(network.grid)[::-1]
        self.inputs = nn.ModuleList(NormedConv(dim, width, bias=True) for _ in self.grids)
        self.levels = nn.Parameter(torch.zeros(len(self.grids), width))
        self.layers = nn.ModuleList(PixelLayer(network, self.grids) for _ in range(network.pixel_layers))
        self.lateral = NormedConv(dim, width)
        self.smooth = NormedConv(width, width, 3)
        self.masks = nn.Conv2d(width, width, 1)

    def forward(self, maps: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The map (B, C, h, w) whose products with queries are masks; cells (B, h * w, C), the smallest grid first."""
        cells = torch.cat([_rows(conv(x)) for conv, x in zip(self.inputs, maps[:0:-1], strict=True)], 1)
        places = [_positions(grid, cells) + level for grid, level in zip(self.grids, self.levels, strict=True)]
        every = torch.cat(places)
        for layer in self.layers:
            cells = layer(cells, every)
        parts = list(torch.split(cells, [rows * columns for rows, columns in self.grids], 1))
        finest = on_grid(parts[-1], self.grids[-1])
        lateral = self.lateral(maps[0])
        largest = self.smooth(lateral + resize(finest, (lateral.shape[2], lateral.shape[3])))
        return self.masks(F.relu(largest)), parts

    @staticmethod
    def multiply_adds(network: Network) -> int:
        """Projections of the maps, deformable layers, and convolutions on the largest map."""
        dim, width = network.embed_dim, network.decoder_dim
        cells = [rows * columns for rows, columns in feature_grids(network.grid)]
        every, largest = sum(cells), 4 * cells[0]
        attention = DeformableAttention.multiply_adds(width, width, network.decoder_heads, every, cells)
        layer = attention + every * width * (2 * NORM + 2 * _MLP_RATIO * width)
        joined = largest * width * (dim + BILINEAR + 9 * width + width + 2 * NORM)
        return every * width * (dim + NORM) + network.pixel_layers * layer + joined


class ChooseCells(nn.Module):
    """The slot in which masks (B, Q, S), before their activation, become the cells (B, Q, S) bool to attend to."""

    def forward(self, masks: Tensor, inputs: MergeInputs | None) -> Tensor:
        return masks >= 0


class QueryAttention(nn.Module):
    """Queries (B, Q, D) attend to rows (B, S, D): to those that `chosen` (B, Q, S) names, if given."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, chosen: Tensor | None = None) -> Tensor:
        query, key, value = (heads_of(x, self.heads) for x in (self.q(queries), self.k(keys), self.v(values)))
        similarity = wide(query * self.scale @ key.mT)
        if chosen is not None:
            similarity = torch.where(chosen[:, None], similarity, -torch.inf)
        mixed = similarity.softmax(-1).to(value.dtype) @ value
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class MaskedLayer(nn.Module):
    """Queries attend to the cells that their masks choose, then to each other; norms come last."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        dim, heads = network.decoder_dim, network.decoder_heads
        self.cross, self.attn = QueryAttention(dim, heads), QueryAttention(dim, heads)
        self.fc1, self.fc2 = nn.Linear(dim, _MLP_RATIO * dim), nn.Linear(_MLP_RATIO * dim, dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.choose: nn.Module = ChooseCells()

    def forward(
        self, queries: Tensor, own: Tensor, keys: Tensor, values: Tensor, masks: Tensor, inputs: MergeInputs | None
    ) -> tuple[Tensor, Tensor]:
        """Queries (B, Q, D), and the cells (B, Q, S) uint8 that were chosen; `own` (Q, D) tells queries apart."""
        chosen = self.choose(masks, inputs)
        nowhere = ~chosen.any(2, keepdim=True)
        queries = self.norm1(queries + self.cross(queries + own, keys, values, chosen | nowhere))
        told = queries + own
        queries = self.norm2(queries + self.attn(told, told, queries))
        changed = self.norm3(queries + self.fc2(F.relu(self.fc1(queries))))
        return changed, chosen.to(torch.uint8)


class Mask2Former(nn.Module):
    """Maps of four sizes to class scores that sum up the masks of all queries."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        dim = network.decoder_dim
        self.grids = network.mask_grids
        self.pixels = PixelDecoder(network)
        self.queries = nn.Parameter(torch.zeros(network.queries, dim))
        self.own = nn.Parameter(torch.zeros(network.queries, dim))
        self.levels = nn.Parameter(torch.zeros(_LEVELS, dim))
        self.layers = nn.ModuleList(MaskedLayer(network) for _ in self.grids)
        self.norm = nn.LayerNorm(dim)
        self.classes = nn.Linear(dim, network.classes + 1)
        self.mask = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, maps: Sequence[Tensor], inputs: MergeInputs | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Scores (B, K, h, w) of the largest map's size, and the cells (B, Q, S) uint8 chosen in each layer."""
        features, cells = self.pixels(maps)
        values = [part + level for part, level in zip(cells, self.levels, strict=True)]
        keys = [value + _positions(grid, value) for value, grid in zip(values, self.pixels.grids, strict=True)]
        queries = self.queries.expand(features.shape[0], -1, -1)
        masks, chosen = self._masks(self.norm(queries), features), []
        for i, (layer, grid) in enumerate(zip(self.layers, self.grids, strict=True)):
            seen = resize(masks, grid).flatten(2)
            queries, cells_of_layer = layer(queries, self.own, keys[i % _LEVELS], values[i % _LEVELS], seen, inputs)
            chosen.append(cells_of_layer)
            masks = self._masks(self.norm(queries), features)
        size = masks.shape[2], masks.shape[3]
        return scores_of_masks(masks, self.classes(self.norm(queries)), size), tuple(chosen)

    def _masks(self, queries: Tensor, features: Tensor) -> Tensor:
        """Masks (B, Q, h, w) before their activation, at least fp32, of normalised queries."""
        first, second, last = self.mask
        rows = last(F.relu(second(F.relu(first(queries)))))
        return wide(torch.einsum("bqc,bchw->bqhw", rows, features))

    @staticmethod
    def multiply_adds(network: Network) -> int:
        """The pixel decoder, queries that attend to a map and to each other in each layer, and masks after each."""
        dim, queries = network.decoder_dim, network.queries
        pixels = 16 * network.grid[0] * network.grid[1]
        heads = queries * dim * (NORM + 3 * dim) + queries * dim * pixels
        total = PixelDecoder.multiply_adds(network) + heads + queries * dim * (network.classes + 1)
        for rows, columns in network.mask_grids:
            cells = rows * columns
            cross = 2 * (queries + cells) * dim * dim + 2 * queries * cells * dim + BILINEAR * queries * cells
            own = 4 * queries * dim * dim + 2 * queries * queries * dim
            total += cross + own + 2 * _MLP_RATIO * queries * dim * dim + 3 * NORM * queries * dim + heads
        return total + queries * network.classes * pixels + BILINEAR * network.classes * 16 * pixels


# ---------------------------------------------------------------------------------------------------- checkpoint keys

_HEAD, _PIXELS = "decode_head.", "decode_head.pixel_decoder."
_NORMED_CONV = {"conv": "conv", "norm": "gn"}
_MLP = {"fc1.": "ffns.0.layers.0.0.", "fc2.": "ffns.0.layers.1."}
_NORMS = {f"norm{i + 1}.": f"norms.{i}." for i in range(3)}
_PIXEL_LAYER = {"attn.": "attentions.0."}
_MASKED_LAYER = {f"{ours}.proj.": f"attentions.{i}.attn.out_proj." for i, ours in enumerate(("cross", "attn"))}


def head_names(network: Network) -> dict[str, str]:
    """Names of the decoder in checkpoints of MMSegmentation's descendants, by `Naming.names`."""
    names = {
        "decoder.queries": f"{_HEAD}query_feat.weight",
        "decoder.own": f"{_HEAD}query_embed.weight",
        "decoder.levels": f"{_HEAD}level_embed.weight",
        "decoder.norm.": f"{_HEAD}transformer_decoder.post_norm.",
        "decoder.classes.": f"{_HEAD}cls_embed.",
        "decoder.pixels.levels": f"{_PIXELS}level_encoding.weight",
        "decoder.pixels.masks.": f"{_PIXELS}mask_feature.",
    }
    names |= {f"decoder.mask.{i}.": f"{_HEAD}mask_embed.{2 * i}." for i in range(3)}
    convs = {f"inputs.{i}": f"input_convs.{i}" for i in range(_LEVELS)}
    for ours, theirs in (convs | {"lateral": "lateral_convs.0", "smooth": "output_convs.0"}).items():
        names |= {f"decoder.pixels.{ours}.{a}.": f"{_PIXELS}{theirs}.{b}." for a, b in _NORMED_CONV.items()}
    for ours, theirs, layers, inside in (
        ("decoder.pixels.layers", f"{_PIXELS}encoder.layers", network.pixel_layers, _PIXEL_LAYER),
        ("decoder.layers", f"{_HEAD}transformer_decoder.layers", network.decoder_depth, _MASKED_LAYER),
    ):
        for i in range(layers):
            names |= {f"{ours}.{i}.{a}": f"{theirs}.{i}.{b}" for a, b in (_MLP | _NORMS | inside).items()}
    return names


def head_made(network: Network) -> dict[str, Made]:
    """Query, key and value of the decoder's attention, which are one matrix there."""
    dim, made = network.decoder_dim, {}
    for i in range(network.decoder_depth):
        for k, attention in enumerate(("cross", "attn")):
            theirs = f"{_HEAD}transformer_decoder.layers.{i}.attentions.{k}.attn.in_proj_"
            for place, part in enumerate("qkv"):
                for kind, shape in (("weight", (3 * dim, dim)), ("bias", (3 * dim,))):
                    key = f"decoder.layers.{i}.{attention}.{part}.{kind}"
                    made[key] = Made({theirs + kind: shape}, partial(_third, theirs + kind, place))
    return made


def _third(key: str, place: int, found: Mapping[str, Tensor]) -> Tensor:
    return found[key].float().chunk(3)[place].clone()
