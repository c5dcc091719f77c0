"""Pictures by name: of folders, of lists of files, and of Parquet tables.

Only names are gathered here; a worker reads a picture when it is due. So all machines have to see the files at the same
paths.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from algm_deploy.errors import DatasetError, ImageError
from algm_deploy.pictures.preprocessing import decoded_photo, read_photo
from algm_deploy.pictures.sources import find_images
from algm_deploy.wording import first_few

LIST, PARQUET = ".txt", ".parquet"
_PATH, _BYTES = "path", "bytes"
_MOST_PIXELS = 170_000_000  # of an encoded picture in a table; the limit that servers have at most


class Item(Struct, frozen=True):
    """A picture: the file it lies in, the row where that is a Parquet table, and the name of its label map."""

    name: str
    file: str
    row: int = -1


def find_items(sources: Sequence[Path]) -> list[Item]:
    """All pictures of photos, folders, lists and tables, in this order.

    A list is a text file (`.txt`) with the path of a picture a line, relative to the list's folder. A table
    (`.parquet`) has the column `path`; it names files, relative to the table's folder, unless a column `bytes` holds
    the pictures, encoded. Both may also be fields of one column `image`. A name is the picture's path from the folder
    that holds all of them; in a table with `bytes`, its `path`.

    Raises:
        DatasetError: a source is not there, holds no picture or cannot be read, or two pictures have one name.
    """
    files: list[tuple[Path, Path]] = []  # with the folder that a source stands for
    items: list[Item] = []
    for source in sources:
        ending = source.suffix.lower()
        if ending == LIST:
            files += [(path, path.parent) for path in _listed(source)]
        elif ending == PARQUET:
            paths, inside = _table(source)
            if inside:
                items += [Item(_within(path, source), str(source.resolve()), row) for row, path in enumerate(paths)]
            else:
                files += [(path, path.parent) for path in _beside(source, paths)]
        else:
            base = source if source.is_dir() else source.parent
            files += [(path.absolute(), base.absolute()) for path in find_images(source)]
    if files:
        root = os.path.commonpath({base for _, base in files})
        items += [Item(os.path.relpath(path, root), str(path)) for path, _ in files]
    _check_names(items)
    return items


def read_item(item: Item) -> NDArray[np.uint8]:
    """The pixels of a picture, RGB (H, W, 3).

    Raises:
        ImageError: it cannot be read.
    """
    if item.row < 0:
        return read_photo(Path(item.file))
    content = _row_bytes(item.file, item.row)
    return decoded_photo(content, f"{item.file}, {item.name}", _MOST_PIXELS)


def label_name(item: Item) -> str:
    """What the label map of a picture is called, without suffix."""
    return str(Path(item.name).with_suffix(""))


def _listed(path: Path) -> list[Path]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: expected a list of pictures, the path of one a line: {error}") from error
    return _beside(path, [line.strip() for line in lines if line.strip()])


def _beside(source: Path, paths: Sequence[str]) -> list[Path]:
    """Paths from a list or a table; a missing file is found out by the worker that reads it."""
    if not paths:
        raise DatasetError(f"{source}: expected the paths of pictures, found none")
    folder = source.parent.absolute()
    return [Path(os.path.normpath(folder / path)) for path in paths]


def _within(path: str, source: Path) -> str:
    """A name that leads out of no folder."""
    parts = Path(path).parts
    if not parts or Path(path).is_absolute() or ".." in parts:
        raise DatasetError(f"{source}: expected names below a folder in the column {_PATH}, got {path!r:.100}")
    return path


def _check_names(items: Sequence[Item]) -> None:
    if not items:
        raise DatasetError("expected pictures, found none")
    counts = Counter(map(label_name, items))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise DatasetError(
            f"expected a name of its own for every picture's label map, {first_few(twice)} would be written twice: "
            "rename one of each, or run them one after the other into different folders"
        )


# ------------------------------------------------------------------------------------------------------------- Parquet


def _table(path: Path) -> tuple[list[str], bool]:
    """The column `path` of a table, and whether it has pictures as well."""
    file, columns = opened_table(path)
    prefix = next((prefix for prefix in ("", "image.") if f"{prefix}{_PATH}" in columns), None)
    if prefix is None:
        raise DatasetError(
            f"{path}: expected the column {_PATH}, and {_BYTES} where the pictures are inside, by themselves or in a "
            f"column image; found {', '.join(columns) or 'none'}"
        )
    paths = [path for table in file.iter_batches(columns=[f"{prefix}{_PATH}"]) for path in _column(table, _PATH)]
    if not all(isinstance(one, str) and one for one in paths):
        raise DatasetError(f"{path}: expected a text in every row of the column {_PATH}")
    return paths, f"{prefix}{_BYTES}" in columns


def opened_table(path: Path) -> tuple[Any, list[str]]:
    """A Parquet file, and the dotted names of its columns."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise DatasetError(f"{path}: expected pyarrow to read it: `pip install 'algm-deploy[ray]'`") from error
    try:
        file = parquet.ParquetFile(path)
        return file, [file.schema.column(index).path for index in range(len(file.schema.names))]
    except (OSError, arrow.ArrowInvalid) as error:
        raise DatasetError(f"{path}: expected a Parquet file: {' '.join(str(error).split())[:200]}") from error


def _column(batch: Any, name: str) -> list[Any]:
    """A column of a batch, or of the struct that is its only column."""
    if name in batch.schema.names:
        return list(batch.column(name).to_pylist())
    return [row and row[name] for row in batch.column(0).to_pylist()]


# Groups of rows that were read last: table, first row, pictures. Two, as some threads still ask for rows of one when
# others have come to the next.
_last: deque[tuple[str, int, list[Any]]] = deque(maxlen=2)
_reading = Lock()


def _row_bytes(file: str, row: int) -> bytes:
    """The encoded picture of a row; its group is read once, and threads that want it too wait for that."""
    with _reading:
        held = next((one for one in _last if one[0] == file and one[1] <= row < one[1] + len(one[2])), None)
        if held is None:
            try:
                held = (file, *_read_group(file, row))
            except DatasetError as error:
                raise ImageError(str(error)) from error
            _last.append(held)
    _, first, rows = held
    found = rows[row - first]
    if not isinstance(found, bytes):
        raise ImageError(f"{file}, row {row}: expected an encoded picture, got {type(found).__name__}")
    return found


def _read_group(path: str, row: int) -> tuple[int, list[Any]]:
    file, columns = opened_table(Path(path))
    column = _BYTES if _BYTES in columns else f"image.{_BYTES}"
    for first, end, group in _groups(file):
        if row < end:
            return first, _column(file.read_row_group(group, columns=[column]).combine_chunks().to_batches()[0], _BYTES)
    raise DatasetError(f"{path}: expected row {row}, it has {file.metadata.num_rows}: it has changed")


def _groups(file: Any) -> Iterator[tuple[int, int, int]]:
    first = 0
    for group in range(file.num_row_groups):
        end = first + file.metadata.row_group(group).num_rows
        yield first, end, group
        first = end
