"""A checkpoint of the published code."""

from __future__ import annotations

from pathlib import Path

import pytest
from official_files import TINY, official, tensors, variant, write


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The tiny network's `checkpoint.pth`, `variant.yml` beside it."""
    return write(tmp_path, official(tensors(TINY)), variant(TINY))
