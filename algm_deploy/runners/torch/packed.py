"""A network on packed rows: what the torch runtime executes on a CUDA device.

Everything but attention works row by row, so the rows of a batch stand one behind the other, (T, D), without padding
between images, and attention is told where each image starts. A batch of different pictures costs what its tokens cost.

The network is cut where the number of tokens becomes known: behind each merge the host reads the lengths back, and the
next segment runs on as many rows, rounded up to a bucket, so that a few CUDA graphs serve all counts. Rows of padding
stand behind the last image. They hold anything, NaN included, and nothing reads them: no step mixes rows but attention,
which stops at the end of an image. A single picture has few buckets: once all are captured (`warm_up`), they are joined
into one graph, in which the device picks the next segment by the length that it finds, and the host waits for nothing.

What decoders make of the rows is not written here: each network describes it (`models/readout.py`). Rows that the
decoder reads from blocks before a merge wait in memory of their own, those of every patch where it reads such.

All that a segment leaves for the next lies in memory of its own (`_Cut`), also what auxiliary heads have said of
patches. Networks that merge nothing, merge by budgets or as ToMe, EViT or CTS does, or drop a fixed number of tokens,
have a single segment, and every image its own place: one CUDA graph a batch size holds all of it, and the host waits
for nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.errors import ExecutionError
from algm_deploy.models.deployed import PIXEL_CENTRE, PIXEL_SCALE, Deployed, PixelEmbedding
from algm_deploy.models.fp8 import Fp8Linear, Quantised
from algm_deploy.models.merges import REPLAYS, Clap, Cts, Dtop, Evit, G2tm, Gbm, KeepFirst, Tome, Unmerge
from algm_deploy.models.quantized import quantized_layers
from algm_deploy.models.readout import Crossed, Joining, ReadNetwork, Steps, filled, heads_of
from algm_deploy.models.scores import GridScores, MaskScores, Scores, TokenScores
from algm_deploy.models.vit import (
    Attention,
    Block,
    KeepTokens,
    MergeInputs,
    Mlp,
    Tokens,
    VisionTransformer,
    VitNetwork,
)
from algm_deploy.ops._rows import wide
from algm_deploy.ops.native_kernels import Decision, Kernels, Merge, clap_merge, gbm_merge, tome_merge, use_kernels
from algm_deploy.recipe.network import patch_margins
from algm_deploy.runners.graphs import Graphs, Joined
from algm_deploy.runners.torch.evit import cls_attention, evit
from algm_deploy.runners.torch.fused import (
    attention,
    attention_fp8,
    crossed,
    fits_attention,
    linear_gelu,
    mean_keys,
    patches,
    product_fp8,
    product_gelu_fp8,
    proportional_attention,
    residual_norm,
    residual_norm_fp8,
    unit,
)
from algm_deploy.runners.torch.layout import Layout, apart, bucket, every_patch, likely_buckets, packed, with_front
from algm_deploy.runners.torch.maps import rectified

_LOG = logging.getLogger("algm_deploy")

MOST_GRAPHS = 512
"""Graphs kept. Token counts drawn like those of CamVid photos, in batches of 1 to 32, powers of two, meet about 220 in
300 batches and 400 in 3000: tests/runners/torch/test_packed.py draws them."""
MOST_BATCH_SIZES = 8
"""Batch sizes whose memory is kept; beyond it the one that was not needed for longest goes. Powers of two up to 128."""
WARM_GRAPHS = MOST_GRAPHS // MOST_BATCH_SIZES
"""Graphs that are captured beforehand for a batch of several pictures: all sizes of batch have room side by side."""
_MERGE_ALL = -2.0, -1e6  # thresholds, CLAP's or the method's own and GBM's, by which everything merges or leaves


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


class _Pruning(nn.Module):
    """DToP's slot at the end of a block, and the head that it asks there."""

    def __init__(self, head: nn.Module, slot: Dtop) -> None:
        super().__init__()
        self.head, self.slot = head, slot

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        """What stays, in as many rows as came, so that the host waits for nothing."""
        return self.slot.unshortened(self.head(tokens), inputs)


