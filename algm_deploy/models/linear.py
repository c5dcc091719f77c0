"""Linear heads on pretrained ViTs: DINOv2 (Oquab et al., TMLR 2024) and DeiT (Touvron et al., ICML 2021).

The arithmetic is that of facebookresearch/dinov2 (dinov2/models/vision_transformer.py, eval/segmentation/) and of
facebookresearch/deit (models.py). The head is the one DINOv2 is evaluated with: a batch norm and a linear layer a patch
on the normalised tokens of the last block, or on those of the last four side by side (called multi-scale there, after
its test-time scales). It works on merged tokens; scores are unmerged after it, each level's by the map of its depth.
Batch norm and LayerScale are folded into linear layers when a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from algm_deploy.models.multiply_adds import linear_head
from algm_deploy.models.naming import (
    STATISTICS,
    Made,
    Naming,
    batch_norm,
    bicubic,
    joined_tokens,
    layer_scales,
    resized_bicubic,
)
from algm_deploy.models.readout import Level, ReadNetwork, Readout, Steps
from algm_deploy.models.scores import GridScores, Scores, TokenScores, on_grid
from algm_deploy.models.vit import Tokens
from algm_deploy.ops._rows import wide
from algm_deploy.recipe.network import Network, Size

EPS = 1e-6
_HEAD = "decode_head."


class LinearProbe(ReadNetwork):
    """Image (B, 3, H, W), normalised, to class scores of merged tokens; of the grid where several blocks are read."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, EPS)
        levels = range(max(1, len(network.stages)))
        self.heads = nn.ModuleList(nn.Linear(network.embed_dim, network.classes, bias=not level) for level in levels)

    def readout(self) -> Readout:
        levels, prefix = tuple(Level(rows=head) for head in self.heads), self.encoder.prefix
        return Readout(levels, self._scores, skipped=prefix, unmerged=len(levels) > 1)

    def _scores(self, levels: Sequence[Tokens], front: Tensor | None, steps: Steps) -> Scores:
        prefix = self.encoder.prefix
        if len(levels) == 1:
            return TokenScores(levels[0].values, levels[0].map, prefix, [])
        total = torch.stack([wide(level.values) for level in levels]).sum(0)
        return GridScores(on_grid(total, self.network.grid), prefix, [])

    @staticmethod
    def decoder_multiply_adds(network: Network, levels: Sequence[int]) -> int:
        return linear_head(network, levels)


class Dinov2(LinearProbe):
    """facebookresearch/dinov2: the backbone's file and that of the head, mmsegmentation's, together."""

    @staticmethod
    def namings(network: Network) -> tuple[Naming, ...]:
        registers = network.extra_tokens
        tokens = joined_tokens(network.embed_dim, {"cls_token": 1, "register_tokens": registers})
        blocks = {f"encoder.blocks.{i}": f"blocks.{i}" for i in range(network.depth)}
        return (
            Naming(
                project="facebookresearch/dinov2",
                mark="blocks.0.ls1.",
                decoders=("linear", "linear_ms"),
                names={"encoder.": ""},
                made=tokens | layer_scales(network, blocks) | _head(network),
                unused=("mask_token", f"{_HEAD}bn.num_batches_tracked"),
                resized=_smoothed if registers else _by_factors,
                refusal=_dinov2_refusal,
            ),
        )


class Deit(LinearProbe):
    """facebookresearch/deit: its backbone, and a head like DINOv2's in a file of its own."""

    @staticmethod
    def namings(network: Network) -> tuple[Naming, ...]:
        distilled = network.extra_tokens
        return (
            Naming(
                project="facebookresearch/deit",
                mark="blocks.",
                decoders=("linear",),
                names={"encoder.": ""},
                made=joined_tokens(network.embed_dim, {"cls_token": 1, "dist_token": distilled}) | _head(network),
                unused=("head.", "head_dist.", f"{_HEAD}bn.num_batches_tracked"),
                positioned=network.prefix,
                resized=resized_bicubic,
                refusal=_headless,
            ),
        )


# ---------------------------------------------------------------------------------------------------- checkpoint keys


def _headless(found: Mapping[str, Tensor]) -> str | None:
    if any(key.startswith(_HEAD) for key in found):
        return None
    return (
        f"expected backbone and head, got the backbone alone: put the head's file, with {_HEAD}conv_seg and {_HEAD}bn, "
        "into one folder with it and name the folder"
    )


def _dinov2_refusal(found: Mapping[str, Tensor]) -> str | None:
    if any(".mlp.w12." in key for key in found):
        return (
            "expected DINOv2 S, B or L, got SwiGLU layers, which the giant model alone has and no network here "
            "computes: use a smaller backbone"
        )
    return _headless(found)


def _head(network: Network) -> dict[str, Made]:
    """The linear layer with the batch norm in front of it folded in, cut into the part of each level."""
    levels, dim = max(1, len(network.stages)), network.embed_dim
    width = levels * dim
    needs: dict[str, tuple[int, ...]] = {f"{_HEAD}bn.{name}": (width,) for name in STATISTICS}
    needs |= {f"{_HEAD}conv_seg.weight": (network.classes, width, 1, 1), f"{_HEAD}conv_seg.bias": (network.classes,)}
    weights = {f"heads.{i}.weight": Made(needs, partial(_head_weight, i * dim, dim)) for i in range(levels)}
    return weights | {"heads.0.bias": Made(needs, _head_bias)}


def _head_weight(start: int, dim: int, found: Mapping[str, Tensor]) -> Tensor:
    scaled = found[f"{_HEAD}conv_seg.weight"].double()[:, :, 0, 0] * batch_norm(f"{_HEAD}bn", found)[0]
    return scaled[:, start : start + dim].float().contiguous()


def _head_bias(found: Mapping[str, Tensor]) -> Tensor:
    shift = found[f"{_HEAD}conv_seg.weight"].double()[:, :, 0, 0] @ batch_norm(f"{_HEAD}bn", found)[1]
    return (found[f"{_HEAD}conv_seg.bias"].double() + shift).float()


def _by_factors(patches: Tensor, old: Size, new: Size) -> Tensor:
    """DINOv2 hands the factors to the interpolation, a tenth of a patch too large against rounding."""
    return bicubic(patches, old, scale_factor=((new[0] + 0.1) / old[0], (new[1] + 0.1) / old[1]))


def _smoothed(patches: Tensor, old: Size, new: Size) -> Tensor:
    """DINOv2 with registers hands over the size, and smooths what gets smaller."""
    return bicubic(patches, old, size=new, antialias=True)
