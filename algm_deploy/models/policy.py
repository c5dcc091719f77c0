"""CTS's policy network, which says of superpatches whether they show one class: EfficientNet-Lite0 and two scores.

As in tue-mps/cts-segmenter (segm/model/policy_net.py) on timm's `efficientnet_lite0`; batch norms are part of their
convolutions here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.vit import ImageConv
from algm_deploy.ops._rows import wide
from algm_deploy.recipe.network import Size

STRIDE = 32  # pixels a side that one answer is for
_STEM = 32
_EXPANSION = 6


class _Stage(NamedTuple):
    """Blocks that differ in the first alone, which has the stride and takes another number of channels."""

    blocks: int
    kernel: int
    stride: int
    channels: int
    expansion: int = _EXPANSION


_STAGES = (
    _Stage(1, 3, 1, 16, expansion=1),
    _Stage(2, 3, 2, 24),
    _Stage(2, 5, 2, 40),
    _Stage(3, 3, 2, 80),
    _Stage(3, 5, 1, 112),
    _Stage(4, 5, 2, 192),
    _Stage(1, 3, 1, 320),
)


class InvertedResidual(nn.Module):
    """More channels where `inner` is larger, one convolution a channel, fewer channels; added to what went in."""

    def __init__(self, channels: int, inner: int, out: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.residual = stride == 1 and channels == out
        self.expand = nn.Conv2d(channels, inner, 1) if inner != channels else nn.Identity()
        self.depthwise = nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner)
        self.project = nn.Conv2d(inner, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = x if isinstance(self.expand, nn.Identity) else F.relu6(self.expand(x))
        made: Tensor = self.project(F.relu6(self.depthwise(inner)))
        return x + made if self.residual else made


class PolicyNet(nn.Module):
    """Normalised pixels (B, 3, H, W) to the score (B, M) of each superpatch, fp32, in raster order.

    It is the difference of two logits, one class less several, and ranks as the probability does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = ImageConv(3, _STEM, 3, 2, 1)
        self.blocks = nn.ModuleList(
            InvertedResidual(channels, channels * stage.expansion, stage.channels, stage.kernel, stride)
            for stage, channels, stride in _blocks()
        )
        self.head = nn.Conv2d(_STAGES[-1].channels, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu6(self.stem(image))
        for block in self.blocks:
            x = block(x)
        several, one = wide(self.head(x)).flatten(2).unbind(1)
        return one - several


def _blocks() -> Iterator[tuple[_Stage, int, int]]:
    """Of every block its stage, the channels that go in, and its stride."""
    channels = _STEM
    for stage in _STAGES:
        for index in range(stage.blocks):
            yield stage, channels, stage.stride if index == 0 else 1
            channels = stage.channels


def convs(ours: str, theirs: str) -> dict[str, tuple[str, str]]:
    """Our convolutions -> timm's convolution and batch norm, under the names of the policy network and its backbone."""
    named = {f"{ours}.stem": (f"{theirs}.conv_stem", f"{theirs}.bn1")}
    index = 0
    for number, stage in enumerate(_STAGES):
        parts = ["depthwise", "project"] if stage.expansion == 1 else ["expand", "depthwise", "project"]
        names = ["conv_dw", "conv_pw"] if stage.expansion == 1 else ["conv_pw", "conv_dw", "conv_pwl"]
        for block in range(stage.blocks):
            place = f"{theirs}.blocks.{number}.{block}"
            for norm, (part, name) in enumerate(zip(parts, names, strict=True), 1):
                named[f"{ours}.blocks.{index}.{part}"] = f"{place}.{name}", f"{place}.bn{norm}"
            index += 1
    return named


def policy_multiply_adds(size: Size) -> int:
    """Multiply-adds on a picture (height, width)."""
    cells = size[0] * size[1] // 4
    total = cells * _STEM * 27
    for stage, channels, stride in _blocks():
        inner = channels * stage.expansion
        total += cells * channels * inner * (inner != channels)
        cells //= stride**2
        total += cells * (inner * stage.kernel**2 + inner * stage.channels)
    return total + cells * _STAGES[-1].channels * 2
