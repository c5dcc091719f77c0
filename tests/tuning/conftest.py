"""A bundle to tune and photos to tune it on; makes the helper module beside the tests importable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from algm_deploy.bundle.store import Bundle
from algm_deploy.evaluation.datasets import Dataset, open_dataset

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def bundle(tiny_bundle: Bundle, copied: Callable[..., Bundle]) -> Bundle:
    """The tiny network, to be changed."""
    return copied(tiny_bundle)


@pytest.fixture
def photos(blob_images: Callable[[int], np.ndarray], tmp_path: Path) -> Path:
    """Four photos of the tiny network's size. A label is how bright a pixel is, a third of the last photo has none."""
    root = tmp_path / "photos"
    for index, pixels in enumerate(blob_images(4)):
        labels = pixels[0] // 24
        labels[: 44 * (index == 3)] = 255
        for kind, content in (("images", pixels.transpose(1, 2, 0)), ("labels", labels)):
            path = root / kind / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(content).save(path)
    names = ", ".join(f'"{index}"' for index in range(11))
    (root / "classes.json").write_text(f'{{"names": [{names}]}}')
    return root


@pytest.fixture
def dataset(photos: Path) -> Dataset:
    """The same photos, opened."""
    return open_dataset("folder", photos)
