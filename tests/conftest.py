"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root_dir() -> Path:
    """The source checkout these tests belong to."""
    return ROOT


@pytest.fixture(scope="session")
def vectors_dir() -> Path:
    """Golden outputs of the published ALGM modules."""
    return ROOT / "tests" / "data" / "vectors"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Trained checkpoints and photos that may not ship with the project (`models/`, `data/`), beside the checkout."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the trained checkpoints and photos that do not ship with the project, looked in {folder}")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips `gpu` tests, with the reason, where no CUDA device is present."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))
