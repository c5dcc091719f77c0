"""Where pictures come from: files, folders, videos, and pictures in memory. All are read one by one, when they are due.

A picture that cannot be read becomes a `Failure` in its place, so that it does not stop the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from algm_deploy.errors import AlgmDeployError, DatasetError, ImageError
from algm_deploy.pictures.preprocessing import photo_of, read_photo
from algm_deploy.pictures.video import VIDEO_SUFFIXES, Video

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
WRITTEN = (".labels", ".overlay", ".tokens")
"""Ends of the names, without suffix, of what `predict` writes (label map, overlay, merged tokens): it is no input."""

AnyPath = str | os.PathLike[str]
Source = AnyPath | Image.Image | NDArray[np.uint8]
"""One picture; a path may also be a folder or a video, and an array (N, H, W, 3)."""
Sources = Source | Iterable[Source]


@dataclass(frozen=True)
class Picture:
    """Pixels (H, W, 3) RGB uint8 that were read; `path` is their file, `frame` their number in a video."""

    pixels: NDArray[np.uint8]
    path: Path | None = None
    frame: int | None = None


@dataclass(frozen=True)
class Failure:
    """A picture that cannot be predicted, and why; the error names the file."""

    error: ImageError
    path: Path | None = None
    frame: int | None = None


def find_images(paths: AnyPath | Sequence[AnyPath]) -> list[Path]:
    """Pictures among files and, in the order of their paths, below folders.

    Of the files that `files_below` finds in folders, pictures that `predict` wrote are left out. A file named by itself
    is taken whatever its name is: its reader will tell.

    Raises:
        DatasetError: a path is empty or does not exist, a folder cannot be listed, or no picture was found.
    """
    return _found(paths, {*IMAGE_SUFFIXES}, "pictures")


def find_sources(paths: AnyPath | Sequence[AnyPath]) -> list[Path]:
    """Pictures and videos, as `find_images` finds pictures."""
    return _found(paths, {*IMAGE_SUFFIXES, *VIDEO_SUFFIXES}, "pictures or videos")


def files_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Files below a folder, in the order of their paths; `above` are the resolved folders that it was reached through.

    Hidden names are left out: systems keep what belongs to a file beside it under such a name, `._a.jpg` for `a.jpg`.
    Links are followed, except where they lead nowhere or back to a folder above them.

    Raises:
        DatasetError: a folder cannot be listed.
    """
    try:
        here = folder.resolve()
        visible = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
        kinds = [(entry, entry.is_dir(), entry.is_file()) for entry in visible]
    except OSError as error:
        raise DatasetError(f"{folder}: expected a folder that can be listed, got {error.strerror}") from error
    if here in above:
        return
    for entry, is_folder, is_file in kinds:
        if is_folder:
            yield from files_below(entry, (*above, here))
        elif is_file:
            yield entry


def is_video(path: Path) -> bool:
    """Whether a file is a video by its name."""
    return path.suffix.lower() in VIDEO_SUFFIXES


def is_single(source: Sources) -> TypeGuard[Source]:
    """Whether something is one picture; all that is no kind of picture counts as one, which `pictures_of` refuses."""
    if isinstance(source, str | os.PathLike):
        path = named(source)
        return not path.is_dir() and not is_video(path)
    return not _is_several(source)


def pictures_of(source: Sources) -> Iterator[Picture | Failure]:
    """All pictures of a source, in order: of a folder those of `find_sources`, and every frame of a video.

    Raises:
        ImageError: at once, where a source is none.
        DatasetError: at once, where a path does not exist, or holds no picture.
    """
    if isinstance(source, str | os.PathLike):
        path = named(source)
        return chain.from_iterable(map(_read, find_sources(path) if path.is_dir() else [path]))
    if _is_several(source):
        return chain.from_iterable(map(_item, source))
    return iter([_in_memory(source)])


def _item(source: Source) -> Iterator[Picture | Failure]:
    """One of several: what is no picture fails in its place."""
    try:
        return pictures_of(source)
    except ImageError as error:
        return iter([Failure(error)])


def _read(path: Path) -> Iterator[Picture | Failure]:
    """The picture in a file, or a video's frames."""
    try:
        if not is_video(path):
            yield Picture(read_photo(path), path)
            return
        with Video(path) as video:
            for number, frame in enumerate(video):
                yield _frame(path, number, frame)
    except ImageError as error:
        yield Failure(error, path)


def _frame(path: Path, number: int, pixels: NDArray[np.uint8] | None) -> Picture | Failure:
    if pixels is not None:
        return Picture(pixels, path, number)
    return Failure(ImageError(f"{path}, frame {number}: expected a frame, its data is damaged"), path, number)


def _in_memory(source: Any) -> Picture:
    if isinstance(source, Image.Image):
        return Picture(photo_of(source))
    if isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.ndim == 3 and source.shape[2] == 3:
        pixels: NDArray[np.uint8] = np.ascontiguousarray(source)
        if pixels.size:
            return Picture(pixels)
    raise ImageError(f"expected a picture (a file, a PIL image, or an RGB array uint8 (H, W, 3)), got {_kind(source)}")


def _kind(source: Any) -> str:
    """What came instead of a picture, and what to do about it where that is known."""
    if isinstance(source, np.ndarray):
        return f"an array {source.dtype} {source.shape}"
    if hasattr(source, "__array__"):  # a PyTorch tensor among others: channels first or last, on a device, floating?
        return f"a {type(source).__name__}: give it as a NumPy array with the channels last"
    return f"{type(source).__name__}"


def _is_several(source: Sources) -> TypeGuard[Iterable[Source]]:
    if isinstance(source, np.ndarray):
        return source.ndim == 4
    other = isinstance(source, str | bytes | os.PathLike | dict | set) or hasattr(source, "__array__")
    return isinstance(source, Iterable) and not other


def read_photos(paths: Iterable[Path]) -> list[NDArray[np.uint8]]:
    """The pixels of photos, as `read_photo` reads them.

    Raises:
        ImageError: some cannot be read; all of them are named, so that the next try finds no further one.
    """
    photos, failures = [], []
    for path in paths:
        try:
            photos.append(read_photo(path))
        except ImageError as error:
            failures.append(str(error))
    if failures:
        raise ImageError("; ".join(failures))
    return photos


def named(path: AnyPath, kind: type[AlgmDeployError] = DatasetError) -> Path:
    """A path; an error of a kind where it is empty, which would be the current folder."""
    if not os.fspath(path):
        raise kind("expected the name of a file or a folder, got an empty one: check the variable it came from")
    return Path(path)


def _found(paths: AnyPath | Sequence[AnyPath], suffixes: set[str], what: str) -> list[Path]:
    given = [named(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    found: list[Path] = []
    for path in given:
        if not path.exists():
            raise DatasetError(f"{path}: expected {what} or a folder of them, found nothing of this name")
        found += [p for p in files_below(path) if _is_input(p, path, suffixes)] if path.is_dir() else [path]
    if not found:
        listed = ", ".join(map(str, given))
        raise DatasetError(f"{listed}: expected {what} ({', '.join(sorted(suffixes))}), found none")
    return found


def _is_input(path: Path, folder: Path, suffixes: set[str]) -> bool:
    names = (*path.relative_to(folder).parts[:-1], path.stem)
    return path.suffix.lower() in suffixes and not any(name.endswith(WRITTEN) for name in names)
