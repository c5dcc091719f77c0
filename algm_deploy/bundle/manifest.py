"""`manifest.json`: read strictly, brought up to date, written whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from algm_deploy.bundle.files import reading_errors, write_atomically
from algm_deploy.bundle.records import SCHEMA, Manifest
from algm_deploy.bundle.signature import merge_names
from algm_deploy.bundle.upgrade import upgraded
from algm_deploy.errors import BundleError, RecipeError
from algm_deploy.recipe.conversion import converted
from algm_deploy.recipe.reading import from_table, to_table

MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle's folder.

    Raises:
        BundleError: there is none, it cannot be read, or it is not what this release or an earlier one wrote.
    """
    file = folder / MANIFEST
    with reading_errors(file):
        if not file.is_file():
            raise BundleError(
                f"{folder}: expected a bundle with {MANIFEST}, found none: name the folder that `deploy` wrote"
            )
        content = file.read_bytes()
    try:
        table = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: expected JSON, got {_reason(error)}: copy or export the bundle again") from error
    return manifest_of(table, file)


def manifest_of(table: Any, file: Path) -> Manifest:
    """The manifest in a table as JSON gives it; `file` is named in errors.

    Raises:
        BundleError: another schema, or a table that no step wrote.
    """
    version = table.get("schema") if isinstance(table, dict) else None
    if type(version) is not int or version not in (1, SCHEMA):
        raise BundleError(f"{file}: expected bundle schema {SCHEMA}, got {version!r:.100}: export it with this release")
    try:
        return _checked(upgraded(table) if version == 1 else table)
    except RecipeError as error:
        raise BundleError(
            f"{file}: {_said(error)}: it was edited, remove that entry and run the step that writes it, or export again"
        ) from error


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Writes it, and returns what a reader will find.

    Raises:
        BundleError: a value is none that JSON holds, such as NaN, or none of its field; nothing is written.
    """
    file = folder / MANIFEST
    try:
        table = {"schema": SCHEMA, **msgspec.to_builtins(manifest), "recipe": to_table(manifest.recipe)}
        text = json.dumps(table, indent=1)
        found = _checked(json.loads(text))
    except (TypeError, ValueError, RecursionError, RecipeError) as error:
        raise BundleError(f"{file}: {_said(error)}: nothing was written") from error
    with write_atomically(file) as path:
        path.write_text(text + "\n", encoding="utf-8")
    return found


def _checked(table: Mapping[str, Any]) -> Manifest:
    """The manifest in a table of today's schema; RecipeError, with the place, where it is none."""
    entries = {key: part for key, part in table.items() if key != "schema"}
    recipe = converted(dict[str, Any], entries.get("recipe"), "recipe")
    manifest: Manifest = converted(Manifest, entries | {"recipe": from_table(recipe, "recipe")}, "")
    merges = merge_names(manifest.recipe.merging)
    if manifest.signature is not None and manifest.signature.merges != merges:
        raise RecipeError(f"signature.merges: expected those of the recipe, {merges}, got {manifest.signature.merges}")
    for listed in (manifest.files, manifest.replacing):
        for name, entry in listed.items():
            for one in (name, *entry.uses):
                if not _is_inside(one):
                    raise RecipeError(f"expected relative paths inside the bundle as files, got {one!r:.100}")
    return manifest


def checked_name(name: str) -> str:
    """The name of a file inside a bundle; BundleError where it leads elsewhere."""
    if not _is_inside(name):
        raise BundleError(f"expected a relative path inside the bundle, got {name!r:.100}")
    return name


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return inside and "\\" not in name and name != MANIFEST


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".splitlines()[0][:200]