class _Half(NamedTuple):
    """Half a block: rows plus `branch` of their norm; then the merge slot, where it is not empty.

    `first`: the layer that the normed rows enter. `output`: which of the encoder's outputs comes after it, if any.
    `telling`: attention that also tells what the slot compares, which takes the place of the branch. It is given the
    rows' sizes too.
    """

    norm: nn.LayerNorm
    first: nn.Module
    branch: Callable[[Tensor | Quantised, Layout], Tensor]
    slot: nn.Module | None = None
    output: int | None = None
    telling: Callable[[Tensor | Quantised, Layout, Tensor], tuple[Tensor, Tensor]] | None = None

    def added(self, x: Tensor | Quantised, layout: Layout, size: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the half adds to its rows, of sizes (B, S); and what its slot compares, where that is not the rows."""
        return (self.branch(x, layout), None) if self.telling is None else self.telling(x, layout, size)

    def entering(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | Quantised]:
        """The sum of x and delta, and what the branch is given of it."""
        step = residual_norm_fp8 if _on_fp8_units(self.first) else residual_norm
        return step(x, delta, self.norm)


def _halves(blocks: Iterable[nn.Module], outputs: Sequence[int] = ()) -> Iterator[_Half]:
    """`outputs`: 1-based blocks that are read."""
    for layer, block in enumerate(blocks, 1):
        assert isinstance(block, Block)
        last = block.end_merge
        last = _Pruning(block.auxiliary, last) if isinstance(last, Dtop) else last
        tells = _counted if block.proportional else _weighed if block.weighs else None
        telling = None if tells is None else partial(tells, block.attn)
        yield _Half(block.norm1, block.attn.qkv, partial(_mixed, block.attn), _filling(block.merge), telling=telling)
        output = outputs.index(layer) if layer in outputs else None
        yield _Half(block.norm2, block.mlp.fc1, partial(_transformed, block.mlp), _filling(last), output)


def _filling(slot: nn.Module) -> nn.Module | None:
    """What is in a slot that is not empty."""
    return None if isinstance(slot, KeepTokens) else slot


def _on_fp8_units(layer: nn.Module) -> TypeGuard[Fp8Linear]:
    """On a CPU the layer computes in fp32 what they would."""
    return isinstance(layer, Fp8Linear) and layer.weight.is_cuda


def _product(layer: nn.Module, x: Tensor | Quantised) -> Tensor:
    if _on_fp8_units(layer):
        return product_fp8(x if isinstance(x, Quantised) else layer.quantise(x), layer)
    out: Tensor = layer(x)
    return out


def _mixed(block: Attention, x: Tensor | Quantised, layout: Layout) -> Tensor:
    return _attended(block, _product(block.qkv, x), layout)


def _attended(block: Attention, qkv: Tensor, layout: Layout) -> Tensor:
    if _on_fp8_units(block.proj) and fits_attention(qkv, qkv.shape[1] // (3 * block.heads)):
        where = layout.starts, layout.images, layout.longest
        return product_fp8(attention_fp8(qkv, *where, block.heads, block.scale), block.proj)
    return _product(block.proj, attend(qkv, layout, block.heads, block.scale))


def _counted(block: Attention, x: Tensor | Quantised, layout: Layout, size: Tensor) -> tuple[Tensor, Tensor]:
    """As `Attention.proportional`, on rows of images of one length."""
    qkv = _product(block.qkv, x)
    images = qkv.view(layout.images, layout.longest, -1)
    keys = mean_keys(qkv, block.heads).view(*images.shape[:2], -1)
    if fits_attention(qkv, images.shape[2] // (3 * block.heads)):
        mixed = proportional_attention(qkv, size, block.heads, block.scale)
    else:
        mixed = torch.ops.algm.proportional_attention(images, size, block.heads, block.scale).flatten(0, 1)
    return _product(block.proj, mixed), keys


def _weighed(block: Attention, x: Tensor | Quantised, layout: Layout, size: Tensor) -> tuple[Tensor, Tensor]:
    """As `Attention.with_cls`, on rows of images of one length."""
    qkv = _product(block.qkv, x)
    weights = cls_attention(qkv.view(layout.images, layout.longest, -1), block.heads, block.scale)
    return _attended(block, qkv, layout), weights[..., None]


def _transformed(mlp: Mlp, x: Tensor | Quantised, layout: Layout) -> Tensor:
    if not _on_fp8_units(mlp.fc1):
        assert isinstance(x, Tensor)
        return _product(mlp.fc2, linear_gelu(x, mlp.fc1))
    first, second = mlp.fc1, cast("Fp8Linear", mlp.fc2)
    assert isinstance(x, Quantised) and second.fit is not None
    return product_fp8(product_gelu_fp8(x, first, second.fit), second)


def _decides(slot: nn.Module | None) -> bool:
    """Whether the number of rows behind a slot depends on the pictures."""
    return isinstance(slot, G2tm | _Pruning) or (isinstance(slot, Clap | Gbm) and slot.decides)


def why_not(network: Deployed) -> str | None:
    """Why `PackedNetwork` does not run this network, as the end of a sentence; None where it does."""
    model = network.model
    for _, layer in quantized_layers(model):
        return layer.why_slow
    if isinstance(model, VitNetwork) and model.network.architecture.adapter:
        return "its encoder exchanges with features beside it, which needs a row for every patch"
    if not isinstance(model, ReadNetwork):
        return "its family does not describe what its decoder reads"
    encoder, readout = model.encoder, model.readout()
    own = cast("list[Block]", [*encoder.blocks])
    blocks = own + cast("list[Block]", [*(readout.joining.blocks if readout.joining is not None else ())])
    if type(encoder) is not VisionTransformer or not all(type(block) is Block for block in blocks):
        return "its blocks are not those of a plain ViT"
    if encoder.outputs[-1] != len(own):
        return "its decoder does not read the last block"
    within = [slot for block in blocks for slot in (block.attention_merge, block.mlp_merge)]
    if not all(isinstance(slot, KeepTokens) for slot in within) or not isinstance(encoder.outlet, KeepTokens | Unmerge):
        return "its method merges tokens for a part of a block"
    if any(isinstance(part, REPLAYS) for part in model.modules()):
        return "it merges as was recorded"
    start = own[0].start_merge
    if not isinstance(start, KeepTokens | Cts | KeepFirst) or any(
        not isinstance(block.start_merge, KeepTokens) for block in blocks[1:]
    ):
        return "its method merges tokens before a block"
    halves = [half for half in _halves(blocks, encoder.outputs) if half.slot is not None]
    if any(_decides(half.slot) and half.output is not None for half in halves):
        return "its decoder reads a block after which the picture decides how many tokens there are"
    slots = [half.slot for half in halves]
    if any(_decides(slot) for slot in slots):
        if any(block.proportional or block.weighs for block in own) or isinstance(encoder.outlet, Unmerge):
            return "its method needs as many tokens in every picture, and the picture decides how many there are"
        return None if all(map(_decides, slots)) else "only some of its merges depend on the picture"
    known = all(isinstance(slot, Clap | Gbm | KeepFirst | Tome | Evit) for slot in slots)
    return None if known else "it merges as none of ALGM, ToMe, EViT, G2TM and DToP does"


def _segments(encoder: VisionTransformer) -> list[list[_Half]]:
    """Halves of the encoder's blocks, cut behind every slot that decides."""
    segments: list[list[_Half]] = [[]]
    for half in _halves(encoder.blocks, encoder.outputs):
        segments[-1].append(half)
        if _decides(half.slot):
            segments.append([])
    return segments


def _lay_out_like_rows(model: ReadNetwork) -> None:
    """Convolutions behind the encoder read maps whose channels lie side by side, as unmerged rows have them."""
    for part in model.children():
        if part is not model.encoder:
            part.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _fused_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return residual_norm(x.flatten(0, -2), None, norm)[1].view(x.shape)


def _fused_crossed(
    query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float, valid: Tensor | None, compared: bool
) -> Crossed:
    """The mean of the heads' products is one product over all of them."""
    if fits_attention(query, query.shape[2] // heads):
        mixed = crossed(query, key, value, valid, heads, scale)
    else:
        q, k, v = (heads_of(x, heads) for x in (query, key, value))
        mask = None if valid is None else valid[:, None, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2).flatten(2)
    return Crossed(mixed, wide(query * (scale / heads) @ key.mT) if compared else None)


_FUSED = Steps(_fused_norm, unit, _fused_crossed, rectified)


class _Outcome:
    """Where a slot leaves its map (B, N) and length (B), and what is told of its merge, (B, N), mostly the map."""

    def __init__(self, first: Tokens, slot: nn.Module) -> None:
        self.map, self.length = torch.empty_like(first.map), torch.empty_like(first.length)
        self.told = torch.empty_like(first.map) if isinstance(slot, Evit) else self.map

    def written_by(self, decision: Decision) -> Decision:
        """Lets the kernels write map and length here, so that nothing is copied."""
        self.map, self.length, self.told = decision.map, decision.length, decision.map
        return decision

    def through(self, slot: nn.Module, entering: Tokens) -> Tokens:
        """What comes through a slot of images of one length; map and length are here."""
        tokens: Tokens = slot.merged(entering, evit) if isinstance(slot, Evit) else slot(entering, None)
        self.keep(tokens)
        return tokens._replace(map=self.map, length=self.length)

    def keep(self, left: Tokens) -> None:
        self.map.copy_(left.map)
        self.length.copy_(left.length)
        if left.decided is not None:
            self.told.copy_(left.decided)


class _KernelTome(_Outcome):
    """The same of ToMe where the kernels merge."""

    def __init__(self, slot: Tome, first: Tokens, kernels: Kernels) -> None:
        super().__init__(first, slot)
        self._kernels, patches = kernels, first.map.shape[1]
        merge = tome_merge(first.values, patches, slot.r, slot.prefix)
        self._decision = self.written_by(kernels.decision(merge, first.values, patches))

    def through(self, slot: nn.Module, entering: Tokens) -> Tokens:
        assert isinstance(slot, Tome) and entering.keys is not None
        values, size = self._kernels.merge_by_keys(*entering[:4], entering.keys, slot.r, slot.prefix, self._decision)
        return entering._replace(values=values, size=size, map=self.map, length=self.length)


class _Cut(_Outcome):
    """All that passes from one segment to the next.

    merged (B, S, D) and size (B, S): merged rows, those of an image first, S as many as there can be; sizes behind them
    are 0. `counts`: lengths in memory of the host. `canvas`: that of the merged tokens, where a head judges them.
    `waits`: the host takes part in the merge, so that it is no part of the segment's graph.
    """

    def __init__(self, slot: nn.Module, first: Tokens) -> None:
        super().__init__(first, slot)
        values, on_cuda = first.values, first.values.is_cuda
        self.slot, self.merged, self.size = slot, torch.empty_like(values), torch.empty_like(first.size)
        self.canvas: Tensor | None = None
        self.waits = not isinstance(slot, _Pruning)
        self._tokens = torch.empty_like(values)
        self._starts = torch.zeros(len(values) + 1, dtype=torch.int32, device=values.device)
        self.counts = torch.empty(len(values), dtype=torch.int64, pin_memory=on_cuda)

    @property
    def left(self) -> Tokens:
        """The merged rows."""
        return Tokens(self.merged, self.size, self.map, self.length, padded=True, canvas=self.canvas)

    def tokens(self, longest: int) -> Tensor:
        """Room for the rows that go into the merge, (B, longest, D)."""
        images, _, width = self.merged.shape
        return self._tokens.view(-1)[: images * longest * width].view(images, longest, width)

    def layout(self, longest: int) -> Layout:
        """Of the merged rows, packed."""
        if len(self.length) == 1:
            self._starts[1:].copy_(self.length)
        else:
            torch.cumsum(self.length, 0, dtype=torch.int32, out=self._starts[1:])
        return Layout(len(self.length), longest, self._starts)

    def merge(self, before: Tokens | _Cut, tokens: Tensor, thresholds: Tensor) -> None:
        """Merges `tokens` (B, S, D); `before` has their sizes, maps and lengths, and their canvas."""
        valid = torch.arange(tokens.shape[1], device=tokens.device) < before.length[:, None]
        # Slots move rows by a product with zeros and ones, and zero times a NaN would be NaN.
        rows = torch.where(valid[:, :, None], tokens, 0)
        size = torch.where(valid, before.size[:, : tokens.shape[1]], 0)
        entering = Tokens(rows, size, before.map, before.length, padded=True, canvas=before.canvas)
        left = self.slot(entering, MergeInputs(thresholds[0], thresholds[1]))
        self.keep(left)
        self.merged[:, : left.values.shape[1]] = left.values
        self.size.zero_()  # as the kernels leave rows that do not exist: decoders tell by it which do
        self.size[:, : left.size.shape[1]] = left.size
        if left.canvas is not None:
            self.canvas = torch.empty_like(left.canvas) if self.canvas is None else self.canvas
            self.canvas.copy_(left.canvas)


class _KernelCut(_Cut):
    """The same where the kernels merge."""

    slot: Clap | Gbm

    def __init__(self, slot: Clap | Gbm, first: Tokens, kernels: Kernels) -> None:
        super().__init__(slot, first)
        self.kernels, self.waits = kernels, False
        patches = first.map.shape[1]
        merge = _merge_of(slot, first.values, patches)
        self.decision = self.written_by(kernels.decision(merge, first.values, patches))

    def merge(self, before: Tokens | _Cut, tokens: Tensor, thresholds: Tensor) -> None:
        merge = _merge_of(self.slot, tokens, self.map.shape[1])
        if isinstance(self.slot, Clap):
            self.kernels.decide_clap(merge, tokens, thresholds[0], self.decision)
        else:
            self.kernels.decide_gbm(merge, tokens, before.map, before.length, thresholds[1], self.decision)
        size = before.size[:, : tokens.shape[1]].contiguous()
        self.kernels.apply(merge, self.decision, tokens, size, (self.merged, self.size))


def _outcome(slot: nn.Module, first: Tokens, kernels: Kernels | None) -> _Outcome:
    if isinstance(slot, Tome) and slot.prefix and kernels:  # without prefix its rows have an order of their own
        return _KernelTome(slot, first, kernels)
    if not _decides(slot):
        return _Outcome(first, slot)
    return _KernelCut(slot, first, kernels) if isinstance(slot, Clap | Gbm) and kernels else _Cut(slot, first)


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
    outcomes: one a slot; levels: what the decoder reads of segments before the last, by output; rooms: where they and
    the scores lie; joined: all segments of a single picture, and the scores they leave.
    """

    image: Tensor
    first: Tokens
    outcomes: list[_Outcome]
    levels: dict[int, Tokens] = field(default_factory=dict)
    rooms: dict[str, Tensor] = field(default_factory=dict)
    joined: tuple[Joined, Scores] | None = None

    def before(self, number: int) -> Tokens | _Cut:
        """What a segment starts with."""
        return self.first if number == 0 else self.cut(number - 1)

    def cut(self, number: int) -> _Cut:
        """What a segment ends with."""
        cut = self.outcomes[number]
        assert isinstance(cut, _Cut)
        return cut

    def kept(self, name: str, x: Tensor, most: int | None = None) -> Tensor:
        """x (B, S, ...) in memory that stays, which has room for `most` rows of an image; without, S never changes."""
        if name not in self.rooms:
            empty = torch.empty_like(x) if most is None else x.new_empty(x.shape[0] * most * x.shape[2:].numel())
            self.rooms[name] = empty
        room = self.rooms[name]
        room = room if most is None else room[: x.numel()].view(x.shape)
        return room.copy_(x)


class Merged(NamedTuple):
    """Results in the network's own memory: scores; length (B) behind every merge, and what it tells (B, N)."""

    scores: Scores
    lengths: tuple[Tensor, ...]
    maps: tuple[Tensor, ...]


class PackedNetwork:
    """Runs a deployed network that `why_not` has nothing against: all its merges wait for the picture, or none does.

    Args:
        network: on its device, in evaluation mode.
        pixels: dtype of the images.
        graphs: replay CUDA graphs, on a CUDA device; otherwise rows are not rounded up.
        most_graphs: graphs kept.
    """

    def __init__(
        self, network: Deployed, pixels: torch.dtype, *, graphs: bool = True, most_graphs: int = MOST_GRAPHS
    ) -> None:
        model = network.model
        assert why_not(network) is None and isinstance(model, ReadNetwork)
        embedding = model.encoder.patch_embed
        assert isinstance(embedding, PixelEmbedding)
        self._model, self._embedding, self._pixels = model, embedding, pixels
        self._projection = embedding.weight.flatten(1).contiguous()
        self._device = embedding.weight.device
        on_cuda = self._device.type == "cuda"
        self.kernels = use_kernels() if on_cuda else None
        self.graphs = Graphs(self._device, most_graphs) if on_cuda and graphs else None
        if on_cuda:
            _lay_out_like_rows(model)
        self._readout = model.readout()
        self._segments = _segments(model.encoder)
        start = cast(Block, model.encoder.blocks[0]).start_merge
        self._start = None if isinstance(start, KeepTokens) else start
        self._thresholds = torch.zeros(2, device=self._device)
        self._given: tuple[float, float] | None = None  # the thresholds there
        self._memories: OrderedDict[int, _Memory] = OrderedDict()
        self._lock = threading.Lock()  # one memory, one run at a time
        self._done = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self._stream: torch.cuda.Stream | None = None  # of the last run

    @property
    def joined(self) -> bool:
        """Whether a single picture is one graph, however many segments it has."""
        memory = self._memories.get(1)
        return memory is not None and memory.joined is not None

    @contextmanager
    def run(self, image: Tensor, clap: float, gbm: float) -> Iterator[Merged]:
        """One batch (B, 3, H, W) of any device's memory, behind the past work of the current stream.

        The results are there inside the block; the next run overwrites them.
        """
        with self._turn():
            memory = self._memory(len(image))
            self._picture(memory).copy_(image)
            self._merge_by(clap, gbm)
            scores = self._advance(memory)
            maps = tuple(outcome.told for outcome in memory.outcomes)
            lengths = tuple(outcome.length for outcome in memory.outcomes)
            yield Merged(scores, lengths, maps)

    def warm_up(self, images: int, deadline: float) -> bool:
        """Captures beforehand the graphs that photos are likely to need in batches of `images`.

        Of a single picture these are all, from what is left of a blank one on, of which all merges; of several up to
        `WARM_GRAPHS` (`likely_buckets`). A batch that needs another, as its pictures keep far more or far fewer tokens
        than photos mostly do or differ far more, is launched kernel by kernel, and captured when the same comes again,
        as `Graphs` does after a warm-up. Nothing is done without graphs, and nothing more once there is no room. Graphs
        of a single picture are joined once all of them are there at the end.

        Args:
            deadline: by `time.monotonic()`; no capture begins after it.

        Returns:
            Whether all was done before the deadline.
        """
        if self.graphs is None:
            return True
        with self._turn():
            memory = self._memory(images)
            self._picture(memory).zero_()
            self._merge_by(*_MERGE_ALL)
            with self.graphs.warming():
                return self._capture_all(memory, self.graphs, deadline)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The memory is the caller's alone, behind the last run."""
        # The calling thread's current device may be another, on which Triton would launch.
        device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with self._lock, device, torch.inference_mode():
            self._wait()
            try:
                yield
            finally:  # behind an error too: what was queued until then uses the memory
                if self._done is not None:
                    self._done.record()

    def _merge_by(self, clap: float, gbm: float) -> None:
        if self._given != (clap, gbm):
            self._given = clap, gbm
            self._thresholds.copy_(torch.tensor((clap, gbm)))

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
        # Padding around pictures is zero once pixels are centred.
        whole = [side * self._embedding.patch_size for side in network.grid]
        image = torch.full((images, 3, *whole), PIXEL_CENTRE, dtype=self._pixels, device=self._device)
        first = self._model.encoder.embed(image[:, :, : network.image_size[0], : network.image_size[1]])
        first = first._replace(values=first.values.contiguous(), map=first.map.contiguous())
        slots = [half.slot for segment in self._segments for half in segment if half.slot is not None]
        slots = slots if self._start is None else [self._start, *slots]
        return _Memory(image, first, [_outcome(slot, first, self.kernels) for slot in slots])

    def _picture(self, memory: _Memory) -> Tensor:
        """The part of the memory's image, which consists of whole patches, that a picture (B, 3, H, W) covers."""
        height, width = self._model.network.image_size
        (top, _), (left, _) = patch_margins((height, width), self._embedding.patch_size)
        return memory.image[:, :, top : top + height, left : left + width]

    # --- segments ---

    def _advance(self, memory: _Memory) -> Scores:
        """All segments."""
        if memory.joined is not None:
            joined, joined_scores = memory.joined
            joined.replay()
            return joined_scores
        images, most = memory.first.values.shape[:2]
        rows, longest = images * most, most
        for number in range(len(self._segments) - 1):
            self._work(memory, number, rows, longest)
            lengths = self._lengths(memory, number, longest)
            rows, longest = (sum(lengths), max(lengths)) if self.graphs is None else bucket(lengths, most)
        scores = self._work(memory, len(self._segments) - 1, rows, longest)
        assert scores is not None
        return scores

    def _capture_all(self, memory: _Memory, graphs: Graphs, deadline: float) -> bool:
        """As `warm_up`. Everything merges, so that the rows there are fit into every bucket, behind them padding."""
        images, most = memory.first.values.shape[:2]
        last, usual, fewest = len(self._segments) - 1, float(most), most
        pairs = [(images * most, most)]
        buckets = [pairs]
        for number in range(last + 1):
            for rows, longest in pairs:
                if graphs.full or time.monotonic() >= deadline:
                    return graphs.full
                self._work(memory, number, rows, longest)
            if number < last:
                left = max(self._lengths(memory, number, pairs[-1][1]))
                usual *= (1 + left / fewest) / 2  # as if photos merged half of what can be merged
                fewest = left
                pairs = likely_buckets(images, usual, fewest, most, (WARM_GRAPHS - 1) // last)
                buckets.append(pairs)
        if images == 1 and last > 0 and memory.joined is None:
            self._join_graphs(memory, graphs, buckets)
        return True

    def _join_graphs(self, memory: _Memory, graphs: Graphs, buckets: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Joins the graphs of a single picture, of a segment those of all its buckets, where that can be done."""
        found = [
            {rows: graphs.found((1, number, rows, longest)) for rows, longest in pairs}
            for number, pairs in enumerate(buckets)
        ]
        captured = [{rows: graph for rows, (graph, _) in one.items() if graph is not None} for one in found]
        waits = self.kernels is None or any(memory.cut(number).waits for number in range(len(found) - 1))
        if waits or any(len(some) < len(wanted) for some, wanted in zip(captured, found, strict=True)):
            return
        assert self.kernels is not None
        ((_, first),) = captured[0].items()
        switches = [(memory.cut(number).length, some) for number, some in enumerate(captured[1:])]
        _, scores = found[-1][max(found[-1])]  # where there is room for all, in memory that all share
        try:
            memory.joined = Joined(self.kernels.library, self._device, first, switches), scores
        except ExecutionError as error:
            _LOG.warning("single pictures wait for the host behind every merge: %s", error)

    def _work(self, memory: _Memory, number: int, rows: int, longest: int) -> Scores | None:
        work = partial(self._segment, memory, number, rows, longest)
        if self.graphs is None:
            return work()
        images = len(memory.image)
        joins = images == 1 and len(self._segments) > 1
        return self.graphs.run((images, number, rows, longest), work, joins=joins)

    def _lengths(self, memory: _Memory, number: int, longest: int) -> list[int]:
        """Valid rows of each image behind a segment; waits for the device."""
        cut = memory.cut(number)
        if cut.waits:
            cut.merge(memory.before(number), cut.tokens(longest), self._thresholds)
            cut.counts.copy_(cut.length)
        elif self._stream is not None:
            self._stream.synchronize()
        return [int(count) for count in cut.counts.tolist()]

    def _segment(self, memory: _Memory, number: int, rows: int, longest: int) -> Scores | None:
        """Runs on `rows` rows, `longest` an image at most. The last segment returns scores."""
        if number == 0:
            x, layout, tokens = self._embedded(memory), Layout(len(memory.image), longest), memory.first
        else:
            cut = memory.cut(number - 1)
            layout, tokens = cut.layout(longest), cut.left
            x = packed(cut.merged, layout, rows)
        delta, outcomes, levels, front = None, iter(memory.outcomes), dict(memory.levels), None
        if number == 0 and self._start is not None:
            x, layout, tokens = self._left(self._start, self._entering(memory), next(outcomes))
        for half in self._segments[number]:
            x, entering = half.entering(x, delta)
            delta, keys = half.added(entering, layout, tokens.size)
            if _decides(half.slot):
                self._end(memory, number, x, delta, layout)
                return None
            if half.slot is not None:
                values = (x + delta).to(x.dtype).view(layout.images, layout.longest, -1)
                merging = tokens._replace(values=values, keys=keys)
                (x, layout, tokens), delta = self._left(half.slot, merging, next(outcomes)), None
            if half.output is not None:
                x, read, front = self._read(half.output, x, delta, layout, tokens)
                delta = None
                if number < len(self._segments) - 1:
                    memory.levels[half.output] = self._waiting(memory, half.output, read)
                levels[half.output] = read._replace(size=read.size[:, : read.values.shape[1]])
        ordered = [levels[i] for i in range(len(levels))]
        return self._kept(memory, filled(self._readout.scores(ordered, front, _FUSED), ordered[-1].canvas))

    def _left(self, slot: nn.Module, entering: Tokens, outcome: _Outcome) -> tuple[Tensor, Layout, Tokens]:
        """What a slot leaves of images of one length: rows, where they lie, and what is told of them."""
        tokens = outcome.through(slot, entering)
        images, longest, width = tokens.values.shape
        return tokens.values.reshape(-1, width), Layout(images, longest), tokens

    def _entering(self, memory: _Memory) -> Tokens:
        """What enters a merge before the first block: the rows of `first`, and superpatches where it is CTS's."""
        encoder = self._model.encoder
        return encoder.with_superpatches(memory.image, memory.first) if encoder.shares else memory.first

    def _embedded(self, memory: _Memory) -> Tensor:
        """Pixels to the rows that enter the first block, all of them in `first`: a product instead of a convolution."""
        encoder, embedding, values = self._model.encoder, self._embedding, memory.first.values
        pixels = patches(memory.image, embedding.patch_size, 1 / PIXEL_SCALE, values.dtype)
        if embedding.bias.ndim == 1:
            embedded = F.linear(pixels, self._projection, embedding.bias)
        else:  # patches with some padding have a bias of their own
            embedded = F.linear(pixels, self._projection) + embedding.bias
        prefix = encoder.prefix
        torch.add(embedded, encoder.pos_embed[:, prefix:], out=values[:, prefix:])
        return values.flatten(0, 1)

    def _end(self, memory: _Memory, number: int, x: Tensor, delta: Tensor, layout: Layout) -> None:
        """Lays x + delta out for the merge, and merges where that needs no host."""
        cut = memory.cut(number)
        tokens = cut.tokens(layout.longest)
        if layout.regular:
            torch.add(x, delta, out=tokens.view(x.shape))
        else:
            tokens.copy_(apart(x, layout, 0, layout.longest, delta))
        if not cut.waits:
            cut.merge(memory.before(number), tokens, self._thresholds)
            cut.counts.copy_(cut.length, non_blocking=True)

    # --- decoder ---

    def _read(
        self, output: int, x: Tensor, delta: Tensor | None, layout: Layout, tokens: Tokens
    ) -> tuple[Tensor, Tokens, Tensor | None]:
        """x plus delta; what the decoder reads of it; and the rows (B, K, D) that joined, where they do."""
        readout, encoder = self._readout, self._model.encoder
        level = readout.levels[output]
        norm = encoder.norm if isinstance(encoder.norm, nn.LayerNorm) else level.norm
        if norm is None:
            x = x if delta is None else (x + delta).to(x.dtype)
            rows = x
        else:
            x, rows = residual_norm(x, delta, norm)
        if not isinstance(encoder.outlet, KeepTokens):
            tokens = encoder.outlet(tokens._replace(values=rows.view(layout.images, layout.longest, -1)), None)
            rows, layout = tokens.values.flatten(0, 1), Layout(layout.images, tokens.values.shape[1])
        rows = rows if level.rows is None else level.rows(rows)
        first, count, front = readout.skipped, layout.longest - readout.skipped, None
        if readout.joining is not None and output == len(readout.levels) - 1:
            rows, layout = self._joined(readout.joining, rows, layout)
            first = len(readout.joining.front)
            front = apart(rows, layout, 0, first)
        if readout.unmerged:
            values = every_patch(rows, layout, first - readout.skipped, tokens.map)
        else:
            values = apart(rows, layout, first, count)
        return x, tokens._replace(values=values, length=tokens.length - readout.skipped), front

    def _joined(self, joining: Joining, x: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        """Rows that the network's own have joined, behind the blocks that they pass together."""
        x, layout = with_front(joining.front, x, layout, self._readout.skipped)
        delta = None
        for half in _halves(joining.blocks):
            x, entering = half.entering(x, delta)
            delta = half.branch(entering, layout)
        return residual_norm(x, delta, joining.norm)[1], layout

    def _waiting(self, memory: _Memory, output: int, tokens: Tokens) -> Tokens:
        """The same for the last segment to read, which does not know how many rows there are."""
        name, values = f"level {output}", tokens.values
        if self._readout.unmerged:
            return tokens._replace(values=memory.kept(name, values))
        if name not in memory.rooms:
            memory.rooms[name] = values.new_zeros(*tokens.size.shape, values.shape[2])
        room = memory.rooms[name]
        room[:, : values.shape[1]] = values
        return tokens._replace(values=room)

    def _kept(self, memory: _Memory, scores: Scores) -> Scores:
        """The same in memory that stays. Maps are those of slots, or the same ones every time."""
        if isinstance(scores, TokenScores):
            return scores._replace(scores=memory.kept("scores", scores.scores, memory.first.map.shape[1]))
        if isinstance(scores, GridScores):
            return scores._replace(scores=memory.kept("scores", scores.scores))
        assert isinstance(scores, MaskScores)
        return scores._replace(masks=memory.kept("masks", scores.masks), classes=memory.kept("classes", scores.classes))
