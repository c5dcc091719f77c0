"""Work for the processes of a cluster; nothing heavy, as workers die and start again."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path


class Deadly:
    """Ends its process: once at the item `once`, always at the item `always`; gives the others back."""

    device_name = "here"

    def __init__(self, folder: str) -> None:
        self._mark = Path(folder) / "died"

    def __call__(self, items: Sequence[bytes]) -> list[bytes]:
        if b"once" in items and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if b"always" in items:
            os.kill(os.getpid(), signal.SIGKILL)
        return list(items)


class Broken:
    """Raises an error."""

    device_name = "none"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, items: Sequence[bytes]) -> list[bytes]:
        raise self._error
