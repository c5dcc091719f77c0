"""Data sets in their official folder layouts: which files belong together, what the stored label values mean.

Adding a data set is adding one entry to `SPECS`. Stored label values become class indices through a table of 256
entries, so a value that has no meaning in a data set is an error that names the file, never a silently ignored pixel.
CamVid has been run on its photos; of the others the layout is tested on miniature trees.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algm_deploy.errors import DatasetError
from algm_deploy.pictures.preprocessing import orientation_of, read_indices, read_photo
from algm_deploy.pictures.sources import IMAGE_SUFFIXES, files_below
from algm_deploy.recipe.schema import Color
from algm_deploy.wording import dataset_title

IGNORE = 255
"""Label of pixels that count for nothing, in every data set after its mapping."""

_NOT_A_LABEL = -1


@dataclass(frozen=True)
class Sample:
    """One photo and its label file. `name` is unique in the data set; `slice` groups photos for figures by slice."""

    name: str
    image_path: Path
    label_path: Path
    slice: str


@dataclass(frozen=True)
class Dataset:
    """An opened data set: samples sorted by name, and `lookup` (256,) int16 from stored label value to class index."""

    name: str
    split: str
    root: Path
    class_names: tuple[str, ...]
    palette: tuple[Color, ...]
    samples: tuple[Sample, ...]
    lookup: NDArray[np.int16] = field(repr=False, compare=False)

    @property
    def title(self) -> str:
        """Data set and split, for people."""
        return dataset_title(self.name, self.split)

    def labels_of(self, sample: Sample) -> NDArray[np.uint8]:
        """Class index of every pixel (H, W), `IGNORE` where a pixel does not count.

        Raises:
            ImageError: the label file cannot be read as indices.
            DatasetError: it holds a value without a meaning in this data set.
        """
        stored = read_indices(sample.label_path)
        within = stored.size > 0 and stored.min() >= 0 and stored.max() < len(self.lookup)
        labels = self.lookup[stored] if within else np.full(stored.shape, _NOT_A_LABEL, np.int16)
        if (labels == _NOT_A_LABEL).any():
            strange = np.unique(stored[labels == _NOT_A_LABEL])[:5].tolist()
            known = np.flatnonzero(self.lookup != _NOT_A_LABEL)
            raise DatasetError(
                f"{sample.label_path}: {self.name} stores values up to {known[known < IGNORE].max()} and {known.max()} "
                f"for unlabelled, got {strange}: check that these are this data set's labels"
            )
        return labels.astype(np.uint8)

    def read(self, sample: Sample) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """A photo (H, W, 3) RGB, upright, and the class index of each of its pixels (H, W) as `labels_of` has them.

        Raises:
            ImageError: a file cannot be read.
            DatasetError: as `labels_of`; or the labels are of another size, or of the photo before its EXIF orientation
                turned it, or it cannot be told whether they are.
        """
        photo, labels = read_photo(sample.image_path), self.labels_of(sample)
        _check_alignment(sample, photo.shape[:2], labels.shape)
        return photo, labels

    def subset(self, count: int) -> Dataset:
        """The same data set with at most `count` samples, evenly spread over the sorted names so that slices stay."""
        picked = np.unique(np.linspace(0, len(self.samples) - 1, min(count, len(self.samples))).round().astype(int))
        return replace(self, samples=tuple(self.samples[index] for index in picked))


def _check_alignment(sample: Sample, upright: tuple[int, ...], labels: tuple[int, ...]) -> None:
    """Whether labels of this height and width lie on the pixels of an upright photo of that one.

    Some tools draw labels on the photo as it is stored, others on it as EXIF turns it. The published evaluation turns
    photos and not labels, so it is right for the second kind alone. Where the orientation exchanges the sides of a
    photo that is not square, its size tells the kind.
    """
    orientation = orientation_of(sample.image_path)
    turned = orientation > 1 and orientation_of(sample.label_path) == 1
    stored = upright[::-1] if orientation > 4 else upright
    if labels == upright and (stored != upright or not turned):
        return
    if not turned or labels not in (upright, stored):
        raise DatasetError(
            f"{sample.label_path}: expected the photo's height and width {upright}, got {labels}: the files do not "
            "belong together"
        )
    kind = "are those of the pixels before that" if labels != upright else "may be those of the pixels before that"
    raise DatasetError(
        f"{sample.label_path}: expected labels of the upright photo, which its EXIF orientation {orientation} turns, "
        f"got some of {labels} that {kind}: save the photo without the orientation, turned as its labels are"
    )


@dataclass(frozen=True)
class Classes:
    """Names and colours in index order, and the stored value of unlabelled pixels."""

    names: tuple[str, ...]
    palette: tuple[Color, ...]
    ignore_label: int = IGNORE


@dataclass(frozen=True)
class Layout:
    """Where a split's photos and labels lie under the root; `{split}` stands for the split's folder name.

    A photo is `images/NAME<image ending>`, its label `labels/NAME<label ending>`; NAME may contain folders. With
    `names`, a file that lists one NAME a line, only the listed photos belong to the split.
    """

    images: str
    image_endings: tuple[str, ...]
    labels: str
    label_ending: str
    lookup: NDArray[np.int16]
    names: str | None = None


@dataclass(frozen=True)
class Spec:
    """What is known about a data set by its name.

    `splits` maps the split's name to its folder, the first one is what published figures use; `folders` are where,
    under the folder a user names, the data set may lie; `slice_of` turns a sample's name into its slice.
    """

    classes: Classes
    splits: Mapping[str, str]
    layouts: tuple[Layout, ...]
    folders: tuple[str, ...] = (".",)
    slice_of: Callable[[str], str] = lambda name: "all"


def open_dataset(name: str, root: Path, split: str | None = None, slice_by: str | None = None) -> Dataset:
    """Opens a data set by its registered name, or `folder`: photos, label PNGs and a `classes.json`.

    `split` defaults to the one published figures use (`folder`: none, the photos lie directly in `images`, which
    `all` means too).
    `slice_by` replaces the data set's own slices: "folder" groups by sub-folder; `FILE.csv:COLUMN` looks a sample's
    name, of the file's first column, up in a column by its title; anything else is a regular expression searched in the
    sample's name, whose first group (or whole match) is the slice.

    Raises:
        DatasetError: unknown name or split, or another layout than expected, with what was looked for and found.
    """
    spec = _folder_spec(root, split) if name == "folder" else _spec(name)
    split = next(iter(spec.splits)) if split is None else split
    if split not in spec.splits:
        raise DatasetError(f"{name} has the splits {', '.join(spec.splits)}, got {split!r}")
    slice_of = spec.slice_of if slice_by is None else _slicer(slice_by)
    layout, base, names = _matching_layout(name, root, split, spec)
    samples = []
    for sample, image in sorted(names.items()):
        label = _folder(base, layout.labels, spec.splits[split]) / (sample + layout.label_ending)
        samples.append(Sample(sample, image, label, slice_of(sample)))
    return Dataset(name, split, root, spec.classes.names, spec.classes.palette, tuple(samples), layout.lookup)


def read_classes(path: Path) -> Classes:
    """Reads a class file: JSON with `names`, optionally `palette` (RGB triples) and `ignore_label` (default 255).

    Without a palette the classes get PASCAL VOC's colours from index 1 on.

    Raises:
        DatasetError: the file is missing or says something else.
    """
    try:
        return _classes(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise DatasetError(f"{path}: expected a class file with the names of the classes, {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f'{path}: expected JSON such as {{"names": ["sky", "road"]}}, got {error!r}') from error
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from error


def _classes(content: dict[str, Any]) -> Classes:
    names, ignore = tuple(content["names"]), content.get("ignore_label", IGNORE)
    distinct = {name for name in names if isinstance(name, str) and name}
    if not isinstance(content["names"], list) or not 1 <= len(names) == len(distinct) <= IGNORE:
        raise DatasetError(f"expected 1 to {IGNORE} distinct class names, got {len(names)}: {names[:5]}")
    palette = tuple(
        (int(r), int(g), int(b)) for r, g, b in content.get("palette", map(_colour, range(1, len(names) + 1)))
    )
    if len(palette) != len(names) or not all(0 <= value <= 255 for color in palette for value in color):
        raise DatasetError(
            f"expected a colour in 0..255 for each of {len(names)} classes, got {len(palette)}: {palette[:5]}"
        )
    if not isinstance(ignore, int) or not len(names) <= ignore <= IGNORE:
        raise DatasetError(f"ignore_label must lie in {len(names)}..{IGNORE}, got {ignore!r}")
    return Classes(names, palette, ignore)


def _colour(index: int) -> Color:
    """PASCAL VOC's colour of an index: its bits dealt out to red, green and blue, highest bit of the colour first."""
    red, green, blue = (
        sum((index >> (3 * bit + channel) & 1) << (7 - bit) for bit in range(8)) for channel in range(3)
    )
    return red, green, blue


