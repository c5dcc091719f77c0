"""Figures that others published, read from `benchmarks/published.toml`, and which of them belong beside a recipe."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from algm_deploy.errors import RecipeError
from algm_deploy.package_data import content
from algm_deploy.recipe.conversion import converted
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.schema import Recipe

SCHEMA = 1
FILE = "published.toml"
NO_REDUCTION = "none"

# Width and depth of the plain ViTs that published tables name by a letter.
_LETTERS = {(192, 12): "Ti", (384, 12): "S", (768, 12): "B", (1024, 24): "L", (1408, 40): "g"}
# What all rows of a table may have in common.
_SHARED = ("network", "dataset", "throughput_conditions", "without_recipe")


class Published(Struct, frozen=True, forbid_unknown_fields=True):
    """One published row. None stands for what its source does not state.

    `gmacs` are multiply-adds in 10⁹ of one crop of `crop` x `crop` pixels; `implemented` says whether this project can
    run the method, `without_recipe` why it has no recipe for a row it could run. `method` is how tables call it, `none`
    for the network without token reduction.
    """

    network: str
    backbone: str
    dataset: str
    method: str
    implemented: bool
    source: str
    crop: int | None = None
    setting: str | None = None
    miou_percent: float | None = None
    gmacs: float | None = None
    throughput_img_per_s: float | None = None
    throughput_conditions: str | None = None
    without_recipe: str | None = None


def read_published(path: Path | None = None) -> tuple[Published, ...]:
    """All rows of the file, by default of the one that comes with the package.

    Raises:
        RecipeError: the file cannot be read, a row names an unknown source or method, or a column is unknown or of
            another type.
    """
    path = path or content("benchmarks") / FILE
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if table.get("schema") != SCHEMA:
            raise RecipeError(f"expected `schema = {SCHEMA}`, got {table.get('schema')!r}: update the file")
        return tuple(_row(row, group, table) for group in table["tables"] for row in group["rows"])
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{path}: expected tables of published figures, got {error!r:.200}: correct it") from error


def network_name(network: Network) -> str | None:
    """Name of a network in published tables; None for decoders they do not have."""
    row = network.architecture
    return row.distilled if network.extra_tokens and row.distilled else row.published


def published_beside(recipe: Recipe, rows: Sequence[Published]) -> tuple[Published, ...]:
    """The rows of the recipe's network, input size and data set."""
    name = backbone(recipe.network)
    wanted = (network_name(recipe.network), name, recipe.protocol.dataset)
    height, width = recipe.network.image_size
    return tuple(
        row for row in rows if (row.network, row.backbone, row.dataset) == wanted and height == width == row.crop
    )


def backbone(network: Network) -> str | None:
    """Name of a plain ViT in published tables, such as `ViT-S/16`; None for other widths and depths."""
    letter = _LETTERS.get((network.embed_dim, network.depth))
    return f"ViT-{letter}/{network.patch_size}" if letter else None


def _row(row: dict[str, Any], group: dict[str, Any], table: dict[str, Any]) -> Published:
    facts = {key: group[key] for key in _SHARED if key in group} | row
    method, source = table["methods"][row["method"]], table["sources"][group["source"]]
    published: Published = converted(
        Published, {**facts, "source": source, "implemented": method["implemented"]}, group["source"]
    )
    return published
