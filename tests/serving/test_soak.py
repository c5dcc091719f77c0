"""Long service: memory, open files and threads stay where they are over requests, good and bad.

Short by default; `--long` sends ten thousand.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from process_memory import resident

MOST_BYTES = 4 << 20  # what an allocator may keep at its own time; a leak of 1 KiB a request is 10 MB in the long form


def used() -> tuple[int, int, int]:
    """Bytes of memory, open files, threads."""
    return resident(), *(len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task"))


def test_requests_leave_nothing(client: Any, photos: list[np.ndarray], long_form: bool) -> None:
    stream = BytesIO()
    Image.fromarray(photos[0]).save(stream, "PNG")
    good = stream.getvalue()
    asked = [(good, 200), (good[:-30], 400), (good, 200), (b"", 400)]

    def send(requests: int) -> None:
        for number in range(requests):
            body, status = asked[number % len(asked)]
            assert client.ask("POST", f"/predict?tau={0.5 + number % 5 / 10}", body)[0] == status

    send(1000 if long_form else 50)
    memory, files, threads = used()
    send(10_000 if long_form else 50)
    later = used()
    assert later[0] - memory < MOST_BYTES
    assert later[1] <= files
    assert later[2] <= threads
