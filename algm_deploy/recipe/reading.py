"""Reads recipes from TOML and lays sources of settings over each other.

Order of authority: command-line flag, recipe, the checkpoint's `variant.yml`. Each source gives *settings*, a mapping
from dotted key (`merging.clap_threshold`) to a checked value; `resolve` lays them over each other.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from algm_deploy.errors import PlanError, RecipeError, nearest, shown
from algm_deploy.package_data import content
from algm_deploy.recipe.conversion import converted
from algm_deploy.recipe.plan import DENSE, method_settings
from algm_deploy.recipe.schema import Recipe

SCHEMA = 1
Settings = Mapping[str, Any]


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes that come with the package."""
    return tuple(sorted(path.stem for path in content("export/recipes").glob("*.toml")))


def recipe_rows(name: str) -> tuple[str, ...]:
    """Names of the other rows that published tables have for a recipe's network, to be called `NAME@ROW`."""
    return tuple(_read_table(content("export/recipes") / f"{name}.toml").get("rows", {}))


def recipe(name: str) -> Recipe:
    """A recipe by name, or by the path of a TOML file; `NAME@ROW` is one of its rows."""
    return resolve([(name, recipe_settings(name))])[0]


def recipe_settings(name: str) -> Settings:
    """What a recipe says, and no more: by its name, the path of a TOML file, or `NAME@ROW` for one of its rows."""
    row = ""
    if "@" in name and not name.endswith(".toml"):  # folders and files may have one in their names
        name, row = name.rsplit("@", 1)
    if name.endswith(".toml"):
        return _read_settings(Path(name), row)
    names = recipe_names()
    if name not in names:
        hint = nearest(name, names) or ":"
        raise RecipeError(
            f"expected a .toml file or a recipe of the package, got {name!r:.100}{hint} `algm-deploy list` names them"
        )
    return _read_settings(content("export/recipes") / f"{name}.toml", row)


def _read_settings(path: Path, row: str = "") -> Settings:
    table = _read_table(path)
    rows = table.pop("rows", {})
    settings = {"name": path.stem, **settings_of(table, str(path))}
    if not row:
        return settings
    if not isinstance(rows, Mapping) or not isinstance(rows.get(row), Mapping):
        known = ", ".join(rows) if rows else "none"
        raise RecipeError(f"{path}: expected one of its rows ({known}), got {row!r:.100}{nearest(row, tuple(rows))}")
    changed = settings_of({"schema": SCHEMA, **rows[row]}, f"{path}, row {row}")
    # The row has figures of its own; those of the network without merging are the same.
    dense = {key: value for key, value in settings.get("published", {}).items() if key.endswith("_dense")}
    return {**settings, **changed, "name": f"{path.stem}@{row}", "published": dense | changed.get("published", {})}


def _read_table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise RecipeError(f"{path}: expected a recipe in TOML: {reason}") from error


def settings_of(table: Mapping[str, Any], source: str) -> Settings:
    """Checked settings of a recipe's table, as TOML or a manifest's JSON gives it; `source` opens every error."""
    version = table.get("schema")
    if version != SCHEMA:
        raise RecipeError(
            f"{source}: expected `schema = {SCHEMA}` of this release, got {shown(version)}: write it or update"
        )
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if key in _SECTIONS and not isinstance(value, Mapping):
            raise RecipeError(f"{source}: expected a table as {key}, got {shown(value)}")
        flat |= {f"{key}.{name}": part for name, part in value.items()} if key in _SECTIONS else {key: value}
    del flat["schema"]
    try:
        return {key: checked(key, value) for key, value in flat.items()}
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from error


def checked(key: str, value: object) -> Any:
    """The value of one setting in its field's type; RecipeError when the key is unknown or the value does not fit."""
    if key not in _FIELDS:
        hint = nearest(key, tuple(_FIELDS))
        raise RecipeError(f"expected a setting such as merging.clap_threshold, got {key!r:.100}{hint}")
    return converted(_FIELDS[key], value, key)


def budget_settings(clap: int | float, gbm: int | float) -> Settings:
    """Settings by which so many windows and tokens merge: counts, or shares."""
    rules = {"merging.clap": "budget", "merging.gbm": "budget"}
    return rules | {"merging.clap_budget": clap, "merging.gbm_budget": gbm}


def resolve(layers: Sequence[tuple[str, Settings]]) -> tuple[Recipe, tuple[str, ...]]:
    """Lays settings over each other, lowest authority first: `[("variant.yml", ...), ("recipe x", ...), ...]`.

    Returns the recipe and one printable line for each setting on which two sources disagree.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    conflicts = []
    for source, settings in layers:
        for key, value in settings.items():
            if key in values and values[key] != value and key != "name":
                conflicts.append(f"{key}: {source} says {value}, {origin[key]} says {values[key]}; {source} wins")
            values[key], origin[key] = value, source
    source = " over ".join(name for name, _ in reversed(layers))
    return _build(values, source), tuple(conflicts)


def with_method(settings: Settings, below: Settings) -> Settings:
    """Settings that say where to merge, to be laid over others, with their method: ALGM's where they name none.

    Without it they would be read by the method of `below`, as a checkpoint's of CTS.
    """
    if "merging.method" not in below or not any(key.startswith("merging.") for key in settings):
        return settings
    unread = {key: getattr(DENSE, key.removeprefix("merging.")) for key in below if key in _METHOD_KEYS}
    return {"merging.method": DENSE.method, **unread, **settings}


def to_table(recipe: Recipe) -> dict[str, Any]:
    """A recipe as a JSON-ready table that `from_table` reads back to an equal recipe."""
    return {"schema": SCHEMA, **asdict(recipe)}


def from_table(table: Mapping[str, Any], source: str) -> Recipe:
    """The recipe in a table that `to_table` wrote."""
    return _build(settings_of(table, source), source)


def flatten(facts: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a recipe or a part of it."""
    flat: dict[str, Any] = {}
    for item in fields(facts):
        value = getattr(facts, item.name)
        flat |= flatten(value, f"{prefix}{item.name}.") if is_dataclass(value) else {f"{prefix}{item.name}": value}
    return flat


def _build(values: Settings, source: str) -> Recipe:
    missing = [key for key in _REQUIRED if key not in values]
    if missing:
        raise RecipeError(
            f"{source}: expected {', '.join(missing)}, found none: add it to the recipe or give variant.yml"
        )
    parts: dict[str, dict[str, Any]] = {name: {} for name in ("", *_SECTIONS)}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        parts[section][name] = value
    try:
        return Recipe(**parts.pop(""), **{name: _SECTIONS[name](**part) for name, part in parts.items()})
    except (RecipeError, PlanError) as error:
        raise RecipeError(f"{source}: {error}") from error


def _required(kind: Any) -> list[str]:
    return [item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING]


_HINTS = get_type_hints(Recipe)
_SECTIONS: dict[str, Any] = {name: kind for name, kind in _HINTS.items() if is_dataclass(kind)}
_FIELDS: dict[str, Any] = {name: kind for name, kind in _HINTS.items() if name not in _SECTIONS} | {
    f"{section}.{name}": kind for section, owner in _SECTIONS.items() for name, kind in get_type_hints(owner).items()
}
_METHOD_KEYS = tuple(f"merging.{name}" for name in method_settings())
_REQUIRED = ["name", *(f"{section}.{name}" for section, owner in _SECTIONS.items() for name in _required(owner))]
