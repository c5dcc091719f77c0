"""Miniature trees in the official layouts; wrong layouts are explained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from algm_deploy.errors import DatasetError, ImageError
from algm_deploy.evaluation.datasets import IGNORE, SPECS, Dataset, open_dataset, read_classes
from algm_deploy.wording import dataset_title


def photo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 2)).save(path)


def label(path: Path, values: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array([values, values], np.uint8)).save(path)


def ade20k(root: Path) -> None:
    for name in ("ADE_val_00000002", "ADE_val_00000001"):
        photo(root / "images" / "validation" / f"{name}.jpg")
        label(root / "annotations" / "validation" / f"{name}.png", [0, 1, 150, 2])


def cityscapes_train_ids(root: Path) -> None:
    for city, name in (("munster", "munster_000000_000019"), ("lindau", "lindau_000001_000019")):
        photo(root / "leftImg8bit" / "val" / city / f"{name}_leftImg8bit.png")
        label(root / "gtFine" / "val" / city / f"{name}_gtFine_labelTrainIds.png", [255, 0, 18, 1])
        label(root / "gtFine" / "val" / city / f"{name}_gtFine_labelIds.png", [0, 7, 33, 8])


def cityscapes_download(root: Path) -> None:
    cityscapes_train_ids(root)
    for path in root.rglob("*_labelTrainIds.png"):
        path.unlink()


def pascal_context(root: Path) -> None:
    voc = root / "VOCdevkit" / "VOC2010"
    for name in ("2008_000002", "2008_000003", "2008_000009"):
        photo(voc / "JPEGImages" / f"{name}.jpg")
        label(voc / "SegmentationClassContext" / f"{name}.png", [0, 1, 59, 255])
    listing = voc / "ImageSets" / "SegmentationContext" / "val.txt"
    listing.parent.mkdir(parents=True)
    listing.write_text("2008_000003\n2008_000002\n")


def coco_stuff10k(root: Path) -> None:
    for name in ("COCO_train2014_000000000077", "COCO_train2014_000000000086"):
        photo(root / "images" / "test2014" / f"{name}.jpg")
        label(root / "annotations" / "test2014" / f"{name}_labelTrainIds.png", [0, 1, 171, 2])


def camvid_segnet(root: Path) -> None:
    for name in ("0001TP_008550", "Seq05VD_f00000"):
        photo(root / "CamVid" / "test" / f"{name}.png")
        label(root / "CamVid" / "testannot" / f"{name}.png", [11, 0, 10, 1])


def camvid_split_folders(root: Path) -> None:
    for name in ("0001TP_008550", "Seq05VD_f00000"):
        photo(root / "images" / "test" / f"{name}.jpg")
        label(root / "annotations" / "test" / f"{name}.png", [255, 0, 10, 1])


TREES = {
    # registered name, tree -> names, class count, labels of the first sample, slices
    ("ade20k", ade20k): (["ADE_val_00000001", "ADE_val_00000002"], 150, [255, 0, 149, 1], {"all"}),
    ("cityscapes", cityscapes_train_ids): (
        ["lindau/lindau_000001_000019", "munster/munster_000000_000019"],
        19,
        [255, 0, 18, 1],
        {"lindau", "munster"},
    ),
    ("cityscapes", cityscapes_download): (
        ["lindau/lindau_000001_000019", "munster/munster_000000_000019"],
        19,
        [255, 0, 18, 1],
        {"lindau", "munster"},
    ),
    ("pascal_context", pascal_context): (["2008_000002", "2008_000003"], 60, [0, 1, 59, 255], {"all"}),
    ("pascal_context_59", pascal_context): (["2008_000002", "2008_000003"], 59, [255, 0, 58, 255], {"all"}),
    ("coco_stuff10k", coco_stuff10k): (
        ["COCO_train2014_000000000077", "COCO_train2014_000000000086"],
        171,
        [255, 0, 170, 1],
        {"all"},
    ),
    ("camvid", camvid_segnet): (["0001TP_008550", "Seq05VD_f00000"], 11, [255, 0, 10, 1], {"0001TP", "Seq05VD"}),
    ("camvid", camvid_split_folders): (["0001TP_008550", "Seq05VD_f00000"], 11, [255, 0, 10, 1], {"0001TP", "Seq05VD"}),
}


@pytest.mark.parametrize("case", TREES, ids=lambda case: case[1].__name__)
def test_official_layouts(tmp_path: Path, record_property: Callable[[str, object], None], case: tuple) -> None:
    name, build = case
    names, classes, labels, slices = TREES[case]
    build(tmp_path)
    dataset = open_dataset(name, tmp_path)
    assert [sample.name for sample in dataset.samples] == names
    assert len(dataset.class_names) == len(set(dataset.class_names)) == len(dataset.palette) == classes
    assert dataset.labels_of(dataset.samples[0]).tolist() == [labels, labels]
    assert {sample.slice for sample in dataset.samples} == slices
    assert all(sample.image_path.is_file() for sample in dataset.samples)
    record_property("support", f"layout {name}")


def test_colours_are_the_data_sets_own_or_distinct() -> None:
    assert SPECS["cityscapes"].classes.palette[11] == (220, 20, 60)
    assert SPECS["coco_stuff10k"].classes.palette[:4] == ((128, 0, 0), (0, 128, 0), (128, 128, 0), (0, 0, 128))
    assert len(set(SPECS["coco_stuff10k"].classes.palette)) == 171


def test_every_registered_data_set_has_a_tree() -> None:
    assert {name for name, _ in TREES} == set(SPECS)


def test_a_data_set_may_lie_in_its_own_sub_folder(tmp_path: Path) -> None:
    ade20k(tmp_path / "ADEChallengeData2016")
    assert len(open_dataset("ade20k", tmp_path).samples) == 2
    pascal_context(tmp_path)
    assert len(open_dataset("pascal_context", tmp_path / "VOCdevkit" / "VOC2010").samples) == 2


def test_the_cityscapes_ids_are_the_nineteen_evaluated_ones(tmp_path: Path) -> None:
    cityscapes_download(tmp_path)
    lookup = open_dataset("cityscapes", tmp_path).lookup
    evaluated = {stored: index for stored, index in enumerate(lookup.tolist()) if 0 <= index < IGNORE}
    assert sorted(evaluated.values()) == list(range(19))
    # road, person, car and bicycle by the official table, and the ids it leaves out
    assert (evaluated[7], evaluated[24], evaluated[26], evaluated[33]) == (0, 11, 13, 18)
    assert all(lookup[stored] == IGNORE for stored in (*range(7), 9, 10, 14, 15, 16, 18, 29, 30, 255))
    assert lookup[34] == -1


# ---------------------------------------------------------------------------------------------------- any folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "classes.json").write_text(
        json.dumps({"names": ["sky", "road"], "palette": [[1, 2, 3], [4, 5, 6]], "ignore_label": 9})
    )
    for name in ("day/a_1", "day/b_1", "night/a_2"):
        photo(tmp_path / "images" / f"{name}.JPG")
        label(tmp_path / "labels" / f"{name}.png", [0, 1, 9, 255])
    return tmp_path


def test_a_folder_with_a_class_file(folder: Path) -> None:
    dataset = open_dataset("folder", folder)
    assert dataset.class_names == ("sky", "road")
    assert [sample.name for sample in dataset.samples] == ["day/a_1", "day/b_1", "night/a_2"]
    assert dataset.labels_of(dataset.samples[0])[0].tolist() == [0, 1, 255, 255]
    assert read_classes(folder / "classes.json").palette == ((1, 2, 3), (4, 5, 6))
    assert [sample.name for sample in open_dataset("folder", folder, "night").samples] == ["a_2"]


@pytest.mark.parametrize(
    ("slice_by", "slices"),
    [
        (None, {"all": 3}),
        ("folder", {"day": 2, "night": 1}),
        (r"/(\w)_", {"a": 2, "b": 1}),
        (r"\d$", {"1": 2, "2": 1}),
    ],
)
def test_slices(folder: Path, slice_by: str | None, slices: dict[str, int]) -> None:
    dataset = open_dataset("folder", folder, slice_by=slice_by)
    assert Counter(sample.slice for sample in dataset.samples) == slices


def test_slices_from_a_column(folder: Path) -> None:
    table = folder / "weather.csv"
    table.write_text("\ufeffimage,city,weather\nday/a_1,Delft,rain\nday/b_1,Delft,sun\n\nnight/a_2,Gouda,rain\n")
    for column, slices in {"weather": {"rain": 2, "sun": 1}, "city": {"Delft": 2, "Gouda": 1}}.items():
        dataset = open_dataset("folder", folder, slice_by=f"{table}:{column}")
        assert Counter(sample.slice for sample in dataset.samples) == slices


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("image,city\nday/a_1,Delft", "expected the column 'weather' behind the first, got image, city"),
        ("weather\nday/a_1", "expected the column 'weather' behind the first"),
        ("", "expected the column 'weather'"),
        ("image,weather\nday/a_1,rain\nday/b_1,", "a row with 'weather' for each image, found none for 'day/b_1'"),
        ("image,weather\nday/a_1\n", "found none for 'day/a_1'"),
        ("image,weather\n\udcff", "expected a table of slices as CSV"),
        (None, "expected a table of slices as CSV: .*No such file"),
    ],
)
def test_tables_of_slices_that_do_not_work_are_refused(folder: Path, content: str | None, words: str) -> None:
    if content is not None:
        (folder / "slices.csv").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DatasetError, match=words):
        open_dataset("folder", folder, slice_by=f"{folder / 'slices.csv'}:weather")


def test_slice_expressions_that_do_not_work_are_refused(folder: Path) -> None:
    with pytest.raises(DatasetError, match="matches no part of 'night/a_2'"):
        open_dataset("folder", folder, slice_by="day")
    with pytest.raises(DatasetError, match="regular expression"):
        open_dataset("folder", folder, slice_by="(")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "expected JSON"),
        ("[]", "expected JSON"),
        ("{}", "expected JSON"),
        ('{"names": "sky"}', "distinct class names"),
        ('{"names": []}', "distinct class names"),
        ('{"names": ["a", "a"]}', "distinct class names"),
        ('{"names": ["a", 3]}', "distinct class names"),
        ('{"names": ["a", "b"], "palette": [[0, 0, 0]]}', "colour in"),
        ('{"names": ["a", "b"], "palette": [[0, 0], [1, 1]]}', "expected JSON"),
        ('{"names": ["a", "b"], "palette": [[0, 0, 0], [1, 1, 256]]}', "colour in 0..255"),
        ('{"names": ["a", "b"], "ignore_label": 1}', "ignore_label"),
        ('{"names": ["a", "b"], "ignore_label": 256}', "ignore_label"),
    ],
)
def test_a_wrong_class_file_is_explained(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "classes.json").write_text(content)
    with pytest.raises(DatasetError, match=f"classes.json: .*{words}"):
        read_classes(tmp_path / "classes.json")


def test_a_folder_without_a_class_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"classes.json: expected a class file"):
        open_dataset("folder", tmp_path)


def test_two_photos_with_one_label_file_are_refused(folder: Path) -> None:
    photo(folder / "images" / "day" / "a_1.png")
    with pytest.raises(DatasetError, match="share one name"):
        open_dataset("folder", folder)


def test_a_folder_without_splits_is_called_what_it_is(folder: Path) -> None:
    assert open_dataset("folder", folder).title == "a folder of pictures"
    assert open_dataset("folder", folder, "all").samples == open_dataset("folder", folder).samples
    assert open_dataset("folder", folder, "night").title == "folder night"
    halves = {split: dataset_title("folder", split) for split in ("all-first-half", "-first-half")}
    assert halves == {"all-first-half": "first half of a folder of pictures", "-first-half": "folder -first-half"}
    assert dataset_title("camvid", "val-second-half") == "second half of camvid val"


def test_a_split_may_be_called_all(folder: Path) -> None:
    for kind in ("images", "labels"):
        (folder / kind / "night").rename(folder / kind / "all")
    assert len(open_dataset("folder", folder, "all").samples) < len(open_dataset("folder", folder).samples)


# -------------------------------------------------------------------------------------------------- wrong layouts


def message(name: str, root: Path, split: str | None = None) -> str:
    with pytest.raises(DatasetError) as caught:
        open_dataset(name, root, split)
    return str(caught.value)


def test_a_wrong_layout_says_what_was_looked_for_and_found(tmp_path: Path) -> None:
    camvid_split_folders(tmp_path)
    text = message("ade20k", tmp_path)
    assert f"{tmp_path}/images/validation/*.jpg with {tmp_path}/annotations/validation/*.png (no photo found)" in text
    assert "ADEChallengeData2016/images/validation" in text
    assert text.endswith(f"{tmp_path} holds: annotations/, images/")
    assert text.startswith(f"expected ade20k val in {tmp_path}, looked for")
    assert "no such folder" in message("ade20k", tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    assert message("ade20k", tmp_path / "empty").endswith("holds: nothing")
    (tmp_path / "empty" / "classes.json").write_text('{"names": ["sky"]}')
    assert message("folder", tmp_path / "empty").startswith("expected a folder of pictures in /")


def test_missing_labels_are_counted_and_named(tmp_path: Path) -> None:
    ade20k(tmp_path)
    gone = tmp_path / "annotations" / "validation" / "ADE_val_00000002.png"
    gone.unlink()
    assert f"1 of 2 labels missing, first {gone}" in message("ade20k", tmp_path)


def test_listed_photos_that_are_missing_are_counted_and_named(tmp_path: Path) -> None:
    pascal_context(tmp_path)
    gone = tmp_path / "VOCdevkit" / "VOC2010" / "JPEGImages" / "2008_000003.jpg"
    gone.unlink()
    assert f"1 of 2 photos missing, first {gone}" in message("pascal_context", tmp_path)
    (tmp_path / "VOCdevkit" / "VOC2010" / "ImageSets" / "SegmentationContext" / "val.txt").unlink()
    assert "SegmentationContext/val.txt (no photo found)" in message("pascal_context", tmp_path)


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    assert "got the data set 'cityscape' (did you mean cityscapes?): name one of these" in message(
        "cityscape", tmp_path
    )
    text = message("nothing like it", tmp_path)
    assert "folder for labelled photos of your own" in text
    assert text.endswith("got the data set 'nothing like it': name one of these, in a command with --dataset")
    assert "splits val, train, got 'validation'" in message("ade20k", tmp_path, "validation")


def test_a_label_value_without_meaning_names_the_file(tmp_path: Path) -> None:
    camvid_split_folders(tmp_path)
    dataset = open_dataset("camvid", tmp_path)
    label(dataset.samples[1].label_path, [0, 12, 77, 255])
    with pytest.raises(DatasetError, match=r"Seq05VD_f00000.png: .*values up to 10 and 255.*\[12, 77\]"):
        dataset.labels_of(dataset.samples[1])
    Image.fromarray(np.full((2, 4), 300, np.uint16)).save(dataset.samples[1].label_path)
    with pytest.raises(DatasetError, match=r"\[300\]"):
        dataset.labels_of(dataset.samples[1])
    photo(dataset.samples[1].label_path)
    with pytest.raises(ImageError, match="one class index a pixel"):
        dataset.labels_of(dataset.samples[1])


def test_what_systems_keep_beside_files_is_no_photo(folder: Path) -> None:
    """A Mac's resource forks, hidden folders, a folder called like a photo, and a link to nothing."""
    before = [sample.name for sample in open_dataset("folder", folder).samples]
    images = folder / "images"
    for name in ("day/._a_1.png", ".thumbnails/a_1.png", ".ghost.png"):
        (images / name).parent.mkdir(exist_ok=True)
        (images / name).write_bytes(b"not meant to be read")
    (images / "folder.png").mkdir()
    (images / "link.png").symlink_to(images / "nowhere.png")
    assert [sample.name for sample in open_dataset("folder", folder).samples] == before


