"""The command line. Exit codes: 0 done, 1 a gate failed, 2 bad input, 3 built but nothing here can execute it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from algm_deploy.cli.parser import parser
from algm_deploy.cli.saying import note, output, prepare_streams, tell
from algm_deploy.errors import AlgmDeployError, OutputError, out_of_memory, remedy


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; errors made for users are one sentence, without a traceback."""
    prepare_streams()
    command = "algm-deploy"
    try:
        options = _options(arguments)
        command = f"algm-deploy {options.command}"
        _listen(options)
        run: Callable[[argparse.Namespace], int] = options.run
        code = run(options)
        if chosen := getattr(options, "chosen", None):
            note(options, f"ran on {chosen}, the best that can execute here; --runtime chooses another")
        with output():
            sys.stdout.flush()  # here, where a failure is caught
        return code
    except AlgmDeployError as error:
        message, code = str(error), error.exit_code
    except ModuleNotFoundError as error:
        if str(error.name).startswith("algm_deploy"):
            raise
        message = f"expected the module {error.name}, found none: `algm-deploy doctor` says what to install"
        code = AlgmDeployError.exit_code
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except BrokenPipeError:  # such as `algm-deploy list | head`: whoever reads has enough
        return 141  # as a shell counts a process that ended by SIGPIPE
    except OSError as error:
        place, reason = f"{error.filename or 'a file'!s:.200}", error.strerror or str(error)
        message = f"expected to use {place}, got {reason}: {remedy(error, 'name another one')}"
        code = AlgmDeployError.exit_code
    except Exception as error:
        if not out_of_memory(error):
            raise
        said = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        message = f"expected more free memory ({said}): use smaller pictures or batches"
        code = AlgmDeployError.exit_code
    with suppress(OutputError, BrokenPipeError), output():
        sys.stdout.flush()  # what was printed before, if it can be
    tell(f"{command}: {message}")
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for; help and versions are printed, and end it."""
    try:
        return parser().parse_args(arguments)
    except SystemExit:
        with output():
            sys.stdout.flush()
        raise


def _listen(options: argparse.Namespace) -> None:
    """What the package logs goes to the standard error: warnings, more with --verbose, errors alone with --quiet."""
    level = logging.INFO if options.verbose else logging.ERROR if options.quiet else logging.WARNING
    logging.getLogger("algm_deploy").setLevel(level)
    if logging.lastResort is not None:  # what writes where a program has set up no logging of its own
        logging.lastResort.setLevel(level)
