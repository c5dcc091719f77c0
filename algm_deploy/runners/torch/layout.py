"""Where the rows of a batch lie when they stand one behind the other, (T, D), without padding between images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from algm_deploy.runners.torch.fused import apart as _apart_kernel
from algm_deploy.runners.torch.fused import fits_moving
from algm_deploy.runners.torch.fused import packed as _packed_kernel

_SINGLE_STEP, _IMAGE_STEP = 32, 128
_SHARE = 32  # at most one row of padding to so many: finer, and photos that differ seldom meet a bucket twice
# How far photos of one data set lie apart, and how far its mean from what was expected: deviations, as shares of the
# rows expected. CamVid's photos have 0.17.
_PHOTOS, _MEANS = 0.17, 0.1
_DRAWS = 2000


def bucket(lengths: Sequence[int], rows: int) -> tuple[int, int]:
    """Rows in all, and rows of the longest image, rounded up so that few pairs occur.

    One image: to 32. Several: in all to at most 1/32 more, or to 32, the longest to 128.

    Args:
        lengths: valid rows of each image.
        rows: most an image can have.
    """
    total, longest = sum(lengths), max(lengths)
    if len(lengths) == 1:
        total = min(_up(total, _SINGLE_STEP), rows)
        return total, total
    step = max(_SINGLE_STEP, 1 << (total // _SHARE).bit_length() >> 1)
    return min(_up(total, step), len(lengths) * rows), min(_up(longest, _IMAGE_STEP), rows)


def likely_buckets(images: int, usual: float, fewest: int, rows: int, count: int) -> list[tuple[int, int]]:
    """Buckets that batches of photos are likely to need.

    One image: all, as there are few, the largest first. Of several images the sum and the longest both count, and all
    pairs would be thousands: the `count` that were met most in batches drawn at random, beginning with the one that was
    met most. Images of the same length would not do, as the longest of a batch is seldom near its mean.

    Args:
        usual: rows that photos have on average, as far as one can say.
        fewest, rows: least and most an image can have.
        count: buckets of several images at most.
    """
    if images == 1:
        return [*dict.fromkeys(bucket([length], rows) for length in range(rows, fewest - 1, -1))]
    draw = np.random.default_rng(0)
    means = draw.normal(usual, _MEANS * usual, (_DRAWS, 1))
    batches = draw.normal(means, _PHOTOS * usual, (_DRAWS, images)).clip(fewest, rows).astype(int)
    return [pair for pair, _ in Counter(bucket(lengths, rows) for lengths in batches.tolist()).most_common(count)]


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


class Layout(NamedTuple):
    """How T packed rows belong to images.

    starts (images + 1) int32: first row of each image, and the end of the last. Without it every image has `longest`
    rows. With it `longest` is a bound.
    """

    images: int
    longest: int
    starts: Tensor | None = None

    @property
    def regular(self) -> bool:
        """Every image has `longest` rows, some of which may be padding if there is but one image."""
        return self.starts is None or self.images == 1


def packed_index(layout: Layout, rows: int, stride: int) -> Tensor:
    """Where each of `rows` packed rows lies in (images, stride) padded ones: (rows,) int64. Padding lies anywhere."""
    assert layout.starts is not None
    row = torch.arange(rows, device=layout.starts.device, dtype=torch.int32)
    image = torch.searchsorted(layout.starts[1:], row, right=True).clamp_(max=layout.images - 1)
    index = image * stride + (row - layout.starts[image])
    return index.clamp_(max=layout.images * stride - 1)


def padded_index(layout: Layout, rows: int, first: int, count: int) -> Tensor:
    """Where rows first, first + 1, ... of each image lie in `rows` packed ones: (images, count) int64.

    Rows behind the end of an image are those of another, or padding.
    """
    assert layout.starts is not None
    offset = torch.arange(first, first + count, device=layout.starts.device)
    return (layout.starts[:-1, None] + offset).clamp_(max=rows - 1)


def packed(merged: Tensor, layout: Layout, rows: int) -> Tensor:
    """Rows (rows, D) of padded ones (B, S, D)."""
    if layout.images == 1:
        return merged[0, :rows]
    assert layout.starts is not None
    if fits_moving(merged):
        return _packed_kernel(merged, merged.shape[1], layout.starts, (rows, layout.longest), merged[0, :0], 0)
    return merged.flatten(0, 1).index_select(0, packed_index(layout, rows, merged.shape[1]))


def apart(x: Tensor, layout: Layout, first: int, count: int, delta: Tensor | None = None) -> Tensor:
    """Rows first to first + count of every image, (B, count, D), x plus delta; behind its end they are anything."""
    if layout.starts is not None and layout.images > 1 and fits_moving(x):
        return _apart_kernel(x, delta, layout.starts, first, count)
    total = x if delta is None else x + delta
    if layout.regular:
        return total.view(layout.images, -1, x.shape[1])[:, first : first + count]
    return total[padded_index(layout, len(x), first, count)]


def every_patch(x: Tensor, layout: Layout, first: int, map: Tensor) -> Tensor:
    """The row of each patch, (B, N, D); map (B, N) int64 counts an image's rows from its row `first` on."""
    if layout.starts is None:
        base = torch.arange(first, len(x), layout.longest, device=x.device)
    else:
        base = layout.starts[:-1] + first
    return x.index_select(0, (map + base[:, None]).flatten()).view(*map.shape, x.shape[1])


def with_front(front: Tensor, x: Tensor, layout: Layout, skipped: int) -> tuple[Tensor, Layout]:
    """Each image's rows without its first `skipped` ones, behind the rows `front` (K, D), and their layout."""
    classes, images, starts = len(front), layout.images, layout.starts
    more = classes - skipped
    if starts is not None:
        starts = starts + more * torch.arange(images + 1, dtype=torch.int32, device=x.device)
    behind = Layout(images, layout.longest + more, starts)
    if layout.regular:
        parts = front.expand(images, -1, -1), x.view(images, -1, x.shape[1])[:, skipped:]
        return torch.cat(parts, 1).flatten(0, 1), behind
    assert layout.starts is not None and starts is not None
    rows = len(x) + images * more
    if fits_moving(x):
        return _packed_kernel(x, layout.starts, starts, (rows, behind.longest), front, skipped), behind
    row = torch.arange(rows, device=x.device, dtype=torch.int32)
    image = torch.searchsorted(starts[1:], row, right=True).clamp_(max=images - 1)
    place = row - starts[image]
    # In [front | rows].
    source = torch.where(place < classes, place, layout.starts[image] + skipped + place)
    table = torch.cat([front, x])
    return table.index_select(0, source.clamp_(max=len(table) - 1)), behind
