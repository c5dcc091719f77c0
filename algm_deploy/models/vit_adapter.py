"""ViT-Adapter (Chen et al., ICLR 2023) with UPerNet: a plain ViT, and convolutions beside it at four sizes.

The arithmetic is that of czczup/ViT-Adapter (segmentation/mmseg_custom/models/backbones/vit_adapter.py,
adapter_modules.py) as it is evaluated, and of mmsegmentation's UPerHead. The blocks stand in groups. Before each group
the patches take from the features of the convolutions, after it the features take from the patches, both by deformable
attention. It needs every patch: merged tokens are unmerged at the end of a group, and merge again in the next one as
the plan says. Batch norms, LayerScale, the injectors' factors and the embeddings of levels are folded into their
neighbours when a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.multiply_adds import BILINEAR, NORM
from algm_deploy.models.naming import STATISTICS, Made, Naming, batch_norm, layer_scales, resized_bicubic, scaled_by
from algm_deploy.models.scores import GridScores, resize
from algm_deploy.models.vit import (
    ImageConv,
    Merged,
    MergeInputs,
    Tokens,
    VisionTransformer,
    VitNetwork,
    merges_of,
)
from algm_deploy.ops._rows import product, table, wide
from algm_deploy.ops.elvit import pooling
from algm_deploy.recipe.network import Network, Size, feature_grids

EPS = 1e-6
POINTS = 4
"""Places that a head looks at in each level."""
_PRIOR_WIDTH = 64
# Input and output channels of the convolutions on the picture, in units of _PRIOR_WIDTH, and their stride.
_PRIOR = ((0, 1, 2), (1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 4, 2))
_STEM = 3
LAST_EXTRACTORS = 3
_POOLED = (1, 2, 3, 6)


def cell_centres(grids: Sequence[Size]) -> np.ndarray:
    """(across, down) in [0, 1] of every cell (Q, 2) fp64 of a few grids, one after the other in raster order."""
    centres = []
    for rows, columns in grids:
        down, across = np.meshgrid((np.arange(rows) + 0.5) / rows, (np.arange(columns) + 0.5) / columns, indexing="ij")
        centres.append(np.stack([across.ravel(), down.ravel()], 1))
    return np.concatenate(centres)


def cell_sizes(grids: Sequence[Size]) -> np.ndarray:
    """(across, down) of a cell (L, 2) fp64 of each grid, whose sides are 1."""
    return 1 / np.array(grids, np.float64)[:, ::-1].copy()


class DeformableAttention(nn.Module):
    """Queries (B, Q, D), one in each cell of `asking` grids, look at a few places around it of `asked` grids.

    `dim` is the width of queries and cells, `width` that of the values that `heads` share.
    """

    def __init__(self, dim: int, width: int, heads: int, asking: tuple[Size, ...], asked: tuple[Size, ...]) -> None:
        super().__init__()
        places = heads * len(asked) * POINTS
        self.heads, self.width, self.asking, self.asked = heads, width // heads, asking, asked
        self.sampling_offsets = nn.Linear(dim, 2 * places)
        self.attention_weights = nn.Linear(dim, places)
        self.value_proj = nn.Linear(dim, width)
        self.output_proj = nn.Linear(width, dim)

    def forward(self, query: Tensor, features: Tensor) -> Tensor:
        """What each query finds (B, Q, D) in the cells (B, N, D) of the asked grids."""
        rows, looks = (query.shape[1], self.heads), (len(self.asked), POINTS)
        value = self.value_proj(features).reshape(-1, features.shape[1], self.heads, self.width)
        offsets = wide(self.sampling_offsets(query)).reshape(-1, *rows, *looks, 2)
        shares = wide(self.attention_weights(query)).reshape(-1, *rows, looks[0] * looks[1]).softmax(3)
        own = table(cell_centres, (self.asking,), offsets.device, offsets.dtype)[:, None, None, None]
        cell = table(cell_sizes, (self.asked,), offsets.device, offsets.dtype)[:, None]
        shapes = [side for grid in self.asked for side in grid]
        shares = shares.reshape(-1, *rows, *looks)
        mixed = torch.ops.algm.deformable_attention(value, own + offsets * cell, shares, shapes)
        out: Tensor = self.output_proj(mixed)
        return out

    @staticmethod
    def multiply_adds(dim: int, width: int, heads: int, asking: int, asked: Sequence[int]) -> int:
        """Of linear layers and of sampling, four corners of each place."""
        places = heads * len(asked) * POINTS
        linear = asking * (3 * places * dim + width * dim) + sum(asked) * dim * width
        return linear + 4 * asking * places * (width // heads)


def _attention(network: Network, asking: tuple[Size, ...], asked: tuple[Size, ...]) -> DeformableAttention:
    return DeformableAttention(network.embed_dim, network.adapter_dim, network.adapter_heads, asking, asked)


class Injector(nn.Module):
    """Patches (B, N, D) take from the features (B, M, D)."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(network.embed_dim, EPS)
        self.feat_norm = nn.LayerNorm(network.embed_dim, EPS)
        self.attn = _attention(network, (network.grid,), feature_grids(network.grid))

    def forward(self, patches: Tensor, features: Tensor) -> Tensor:
        taken: Tensor = self.attn(self.query_norm(patches), self.feat_norm(features))
        return patches + taken


