"""What goes in and out of an exported network: the part of the manifest that runners read instead of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from algm_deploy.errors import BundleError
from algm_deploy.recipes import MergePlan, Output, Recipe

CLAP_THRESHOLD, GBM_THRESHOLD = "clap_threshold", "gbm_threshold"
_DTYPES = ("uint8", "float32", "int32", "int64")


@dataclass(frozen=True)
class Tensor:
    """One input or output: NumPy dtype name and shape; -1 is the free batch axis."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """Inputs, outputs, threshold defaults and the names of the merges (`clap_1`, `gbm_5`: kind and 1-based layer)."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    defaults: Mapping[str, float]
    merges: tuple[str, ...]
    max_batch: int

    @property
    def image(self) -> Tensor:
        """The image input (batch, 3, H, W), RGB in 0..255."""
        return self.inputs[0]

    def to_table(self) -> dict[str, Any]:
        """JSON-able form for the manifest."""
        return asdict(self)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Signature:
        """The inverse of `to_table`; BundleError where the table is none."""
        try:
            inputs, outputs = (tuple(_tensor(t) for t in table[key]) for key in ("inputs", "outputs"))
            defaults = {str(name): float(value) for name, value in table["defaults"].items()}
            merges, largest = tuple(map(str, table["merges"])), int(table["max_batch"])
            if not inputs or len(outputs) < 2:
                raise ValueError("no image or no outputs")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise BundleError(
                f"expected the signature of a network in the manifest, got {type(error).__name__} {error}: export the "
                "bundle again"
            ) from error
        return cls(inputs, outputs, defaults, merges, largest)


def _tensor(table: Mapping[str, Any]) -> Tensor:
    if table["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {table['dtype']!r:.100}")
    return Tensor(str(table["name"]), table["dtype"], tuple(map(int, table["shape"])))


def threshold_defaults(plan: MergePlan) -> dict[str, float]:
    """The threshold inputs a plan needs, in graph order, with the plan's values."""
    clap = {CLAP_THRESHOLD: plan.clap_threshold} if plan.clap_layers else {}
    return clap | ({GBM_THRESHOLD: plan.gbm_threshold} if plan.gbm_layers else {})


def merge_names(plan: MergePlan) -> tuple[str, ...]:
    """`clap_1`, `gbm_5`, `tome_1`, ...: one name a merge, in the order they run; layers count from 1."""
    return tuple(f"{plan.merge_in(layer)}_{layer}" for layer in plan.layers)


def output_names(plan: MergePlan, output: Output) -> tuple[str, ...]:
    """Graph outputs: labels or scores, token counts, one token map a merge."""
    return (output, "token_counts", *(f"token_map_{name}" for name in merge_names(plan)))


def signature_of(recipe: Recipe) -> Signature:
    """The signature a recipe's network is exported with."""
    network, plan = recipe.network, recipe.merging
    height, width = network.image_size
    # Where the protocol enlarges photos to the window, pixels are interpolated and no longer whole numbers.
    pixel = "float32" if recipe.protocol.resized_side < recipe.protocol.window else "uint8"
    label = "uint8" if network.classes <= 255 else "int32"
    main = {
        "labels": Tensor("labels", label, (-1, height, width)),
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
        ),
        defaults=thresholds,
        merges=merges,
        max_batch=recipe.max_batch,
    )