def test_photos_in_folders_that_are_links_are_photos(folder: Path, tmp_path: Path) -> None:
    """A large folder lies on another disk: without it, the figures would be those of a part."""
    expected = open_dataset("folder", folder).samples
    (folder / "images" / "night").rename(tmp_path / "disk")
    (folder / "images" / "night").symlink_to(tmp_path / "disk")
    assert open_dataset("folder", folder).samples == expected


def turned(root: Path, orientation: int, labels: tuple[int, int], stored: tuple[int, int] = (2, 4)) -> Dataset:
    """One photo of the height and width `stored`, with an EXIF orientation, and labels of others."""
    for kind in ("images", "labels"):
        (root / kind).mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", stored[::-1]).save(root / "images" / "a.jpg", exif=exif)
    Image.fromarray(np.arange(labels[0] * labels[1], dtype=np.uint8).reshape(labels) % 3).save(root / "labels/a.png")
    (root / "classes.json").write_text('{"names": ["a", "b", "c"]}')
    return open_dataset("folder", root)


def test_labels_of_the_upright_photo_fit(tmp_path: Path) -> None:
    dataset = turned(tmp_path, 6, (4, 2))
    photo, labels = dataset.read(dataset.samples[0])
    assert (photo.shape, labels.shape) == ((4, 2, 3), (4, 2))


