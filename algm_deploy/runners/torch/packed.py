"""A Segmenter on packed rows: what the torch runtime executes on a CUDA device.

Everything but attention works row by row, so the rows of a batch stand one behind the other, (T, D), without padding
between images, and attention is told where each image starts. A batch of different pictures costs what its tokens cost.

The network is cut where the number of tokens becomes known: behind each merge the host reads the lengths back, and the
next segment runs on as many rows, rounded up to a bucket, so that a few CUDA graphs serve all counts. Rows of padding
stand behind the last image. They hold anything, NaN included, and nothing reads them: no step mixes rows but attention,
which stops at the end of an image.

All that a segment leaves for the next lies in memory of its own (`_Cut`). Networks that merge nothing, merge by
budgets, or drop a fixed number of tokens, have a single segment, and every image its own place: one CUDA graph a batch
size holds all of it, and the host waits for nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.merging import Clap, Gbm, KeepFirst
from algm_deploy.models.deployed import PIXEL_SCALE, Deployed, PixelEmbedding
from algm_deploy.models.fp8 import Fp8Linear, Quantised
from algm_deploy.models.quantized import is_quantized
from algm_deploy.models.scores import TokenScores
from algm_deploy.models.segmenter import LinearDecoder, MaskTransformer, Segmenter
from algm_deploy.models.vit import SLOTS, Attention, Block, KeepTokens, MergeInputs, Mlp, Tokens, VisionTransformer
from algm_deploy.ops.native_kernels import Kernels, Merge, clap_merge, gbm_merge, use_kernels
from algm_deploy.runners.torch.fused import (
    apart,
    attention,
    attention_fp8,
    fits_attention,
    fits_moving,
    linear_gelu,
    packed,
    patches,
    product_fp8,
    product_gelu_fp8,
    residual_norm,
    residual_norm_fp8,
    unit,
)
from algm_deploy.runners.torch.graphs import Graphs

MOST_GRAPHS = 128
MOST_BATCH_SIZES = 4
"""Batch sizes whose memory is kept; beyond it the one that was not needed for longest goes."""
_SINGLE_STEP, _IMAGE_STEP = 32, 128


def bucket(lengths: Sequence[int], rows: int) -> tuple[int, int]:
    """Rows in all, and rows of the longest image, rounded up so that few pairs occur.

    One image: to 32. Several: in all to at most 1/128 more, or to 32, the longest to 128.

    Args:
        lengths: valid rows of each image.
        rows: most an image can have.
    """
    total, longest = sum(lengths), max(lengths)
    if len(lengths) == 1:
        total = min(_up(total, _SINGLE_STEP), rows)
        return total, total
    step = max(_SINGLE_STEP, 1 << (total // 128).bit_length() >> 1)
    return min(_up(total, step), len(lengths) * rows), min(_up(longest, _IMAGE_STEP), rows)


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


def attend(qkv: Tensor, layout: Layout, heads: int, scale: float) -> Tensor:
    """Attention (T, D) of packed rows (T, 3D) within each image; rows of padding get anything."""
    rows, width = qkv.shape
    side = width // (3 * heads)
    if fits_attention(qkv, side):
        return attention(qkv, layout.starts, layout.images, layout.longest, heads, scale)
    if layout.starts is None:
        images = qkv.view(layout.images, layout.longest, width)
        mixed: Tensor = torch.ops.algm.attention(images, None, heads, scale)
        return mixed.reshape(rows, width // 3)
    if not qkv.is_cuda:
        return _attend_image_by_image(qkv, layout.starts, heads, scale)
    parts = qkv.view(rows, 3, heads, side).unbind(1)
    bounds = layout.starts, layout.starts, layout.longest, layout.longest
    batch = [part[None] for part in parts]
    mixed = torch.ops.aten._efficient_attention_forward(*batch, None, *bounds, 0.0, 0, scale=scale)[0]
    return mixed.reshape(rows, width // 3)


def _attend_image_by_image(qkv: Tensor, starts: Tensor, heads: int, scale: float) -> Tensor:
    out = torch.full((len(qkv), qkv.shape[1] // 3), torch.nan, dtype=qkv.dtype)
    for first, end in pairwise(starts.tolist()):
        out[first:end] = torch.ops.algm.attention(qkv[None, first:end], None, heads, scale)[0]
    return out


class _Half(NamedTuple):
    """Half a block: rows plus `branch` of their norm; then the merge slot, where it is not empty.

    `first`: the layer that the normed rows enter.
    """

    norm: nn.LayerNorm
    first: nn.Module
    branch: Callable[[Tensor | Quantised, Layout], Tensor]
    slot: nn.Module | None = None

    def entering(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | Quantised]:
        """The sum of x and delta, and what the branch is given of it."""
        step = residual_norm_fp8 if _on_fp8_units(self.first) else residual_norm
        return step(x, delta, self.norm)


def _halves(blocks: nn.ModuleList) -> Iterator[_Half]:
    for block in blocks:
        assert isinstance(block, Block)
        slot = None if isinstance(block.merge, KeepTokens) else block.merge
        yield _Half(block.norm1, block.attn.qkv, partial(_mixed, block.attn), slot)
        yield _Half(block.norm2, block.mlp.fc1, partial(_transformed, block.mlp))


def _on_fp8_units(layer: nn.Module) -> TypeGuard[Fp8Linear]:
    """On a CPU the layer computes in fp32 what they would."""
    return isinstance(layer, Fp8Linear) and layer.weight.is_cuda


def _product(layer: nn.Module, x: Tensor | Quantised) -> Tensor:
    if _on_fp8_units(layer):
        return product_fp8(x if isinstance(x, Quantised) else layer.quantise(x), layer)
    out: Tensor = layer(x)
    return out


def _mixed(block: Attention, x: Tensor | Quantised, layout: Layout) -> Tensor:
    qkv = _product(block.qkv, x)
    if _on_fp8_units(block.proj) and fits_attention(qkv, qkv.shape[1] // (3 * block.heads)):
        where = layout.starts, layout.images, layout.longest
        return product_fp8(attention_fp8(qkv, *where, block.heads, block.scale), block.proj)
    return _product(block.proj, attend(qkv, layout, block.heads, block.scale))


def _transformed(mlp: Mlp, x: Tensor | Quantised, layout: Layout) -> Tensor:
    if not _on_fp8_units(mlp.fc1):
        assert isinstance(x, Tensor)
        return _product(mlp.fc2, linear_gelu(x, mlp.fc1))
    first, second = mlp.fc1, cast("Fp8Linear", mlp.fc2)
    assert isinstance(x, Quantised) and second.fit is not None
    return product_fp8(product_gelu_fp8(x, first, second.fit), second)


def _decides(slot: nn.Module | None) -> bool:
    """Whether the number of rows behind a slot depends on the pictures."""
    return isinstance(slot, Clap | Gbm) and slot.decides


def supports(network: Deployed) -> bool:
    """Whether `PackedSegmenter` runs this network."""
    model = network.model
    if (
        is_quantized(model)
        or not isinstance(model, Segmenter)
        or not isinstance(model.decoder, LinearDecoder | MaskTransformer)
    ):
        return False
    encoder, decoder = model.encoder, model.decoder
    own = cast("list[Block]", [*encoder.blocks])
    blocks = [*own, *(decoder.blocks if isinstance(decoder, MaskTransformer) else ())]
    plain = type(encoder) is VisionTransformer and isinstance(encoder.outlet, KeepTokens)
    plain = plain and all(type(block) is Block and not block.proportional for block in blocks)
    plain = plain and all(
        isinstance(getattr(block, SLOTS[part]), KeepTokens) for block in own for part in SLOTS if part
    )
    slots = [block.merge for block in own if not isinstance(block.merge, KeepTokens)]
    static = all(isinstance(s, Clap | Gbm | KeepFirst) and not _decides(s) for s in slots)
    return plain and (static or all(_decides(s) for s in slots))


def _segments(model: Segmenter) -> list[list[_Half]]:
    """Halves of the encoder's blocks, cut behind every slot that decides."""
    segments: list[list[_Half]] = [[]]
    for half in _halves(model.encoder.blocks):
        segments[-1].append(half)
        if _decides(half.slot):
            segments.append([])
    return segments


