"""The browser of the tests that look at pages."""

from __future__ import annotations

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Its program on the search path, under whichever name."""
    return next(filter(None, map(shutil.which, NAMES)), None)