def _spec(name: str) -> Spec:
    if name not in SPECS:
        near = get_close_matches(name, SPECS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise DatasetError(
            f"expected {', '.join(SPECS)}, or folder for labelled photos of your own, got the data set {name!r}{hint}: "
            "name one of these, in a command with --dataset"
        )
    return SPECS[name]


def _folder_spec(root: Path, split: str | None) -> Spec:
    classes = read_classes(root / "classes.json")
    lookup = _lookup({index: index for index in range(len(classes.names))}, ignored=(classes.ignore_label,))
    layouts = tuple(
        Layout("images/{split}", IMAGE_SUFFIXES, f"{labels}/{{split}}", ".png", lookup)
        for labels in ("annotations", "labels")
    )
    # The title of a data set without splits opens it again, unless a split of the user's is called so.
    if split is None or (split == "all" and not (root / "images" / split).is_dir()):
        return Spec(classes, {"all": "."}, layouts)
    return Spec(classes, {split: split}, layouts)


def _matching_layout(name: str, root: Path, split: str, spec: Spec) -> tuple[Layout, Path, dict[str, Path]]:
    """The first layout whose photos all have labels, the folder it lies in, and its photos by name."""
    attempts = []
    for base in (root / folder for folder in spec.folders):
        for layout in spec.layouts:
            images = _photos(base, layout, spec.splits[split])
            problem = _problem(base, layout, spec.splits[split], images)
            if not problem:
                return layout, base, images
            attempts.append(problem)
    found = _listing(root) if root.is_dir() else "no such folder"
    title = dataset_title(name, split)
    raise DatasetError(f"expected {title} in {root}, looked for {'; or '.join(attempts)}; {root} holds: {found}")


def _photos(base: Path, layout: Layout, split: str) -> dict[str, Path]:
    """Photos by sample name; of a listed split, the listed ones whether they exist or not."""
    folder = _folder(base, layout.images, split)
    if layout.names is not None:
        listing = base / layout.names.format(split=split)
        names = listing.read_text().split() if listing.is_file() else []
        return {name: folder / (name + layout.image_endings[0]) for name in names}
    photos: dict[str, Path] = {}
    for path in files_below(folder) if folder.is_dir() else ():
        ending = next((end for end in layout.image_endings if path.name.lower().endswith(end.lower())), None)
        if ending is not None:
            name = PurePosixPath(path.relative_to(folder)).as_posix()[: -len(ending)]
            if name in photos:
                raise DatasetError(f"{path} and {photos[name].name} share one name and so one label file: rename one")
            photos[name] = path
    return photos


def _problem(base: Path, layout: Layout, split: str, images: dict[str, Path]) -> str:
    """Why a layout does not fit, with what was looked for and found; empty where it fits."""
    folder, labels = _folder(base, layout.images, split), _folder(base, layout.labels, split)
    sought = f"{folder}/*{layout.image_endings[0]} with {labels}/*{layout.label_ending}"
    if not images:
        where = f" named by {base / layout.names.format(split=split)}" if layout.names else ""
        return f"{sought}{where} (no photo found)"
    for what, paths in (
        ("photos", list(images.values())),
        ("labels", [labels / (name + layout.label_ending) for name in images]),
    ):
        missing = [path for path in paths if not path.is_file()]
        if missing:
            return f"{sought} ({len(missing)} of {len(paths)} {what} missing, first {missing[0]})"
    return ""


def _folder(base: Path, pattern: str, split: str) -> Path:
    return base / pattern.format(split=split)


def _listing(folder: Path, limit: int = 8) -> str:
    entries = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    return ", ".join(entries[:limit] + [f"{len(entries) - limit} more"] * (len(entries) > limit)) or "nothing"


def _slicer(slice_by: str) -> Callable[[str], str]:
    if not slice_by:
        raise DatasetError("expected 'folder', FILE.csv:COLUMN or a regular expression for slices, got an empty text")
    if slice_by == "folder":
        return _parent_folder
    file, _, column = slice_by.rpartition(":")
    if file.lower().endswith(".csv"):
        return _column_slicer(Path(file), column)
    try:
        pattern = re.compile(slice_by)
    except re.error as error:
        raise DatasetError(
            f"expected 'folder', FILE.csv:COLUMN or a regular expression for slices, got {slice_by!r}: {error}"
        ) from error

    def slice_of(name: str) -> str:
        match = pattern.search(name)
        if match is None:
            raise DatasetError(
                f"the slice expression {slice_by!r} matches no part of {name!r}: make it match every name"
            )
        return str(match.group(1) if pattern.groups else match.group())

    return slice_of


def _column_slicer(path: Path, column: str) -> Callable[[str], str]:
    """Slices from a table with titles in its first row and samples' names in its first column."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            titles, *rows = [row for row in csv.reader(stream) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"{path}: expected a table of slices as CSV: {error}") from error
    if column not in titles[1:]:
        raise DatasetError(f"{path}: expected the column {column!r} behind the first, got {', '.join(titles)}")
    place = titles.index(column)
    slices = {row[0]: row[place] for row in rows if len(row) > place}

    def slice_of(name: str) -> str:
        if not slices.get(name):
            raise DatasetError(f"{path}: expected a row with {column!r} for each image, found none for {name!r}")
        return slices[name]

    return slice_of


def _parent_folder(name: str) -> str:
    return PurePosixPath(name).parent.as_posix()


def _sequence(name: str) -> str:
    return PurePosixPath(name).name.split("_")[0]


def _lookup(indices: Mapping[int, int], ignored: tuple[int, ...]) -> NDArray[np.int16]:
    """Table (256,) from stored value to class index; 255 always means unlabelled, other values nothing."""
    table = np.full(256, _NOT_A_LABEL, np.int16)
    table[[*ignored, IGNORE]] = IGNORE
    table[list(indices)] = list(indices.values())
    return table


def _as_stored(classes: int, ignored: tuple[int, ...] = ()) -> NDArray[np.int16]:
    return _lookup({index: index for index in range(classes)}, ignored)


def _from_one(classes: int) -> NDArray[np.int16]:
    """Stored 0 is unlabelled, class k is stored as k + 1."""
    return _lookup({index + 1: index for index in range(classes)}, ignored=(0,))


# Cityscapes label ids in the order of the 19 evaluated classes; every other id up to 33 is not evaluated.
_CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_cityscapes_ids = _lookup(
    {stored: index for index, stored in enumerate(_CITYSCAPES_IDS)},
    ignored=tuple(stored for stored in range(34) if stored not in _CITYSCAPES_IDS),
)


def _cityscapes(label_ending: str, lookup: NDArray[np.int16]) -> Layout:
    return Layout("leftImg8bit/{split}", ("_leftImg8bit.png",), "gtFine/{split}", label_ending, lookup)


def _pascal(classes: Classes, lookup: NDArray[np.int16]) -> Spec:
    layout = Layout(
        "JPEGImages", (".jpg",), "SegmentationClassContext", ".png", lookup, "ImageSets/SegmentationContext/{split}.txt"
    )
    return Spec(classes, {"val": "val", "train": "train"}, (layout,), (".", "VOC2010", "VOCdevkit/VOC2010"))


_KNOWN = {
    name: _classes(content)
    for name, content in json.loads((Path(__file__).parent / "classes.json").read_text()).items()
}
_PASCAL = _KNOWN["pascal_context"]

SPECS: dict[str, Spec] = {
    "ade20k": Spec(
        _KNOWN["ade20k"],
        {"val": "validation", "train": "training"},
        (Layout("images/{split}", (".jpg",), "annotations/{split}", ".png", _from_one(150)),),
        (".", "ADEChallengeData2016"),
    ),
    "cityscapes": Spec(
        _KNOWN["cityscapes"],
        {"val": "val", "train": "train"},
        (
            _cityscapes("_gtFine_labelTrainIds.png", _as_stored(19)),
            _cityscapes("_gtFine_labelIds.png", _cityscapes_ids),
        ),
        slice_of=_parent_folder,
    ),
    "pascal_context": _pascal(_PASCAL, _as_stored(60)),
    "pascal_context_59": _pascal(Classes(_PASCAL.names[1:], _PASCAL.palette[1:]), _from_one(59)),
    "coco_stuff10k": Spec(
        _KNOWN["coco_stuff10k"],
        {"test": "test2014", "train": "train2014"},
        (Layout("images/{split}", (".jpg",), "annotations/{split}", "_labelTrainIds.png", _from_one(171)),),
    ),
    "camvid": Spec(
        _KNOWN["camvid"],
        {"test": "test", "val": "val", "train": "train"},
        (
            Layout("{split}", (".png",), "{split}annot", ".png", _as_stored(11, ignored=(11,))),
            Layout("images/{split}", (".jpg", ".png"), "annotations/{split}", ".png", _as_stored(11)),
        ),
        (".", "CamVid"),
        slice_of=_sequence,
    ),
}
"""Every data set by name, `folder` aside. Pascal-Context with 59 classes takes background for unlabelled."""