class GridMlp(nn.Module):
    """Two linear layers with a 3x3 convolution of every channel on each grid, then the exact GELU, between them."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        dim, hidden = network.embed_dim, network.embed_dim // 4
        self.grids = feature_grids(network.grid)
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, features: Tensor) -> Tensor:
        parts = _split(self.fc1(features), self.grids)
        rows = torch.cat([self.dwconv(part).flatten(2) for part in parts], 2).mT
        out: Tensor = self.fc2(F.gelu(rows))
        return out


class Extractor(nn.Module):
    """Features (B, M, D) take from the patches (B, N, D)."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        dim = network.embed_dim
        self.query_norm, self.feat_norm, self.ffn_norm = (nn.LayerNorm(dim, EPS) for _ in range(3))
        self.attn = _attention(network, feature_grids(network.grid), (network.grid,))
        self.ffn = GridMlp(network)

    def forward(self, features: Tensor, patches: Tensor) -> Tensor:
        features = features + self.attn(self.query_norm(features), self.feat_norm(patches))
        changed: Tensor = self.ffn(self.ffn_norm(features))
        return features + changed


class Interaction(nn.Module):
    """What happens between patches and features before and after a group of blocks."""

    def __init__(self, network: Network, extractors: int) -> None:
        super().__init__()
        self.injector = Injector(network)
        self.extractors = nn.ModuleList(Extractor(network) for _ in range(extractors))

    def extract(self, features: Tensor, patches: Tensor) -> Tensor:
        """Features after all extractors."""
        for extractor in self.extractors:
            features = extractor(features, patches)
        return features


class SpatialPrior(nn.Module):
    """Convolutions on the picture (B, 3, H, W): a map at a quarter of its size, and the features (B, M, D)."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            (nn.Conv2d if i else ImageConv)(_PRIOR_WIDTH * a or 3, _PRIOR_WIDTH * b, 3, stride, 1)
            for i, (a, b, stride) in enumerate(_PRIOR)
        )
        widths = [_PRIOR_WIDTH * b for _, b, _ in _PRIOR[_STEM - 1 :]]
        self.laterals = nn.ModuleList(nn.Conv2d(width, network.embed_dim, 1) for width in widths)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        maps, x = [], image
        for i, conv in enumerate(self.convs, 1):
            x = F.relu(conv(x))
            if i == _STEM:
                x = F.max_pool2d(x, 3, 2, 1)
            if i >= _STEM:
                maps.append(x)
        first, *others = (lateral(x) for lateral, x in zip(self.laterals, maps, strict=True))
        return first, torch.cat([x.flatten(2) for x in others], 2).mT

    @staticmethod
    def multiply_adds(network: Network) -> int:
        """Convolutions, at half of the picture's size and below."""
        height, width = network.image_size
        cells, total, pooled = height * width, 0, []
        for i, (a, b, stride) in enumerate(_PRIOR, 1):
            cells //= stride**2
            total += 9 * cells * (_PRIOR_WIDTH * a or 3) * _PRIOR_WIDTH * b
            if i == _STEM:
                cells //= 4
            if i >= _STEM:
                pooled.append(cells * _PRIOR_WIDTH * b * network.embed_dim)
        return total + sum(pooled)


