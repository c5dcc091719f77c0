"""Files, folders, videos and pictures in memory, in order; what is no picture fails in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from algm_deploy.errors import DatasetError, ImageError
from algm_deploy.pictures.sources import Failure, Picture, find_images, find_sources, is_single, pictures_of
from algm_deploy.pictures.video import video_writer


def picture(value: int, size: tuple[int, int] = (16, 24)) -> np.ndarray:
    return np.full((*size, 3), value, np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two pictures, one deeper, a video of three frames, and much that is no input."""
    root = tmp_path / "photos"
    (root / "deep").mkdir(parents=True)
    for index, name in enumerate(("b.png", "a.JPG", "deep/c.tiff")):
        Image.fromarray(picture(40 * index)).save(root / name)
    with video_writer(root / "clip.mkv", 25) as write:
        for index in range(3):
            write(picture(200 + index))
    (root / "readme.txt").write_text("no picture")
    # A Mac's resource fork, a hidden file and folder, a folder called like a picture, a link to nothing, own results.
    (root / ".hidden").mkdir()
    (root / "clip.labels").mkdir()
    (root / "folder.jpg").mkdir()
    (root / "link.png").symlink_to(root / "nowhere.png")
    written = ("b.labels.png", "b.overlay.png", "b.tokens.png", "clip.overlay.mp4", "clip.labels/000000.png")
    for name in ("._a.jpg", ".b.png", ".hidden/d.png", *written):
        (root / name).write_bytes(b"not meant to be read")
    return root


def test_pictures_and_videos_are_found_in_the_order_of_their_paths(folder: Path) -> None:
    assert [p.name for p in find_images(folder)] == ["a.JPG", "b.png", "c.tiff"]
    assert [p.name for p in find_sources([str(folder)])] == ["a.JPG", "b.png", "clip.mkv", "c.tiff"]
    hidden = folder / ".hidden"
    assert find_images(hidden) == [hidden / "d.png"]  # named by hand
    assert find_images([folder / "readme.txt"]) == [folder / "readme.txt"]  # its reader will tell


def test_a_link_to_a_picture_is_one(folder: Path) -> None:
    (folder / "deep" / "again.png").symlink_to(folder / "b.png")
    assert [p.name for p in find_images(folder / "deep")] == ["again.png", "c.tiff"]


def test_what_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", [str(tmp_path / "nowhere")]):
        with pytest.raises(DatasetError, match="nowhere: expected pictures or a folder of them, found nothing"):
            find_images(path)
    with pytest.raises(DatasetError, match=r"expected pictures \(\.bmp.*\), found none"):
        find_images(tmp_path)
    with pytest.raises(DatasetError, match=r"expected pictures or videos \(\.avi"):
        find_sources(tmp_path)


@pytest.mark.parametrize("find", [find_images, find_sources, pictures_of, is_single])
def test_an_empty_name_is_not_the_current_folder(find: Any) -> None:
    with pytest.raises(DatasetError, match="expected the name of a file or a folder, got an empty one"):
        find("")


def kinds(folder: Path) -> Iterator[tuple[Any, list[int]]]:
    """What a user may give, and the first value of each picture."""
    arrays = [picture(7), picture(9)]
    yield picture(5), [5]
    yield np.flip(picture(5)), [5]  # a view with negative strides
    yield Image.fromarray(picture(6)), [6]
    yield np.stack(arrays), [7, 9]
    yield arrays, [7, 9]
    yield tuple(arrays), [7, 9]
    yield iter(arrays), [7, 9]
    yield folder / "b.png", [0]
    yield str(folder / "b.png"), [0]
    yield folder, [40, 0, 200, 201, 202, 80]
    yield folder / "clip.mkv", [200, 201, 202]
    yield [folder / "clip.mkv", Image.fromarray(picture(6)), np.stack(arrays)], [200, 201, 202, 6, 7, 9]
    yield [], []


def test_all_kinds_of_pictures(folder: Path) -> None:
    for source, values in kinds(folder):
        found = list(pictures_of(source))
        assert all(isinstance(one, Picture) for one in found)
        assert [int(one.pixels[0, 0, 0]) for one in found] == values
        assert all(one.pixels.shape == (16, 24, 3) and one.pixels.flags["C_CONTIGUOUS"] for one in found)


def test_pictures_know_where_they_came_from(folder: Path) -> None:
    names = [(one.path.name if one.path else None, one.frame) for one in pictures_of([folder, picture(1)])]
    clip = [("clip.mkv", 0), ("clip.mkv", 1), ("clip.mkv", 2)]
    assert names == [("a.JPG", None), ("b.png", None), *clip, ("c.tiff", None), (None, None)]


def test_one_or_several(folder: Path) -> None:
    several = [folder, folder / "clip.mkv", np.zeros((2, 8, 8, 3), np.uint8), [picture(1)], iter([]), []]
    single = [folder / "b.png", "nowhere.png", picture(1), Image.fromarray(picture(1)), None, b"a.png", {"a": 1}]
    assert [is_single(one) for one in several] == [False] * len(several)
    assert [is_single(one) for one in single] == [True] * len(single)


