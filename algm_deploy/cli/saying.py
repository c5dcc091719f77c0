"""What the commands write: results to stdout, everything else to stderr; no stream and no name ends a command."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any, TextIO

import msgspec

from algm_deploy.errors import OutputError


def prepare_streams() -> None:
    """Makes the standard streams take any text, also those that are closed or know ASCII alone.

    What has no letter in a stream's encoding, such as the bytes of a name that is no UTF-8, is written as an escape. A
    closed descriptor would go to the next file that is opened, which libraries that print would then write into: it
    leads to nowhere instead.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is this one
        stream = getattr(sys, name)
        if stream is None or stream.closed:
            stream = Path(os.devnull).open("r+", encoding="utf-8")  # noqa: SIM115 - stays open
            setattr(sys, name, stream)
        if descriptor and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def output() -> Iterator[None]:
    """Writing to stdout inside the block: BrokenPipeError where nobody reads any more, OutputError where it fails."""
    try:
        yield
    except BrokenPipeError:
        silence(sys.stdout)
        raise
    except OSError as error:
        silence(sys.stdout)
        raise OutputError(
            f"expected to print the result, got {error.strerror} from the standard output: give it another place"
        ) from error


def silence(stream: TextIO) -> None:
    """Leads a stream that fails to nowhere, so that Python does not meet the failure again when it ends."""
    with suppress(OSError, ValueError):  # a stream without a descriptor holds nothing back
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(line: str = "", at_once: bool = False) -> None:
    """A line of the result; `at_once`: not only when the command ends."""
    with output():
        print(line, flush=at_once)


def say_json(value: Any) -> None:
    """A record, or several, as JSON with the names of their fields."""
    say(json.dumps(msgspec.to_builtins(value), indent=1))


def tell(line: str) -> None:
    """A line beside the result; that it cannot be written stops nothing."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def note(options: argparse.Namespace, line: str) -> None:
    """What a person should know beside the result; nothing with --quiet."""
    if not options.quiet:
        tell(f"note: {line}")


def word(path: Path) -> str:
    """A path as a shell takes it."""
    return quote(str(path))
