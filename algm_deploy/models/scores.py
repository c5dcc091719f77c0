"""What a network returns: class scores of merged tokens or on a grid, or masks; and how they become pictures."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import algm_deploy.ops  # noqa: F401  registers torch.ops.algm
from algm_deploy.models.vit import Merged
from algm_deploy.ops._rows import wide
from algm_deploy.ops.label_map import label_dtype
from algm_deploy.ops.mask_labels import covered
from algm_deploy.recipe.network import Size


class TokenScores(NamedTuple):
    """Class scores of merged tokens.

    scores (B, S', K), rows of padding unspecified; map (B, N) with `prefix` leading rows that `scores` no longer has;
    stages: what each merge left, in order.
    """

    scores: Tensor
    map: Tensor
    prefix: int
    stages: list[Merged]


class GridScores(NamedTuple):
    """Class scores (B, K, h, w) of a decoder that unmerges its tokens itself; `prefix` and `stages` as above.

    chosen: layer by layer, where queries chose the cells (B, Q, cells) uint8 that they attend to, 1 for those.
    """

    scores: Tensor
    prefix: int
    stages: list[Merged]
    chosen: tuple[Tensor, ...] = ()


class MaskScores(NamedTuple):
    """Masks (B, Q, h, w) and classes (B, Q, K + 1) of queries, both before their activation; the rest as above."""

    masks: Tensor
    classes: Tensor
    prefix: int
    stages: list[Merged]


Scores = TokenScores | GridScores | MaskScores


def to_grid(values: Tensor, map: Tensor, prefix: int, grid: Size) -> Tensor:
    """Unmerged rows (B, S', C) on the patch grid: (B, C, rows, columns)."""
    return on_grid(torch.ops.algm.unmerge(values, map, prefix), grid)


def on_canvas(values: Tensor, map: Tensor, prefix: int, canvas: Tensor | None) -> Tensor:
    """A row (B, N, C) for every patch: that of its token in `values` (B, S', C), or, where it has left, what the canvas
    (B, N, C) holds; without a canvas none has."""
    if canvas is None:
        unmerged: Tensor = torch.ops.algm.unmerge(values, map, prefix)
        return unmerged
    rows = torch.ops.algm.unmerge(wide(values), map.clamp(min=prefix), prefix)
    return torch.where((map < 0)[..., None], canvas, rows)


def on_grid(patches: Tensor, grid: Size) -> Tensor:
    """A row a patch (B, N, C) as maps (B, C, rows, columns)."""
    maps: Tensor = patches.mT.unflatten(2, grid)  # type: ignore[no-untyped-call]
    return maps


def resize(maps: Tensor, size: Size, align_corners: bool = False) -> Tensor:
    """Bilinear to `size`; as it is where it has that size."""
    if maps.shape[-2:] == size:
        return maps
    return F.interpolate(maps, size=size, mode="bilinear", align_corners=align_corners)


def enlarged(maps: Tensor, factor: int, align_corners: bool = False) -> Tensor:
    """The same to a multiple of its own size."""
    return resize(maps, (factor * maps.shape[-2], factor * maps.shape[-1]), align_corners)


def scores_of_masks(masks: Tensor, classes: Tensor, size: Size) -> Tensor:
    """Masks (B, Q, h, w) and classes (B, Q, K + 1) of queries, both before their activation, to scores (B, K, H, W).

    Every mask is enlarged and weighted with its query's probabilities; the last class stands for no object.
    """
    return torch.einsum("bqk,bqhw->bkhw", probabilities(classes), covered(resize(wide(masks), size)))


def probabilities(classes: Tensor) -> Tensor:
    """Of the classes (B, Q, K) of queries, given before their activation with one more, which stands for no object."""
    return wide(classes).softmax(-1)[..., :-1]


def upsample_scores(output: Scores, grid: Size, size: Size) -> Tensor:
    """Unmerged scores, bilinear to `size`: (B, K, H, W). 16-bit scores are interpolated and returned in fp32."""
    if isinstance(output, MaskScores):
        return scores_of_masks(output.masks, output.classes, size)
    maps = wide(output.scores)
    if isinstance(output, TokenScores):
        maps = to_grid(maps, output.map, output.prefix, grid)
    return resize(maps.contiguous(), size)  # a CPU takes four times as long where the classes of a patch are adjacent


def labels_of(output: Scores, grid: Size, size: Size) -> Tensor:
    """The class of the highest score of every pixel (B, H, W): uint8 for at most 255 classes, else int32."""
    if isinstance(output, TokenScores):
        labels: Tensor = torch.ops.algm.label_map(output.scores, output.map, output.prefix, grid, size)
        return labels
    full = upsample_scores(output, grid, size)
    return full.argmax(1).to(label_dtype(full.shape[1]))