class _Outcome:
    """Where a slot leaves its map (B, N) and length (B)."""

    def __init__(self, first: Tokens) -> None:
        self.map, self.length = torch.empty_like(first.map), torch.empty_like(first.length)

    def keep(self, map: Tensor, length: Tensor) -> None:
        self.map.copy_(map)
        self.length.copy_(length)


class _Cut(_Outcome):
    """All that passes from one segment to the next.

    merged (B, S, D) and size (B, S): merged rows, those of an image first, S as many as there can be. `counts`: lengths
    in memory of the host.
    """

    def __init__(self, slot: Clap | Gbm, first: Tokens, kernels: Kernels | None) -> None:
        super().__init__(first)
        values, on_cuda = first.values, first.values.is_cuda
        self.slot, self.merged, self.size = slot, torch.empty_like(values), torch.empty_like(first.size)
        self._tokens = torch.empty_like(values)
        self._starts = torch.zeros(len(values) + 1, dtype=torch.int32, device=values.device)
        self.counts = torch.empty(len(values), dtype=torch.int64, pin_memory=on_cuda)
        if kernels is not None:
            self.decision = kernels.decision(_merge_of(slot, values, first.map.shape[1]), values, first.map.shape[1])
            self.map, self.length = self.decision.map, self.decision.length

    def tokens(self, longest: int) -> Tensor:
        """Room for the rows that go into the merge, (B, longest, D)."""
        images, _, width = self.merged.shape
        return self._tokens.view(-1)[: images * longest * width].view(images, longest, width)

    def layout(self, longest: int) -> Layout:
        """Of the merged rows, packed."""
        torch.cumsum(self.length, 0, dtype=torch.int32, out=self._starts[1:])
        return Layout(len(self.length), longest, self._starts)

    def merge_by(self, kernels: Kernels, before: Tokens | _Cut, tokens: Tensor, thresholds: Tensor) -> None:
        """Merges `tokens` (B, S, D) by the kernels; `before` has their sizes, maps and lengths."""
        merge = _merge_of(self.slot, tokens, self.map.shape[1])
        if isinstance(self.slot, Clap):
            kernels.decide_clap(merge, tokens, thresholds[0], self.decision)
        else:
            kernels.decide_gbm(merge, tokens, before.map, before.length, thresholds[1], self.decision)
        size = before.size[:, : tokens.shape[1]].contiguous()
        kernels.apply(merge, self.decision, tokens, size, (self.merged, self.size))

    def merge_by_slot(self, before: Tokens | _Cut, tokens: Tensor, thresholds: Tensor) -> None:
        """The same by the slot, which may wait for the device."""
        valid = torch.arange(tokens.shape[1], device=tokens.device) < before.length[:, None]
        # It moves rows by a product with zeros and ones, and zero times a NaN would be NaN.
        rows = torch.where(valid[:, :, None], tokens, 0)
        size = torch.where(valid, before.size[:, : tokens.shape[1]], 0)
        entering = Tokens(rows, size, before.map, before.length, padded=True)
        left = self.slot(entering, MergeInputs(thresholds[0], thresholds[1]))
        self.keep(left.map, left.length)
        self.merged[:, : left.values.shape[1]] = left.values
        self.size[:, : left.values.shape[1]] = left.size


