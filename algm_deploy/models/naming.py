"""How other projects name the parameters of our networks, and how their checkpoints become ours.

mmsegmentation and its descendants write `{"state_dict": ..., "meta": ...}`. Their convolutions are followed by batch
norms, which at inference only scale and shift: they are folded into the convolution, in fp64 with one rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from algm_deploy.recipes import Network

Shapes = Mapping[str, tuple[int, ...]]
BATCH_NORM_EPS = 1e-5
_STATISTICS = ("weight", "bias", "running_mean", "running_var")
_POSITIONS = "encoder.pos_embed"


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
        unused: beginnings of keys that play no part at inference.
    """

    project: str
    mark: str
    decoders: tuple[str, ...]
    names: Mapping[str, str]
    convs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    conv_bias: bool = False
    changed: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def expected(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Their name -> shape of all they must have, from the shapes of our parameters."""
        expected: dict[str, tuple[int, ...]] = {}
        for ours, shape in shapes.items():
            layer, _, kind = ours.rpartition(".")
            conv, norm = self.convs.get(layer, ("", ""))
            if not conv:
                expected[self._theirs(ours)] = shape
            elif kind == "weight":
                expected |= {f"{conv}.weight": shape} | {f"{norm}.{name}": shape[:1] for name in _STATISTICS}
            elif self.conv_bias:
                expected[f"{conv}.bias"] = shape
        # Their position embedding always has a row for the cls token.
        _, rows, dim = shapes[_POSITIONS]
        return expected | {self.positions: (1, rows + ("encoder.cls_token" not in shapes), dim)}

    @property
    def positions(self) -> str:
        """Their name of the position embedding."""
        return self._theirs(_POSITIONS)

    def is_unused(self, key: str) -> bool:
        """Whether a key that no parameter of ours comes from is known to play no part."""
        counters = (f"{norm}.num_batches_tracked" for _, norm in self.convs.values())
        return key.startswith(self.unused) or key in counters

    def translated(self, found: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
        """Our parameters in fp32, copies, from their checkpoint, which has all of `expected`."""
        ours = {}
        for name in shapes:
            layer, _, kind = name.rpartition(".")
            if layer not in self.convs:
                ours[name] = found[self._theirs(name)].to(torch.float32, copy=True)
            elif kind == "weight":
                ours |= self._folded(layer, found)
        ours[_POSITIONS] = ours[_POSITIONS][:, -shapes[_POSITIONS][1] :].clone()
        return ours | {name: change(ours[name]) for name, change in self.changed.items()}

    def _theirs(self, ours: str) -> str:
        start = max((s for s in self.names if ours.startswith(s)), key=len)
        return self.names[start] + ours.removeprefix(start)

    def _folded(self, layer: str, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        conv, norm = self.convs[layer]
        scale, shift, mean, variance = (found[f"{norm}.{name}"].double() for name in _STATISTICS)
        scale = scale / (variance + BATCH_NORM_EPS).sqrt()
        own = found[f"{conv}.bias"].double() if self.conv_bias else 0
        return {
            f"{layer}.weight": (found[f"{conv}.weight"].double() * scale[:, None, None, None]).float(),
            f"{layer}.bias": (shift + (own - mean) * scale).float(),
        }


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
