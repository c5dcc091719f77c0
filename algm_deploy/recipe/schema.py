"""What a recipe holds: everything a person decides about a deployment, as frozen dataclasses that check themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from algm_deploy.errors import RecipeError
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.ranges import check_ranges

Color = tuple[int, int, int]
Resize = Literal["double", "single"]
Output = Literal["labels", "scores"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "fp8"]


@dataclass(frozen=True)
class Protocol:
    """How a photo becomes windows and windows become a label map (spec: published evaluation).

    The photo is resized with its aspect kept so that its short side is `short_side` and its long side at most
    `max_ratio * short_side`; square windows of `window` pixels move by `stride`; scores are averaged.

    `resize` matters where `short_side` is below `window`, as for Segmenter-L on ADE20K: `double`, the published
    evaluation's way, resizes the photo to `short_side` and then interpolates it up to the window; `single` resizes it
    to the window at once, as `--im-size` does there. `multiple`: then both sides are resized up to whole multiples of
    it, as mmsegmentation's ResizeToMultiple does.
    """

    dataset: str
    short_side: int
    window: int
    stride: int
    max_ratio: float = 4.0
    resize: Resize = "double"
    multiple: int = 1

    def __post_init__(self) -> None:
        check_ranges("protocol", self, short_side=(1, 16384), window=(1, 16384), max_ratio=(1, 100))
        check_ranges("protocol", self, stride=(1, self.window), multiple=(1, 1024))

    @property
    def resized_side(self) -> int:
        """Short side in pixels after the photo's own resize."""
        return self.short_side if self.resize == "double" else max(self.short_side, self.window)


# Largest long side, as a multiple of the short side, in the published evaluation (data/config/*.py of the public code);
# for the data sets of SegViT alone, whose `min_size` lifts the limit, the longest picture that is taken at all.
_MAX_RATIO = {"ade20k": 4.0, "cityscapes": 2.0, "pascal_context": 8.0, "pascal_context_59": 8.0, "coco_stuff10k": 8.0}


def dataset_ratio(dataset: str) -> float:
    """`Protocol.max_ratio` of a dataset; 4 where nothing is published."""
    return _MAX_RATIO.get(dataset, 4.0)


@dataclass(frozen=True)
class Gates:
    """Values that `verify` holds a bundle to. Shares lie in [0, 1].

    `int8_label_agreement`: an export to int8 keeps as many products in fp32 as this agreement with fp32 needs;
    `fp8_label_agreement`: likewise in fp16, where an export to fp8 measures ranges.
    """

    label_agreement: float = 0.999
    excused_decisions: float = 0.01
    miou_drop_points: float = 0.1
    int8_label_agreement: float = 0.99
    fp8_label_agreement: float = 0.99

    def __post_init__(self) -> None:
        check_ranges("gates", self, label_agreement=(0, 1), excused_decisions=(0, 1), miou_drop_points=(0, 100))
        check_ranges("gates", self, int8_label_agreement=(0, 1), fp8_label_agreement=(0, 1))


@dataclass(frozen=True)
class Recipe:
    """One published network, or one derived from a checkpoint's `variant.yml`.

    `class_names` and `palette` are empty where those of the dataset apply. `published` holds the figures its authors
    report: `miou_percent`, `gmacs`, `throughput_img_per_s` with merging, the same with `_dense` without.
    """

    name: str
    network: Network
    merging: MergePlan
    protocol: Protocol
    class_names: tuple[str, ...] = ()
    palette: tuple[Color, ...] = ()
    output: Output = "scores"
    precision: Precision = "fp32"
    max_batch: int = 8
    gates: Gates = field(default_factory=Gates)
    published: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges("recipe", self, max_batch=(1, 1024), palette=(0, 255))
        check_ranges("merging", self.merging, clap_threshold=(-2, 2), gbm_threshold=(-1000, 1000))
        if any(layer > self.network.encoder_depth for layer in self.merging.layers):
            raise RecipeError(f"expected merging layers up to {self.network.encoder_depth}, got {self.merging.layers}")
        if any(side > limit for side, limit in zip(self.merging.window, self.network.grid, strict=True)):
            raise RecipeError(
                f"expected a merging.window within the grid {self.network.grid}, got {self.merging.window}"
            )
        if self.merging.layers:
            self.merging.row.check_network(self.merging, self.network)
        if self.merging.between_groups == "remerge" and (
            not self.network.architecture.adapter or not self.merging.row.lasting or not self.merging.row.standing
        ):
            raise RecipeError(
                'expected merging.between_groups = "remerge" for ViT-Adapter and a method whose tokens stand for '
                f"patches and stay merged, got {self.network.family} and {self.merging.method}: leave it out"
            )
        for key, listed in (("class_names", self.class_names), ("palette", self.palette)):
            if listed and len(listed) != self.network.classes:
                raise RecipeError(f"expected {key} for {self.network.classes} classes, got {len(listed)}")