STRANGE = [
    (np.zeros((8, 8)), r"array float64 \(8, 8\)"),
    (np.zeros((8, 8, 3)), r"array float64 \(8, 8, 3\)"),
    (np.zeros((8, 8, 4), np.uint8), r"array uint8 \(8, 8, 4\)"),
    (np.zeros((8, 8), np.uint8), r"array uint8 \(8, 8\)"),
    (np.zeros((0, 8, 3), np.uint8), r"array uint8 \(0, 8, 3\)"),
    (torch.zeros(8, 8, 3, dtype=torch.uint8), "a Tensor: give it as a NumPy array with the channels last"),
    (torch.zeros(2, 8, 8, 3), "a Tensor: give it as a NumPy array"),
    (b"photo.jpg", "bytes"),
    ({"image": 1}, "dict"),
    (None, "NoneType"),
    (3, "int"),
]


@pytest.mark.parametrize(("source", "message"), STRANGE, ids=[message for _, message in STRANGE])
def test_what_is_no_picture(source: Any, message: str) -> None:
    with pytest.raises(ImageError, match=rf"RGB array uint8 \(H, W, 3\)\), got (an )?{message}"):
        pictures_of(source)
    before, failure, after = pictures_of([picture(1), source, picture(2)])
    assert isinstance(before, Picture)
    assert isinstance(failure, Failure)
    assert isinstance(after, Picture)
    assert failure.path is failure.frame is None


def test_a_stack_of_another_kind(folder: Path) -> None:
    for stack in (np.zeros((2, 8, 8, 3)), np.zeros((2, 3, 8, 8), np.uint8)):
        assert [type(one) for one in pictures_of(stack)] == [Failure, Failure]
    with pytest.raises(ImageError):
        pictures_of(np.zeros((1, 2, 8, 8, 3), np.uint8))


def test_what_cannot_be_read_fails_in_its_place(folder: Path) -> None:
    (folder / "aa.png").write_bytes(b"no picture")
    whole = (folder / "b.png").read_bytes()
    (folder / "b.png").write_bytes(whole[: len(whole) // 2])
    (folder / "clip.mkv").write_bytes(b"no video")
    found = list(pictures_of(folder))
    assert [type(one) for one in found] == [Picture, Failure, Failure, Failure, Picture]
    for failure, name in zip(found[1:4], ("aa.png", "b.png", "clip.mkv"), strict=True):
        assert isinstance(failure, Failure)
        assert failure.path == folder / name
        assert str(failure.error).startswith(f"{folder / name}: ")


def test_a_damaged_frame_fails_in_its_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [picture(1), None, picture(3)]
    monkeypatch.setattr("algm_deploy.pictures.sources.Video.__iter__", lambda self: iter(frames))
    first, failure, last = pictures_of(folder / "clip.mkv")
    assert isinstance(failure, Failure)
    assert (failure.path, failure.frame) == (folder / "clip.mkv", 1)
    assert "clip.mkv, frame 1: expected a frame" in str(failure.error)
    assert (first.frame, last.frame) == (0, 2)


def test_pictures_of_pillow_are_read_like_files(tmp_path: Path) -> None:
    upright = np.arange(16 * 24 * 3, dtype=np.uint8).reshape(16, 24, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.fromarray(np.ascontiguousarray(np.rot90(upright))).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as opened:
        (found,) = pictures_of(opened)
    assert isinstance(found, Picture)
    assert np.array_equal(found.pixels, upright)
    with pytest.raises(ImageError, match="a PIL image: expected an opaque picture"):
        pictures_of(Image.new("RGBA", (4, 4)))
    content = (tmp_path / "turned.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    with (
        Image.open(tmp_path / "cut.png") as opened,
        pytest.raises(ImageError, match=r"cut\.png: the picture cannot be"),
    ):
        pictures_of(opened)


def test_pictures_are_read_when_they_are_due(folder: Path) -> None:
    def endless() -> Iterator[np.ndarray]:
        while True:
            read.append(1)
            yield picture(len(read))

    read: list[int] = []
    pictures = pictures_of(endless())
    assert read == []
    next(pictures)
    next(pictures)
    assert len(read) == 2
    files = pictures_of(folder)
    (folder / "b.png").unlink()  # after the folder was listed
    assert [type(one) for one in files] == [Picture, Failure, Picture, Picture, Picture, Picture]


def test_folders_that_are_links(folder: Path, tmp_path: Path) -> None:
    """They are followed, but not back to where they lie."""
    (tmp_path / "disk").mkdir()
    Image.fromarray(picture(1)).save(tmp_path / "disk" / "d.png")
    (folder / "album").symlink_to(tmp_path / "disk")
    (folder / "deep" / "up").symlink_to(folder)
    (folder / "itself").symlink_to(folder / "itself")
    assert [p.name for p in find_images(folder)] == ["a.JPG", "d.png", "b.png", "c.tiff"]


def test_a_folder_that_cannot_be_listed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pictures would be missing without a word."""
    listed = Path.iterdir

    def refusing(path: Path) -> Iterator[Path]:
        if path.name == "deep":
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refusing)
    with pytest.raises(DatasetError, match="deep: expected a folder that can be listed, got Permission denied"):
        find_images(folder)
