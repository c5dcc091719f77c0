"""Videos in and out, by OpenCV and the FFmpeg that comes with it.

Only files are opened: FFmpeg follows a playlist or a description of a stream in them to no address.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import cv2
import numpy as np
from numpy.typing import NDArray

from algm_deploy.bundle.files import require_utf8, write_atomically
from algm_deploy.errors import ImageError

# What OpenCV's FFmpeg can write for each kind of file; H.264 is not among it. Browsers play WebM.
_CODECS = {".mp4": "mp4v", ".m4v": "mp4v", ".mov": "mp4v", ".avi": "MJPG", ".mkv": "FFV1", ".webm": "VP90"}
VIDEO_SUFFIXES = {*_CODECS, ".mpg", ".mpeg"}

# Reads in a row that may fail before a video counts as ended: a damaged frame fails alike, and others follow it.
_ATTEMPTS = 64
_USUAL_RATE = 25.0
_LOG = logging.getLogger("algm_deploy")

# FFmpeg reports damage of every kind on the terminal; what matters of it is said by this module.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")


class Video:
    """The frames of a video file, RGB (H, W, 3) uint8, upright as the file says; use it in a `with` block.

    Attributes:
        rate: frames a second, 25 where the file does not say.
        length: frames that the file promises, None where it does not say; some kinds of file only estimate it.

    Raises:
        ImageError: no such file, or no video that FFmpeg can read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ImageError(f"{path}: no such file")
        require_utf8(path.absolute(), ImageError)
        with _quiet():  # the absolute path, as FFmpeg takes names with a colon for addresses
            self._capture = cv2.VideoCapture(str(path.absolute()), cv2.CAP_FFMPEG)
        if not self._capture.isOpened():
            raise ImageError(f"{path}: expected a video such as MP4 or WebM, FFmpeg cannot read it: it may be cut")
        rate, length = self._capture.get(cv2.CAP_PROP_FPS), self._capture.get(cv2.CAP_PROP_FRAME_COUNT)
        self.rate = rate if 0 < rate < 1000 else _USUAL_RATE
        self.length = int(length) if length > 0 else None

    def __iter__(self) -> Iterator[NDArray[np.uint8] | None]:
        """The frames from the first that was not read yet; None for one whose data is damaged.

        A file that ends before its promised length, because it was cut or because it keeps frames that are not to be
        shown, is told in the log.
        """
        shown = failed = 0
        while failed < _ATTEMPTS:
            there, frame = self._capture.read()
            if not there:
                failed += 1
                continue
            for _ in range(failed):
                yield None
            yield np.asarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), np.uint8)
            shown, failed = shown + failed + 1, 0
        if self.length and shown < self.length:
            _LOG.warning("%s: expected %d frames as its header says, found %d", self.path, self.length, shown)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._capture.release()


@contextmanager
def video_writer(path: Path, rate: float) -> Iterator[Callable[[NDArray[np.uint8]], None]]:
    """Yields a function that adds a frame, RGB (H, W, 3) uint8, to a video file.

        with video_writer(Path("labels.mp4"), rate=25) as write:
            write(frame)

    The file appears when the block ends, and not at all after an exception. Its suffix decides the format: `.mp4`,
    `.mov`, `.avi`, `.mkv` (lossless) or `.webm` (for browsers). Odd sides grow by a pixel, as codecs ask for.

    Raises:
        ImageError: a suffix of no such format, no such folder, frames of different sizes or none, or FFmpeg fails.
        BundleError: nothing can be written there.
    """
    if path.suffix.lower() not in _CODECS:
        raise ImageError(f"{path}: expected one of {', '.join(_CODECS)} as the suffix of a video to write")
    if not path.parent.is_dir():
        raise ImageError(f"{path}: expected a folder that exists for a video, got {path.parent}: make it first")
    require_utf8(path.absolute(), ImageError)
    with write_atomically(path) as temporary:
        writer = _Writer(path, temporary, rate)
        try:
            yield writer.write
        finally:
            writer.file.release()
        writer.check()


class _Writer:
    """Frames on their way to a file."""

    def __init__(self, path: Path, temporary: Path, rate: float) -> None:
        self.path, self.temporary, self.rate = path, temporary, rate
        self.file, self.size, self.count = cv2.VideoWriter(), (0, 0), 0

    def write(self, frame: NDArray[np.uint8]) -> None:
        size = frame.shape[:2]
        if not self.count:
            self._open(size)
        if size != self.size:
            raise ImageError(f"{self.path}: expected frames of the first one's size {self.size}, got {size}")
        even = cv2.copyMakeBorder(frame, 0, size[0] % 2, 0, size[1] % 2, cv2.BORDER_REPLICATE)
        self.file.write(cv2.cvtColor(even, cv2.COLOR_RGB2BGR))
        self.count += 1

    def check(self) -> None:
        """Counts the frames of the closed file, as OpenCV reports no failure to write."""
        if not self.count:
            raise ImageError(f"{self.path}: expected frames for a video, got none")
        with Video(self.temporary) as video:
            if video.length != self.count:
                raise ImageError(f"{self.path}: expected {self.count} frames in it, FFmpeg wrote {video.length}")

    def _open(self, size: tuple[int, int]) -> None:
        height, width = (side + side % 2 for side in size)
        codec = cv2.VideoWriter.fourcc(*_CODECS[self.path.suffix.lower()])
        with _quiet():
            self.file.open(str(self.temporary.absolute()), cv2.CAP_FFMPEG, codec, self.rate, (width, height))
        if not self.file.isOpened():
            raise ImageError(
                f"{self.path}: FFmpeg cannot write frames of {height}x{width} at {self.rate:g} a second: try another "
                "suffix"
            )
        self.size = size


@contextmanager
def _quiet() -> Iterator[None]:
    """Without OpenCV's own messages about a file that it cannot open: the error says it."""
    before = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        cv2.utils.logging.setLogLevel(before)
