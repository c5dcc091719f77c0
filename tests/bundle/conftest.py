"""A manifest with a record of each kind, as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from algm_deploy.bundle.manifest import manifest_of, write_manifest

OLD = Path(__file__).resolve().parents[1] / "data" / "manifests" / "schema1.json"


@pytest.fixture(scope="session")
def full_manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What this release writes of it, as text."""
    folder = tmp_path_factory.mktemp("manifest")
    write_manifest(folder, manifest_of(json.loads(OLD.read_text()), OLD))
    return (folder / "manifest.json").read_text()


@pytest.fixture
def table(full_manifest: str) -> dict[str, Any]:
    """The same as JSON, to be changed."""
    found: dict[str, Any] = json.loads(full_manifest)
    return found
