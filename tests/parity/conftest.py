"""Bundles to verify; makes the helper module beside the tests importable."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import parity_windows
from algm_deploy.parity import chain
from algm_deploy.runners import contract
from algm_deploy.runners.contract import Array
from algm_deploy.runners.torch.runner import TorchRunner

sys.path.insert(0, str(Path(__file__).parent))
Outputs = dict[str, Array]


@pytest.fixture(scope="session")
def windows(tiny_bundle: Bundle) -> Array:
    """Three different pictures for the tiny network."""
    return parity_windows(tiny_bundle.recipe, [], 3)


@pytest.fixture
def own_bundle(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    """A copy of the tiny bundle that a test may break."""
    return Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))


@pytest.fixture
def tampered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Outputs, Array], Outputs]], str]:
    """Registers a runtime that is PyTorch with its outputs changed: `change(outputs, images) -> outputs`."""

    def register(change: Callable[[Outputs, Array], Outputs]) -> str:
        class Tampered(TorchRunner):
            def infer(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> Outputs:
                return change(super().infer(feeds, outputs), feeds["image"])

        def runner(bundle: Bundle, runtime: str) -> contract.Runner:
            return Tampered(bundle) if runtime == "tampered" else contract.runner(bundle, runtime)

        monkeypatch.setattr(chain, "runner", runner)
        return "tampered"

    return register