def _merge_of(slot: Clap | Gbm, tokens: Tensor, patches: int) -> Merge:
    plan = slot.plan
    batch = plan.batch if len(tokens) > 1 else "per_image"  # the same for one image, and quicker
    if isinstance(slot, Clap):
        grid, window, prefix, semantics, _, *rest = slot.attributes
        return clap_merge(tokens, grid, window, prefix, semantics, batch, *rest)
    prefix, rule, divisor, semantics, _, budget = slot.attributes
    return gbm_merge(tokens, patches, prefix, rule, divisor, semantics, batch, budget)


@dataclass
class _Memory:
    """Everything that stays where it is, for batches of one size.

    image (B, 3, H, W); first: the tokens that enter the first block, whose prefix rows are those of every image;
    outcomes: one a slot; scores: room for token scores (B, N, K).
    """

    image: Tensor
    first: Tokens
    outcomes: list[_Outcome]
    scores: Tensor

    def before(self, number: int) -> Tokens | _Cut:
        """What a segment starts with."""
        return self.first if number == 0 else self.cut(number - 1)

    def cut(self, number: int) -> _Cut:
        """What a segment ends with."""
        cut = self.outcomes[number]
        assert isinstance(cut, _Cut)
        return cut


class Merged(NamedTuple):
    """Results in the network's own memory: token scores; length (B) and map (B, N) behind every merge."""

    scores: TokenScores
    lengths: tuple[Tensor, ...]
    maps: tuple[Tensor, ...]


