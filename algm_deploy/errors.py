"""Every error a user can meet, by kind.

Each message says what was expected, what came, and what to do. The command line prints the message alone and exits with
`exit_code`: 1 a gate failed, 2 bad input, 3 built but nothing here can execute it.
"""

import errno
import re
from collections.abc import Sequence
from difflib import get_close_matches

# How PyTorch, oneDNN, ONNX Runtime, OpenCV and TensorRT say it, on the host and on a device; they share no class.
_MEMORY = re.compile(
    "(out of|not enough|insufficient) memory|allocate.* memory|bad.?alloc|could not create a primitive", re.IGNORECASE
)


def out_of_memory(error: Exception) -> bool:
    """Whether an error of any library says that memory ran out."""
    return isinstance(error, MemoryError) or bool(_MEMORY.search(str(error)))


class AlgmDeployError(Exception):
    """Base of every error raised on purpose by this package."""

    exit_code = 2


def shown(value: object) -> str:
    """Up to 100 characters of a value from a file, for a message."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write numbers of more than 4300 digits; hexadecimal ones can be read
        text = "a number of thousands of digits"
    return text[:100]


# What helps where the system refuses a file, by its error; there is nothing special to do about others.
_REMEDIES = {
    errno.EACCES: "change its permissions",
    errno.EPERM: "change its permissions",
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
}


def remedy(error: OSError, otherwise: str) -> str:
    """What to do about a file that the system refuses, `otherwise` as the last words."""
    special = _REMEDIES.get(error.errno or 0)
    return f"{special} or {otherwise}" if special else otherwise


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name that an unknown one resembles, as the end of a message; empty where it resembles none."""
    close = get_close_matches(name, known, 1, 0.5) or [key for key in known if key.endswith(f".{name}")][:1]
    return f": did you mean {close[0]}?" if close else ""


class CheckpointError(AlgmDeployError):
    """A checkpoint or its `variant.yml` cannot be used."""


class RecipeError(AlgmDeployError):
    """A recipe is unknown, malformed or contradicts itself."""


class BundleError(AlgmDeployError):
    """A bundle is incomplete, was changed after it was written, or does not fit the request."""


class ImageError(AlgmDeployError):
    """A picture cannot be read or does not fit the network."""


class DatasetError(AlgmDeployError):
    """A dataset folder does not have the layout that was asked for."""


class PlanError(AlgmDeployError):
    """A merge plan does not fit the network or the runtime."""


class ExportError(AlgmDeployError):
    """A network could not be written as ONNX."""


class BuildError(AlgmDeployError):
    """An engine or a native library could not be built."""


class RuntimeUnavailableError(AlgmDeployError):
    """The requested runtime is not installed, or no device here can execute it."""


class NotExecutedError(RuntimeUnavailableError):
    """The artifact was built, and no device here can execute it."""

    exit_code = 3


class ExecutionError(AlgmDeployError):
    """A runtime took the executable and failed while running it."""


class OutputError(AlgmDeployError):
    """The standard output does not take what is printed."""


class RequestError(AlgmDeployError):
    """A request to a server cannot be answered; `status` is its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ListenError(AlgmDeployError):
    """A server cannot listen on an address."""


class GateError(AlgmDeployError):
    """A measured value missed its gate."""

    exit_code = 1
