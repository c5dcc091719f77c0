"""How other projects name the parameters of our networks, and how their checkpoints become ours.

mmsegmentation and its descendants write `{"state_dict": ..., "meta": ...}`. Batch norms after or before their
convolutions, and LayerScale after linear layers, only scale and shift at inference: they are folded into their
neighbour, in fp64 with one rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from algm_deploy.recipe.network import Network, Size

Shapes = Mapping[str, tuple[int, ...]]
_BATCH_NORM_EPS = 1e-5
# Parts of a batch norm that count at inference.
STATISTICS = ("weight", "bias", "running_mean", "running_var")
_POSITIONS, _TOKENS = "encoder.pos_embed", "encoder.cls_token"


@dataclass(frozen=True)
class Made:
    """A parameter of ours that several of theirs make up: their name -> shape, and what makes it, in fp32."""

    needs: Shapes
    make: Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Naming:
    """Names of one project for one network.

    Args:
        project: whose names these are.
        mark: some key of this project's checkpoints begins with it, and none of another's.
        decoders: what this project computes, as `network.decoder`.
        names: beginnings of our parameter names -> theirs; the longest wins.
        convs: our convolutions that they follow with a batch norm -> their convolution and batch norm.
        conv_bias: whether those convolutions have a bias of their own.
        changed: our parameters whose elements lie elsewhere in theirs -> what puts them in place.
        made: our parameters that are made of several of theirs.
        unused: beginnings of keys that play no part at inference.
        positioned: how many tokens in front of the patches have a row in their position embedding.
        resized: position embeddings (1, N, D) of the patches of a grid, that grid, another one -> those of the other;
            None where they have no such rule.
        square: whether their grid is always a square; otherwise it is that of the pictures in training.
        refusal: what is wrong with a checkpoint of theirs, which keys and shapes do not tell.
    """

    project: str
    mark: str
    decoders: tuple[str, ...]
    names: Mapping[str, str]
    convs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    conv_bias: bool = False
    changed: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    made: Mapping[str, Made] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    positioned: int = 1
    resized: Callable[[Tensor, Size, Size], Tensor] | None = None
    square: bool = True
    refusal: Callable[[Mapping[str, Tensor]], str | None] = lambda found: None

    def expected(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Their name -> shape of all they must have, from the shapes of our parameters."""
        expected: dict[str, tuple[int, ...]] = {}
        for ours, shape in shapes.items():
            layer, _, kind = ours.rpartition(".")
            conv, norm = self.convs.get(layer, ("", ""))
            if ours in self.made:
                expected |= self.made[ours].needs
            elif not conv:
                expected[self._theirs(ours)] = shape
            elif kind == "weight":
                expected |= {f"{conv}.weight": shape} | {f"{norm}.{name}": shape[:1] for name in STATISTICS}
            elif self.conv_bias:
                expected[f"{conv}.bias"] = shape
        _, rows, dim = shapes[_POSITIONS]
        return expected | {self.positions: (1, rows - _prefix(shapes) + self.positioned, dim)}

    @property
    def positions(self) -> str:
        """Their name of the position embedding."""
        return self._theirs(_POSITIONS)

    def is_unused(self, key: str) -> bool:
        """Whether a key that no parameter of ours comes from is known to play no part."""
        counters = (f"{norm}.num_batches_tracked" for _, norm in self.convs.values())
        return key.startswith(self.unused) or key in counters

    def translated(
        self, found: Mapping[str, Tensor], shapes: Shapes, grids: tuple[Size, Size] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Our parameters by name in fp32, copies, from their checkpoint, which has all of `expected`.

        They come one at a time, so that whoever wants another dtype never holds all of them in fp32.

        `grids`: that of the position embedding and the one it is resized to, if it has to be.
        """
        for name in shapes:
            value = self._translated(name, found)
            if name == _POSITIONS:
                value = self._position_rows(value, _prefix(shapes), grids)
            yield name, self.changed[name](value) if name in self.changed else value

    def _translated(self, name: str, found: Mapping[str, Tensor]) -> Tensor:
        layer, _, kind = name.rpartition(".")
        if name in self.made:
            return self.made[name].make(found)
        if layer in self.convs:
            return self._folded(layer, kind, found)
        return found[self._theirs(name)].to(torch.float32, copy=True)

    def _position_rows(self, positions: Tensor, prefix: int, grids: tuple[Size, Size] | None) -> Tensor:
        """Theirs with one row for each token in front of the patches, zero for those that have none."""
        patches = positions[:, self.positioned :]
        if grids and self.resized:
            patches = self.resized(patches, *grids)
        tokens = torch.zeros(1, prefix, positions.shape[2])
        count = min(prefix, self.positioned)
        tokens[:, :count] = positions[:, :count]
        return torch.cat([tokens, patches], 1)

    def _theirs(self, ours: str) -> str:
        start = max((s for s in self.names if ours.startswith(s)), key=len)
        return self.names[start] + ours.removeprefix(start)

    def _folded(self, layer: str, kind: str, found: Mapping[str, Tensor]) -> Tensor:
        """The weight or the bias of a convolution with its batch norm."""
        conv, norm = self.convs[layer]
        scale, shift = batch_norm(norm, found)
        if kind == "weight":
            return (found[f"{conv}.weight"].double() * scale[:, None, None, None]).float()
        own = found[f"{conv}.bias"].double() if self.conv_bias else 0
        return (own * scale + shift).float()


def batch_norm(name: str, found: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scale and shift of every channel, fp64, that a batch norm amounts to."""
    weight, bias, mean, variance = (found[f"{name}.{part}"].double() for part in STATISTICS)
    scale = weight / (variance + _BATCH_NORM_EPS).sqrt()
    return scale, bias - mean * scale


def _prefix(shapes: Shapes) -> int:
    return shapes[_TOKENS][1] if _TOKENS in shapes else 0


def joined_tokens(dim: int, rows: Mapping[str, int]) -> dict[str, Made]:
    """The tokens in front of the patches, from their keys -> rows, in this order."""
    needs = {key: (1, count, dim) for key, count in rows.items() if count}
    return {_TOKENS: Made(needs, lambda found: torch.cat([found[key].float() for key in needs], 1))}


def layer_scales(
    network: Network, blocks: Mapping[str, str], factors: tuple[str, str] = ("ls1.gamma", "ls2.gamma")
) -> dict[str, Made]:
    """The last linear layers of attention and MLP with LayerScale folded in.

    `blocks`: our names -> theirs. `factors`: their names in a block, of attention and of the MLP.
    """
    dim = network.embed_dim
    made = {}
    for ours, theirs in blocks.items():
        for layer, factor, width in zip(("attn.proj", "mlp.fc2"), factors, (dim, network.mlp_width), strict=True):
            for kind, shape in (("weight", (dim, width)), ("bias", (dim,))):
                part = f"{layer}.{kind}"
                made[f"{ours}.{part}"] = scaled_by(f"{theirs}.{part}", shape, f"{theirs}.{factor}")
    return made


def scaled_by(key: str, shape: tuple[int, ...], factor: str) -> Made:
    """A weight, or bias, of theirs whose rows are multiplied by a factor each."""
    return Made({key: shape, factor: shape[:1]}, partial(_scaled, key, factor))


def _scaled(key: str, factor: str, found: Mapping[str, Tensor]) -> Tensor:
    """Rows of a weight, or elements of a bias, times their factor."""
    value = found[key].double()
    return (value * found[factor].double().view(-1, *[1] * (value.ndim - 1))).float()


def resized_bicubic(patches: Tensor, old: Size, new: Size) -> Tensor:
    """Position embeddings (1, N, D) of a grid at another size; DeiT's own fine-tuning and ViT-Adapter do it so."""
    return bicubic(patches, old, size=new)


def bicubic(patches: Tensor, old: Size, **how: Any) -> Tensor:
    """Position embeddings (1, N, D) of a grid `old` interpolated as `how` says."""
    return F.interpolate(patches.mT.reshape(1, -1, *old), mode="bicubic", **how).flatten(2).mT


def mmseg_encoder(network: Network) -> dict[str, str]:
    """Names of mmsegmentation's VisionTransformer (mmseg/models/backbones/vit.py, from 0.17 on)."""
    names = {"encoder.": "backbone.", "encoder.patch_embed.proj.": "backbone.patch_embed.projection."}
    inside = {
        "norm1.": "ln1.",
        "norm2.": "ln2.",
        "attn.qkv.": "attn.attn.in_proj_",
        "attn.proj.": "attn.attn.out_proj.",
        "mlp.fc1.": "ffn.layers.0.0.",
        "mlp.fc2.": "ffn.layers.1.",
    }
    for i in range(network.depth):
        names |= {f"encoder.blocks.{i}.{ours}": f"backbone.layers.{i}.{theirs}" for ours, theirs in inside.items()}
    return names


def dropped(network: Network) -> tuple[str, ...]:
    """Keys that a network without a cls token in its blocks leaves alone."""
    return () if network.prefix else ("backbone.cls_token",)