@pytest.mark.parametrize(
    ("orientation", "labels", "stored", "kind"),
    [
        (6, (2, 4), (2, 4), "are those"),
        (6, (4, 4), (4, 4), "may be those"),  # square: nothing tells
        (3, (2, 4), (2, 4), "may be those"),  # turned by half
        (2, (2, 4), (2, 4), "may be those"),  # mirrored
    ],
)
def test_labels_that_may_lie_elsewhere_than_the_photo_are_refused(
    tmp_path: Path, orientation: int, labels: tuple[int, int], stored: tuple[int, int], kind: str
) -> None:
    dataset = turned(tmp_path, orientation, labels, stored)
    with pytest.raises(
        DatasetError, match=rf"a\.png: .* EXIF orientation {orientation} turns, .* {kind} of the pixels"
    ):
        dataset.read(dataset.samples[0])


def test_labels_that_are_turned_like_their_photo_fit(tmp_path: Path) -> None:
    dataset = turned(tmp_path, 6, (4, 4), (4, 4))
    path = dataset.samples[0].label_path
    stored, exif = np.asarray(Image.open(path)), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(stored).save(path, exif=exif)
    assert np.array_equal(dataset.read(dataset.samples[0])[1], np.rot90(stored, -1))


def test_labels_of_another_photo_are_no_matter_of_orientation(tmp_path: Path) -> None:
    dataset = turned(tmp_path, 6, (3, 3))
    with pytest.raises(DatasetError, match=r"\(4, 2\), got \(3, 3\): the files do not belong together"):
        dataset.read(dataset.samples[0])


def test_a_subset_is_spread_over_the_names(folder: Path) -> None:
    dataset = open_dataset("folder", folder)

    def names(part: Dataset) -> list[str]:
        return [sample.name for sample in part.samples]

    assert names(dataset.subset(2)) == ["day/a_1", "night/a_2"]
    assert names(dataset.subset(99)) == names(dataset)


def test_camvid_as_it_lies_on_disk(shared_dir: Path) -> None:
    dataset = open_dataset("camvid", shared_dir / "data" / "camvid")
    assert len(dataset.samples) == 233
    assert Counter(s.slice for s in dataset.samples) == {"Seq05VD": 171, "0001TP": 62}
    assert dataset.class_names == read_classes(shared_dir / "data" / "camvid" / "classes.json").names
    assert len(open_dataset("camvid", dataset.root, "val").samples) == 101
    labels = np.stack([dataset.labels_of(sample) for sample in dataset.samples])
    assert np.mean(labels == IGNORE) == pytest.approx(0.0383, abs=5e-5)
    assert np.mean(labels[labels != IGNORE] == 3) == pytest.approx(0.26836, abs=1e-5)
