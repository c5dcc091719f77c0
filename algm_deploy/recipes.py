"""Recipes: everything a person decides about a deployment, as frozen dataclasses read from TOML.

Order of authority: command-line flag, recipe, the checkpoint's `variant.yml`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from algm_deploy.errors import PlanError

Size = tuple[int, int]
Semantics = Literal["code", "paper"]
Batching = Literal["per_image", "batch_min"]
TokenOrder = Literal["published", "raster"]
GbmMode = Literal["adaptive", "fixed"]
Output = Literal["labels", "scores"]
Precision = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True)
class Network:
    """Shape of a plain-ViT segmenter. Sizes are (height, width) in pixels; `embed_dim` is the width of a token."""

    family: str
    embed_dim: int
    depth: int
    heads: int
    classes: int
    image_size: Size
    patch_size: int = 16
    decoder: str = "mask_transformer"
    decoder_depth: int = 2
    normalization: Literal["vit", "deit"] = "vit"

    @property
    def grid(self) -> Size:
        """Patch grid (rows, columns)."""
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size


@dataclass(frozen=True)
class MergePlan:
    """Where and how a network merges tokens. Layers are 1-based encoder blocks, as in the published code.

    `clap_threshold` is CLAP's cosine-similarity threshold (tau). `gbm_threshold` is the multiplier of the standard
    deviation's share in `adaptive` mode (published: 1) and the similarity threshold in `fixed` mode.
    """

    clap_layers: tuple[int, ...] = (1,)
    gbm_layers: tuple[int, ...] = (5,)
    window: Size = (2, 2)
    clap_threshold: float = 1.0
    gbm_threshold: float = 1.0
    gbm_mode: GbmMode = "adaptive"
    semantics: Semantics = "code"
    batch: Batching = "per_image"
    order: TokenOrder = "published"

    def __post_init__(self) -> None:
        layers = (*self.clap_layers, *self.gbm_layers)
        if len(set(layers)) != len(layers) or any(layer < 1 for layer in layers):
            raise PlanError(
                f"merge layers must be distinct and at least 1, got CLAP {self.clap_layers}, GBM {self.gbm_layers}"
            )
        if len(self.clap_layers) > 1:
            raise PlanError(f"CLAP works on the full patch grid and fits one layer only, got {self.clap_layers}")
        if self.clap_layers and self.gbm_layers and min(self.gbm_layers) < self.clap_layers[0]:
            raise PlanError(
                f"CLAP needs the full patch grid: layer {self.clap_layers[0]} lies behind GBM {self.gbm_layers}"
            )
        if min(self.window) < 1 or self.window[0] * self.window[1] < 2:
            raise PlanError(f"a CLAP window covers at least two patches, got {self.window[0]}x{self.window[1]}")

    @property
    def layers(self) -> tuple[int, ...]:
        """All merging layers in the order they run."""
        return tuple(sorted((*self.clap_layers, *self.gbm_layers)))


DENSE = MergePlan(clap_layers=(), gbm_layers=())


@dataclass(frozen=True)
class Protocol:
    """How a photo becomes windows and windows become a label map (spec: published evaluation).

    The photo is resized with its aspect kept so that its short side is `short_side` and its long side at most
    `max_ratio * short_side`; square windows of `window` pixels move by `stride`; scores are averaged.
    """

    dataset: str
    short_side: int
    window: int
    stride: int
    max_ratio: float = 4.0


# Largest long side, as a multiple of the short side, in the published evaluation (data/config/*.py of the public code).
_MAX_RATIO = {"ade20k": 4.0, "cityscapes": 2.0, "pascal_context": 8.0}


def dataset_ratio(dataset: str) -> float:
    """`Protocol.max_ratio` of a dataset; 4 where nothing is published."""
    return _MAX_RATIO.get(dataset, 4.0)


@dataclass(frozen=True)
class Gates:
    """Values that `verify` holds a bundle to. Shares lie in [0, 1]."""

    label_agreement: float = 0.999
    excused_windows: float = 0.25
    miou_drop_points: float = 0.1


@dataclass(frozen=True)
class Recipe:
    """One published network, or one derived from a checkpoint's `variant.yml`."""

    name: str
    network: Network
    merging: MergePlan
    protocol: Protocol
    class_names: tuple[str, ...] = ()
    palette: tuple[tuple[int, int, int], ...] = ()
    output: Output = "scores"
    precision: Precision = "fp32"
    max_batch: int = 8
    gates: Gates = field(default_factory=Gates)
    published: dict[str, float] = field(default_factory=dict)