class PackedSegmenter:
    """Runs a deployed Segmenter that `supports` allows: its slots are empty, all wait for the picture, or none does.

    Args:
        network: on its device, in evaluation mode.
        pixels: dtype of the images.
        graphs: replay CUDA graphs, on a CUDA device; otherwise rows are not rounded up.
        most_graphs: graphs kept.
    """

    def __init__(
        self, network: Deployed, pixels: torch.dtype, *, graphs: bool = True, most_graphs: int = MOST_GRAPHS
    ) -> None:
        assert supports(network)
        model = network.model
        assert isinstance(model, Segmenter) and isinstance(model.encoder.patch_embed, PixelEmbedding)
        self._model, self._embedding, self._pixels = model, model.encoder.patch_embed, pixels
        self._device = self._embedding.weight.device
        on_cuda = self._device.type == "cuda"
        self.kernels = use_kernels() if on_cuda else None
        self.graphs = Graphs(self._device, most_graphs) if on_cuda and graphs else None
        self._segments = _segments(model)
        self._thresholds = torch.zeros(2, device=self._device)
        self._given: tuple[float, float] | None = None  # the thresholds there
        self._memories: OrderedDict[int, _Memory] = OrderedDict()
        self._lock = threading.Lock()  # one memory, one run at a time
        self._done = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self._stream: torch.cuda.Stream | None = None  # of the last run

    @contextmanager
    def run(self, image: Tensor, clap: float, gbm: float) -> Iterator[Merged]:
        """One batch (B, 3, H, W) of any device's memory, behind the past work of the current stream.

        The results are there inside the block; the next run overwrites them.
        """
        # The calling thread's current device may be another, on which Triton would launch.
        device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with self._lock, device, torch.inference_mode():
            self._wait()
            try:
                memory = self._memory(len(image))
                memory.image.copy_(image)
                if self._given != (clap, gbm):
                    self._given = clap, gbm
                    self._thresholds.copy_(torch.tensor((clap, gbm)))
                scores = self._advance(memory)
                maps = tuple(outcome.map for outcome in memory.outcomes)
                lengths = tuple(outcome.length for outcome in memory.outcomes)
                last = (memory.first.map, *maps)[-1]
                yield Merged(TokenScores(scores, last, self._model.encoder.prefix, []), lengths, maps)
            finally:  # behind an error too: what was queued until then uses the memory
                if self._done is not None:
                    self._done.record()

    def _wait(self) -> None:
        """The current stream waits for the last run, if that was on another."""
        if self._done is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_event(self._done)
        self._stream = stream

    def _memory(self, images: int) -> _Memory:
        if images not in self._memories:
            if len(self._memories) >= MOST_BATCH_SIZES:
                dropped = next(iter(self._memories))
                if self.graphs is not None:
                    self.graphs.drop(lambda key: key[0] == dropped)
                del self._memories[dropped]
            self._memories[images] = self._new_memory(images)
        self._memories.move_to_end(images)
        return self._memories[images]

    def _new_memory(self, images: int) -> _Memory:
        network = self._model.network
        image = torch.zeros(images, 3, *network.image_size, dtype=self._pixels, device=self._device)
        first = self._model.encoder.embed(image)
        first = first._replace(values=first.values.contiguous(), map=first.map.contiguous())
        slots = [half.slot for segment in self._segments for half in segment if half.slot is not None]
        outcomes = [
            _Cut(s, first, self.kernels) if isinstance(s, Clap | Gbm) and s.decides else _Outcome(first) for s in slots
        ]
        scores = first.values.new_empty(first.map.numel() * network.classes)
        return _Memory(image, first, outcomes, scores)

    # --- segments ---

    def _advance(self, memory: _Memory) -> Tensor:
        """All segments; returns token scores (B, S - prefix, K)."""
        images, most = memory.first.values.shape[:2]
        rows, longest = images * most, most
        for number in range(len(self._segments) - 1):
            self._work(memory, number, rows, longest)
            lengths = self._lengths(memory, number, longest)
            rows, longest = (sum(lengths), max(lengths)) if self.graphs is None else bucket(lengths, most)
        scores = self._work(memory, len(self._segments) - 1, rows, longest)
        assert scores is not None
        return scores

    def _work(self, memory: _Memory, number: int, rows: int, longest: int) -> Tensor | None:
        work = partial(self._segment, memory, number, rows, longest)
        return work() if self.graphs is None else self.graphs.run((len(memory.image), number, rows, longest), work)

    def _lengths(self, memory: _Memory, number: int, longest: int) -> list[int]:
        """Valid rows of each image behind a segment; waits for the device."""
        cut = memory.cut(number)
        if self.kernels is None:
            cut.merge_by_slot(memory.before(number), cut.tokens(longest), self._thresholds)
            cut.counts.copy_(cut.length)
        elif self._stream is not None:
            self._stream.synchronize()
        return [int(count) for count in cut.counts.tolist()]

    def _segment(self, memory: _Memory, number: int, rows: int, longest: int) -> Tensor | None:
        """Runs on `rows` rows, `longest` an image at most. The last segment returns token scores (B, S - prefix, K)."""
        if number == 0:
            x, layout = self._embedded(memory), Layout(len(memory.image), longest)
        else:
            layout = memory.cut(number - 1).layout(longest)
            x = _packed(memory.cut(number - 1).merged, layout, rows)
        delta, tokens, outcomes = None, memory.first, iter(memory.outcomes)
        for half in self._segments[number]:
            x, entering = half.entering(x, delta)
            delta = half.branch(entering, layout)
            if _decides(half.slot):
                self._end(memory, number, x, delta, layout)
                return None
            if half.slot is not None:
                values = (x + delta).to(x.dtype).view(layout.images, layout.longest, -1)
                tokens = half.slot(tokens._replace(values=values), None)
                next(outcomes).keep(tokens.map, tokens.length)
                layout = Layout(layout.images, tokens.values.shape[1])
                x, delta = tokens.values.reshape(-1, x.shape[1]), None
        return self._scores(memory, x, delta, layout)

    def _embedded(self, memory: _Memory) -> Tensor:
        """Pixels to the rows that enter the first block, all of them in `first`: a product instead of a convolution."""
        encoder, embedding, values = self._model.encoder, self._embedding, memory.first.values
        pixels = patches(memory.image, embedding.patch_size, 1 / PIXEL_SCALE, values.dtype)
        embedded = F.linear(pixels, embedding.weight.flatten(1), embedding.bias)
        prefix = encoder.prefix
        torch.add(embedded, encoder.pos_embed[:, prefix:], out=values[:, prefix:])
        return values.flatten(0, 1)

    def _end(self, memory: _Memory, number: int, x: Tensor, delta: Tensor, layout: Layout) -> None:
        """Lays x + delta out for the merge, and merges where the kernels are there."""
        cut = memory.cut(number)
        tokens = cut.tokens(layout.longest)
        if layout.regular:
            torch.add(x, delta, out=tokens.view(x.shape))
        else:
            tokens.copy_(_apart(x, layout, 0, layout.longest, delta))
        if self.kernels is not None:
            cut.merge_by(self.kernels, memory.before(number), tokens, self._thresholds)
            cut.counts.copy_(cut.length, non_blocking=True)

    # --- decoder ---

    def _scores(self, memory: _Memory, x: Tensor, delta: Tensor | None, layout: Layout) -> Tensor:
        encoder, decoder = self._model.encoder, self._model.decoder
        assert isinstance(encoder.norm, nn.LayerNorm)
        _, normed = residual_norm(x, delta, encoder.norm)
        count = layout.longest - encoder.prefix
        if isinstance(decoder, MaskTransformer):
            rows, classes = self._decoded(decoder, normed, layout)
            label = unit(classes @ decoder.proj_classes)
            cosines = unit(rows @ decoder.proj_patch) @ label.mT
            scores = residual_norm(cosines.flatten(0, 1), None, decoder.mask_norm)[1].view(cosines.shape)
        else:
            assert isinstance(decoder, LinearDecoder)
            scores = _apart(decoder.head(normed), layout, encoder.prefix, count)
        room = memory.scores[: scores.numel()].view(scores.shape)
        room.copy_(scores)
        return room

    def _decoded(self, decoder: MaskTransformer, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Patch rows (B, S - prefix, D) and class rows (B, K, D) behind the decoder's blocks."""
        classes, prefix = decoder.cls_emb.shape[1], self._model.encoder.prefix
        count = layout.longest - prefix
        x, layout = _with_classes(decoder.cls_emb[0], decoder.proj_dec(x), layout, prefix)
        delta = None
        for half in _halves(decoder.blocks):
            x, entering = half.entering(x, delta)
            delta = half.branch(entering, layout)
        _, normed = residual_norm(x, delta, decoder.decoder_norm)
        return _apart(normed, layout, classes, count), _apart(normed, layout, 0, classes)


def _packed(merged: Tensor, layout: Layout, rows: int) -> Tensor:
    """Rows (rows, D) of padded ones (B, S, D)."""
    if layout.images == 1:
        return merged[0, :rows]
    assert layout.starts is not None
    if fits_moving(merged):
        return packed(merged, merged.shape[1], layout.starts, (rows, layout.longest), merged[0, :0], 0)
    return merged.flatten(0, 1).index_select(0, packed_index(layout, rows, merged.shape[1]))


def _apart(x: Tensor, layout: Layout, first: int, count: int, delta: Tensor | None = None) -> Tensor:
    """Rows first to first + count of every image, (B, count, D), x plus delta; behind its end they are anything."""
    if layout.starts is not None and layout.images > 1 and fits_moving(x):
        return apart(x, delta, layout.starts, first, count)
    total = x if delta is None else x + delta
    if layout.regular:
        return total.view(layout.images, -1, x.shape[1])[:, first : first + count]
    return total[padded_index(layout, len(x), first, count)]


def _with_classes(embeddings: Tensor, x: Tensor, layout: Layout, prefix: int) -> tuple[Tensor, Layout]:
    """Each image's rows without its first `prefix` ones, behind the class embeddings (K, D)."""
    classes, images, starts = len(embeddings), layout.images, layout.starts
    more = classes - prefix
    if starts is not None:
        starts = starts + more * torch.arange(images + 1, dtype=torch.int32, device=x.device)
    behind = Layout(images, layout.longest + more, starts)
    if layout.regular:
        parts = embeddings.expand(images, -1, -1), x.view(images, -1, x.shape[1])[:, prefix:]
        return torch.cat(parts, 1).flatten(0, 1), behind
    assert layout.starts is not None and starts is not None
    rows = len(x) + images * more
    if fits_moving(x):
        return packed(x, layout.starts, starts, (rows, behind.longest), embeddings, prefix), behind
    row = torch.arange(rows, device=x.device, dtype=torch.int32)
    image = torch.searchsorted(starts[1:], row, right=True).clamp_(max=images - 1)
    place = row - starts[image]
    # In [embeddings | rows].
    source = torch.where(place < classes, place, layout.starts[image] + prefix + place)
    table = torch.cat([embeddings, x])
    return table.index_select(0, source.clamp_(max=len(table) - 1)), behind
