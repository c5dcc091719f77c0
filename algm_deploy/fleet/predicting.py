"""Label maps of many pictures on a Ray cluster, as PNG files or in Parquet tables.

What is there tells what is done: every label map, and every table, appears whole or not at all. So a run that stopped,
wherever it did, goes on with the pictures that have no label map yet.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import msgspec
from tqdm import tqdm

from algm_deploy.bundle.files import storage_errors, write_atomically
from algm_deploy.bundle.records import Record, Threshold, storable
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import thread_limit
from algm_deploy.errors import AlgmDeployError, BundleError, ExecutionError
from algm_deploy.fleet.cluster import GIVEN_UP, Cluster
from algm_deploy.fleet.opening import Opening, opening_of
from algm_deploy.fleet.sources import Item, find_items, label_name, opened_table, read_item
from algm_deploy.pictures.preprocessing import preprocessing_fingerprint
from algm_deploy.pictures.sliding import Pending, Prediction
from algm_deploy.pictures.sources import WRITTEN
from algm_deploy.predictor import FAILURES_OF_A_BROKEN_RUNTIME, given_thresholds, thresholds_in_force
from algm_deploy.recipe.schema import Color
from algm_deploy.report.colors import classes_of
from algm_deploy.report.pictures import labels_picture

Format = Literal["png", "parquet"]
ABOUT, FAILURES = "predictions.json", "failures.json"
_LABELS, _TABLE = f"{WRITTEN[0]}.png", "labels-{}.parquet"


class About(Record, frozen=True, kw_only=True):
    """What made the label maps of a folder; a later run into it must be of the same."""

    files_sha256: dict[str, str]
    runtime: str
    thresholds: dict[str, Threshold]
    preprocessing_sha256: str
    format: Format
    class_names: tuple[str, ...]
    palette: tuple[Color, ...]


@dataclass(frozen=True)
class Outcome:
    """What a run did: pictures that got a label map, those that had one, and why others have none, by name."""

    done: int
    kept: int
    failures: dict[str, str] = field(default_factory=dict)


def predict(
    cluster: Cluster,
    bundle: Bundle,
    sources: Sequence[Path],
    output: Path,
    runtime: str | None = None,
    *,
    device: str | None = None,
    tau: float | None = None,
    gbm: float | None = None,
    dense: bool = False,
    format: Format = "png",
    progress: bool = True,
) -> Outcome:
    """Label maps of all pictures of `sources`, in `output`, which every machine of the cluster has to see.

    Args:
        cluster: of `connected`.
        bundle: as every machine sees it.
        sources: photos, folders, lists (`.txt`) and tables (`.parquet`), as `find_items` takes them.
        output: a folder. A picture a/b.jpg becomes a/b.labels.png there, or a row of one of the tables, which have the
            columns `path` (the picture's name), `labels` (that PNG), `height`, `width`, `patches` and `token_counts`
            (of all windows, after each merge). What made them stands in `predictions.json`, failures in
            `failures.json`.
        runtime: what executes; by default the best on a machine of the cluster.
        device: kind of device, such as `cpu`.
        tau, gbm, dense: as `Predictor` has them.
        format: `png` or `parquet`.
        progress: show a bar.

    Raises:
        DatasetError: as `find_items`.
        BundleError: another network, threshold or format wrote into this folder before; or it cannot be written.
        RuntimeUnavailableError: as `opening_of`.
    """
    items = find_items(sources)
    given = given_thresholds(bundle, tau, gbm, dense)
    opening = opening_of(cluster, bundle, runtime, device, tau=tau, gbm=gbm, dense=dense)
    classes = classes_of(bundle.recipe)
    about = About(
        files_sha256=opening.files,
        runtime=opening.runtime,
        thresholds=storable(thresholds_in_force(bundle, given)),
        preprocessing_sha256=preprocessing_fingerprint(bundle.recipe.protocol),
        format=format,
        class_names=classes.names,
        palette=classes.palette,
    )
    output = output.absolute()
    with storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    _claim(output, about)
    there = _tables_there(output) if format == "parquet" else _maps_there(output)
    left = [item for item in items if label_name(item) not in there]
    make = partial(Labeller, opening, str(output), format)
    work = cluster.run(make, [msgspec.json.encode(item) for item in left], opening.on_gpus)
    failures: dict[str, str] = {}
    kept, quiet = len(items) - len(left), None if progress else True
    with tqdm(total=len(items), initial=kept, desc="predict", unit="image", disable=quiet) as bar:
        for index, result, _ in work:
            why = GIVEN_UP if result is None else msgspec.json.decode(result, type=str)
            if why:
                failures[left[index].name] = why
                bar.set_postfix(failed=len(failures))
            bar.update()
    _write_json(output / FAILURES, dict(sorted(failures.items())))
    return Outcome(len(left) - len(failures), kept, failures)


class Labeller:
    """In a worker: label maps of a block of pictures, written. Results are why a picture has none, or empty.

    While the network runs, threads read the pictures that come next and write those that are done.
    """

    def __init__(self, opening: Opening, output: str, format: Format) -> None:
        self._predictor = opening.opened()
        self._output, self._format = Path(output), format
        self._classes = classes_of(self._predictor.bundle.recipe)
        grid = self._predictor.bundle.recipe.network.grid
        self._patches = grid[0] * grid[1]
        self._threads = ThreadPoolExecutor(max(2, thread_limit() or 0), "pictures")
        self._failures = 0
        self.device_name = self._predictor.device_name

    def __call__(self, items: Sequence[bytes]) -> list[bytes]:
        """Why a picture has no label map, for each item."""
        block = [msgspec.json.decode(item, type=Item) for item in items]
        rows = list(self._rows(block))
        if self._format == "parquet":
            self._write_table([row for row in rows if not isinstance(row, AlgmDeployError)])
        return [msgspec.json.encode(str(row) if isinstance(row, AlgmDeployError) else "") for row in rows]

    def _rows(self, block: Sequence[Item]) -> Iterator[dict[str, Any] | AlgmDeployError]:
        """The row of each picture, or why it has none; at most two batches of scores are in memory."""
        prepared = self._threads.map(self._prepared, block)
        before: Iterator[dict[str, Any] | AlgmDeployError] = iter(())
        for start in range(0, len(block), self._predictor.batch):
            items = block[start : start + self._predictor.batch]
            found = self._run([next(prepared) for _ in items])
            yield from before
            before = self._threads.map(self._finished, items, found)
        yield from before

    def _run(self, pictures: Sequence[Pending | AlgmDeployError]) -> list[Pending | AlgmDeployError]:
        """The pictures when they are done, each or its error."""
        ready = [one for one in pictures if isinstance(one, Pending)]
        errors = self._predictor.run_apart(ready) if ready else []
        for error in errors:
            self._failures = self._failures + 1 if isinstance(error, ExecutionError) else 0
            if self._failures == FAILURES_OF_A_BROKEN_RUNTIME:
                raise ExecutionError(
                    f"{error}; so for {self._failures} pictures in a row, the runtime is broken: mend it and run "
                    "again, what is done is kept"
                )
        told = iter(errors)
        return [next(told) or one if isinstance(one, Pending) else one for one in pictures]

    def _prepared(self, item: Item) -> Pending | AlgmDeployError:
        try:
            return self._predictor.prepared(read_item(item))
        except AlgmDeployError as error:
            return error

    def _finished(self, item: Item, found: Pending | AlgmDeployError) -> dict[str, Any] | AlgmDeployError:
        if isinstance(found, AlgmDeployError):
            return found
        prediction = found.prediction()
        content = self._png(prediction)
        if self._format == "png":
            path = self._output / f"{label_name(item)}{_LABELS}"
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(path) as place:
                place.write_bytes(content)
            content = b""
        height, width = prediction.labels.shape
        return {
            "path": item.name,
            "labels": content,
            "height": height,
            "width": width,
            "patches": len(prediction.anchors) * self._patches,
            "token_counts": prediction.token_counts.sum(0).tolist(),
        }

    def _png(self, prediction: Prediction) -> bytes:
        stream = BytesIO()
        labels_picture(prediction.labels, self._classes).save(stream, "PNG", compress_level=1)
        return stream.getvalue()

    def _write_table(self, rows: list[dict[str, Any]]) -> None:
        """A table whose name tells its pictures: a block that is done again takes its own place."""
        if not rows:
            return
        import pyarrow as arrow
        from pyarrow import parquet

        sizes = {name: arrow.int64() for name in ("height", "width", "patches")}
        kinds = {"path": arrow.string(), "labels": arrow.binary(), **sizes, "token_counts": arrow.list_(arrow.int64())}
        names = hashlib.sha256(json.dumps([row["path"] for row in rows]).encode()).hexdigest()[:16]
        with write_atomically(self._output / _TABLE.format(names)) as place:
            # PNG does not compress any further.
            parquet.write_table(arrow.Table.from_pylist(rows, arrow.schema(kinds)), place, compression="none")


def _claim(output: Path, about: About) -> None:
    """Refuses a folder whose label maps something else made."""
    path = output / ABOUT
    if path.exists():
        try:
            before = msgspec.json.decode(path.read_bytes(), type=About)
        except (OSError, msgspec.DecodeError) as error:
            raise BundleError(f"{path}: expected what made this folder's label maps: name another folder") from error
        if before != about:
            parts = [name for name in About.__struct_fields__ if getattr(before, name) != getattr(about, name)]
            raise BundleError(
                f"{output}: expected label maps of the same network and settings, those there are of other "
                f"{', '.join(parts)}: name another folder"
            )
        return
    _write_json(path, msgspec.to_builtins(about))


def _write_json(path: Path, content: Any) -> None:
    with write_atomically(path) as place:
        place.write_text(json.dumps(content, indent=1) + "\n")


def _maps_there(output: Path) -> set[str]:
    """Names of the pictures that have a label map as PNG."""
    found = set()
    for folder, _, files in os.walk(output):
        base = os.path.relpath(folder, output)
        found |= {os.path.normpath(f"{base}/{name.removesuffix(_LABELS)}") for name in files if name.endswith(_LABELS)}
    return found


def _tables_there(output: Path) -> set[str]:
    """The same of tables."""
    found: set[str] = set()
    for path in output.glob(_TABLE.format("*")):
        file, _ = opened_table(path)
        found |= {label_name(Item(name, "")) for name in file.read(columns=["path"]).column(0).to_pylist()}
    return found
