"""What goes in and out of an exported network: the part of the manifest that runners read instead of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.schema import Output, Recipe

CLAP_THRESHOLD, GBM_THRESHOLD = "clap_threshold", "gbm_threshold"


@dataclass(frozen=True)
class Tensor:
    """One input or output: NumPy dtype name and shape; -1 is the free batch axis."""

    name: str
    dtype: Literal["uint8", "float32", "int32", "int64"]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """Inputs, outputs, threshold defaults and the names of the merges, which `merge_names` gives."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    defaults: dict[str, float]
    merges: tuple[str, ...]
    max_batch: int

    def __post_init__(self) -> None:
        if not self.inputs or len(self.outputs) < 2:
            raise ValueError("expected an image, labels or scores, and token counts")

    @property
    def image(self) -> Tensor:
        """The image input (batch, 3, H, W), RGB in 0..255."""
        return self.inputs[0]


def threshold_defaults(plan: MergePlan) -> dict[str, float]:
    """The threshold inputs a plan needs, in graph order, with the plan's values; a budget needs none."""
    clap = {CLAP_THRESHOLD: plan.clap_threshold} if plan.reads_clap_threshold else {}
    return clap | ({GBM_THRESHOLD: plan.gbm_threshold} if plan.gbm_layers and plan.gbm != "budget" else {})


def merge_names(plan: MergePlan) -> tuple[str, ...]:
    """One name a merge, in the order they run: kind and 1-based layer, and the part of it that the merge ends with.

    So `clap_1`, `gbm_5`, `tome_1`, `tome_1_attention`.
    """
    names = ((plan.merge_in(layer), str(layer), "" if plan.row.lasting else part) for layer, part in plan.places)
    return tuple("_".join(filter(None, name)) for name in names)


def output_names(plan: MergePlan, output: Output) -> tuple[str, ...]:
    """Graph outputs: labels or scores, token counts, one token map a merge."""
    return (output, "token_counts", *(f"token_map_{name}" for name in merge_names(plan)))


def mask_names(network: Network) -> tuple[str, ...]:
    """Graph outputs behind those: for each layer whose queries choose the cells that they attend to, which ones."""
    return tuple(f"mask_{layer}" for layer in range(1, len(network.mask_grids) + 1))


def signature_of(recipe: Recipe) -> Signature:
    """The signature a recipe's network is exported with."""
    network, plan = recipe.network, recipe.merging
    height, width = network.image_size
    # Where the protocol enlarges photos to the window, pixels are interpolated and no longer whole numbers.
    pixel: Literal["uint8", "float32"] = "float32" if recipe.protocol.resized_side < recipe.protocol.window else "uint8"
    main = {
        "labels": Tensor("labels", "uint8" if network.classes <= 255 else "int32", (-1, height, width)),
        "scores": Tensor("scores", "float32", (-1, network.classes, height, width)),
    }[recipe.output]
    merges, patches = merge_names(plan), network.grid[0] * network.grid[1]
    thresholds = threshold_defaults(plan)
    return Signature(
        inputs=(Tensor("image", pixel, (-1, 3, height, width)), *(Tensor(n, "float32", ()) for n in thresholds)),
        outputs=(
            main,
            Tensor("token_counts", "int64", (-1, len(merges))),
            *(Tensor(f"token_map_{name}", "int64", (-1, patches)) for name in merges),
            *(
                Tensor(name, "uint8", (-1, network.queries, rows * columns))
                for name, (rows, columns) in zip(mask_names(network), network.mask_grids, strict=True)
            ),
        ),
        defaults=thresholds,
        merges=merges,
        max_batch=recipe.max_batch,
    )
