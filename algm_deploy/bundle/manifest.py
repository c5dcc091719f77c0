"""`manifest.json`: read strictly, brought up to date, written whole."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import msgspec

from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.records import SCHEMA, Manifest
from algm_deploy.bundle.upgrade import upgraded
from algm_deploy.errors import BundleError, RecipeError
from algm_deploy.recipe.conversion import converted
from algm_deploy.recipe.reading import from_table, to_table

MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle's folder.

    Raises:
        BundleError: there is none, or it is not what this release or an earlier one wrote.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise BundleError(
            f"{folder}: expected a bundle with {MANIFEST}, found none: name the folder that `deploy` wrote"
        )
    try:
        table = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{file}: expected JSON, got {_reason(error)}: copy or export the bundle again") from error
    return manifest_of(table, file)


def manifest_of(table: Any, file: Path) -> Manifest:
    """The manifest in a table as JSON gives it; `file` is named in errors.

    Raises:
        BundleError: another schema, or a table that no step wrote.
    """
    version = table.get("schema") if isinstance(table, dict) else None
    if version not in (1, SCHEMA) or isinstance(version, bool):
        raise BundleError(f"{file}: expected bundle schema {SCHEMA}, got {version!r:.100}: export it with this release")
    try:
        table = upgraded(table) if version == 1 else dict(table)
        table["recipe"] = from_table(table["recipe"], str(file))
    except (KeyError, TypeError, AttributeError, ValueError, RecipeError) as error:
        raise BundleError(f"{file}: expected the facts of a bundle, got {_reason(error)}: export it again") from error
    try:
        manifest: Manifest = converted(Manifest, table, "")
    except RecipeError as error:
        said = " ".join(str(error).split())[:400]
        raise BundleError(
            f"{file}: {said}: it was edited, remove that entry and run the step that writes it, or export again"
        ) from error
    for entries in (manifest.files, manifest.replacing):
        for name, entry in entries.items():
            for listed in (name, *entry.uses):
                checked_name(listed)
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Writes it, and returns what a reader will find.

    Raises:
        BundleError: a figure is NaN, or a value is none that JSON holds.
    """
    try:
        table = {**msgspec.to_builtins(manifest), "recipe": to_table(manifest.recipe)}
        text = json.dumps(table, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BundleError(f"expected finite JSON values as facts of a manifest, got {_reason(error)}") from error
    found = manifest_of(json.loads(text), folder / MANIFEST)
    with write_atomically(folder / MANIFEST) as path:
        path.write_text(text + "\n", encoding="utf-8")
    return found


def checked_name(name: str) -> str:
    """The name of a file inside a bundle; BundleError where it leads elsewhere."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name or name == MANIFEST:
        raise BundleError(f"expected a relative path inside the bundle, got {name!r:.100}")
    return name


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant}, which is no JSON")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".splitlines()[0][:200]
