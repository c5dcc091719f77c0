"""How class scores come of the rows that an encoder leaves: each network describes it, whoever runs it follows.

A network's own `forward` follows its description on padded sequences. A runtime that keeps rows in another way follows
the same one: it needs to know which rows are read where, what is done with each row alone, and which rows of the
network's own pass further blocks with them. Everything after that is `Readout.scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import algm_deploy.ops  # noqa: F401  registers torch.ops.algm
from algm_deploy.models.scores import Scores, TokenScores, enlarged, on_canvas
from algm_deploy.models.vit import Merged, MergeInputs, Tokens, VitNetwork
from algm_deploy.ops._rows import wide


class Crossed(NamedTuple):
    """What attention of queries to rows gives: the mixed rows (B, K, D), and (B, K, S) fp32, the mean over the heads of
    what went into its softmax."""

    mixed: Tensor
    similarity: Tensor | None


class Steps(NamedTuple):
    """Steps that a runtime may do in its own way.

    normed, unit: a norm of rows (..., D), and scaling them to length one. crossed: attention of queries (B, K, D) to
    keys and values (B, S, D), given the number of heads, a scale, which (B, S) rows are valid, the first ones of an
    image, unless all are, and whether the similarity is wanted, without which it may be left out. rectified: the
    positive parts of what convolutions make of maps (B, C, h, w), one of each, enlarged as many times, their corners
    aligned or not.
    """

    normed: Callable[[Tensor, nn.LayerNorm], Tensor]
    unit: Callable[[Tensor], Tensor]
    crossed: Callable[[Tensor, Tensor, Tensor, int, float, Tensor | None, bool], Crossed]
    rectified: Callable[[Iterable[nn.Module], Iterable[Tensor], int, bool], list[Tensor]]


def heads_of(x: Tensor, heads: int) -> Tensor:
    """Rows (B, S, D) as (B, heads, S, D / heads)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _crossed(
    query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float, valid: Tensor | None, compared: bool
) -> Crossed:
    query, key, value = (heads_of(x, heads) for x in (query, key, value))
    similarity = wide(query @ key.mT * scale)
    masked = similarity if valid is None else torch.where(valid[:, None, None], similarity, -torch.inf)
    mixed = masked.softmax(-1).to(value.dtype) @ value
    return Crossed(mixed.transpose(1, 2).flatten(2), similarity.mean(1) if compared else None)


def _normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    out: Tensor = norm(x)
    return out


def _unit(x: Tensor) -> Tensor:
    """The length is taken in fp32, where 16-bit squares cannot overflow."""
    return F.normalize(wide(x), dim=-1).to(x.dtype)


def _rectified(convs: Iterable[nn.Module], maps: Iterable[Tensor], factor: int, align_corners: bool) -> list[Tensor]:
    positive = [F.relu(conv(x)) for conv, x in zip(convs, maps, strict=True)]
    return [enlarged(x, factor, align_corners) for x in positive]


PLAIN = Steps(_normed, _unit, _crossed, _rectified)


class Level(NamedTuple):
    """What the decoder reads of an output of the encoder: `norm`, then `rows`, of each row alone; without, as it is.

    rows: (..., D) to (..., C).
    """

    norm: nn.LayerNorm | None = None
    rows: Callable[[Tensor], Tensor] | None = None


class Joining(NamedTuple):
    """Blocks after the encoder that rows of the network's own (K, D) pass together with those of the last level.

    `front` stands in front of each image's rows, so that padding stays at the end; attention does not depend on the
    order. `norm` comes after the blocks.
    """

    front: Tensor
    blocks: nn.ModuleList
    norm: nn.LayerNorm


@dataclass(frozen=True)
class Readout:
    """From an encoder's outputs to class scores.

    Args:
        levels: one for each output of the encoder, in its order.
        scores: given the levels, the rows (B, K, D) that joined, if any, and steps; the scores' `stages` stay empty.
        joining: the blocks that rows of the network's own pass with the last level.
        skipped: leading rows of each image that are not read, those that are no patches; the maps still count them.
        unmerged: whether `scores` is given a row for every patch, (B, N, C), instead of the merged rows.
    """

    levels: tuple[Level, ...]
    scores: Callable[[Sequence[Tokens], Tensor | None, Steps], Scores]
    joining: Joining | None = None
    skipped: int = 0
    unmerged: bool = False


class ReadNetwork(VitNetwork):
    """A network that says how its decoder reads rows. Image (B, 3, H, W), normalised, to class scores."""

    def readout(self) -> Readout:
        """Made of the modules and parameters that are there now."""
        raise NotImplementedError

    def forward(self, image: Tensor, inputs: MergeInputs | None = None) -> Scores:
        outputs, stages = self.encoder(image, inputs)
        return read(self.readout(), outputs, stages)


def read(readout: Readout, outputs: Sequence[Tokens], stages: list[Merged]) -> Scores:
    """Scores of an encoder's outputs, padded sequences."""
    levels = [_read(level, tokens, readout.skipped) for level, tokens in zip(readout.levels, outputs, strict=True)]
    front = None
    if readout.joining is not None:
        levels[-1], front = _joined(readout.joining, levels[-1])
    if readout.unmerged:
        levels = [_every_patch(tokens, readout.skipped) for tokens in levels]
    return filled(readout.scores(levels, front, PLAIN), levels[-1].canvas)._replace(stages=stages)


def filled(scores: Scores, canvas: Tensor | None) -> Scores:
    """Scores of every patch where tokens have left, of whom a canvas tells."""
    if canvas is None or not isinstance(scores, TokenScores):
        return scores
    values = on_canvas(scores.scores, scores.map, scores.prefix, canvas)
    rows = torch.arange(scores.prefix, scores.prefix + values.shape[1], device=values.device)
    return scores._replace(scores=values, map=rows.expand_as(scores.map))


def _read(level: Level, tokens: Tokens, skipped: int) -> Tokens:
    values = tokens.values[:, skipped:] if skipped else tokens.values
    values = values if level.norm is None else level.norm(values)
    values = values if level.rows is None else level.rows(values)
    return tokens._replace(values=values, length=tokens.length - skipped)


def _joined(joining: Joining, tokens: Tokens) -> tuple[Tokens, Tensor]:
    images, count = tokens.values.shape[0], joining.front.shape[0]
    rows = torch.cat([joining.front.expand(images, -1, -1), tokens.values], 1)
    joined = tokens._replace(values=rows, length=tokens.length + count)
    for block in joining.blocks:
        joined = block(joined)
    rows = joining.norm(joined.values)
    return tokens._replace(values=rows[:, count:]), rows[:, :count]


def _every_patch(tokens: Tokens, skipped: int) -> Tokens:
    return tokens._replace(values=torch.ops.algm.unmerge(tokens.values, tokens.map, skipped))
