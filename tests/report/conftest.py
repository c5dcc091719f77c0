"""A browser that draws pages."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import numpy as np
import pytest
from chromium import NAMES, find_chromium
from PIL import Image


@pytest.fixture(scope="session")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, int], tuple[np.ndarray, str]]:
    """Draws a page in a window of a width and height; returns its pixels and the browser's complaints."""
    browser = find_chromium()
    if browser is None:
        pytest.skip(f"needs Chromium, found no {' or '.join(NAMES)}")
    folder = tmp_path_factory.mktemp("browser")
    quiet = ("background-networking", "component-update", "sync", "gpu", "quic")
    flags = ["--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr"]
    flags += [f"--disable-{name}" for name in quiet]

    def draw(page: str, width: int, height: int) -> tuple[np.ndarray, str]:
        source, target = folder / "page.html", folder / "page.png"
        source.write_text(page, encoding="utf-8")
        command = [browser, *flags, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}",
                   f"--screenshot={target}", source.as_uri()]  # fmt: skip
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        return np.asarray(Image.open(target).convert("RGB")), done.stderr

    return draw
