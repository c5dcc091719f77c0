"""From flags to recipe settings, and the types of flags."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable
from math import isfinite, nan
from typing import Any

from algm_deploy.errors import RecipeError
from algm_deploy.recipe.reading import checked

SETTINGS = {
    "image_size": "network.image_size",
    "tau": "merging.clap_threshold",
    "tail": "output",
    "precision": "precision",
    "max_batch": "max_batch",
}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Recipe settings from flags."""
    given = {key: getattr(options, flag) for flag, key in SETTINGS.items() if getattr(options, flag) is not None}
    for text in options.set:
        key, separator, value = text.partition("=")
        if not separator:
            raise RecipeError(f"expected --set KEY=VALUE, such as merging.order=raster; got {text!r}")
        given[key] = checked(key, parsed(value))
    return given


def parsed(value: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return value


def size(text: str) -> tuple[int, int]:
    """HEIGHTxWIDTH in pixels."""
    height, separator, width = text.partition("x")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH in pixels, such as 512x1024, got {text!r}")
    return positive(height), positive(width)


def finite(text: str) -> float:
    """A number, not infinity or NaN."""
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r:.50}")
    return number


def percent(text: str) -> float:
    """A number where a reference may also have a name."""
    try:
        return finite(text)
    except argparse.ArgumentTypeError as error:
        raise RecipeError(
            f"expected dense, clap, an mIoU in percent or a bundle as --reference, got {text!r}"
        ) from error


def count(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else positive(text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return up_to(999_999_999)(text)


def up_to(limit: int) -> Callable[[str], int]:
    """A whole number from 1 to `limit`, such as that of pictures that lie in memory at once."""

    def number(text: str) -> int:
        if not text.isdecimal() or not text.strip("0"):
            raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r:.50}")
        if len(text) > len(str(limit)) or int(text) > limit:
            raise argparse.ArgumentTypeError(f"expected a whole number up to {limit}, got {text!r:.50}")
        return int(text)

    return number
