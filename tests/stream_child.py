"""Commands in children whose standard streams are as no one thinks of.

Run as a program it reads requests, a line of JSON each: the name of the streams, the words of the command, and whether
it prepares its streams. It answers with the exit code. It imports little, so forking it takes a fraction of the time
that forking a process of tests takes.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import pty
import sys
from collections.abc import Callable
from contextlib import suppress

from tqdm import tqdm

from algm_deploy import cli
from algm_deploy.cli.saying import note, output, say, say_json, tell
from algm_deploy.errors import BundleError

LATIN = os.fsdecode(b"stra\xdfe \xfc")
"""A name in Latin-1, as an old disk has it: no UTF-8."""
AWKWARD = "-a b ü'" + "x" * 192
"""A dash, spaces, an umlaut, a quote, 200 bytes."""


def stream(descriptor: int, encoding: str = "ascii") -> io.TextIOWrapper:
    """As Python makes it of a descriptor in the C locale of old."""
    return io.TextIOWrapper(open(descriptor, "wb", closefd=False), encoding, "strict", line_buffering=descriptor == 2)


def lead(descriptor: int, place: str | int) -> None:
    os.dup2(os.open(place, os.O_WRONLY) if isinstance(place, str) else place, descriptor)
    setattr(sys, ("stdin", "stdout", "stderr")[descriptor], stream(descriptor))


def close(descriptor: int) -> None:
    os.close(descriptor)
    setattr(sys, ("stdin", "stdout", "stderr")[descriptor], None)  # as Python starts without it


def no_reader(descriptor: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    lead(descriptor, writer)


def broken_off(descriptor: int) -> None:
    """The descriptor went away below Python's object, as a daemon does it."""
    lead(descriptor, os.devnull)
    os.close(descriptor)


def terminal() -> None:
    _, end = pty.openpty()
    os.environ.update(NO_COLOR="1", TERM="dumb")
    for descriptor in (1, 2):
        lead(descriptor, end)


# How the streams are, and the exit code of a command that succeeds and of one that fails.
STREAMS: dict[str, tuple[Callable[[], object], int, int]] = {
    "ASCII, strict": (lambda: None, 0, 2),
    "stdout closed": (lambda: close(1), 0, 2),
    "stderr closed": (lambda: close(2), 0, 2),
    "all closed": (lambda: [close(descriptor) for descriptor in (0, 1, 2)], 0, 2),
    "stdout broken off": (lambda: broken_off(1), 0, 2),
    "stdout full": (lambda: lead(1, "/dev/full"), 2, 2),
    "stderr full": (lambda: lead(2, "/dev/full"), 0, 2),
    "no reader of stdout": (lambda: no_reader(1), 141, 2),
    "no reader of stderr": (lambda: no_reader(2), 0, 2),
    "terminal without colours": (terminal, 0, 2),
}


def work(options: argparse.Namespace) -> int:
    """Says what commands say, in every way that they have, of files with any name."""
    for name in (AWKWARD, LATIN, "街", "\ud800"):
        say(name)
        say_json({name: name})
        note(options, name)
        tell(name)
        with output():
            tqdm.write(name)
        logging.getLogger("algm_deploy").warning("%s", name)
    if options.verbose:
        raise BundleError(f"expected a file, got {LATIN} ü")
    return 0


def in_child(arrange: Callable[[], object], words: list[str]) -> int:
    """Exit code of `algm-deploy WORDS` in a forked process whose streams were arranged, and as it ends by itself.

    A program that cannot write its streams out when it ends has Python's exit code 120.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 99  # a traceback
    with suppress(BaseException):
        logging.lastResort = logging._StderrHandler(logging.WARNING)  # type: ignore[attr-defined]
        sys.stdin = sys.__stdin__
        for descriptor in (1, 2):
            lead(descriptor, os.devnull)
        arrange()
        chosen = cli._options

        def stubbed(arguments: list[str]) -> argparse.Namespace:
            options = chosen(arguments)
            options.run = work
            return options

        cli._options = stubbed  # type: ignore[assignment]
        try:
            code = cli.main(words)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        try:
            for one in (sys.stdout, sys.stderr):
                one.flush()
        except (OSError, ValueError):
            code = 120
    os._exit(code)


def answer_requests() -> None:
    prepare = cli.prepare_streams
    for line in sys.stdin:
        streams, words, prepared = json.loads(line)
        cli.prepare_streams = prepare if prepared else lambda: None  # type: ignore[assignment]
        sys.stdout.write(f"{in_child(STREAMS[streams][0], words)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    answer_requests()
