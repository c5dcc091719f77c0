"""What the commands write: results to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec


def say(line: str = "") -> None:
    """A line of the result."""
    print(line)


def say_json(value: Any) -> None:
    """A record, or several, as JSON with the names of their fields."""
    print(json.dumps(msgspec.to_builtins(value), indent=1))


def note(options: argparse.Namespace, line: str) -> None:
    """What a person should know beside the result; nothing with --quiet."""
    if not options.quiet:
        print(f"note: {line}", file=sys.stderr)


def word(path: Path) -> str:
    """A path as a shell takes it."""
    return quote(str(path))