class ChannelScale(nn.Module):
    """A factor and a summand for each channel of a map (B, C, h, w): a batch norm that no neighbour takes up."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, maps: Tensor) -> Tensor:
        return maps * self.weight[:, None, None] + self.bias[:, None, None]


class AdapterEncoder(VisionTransformer):
    """A plain ViT and its adapter."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, EPS, norm=False)
        dim = network.embed_dim
        self.groups = network.groups
        self.prior = SpatialPrior(network)
        extractors = [1] * (len(self.groups) - 1) + [LAST_EXTRACTORS]
        self.interactions = nn.ModuleList(Interaction(network, count) for count in extractors)
        self.up = nn.ConvTranspose2d(dim, dim, 2, 2)
        self.scales = nn.ModuleList(ChannelScale(dim) for _ in range(4))

    def run(self, image: Tensor, inputs: MergeInputs | None = None) -> Iterator[Tokens]:
        """The tokens after each block."""
        return (tokens for tokens, _ in self._run(image, self.prior(image)[1], inputs))

    def maps(self, image: Tensor, inputs: MergeInputs | None = None) -> tuple[list[Tensor], list[Merged]]:
        """Maps (B, D, h, w) at a quarter, an eighth, ... of the picture's size; what every merge left, in order."""
        first, features = self.prior(image)
        stages: list[Merged] = []
        outputs: list[Tensor] = []
        for block, (tokens, after) in zip(self.blocks, self._run(image, features, inputs), strict=True):
            stages += merges_of(block, tokens)
            if after is not None:
                patches, features = after
                outputs += _split(patches, [self.grid])
        return self._joined(first, features, outputs), stages

    def _run(
        self, image: Tensor, features: Tensor, inputs: MergeInputs | None
    ) -> Iterator[tuple[Tokens, tuple[Tensor, Tensor] | None]]:
        """The tokens after each block, and after the last one of a group every patch (B, N, D) and the features."""
        every, left = self.embed(image), cast("Tokens | None", None)
        for (start, end), interaction in zip(self.groups, cast("list[Interaction]", self.interactions), strict=True):
            injected = interaction.injector(self._patches(every), features)
            if self.prefix:
                injected = torch.cat([every.values[:, : self.prefix], injected], 1)
            every = every._replace(values=injected)
            tokens = every if left is None else self.regroup(every, left)
            for block in self.blocks[start - 1 : end - 1]:
                tokens = block(tokens, inputs)
                yield tokens, None
            tokens = self.blocks[end - 1](tokens, inputs)
            merged = tokens.map is not every.map
            every, left = (self.outlet(tokens, inputs), tokens) if merged else (tokens, None)
            features = interaction.extract(features, self._patches(every))
            yield tokens, (self._patches(every), features)

    def _patches(self, every: Tokens) -> Tensor:
        """Rows (B, N, D) without the prefix, of which the adapter knows nothing."""
        return every.values[:, self.prefix :] if self.prefix else every.values

    def _joined(self, first: Tensor, features: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Features and the patches after each group, at one size a group."""
        second, *others = _split(features, feature_grids(self.grid))
        levels = [self.up(second) + first, second, *others]
        return [
            scale(level + resize(patches, (level.shape[2], level.shape[3])))
            for scale, level, patches in zip(self.scales, levels, outputs, strict=True)
        ]


def _split(features: Tensor, grids: Sequence[Size]) -> list[Tensor]:
    """Rows (B, M, C) as the maps (B, C, h, w) of their grids."""
    parts = torch.split(features.mT, [rows * columns for rows, columns in grids], 2)
    return [part.reshape(-1, part.shape[1], *grid) for part, grid in zip(parts, grids, strict=True)]


class UPerHead(nn.Module):
    """Maps of four sizes, the smallest pooled to four more first, added up from there and scored together."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        dim, width = network.embed_dim, network.decoder_dim
        self.pools = nn.ModuleList(nn.Conv2d(dim, width, 1) for _ in _POOLED)
        self.bottleneck = nn.Conv2d(dim + len(_POOLED) * width, width, 3, padding=1)
        self.laterals = nn.ModuleList(nn.Conv2d(dim, width, 1) for _ in range(3))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.fuse = nn.Conv2d(4 * width, width, 3, padding=1)
        self.score = nn.Conv2d(width, network.classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Class scores (B, K, h, w) of the largest map's size."""
        levels = [F.relu(lateral(x)) for lateral, x in zip(self.laterals, maps, strict=False)]
        levels.append(self._pooled(maps[-1]))
        for i in (2, 1, 0):
            levels[i] = levels[i] + resize(levels[i + 1], (levels[i].shape[2], levels[i].shape[3]))
        size = levels[0].shape[2], levels[0].shape[3]
        smooth = [F.relu(conv(x)) for conv, x in zip(self.smooth, levels, strict=False)]
        joined = torch.cat([resize(x, size) for x in (*smooth, levels[-1])], 1)
        scores: Tensor = self.score(F.relu(self.fuse(joined)))
        return scores

    def _pooled(self, maps: Tensor) -> Tensor:
        size = maps.shape[2], maps.shape[3]
        parts = [
            resize(F.relu(conv(mean_of_cells(maps, side))), size)
            for conv, side in zip(self.pools, _POOLED, strict=True)
        ]
        return F.relu(self.bottleneck(torch.cat([maps, *parts], 1)))

    @staticmethod
    def multiply_adds(network: Network) -> int:
        """Convolutions on maps of four sizes, and bilinear interpolation between them."""
        dim, width = network.embed_dim, network.decoder_dim
        patches = network.grid[0] * network.grid[1]
        smallest, cells = patches // 4, [16 * patches, 4 * patches, patches]
        pooled = 9 * smallest * (dim + len(_POOLED) * width) * width
        pooled += sum(side**2 for side in _POOLED) * dim * width + BILINEAR * len(_POOLED) * smallest * width
        levels = sum(count * width * (dim + 9 * width) for count in cells) + BILINEAR * sum(cells) * width
        fused = 16 * patches * width * (BILINEAR * 3 + 9 * 4 * width + network.classes)
        return pooled + levels + fused


def mean_of_cells(maps: Tensor, side: int) -> Tensor:
    """Means (B, C, side, side) of cells of the map, which overlap where `side` does not divide its sides."""
    down, across = (table(pooling, (side, extent), maps.device, maps.dtype) for extent in maps.shape[2:])
    return product(product(down, maps), across.mT)


class VitAdapter(VitNetwork):
    """Image (B, 3, H, W), normalised, to class scores at a quarter of its size."""

    encoder: AdapterEncoder

    def __init__(self, network: Network) -> None:
        nn.Module.__init__(self)
        self.network = network
        self.encoder = AdapterEncoder(network)
        self.decoder = UPerHead(network)

    def forward(self, image: Tensor, inputs: MergeInputs | None = None) -> GridScores:
        maps, stages = self.encoder.maps(image, inputs)
        return GridScores(self.decoder(maps), self.encoder.prefix, stages)

    @staticmethod
    def decoder_multiply_adds(network: Network, levels: Sequence[int]) -> int:
        """All beside the blocks, the adapter included: none of it depends on what merged."""
        return adapter_multiply_adds(network) + UPerHead.multiply_adds(network)

    @staticmethod
    def namings(network: Network) -> tuple[Naming, ...]:
        return (_published(network),)


def adapter_multiply_adds(network: Network) -> int:
    """Multiply-adds of all that stands beside the blocks, up to the maps it hands on."""
    dim, patches = network.embed_dim, network.grid[0] * network.grid[1]
    features = [rows * columns for rows, columns in feature_grids(network.grid)]
    all_features, hidden, groups = sum(features), dim // 4, len(network.groups)
    attention = partial(DeformableAttention.multiply_adds, dim, network.adapter_dim, network.adapter_heads)
    norms = NORM * dim * (patches + all_features)
    injector = attention(patches, features) + norms
    extractor = attention(all_features, [patches]) + norms
    extractor += all_features * (NORM * dim + 2 * dim * hidden + 9 * hidden)
    beside = groups * injector + (groups - 1 + LAST_EXTRACTORS) * extractor
    joined = 4 * features[0] * dim * dim + BILINEAR * dim * (16 * patches + 4 * patches + patches // 4)
    return SpatialPrior.multiply_adds(network) + beside + joined


# ---------------------------------------------------------------------------------------------------- checkpoint keys

_SPM = "backbone.spm."
ADAPTER_UNUSED = tuple(f"backbone.norm{i}.num_batches_tracked" for i in range(1, 5))


def _published(network: Network) -> Naming:
    """czczup/ViT-Adapter, whose head is mmsegmentation's."""
    head = {f"decoder.pools.{i}": f"decode_head.psp_modules.{i}.1" for i in range(len(_POOLED))}
    head |= {"decoder.bottleneck": "decode_head.bottleneck", "decoder.fuse": "decode_head.fpn_bottleneck"}
    for i in range(3):
        head |= {f"decoder.laterals.{i}": f"decode_head.lateral_convs.{i}"}
        head |= {f"decoder.smooth.{i}": f"decode_head.fpn_convs.{i}"}
    blocks = {f"encoder.blocks.{i}": f"backbone.blocks.{i}" for i in range(network.depth)}
    return Naming(
        project="czczup/ViT-Adapter",
        mark="backbone.interactions.",
        decoders=("upernet",),
        names=adapter_names(network) | {"decoder.score.": "decode_head.conv_seg."},
        convs=prior_convs() | {ours: (f"{theirs}.conv", f"{theirs}.bn") for ours, theirs in head.items()},
        made=layer_scales(network, blocks, ("gamma1", "gamma2")) | adapter_made(network),
        unused=("auxiliary_head.", *ADAPTER_UNUSED),
        resized=resized_bicubic,
        refusal=partial(_refusal, network),
    )


def adapter_names(network: Network) -> dict[str, str]:
    """Names of the encoder, by `Naming.names`."""
    names = {"encoder.": "backbone."}
    names |= {f"encoder.prior.laterals.{i}.": f"{_SPM}fc{i + 1}." for i in range(4)}
    for i in range(len(network.groups)):
        ours, theirs = f"encoder.interactions.{i}.", f"backbone.interactions.{i}."
        for k in range(LAST_EXTRACTORS):
            extractor = f"extra_extractors.{k - 1}." if k else "extractor."
            names[f"{ours}extractors.{k}."] = f"{theirs}{extractor}"
            names[f"{ours}extractors.{k}.ffn.dwconv."] = f"{theirs}{extractor}ffn.dwconv.dwconv."
    return names


def prior_convs() -> dict[str, tuple[str, str]]:
    """The convolutions on the picture and their batch norms, by `Naming.convs`."""
    stem = [(f"{_SPM}stem.{3 * i}", f"{_SPM}stem.{3 * i + 1}") for i in range(_STEM)]
    stem += [(f"{_SPM}conv{i}.0", f"{_SPM}conv{i}.1") for i in (2, 3, 4)]
    return {f"encoder.prior.convs.{i}": pair for i, pair in enumerate(stem)}


def adapter_made(network: Network) -> dict[str, Made]:
    """Injectors with their factor, laterals with the embedding of their level, and the batch norms of the maps."""
    dim, made = network.embed_dim, {}
    for i in range(len(network.groups)):
        ours, theirs = f"encoder.interactions.{i}.injector.", f"backbone.interactions.{i}.injector."
        for kind, shape in (("weight", (dim, network.adapter_dim)), ("bias", (dim,))):
            proj = f"attn.output_proj.{kind}"
            made[ours + proj] = scaled_by(theirs + proj, shape, f"{theirs}gamma")
    for level in range(3):
        bias, embedding = f"backbone.spm.fc{level + 2}.bias", "backbone.level_embed"
        needs = {bias: (dim,), embedding: (3, dim)}
        made[f"encoder.prior.laterals.{level + 1}.bias"] = Made(needs, partial(_shifted, bias, embedding, level))
    for i in range(4):
        norm = f"backbone.norm{i + 1}"
        needs = {f"{norm}.{part}": (dim,) for part in STATISTICS}
        for index, kind in enumerate(("weight", "bias")):
            made[f"encoder.scales.{i}.{kind}"] = Made(needs, partial(_batch_norm_part, norm, index))
    return made


def _shifted(bias: str, embedding: str, level: int, found: Mapping[str, Tensor]) -> Tensor:
    return (found[bias].double() + found[embedding][level].double()).float()


def _batch_norm_part(norm: str, index: int, found: Mapping[str, Tensor]) -> Tensor:
    return batch_norm(norm, found)[index].float()


def _refusal(network: Network, found: Mapping[str, Tensor]) -> str | None:
    """Variants of the public project that no network here computes."""
    if any("relative_position" in key or ".attn.q_bias" in key for key in found):
        return (
            "expected ViT-Adapter on a plain ViT, got it on BEiT, whose relative positions merged tokens do "
            "not have: use one on DeiT or AugReg"
        )
    if "backbone.interactions.0.extractor.ffn.fc1.weight" not in found:
        return "expected the full ViT-Adapter, got the light one without convolutions in its extractors: use a full one"
    return None
