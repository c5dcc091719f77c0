"""Pictures: what they store, what they colour, and what happens where they cannot be made."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, GateError, ImageError
from algm_deploy.evaluation.datasets import SPECS, Classes
from algm_deploy.pictures.preprocessing import read_indices
from algm_deploy.pictures.shipped import scene
from algm_deploy.predictor import Predictor
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.report import pictures as module
from algm_deploy.report.pictures import Mosaic, PictureWriter, labels_picture, overlay
from algm_deploy.report.sheets import Panel

RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 200, 0)


@pytest.fixture(scope="module")
def predictor(tiny_bundle: Bundle) -> Iterator[Predictor]:
    with Predictor(tiny_bundle, "torch") as opened:
        yield opened


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A photo 150 wide and 100 high, which takes two windows of 128."""
    path = tmp_path / "street.jpg"
    Image.fromarray(scene(5)[0][:100, :150]).save(path)
    return path


def panels_of(predictor: Predictor, photo: Path, monkeypatch: pytest.MonkeyPatch) -> list[Panel]:
    """What the token sheet of a photo is made of."""
    seen: list[Panel] = []

    def sheet(heading: str, panels: list[Panel], caption: str, columns: int) -> Image.Image:
        seen.extend(panels)
        return Image.new("RGB", (1, 1))

    monkeypatch.setattr(module, "sheet", sheet)
    PictureWriter(predictor, photo.parent / "out").write(photo)
    return seen


def square_mosaic(anchors: list[tuple[int, int]], size: tuple[int, int]) -> Mosaic:
    """Windows of 8x8 pixels, four patches each, on a canvas whose left half is red and whose right half is blue."""
    canvas = np.full((*size, 3), BLUE, np.uint8)
    canvas[:, : size[1] // 2] = RED
    return Mosaic(canvas, anchors, (8, 8), 4, columns=1)


def test_a_padded_window_has_cells_for_its_padding() -> None:
    """8 pixels in patches of 5: one more in front and behind, so patches begin at -1 and 4."""
    canvas = np.full((8, 8, 3), BLUE, np.uint8)
    canvas[:, :4] = RED
    mosaic = Mosaic(canvas, [(0, 0)], (8, 8), 5, columns=1)
    assert mosaic.grid == (2, 2)
    np.testing.assert_allclose(mosaic.patch_colors()[0], [RED, BLUE, RED, BLUE])
    picture = mosaic.spread(np.arange(4).reshape(1, 2, 2), (5, 5))
    middle = np.array(picture.shape) // 2
    for index, part in enumerate((picture[: middle[0], : middle[1]], picture[: middle[0], middle[1] :])):
        assert set(part.ravel().tolist()) == {index}
    assert set(picture[middle[0] :].ravel().tolist()) == {2, 3}


# ------------------------------------------------------------------------------------------------------------- files


def test_three_pictures_a_photo(predictor: Predictor, photo: Path, tmp_path: Path) -> None:
    written = PictureWriter(predictor, tmp_path / "new" / "out").write(photo)
    assert [path.name for path in written] == ["street.labels.png", "street.overlay.png", "street.tokens.png"]
    assert sorted((tmp_path / "new" / "out").iterdir()) == sorted(written)
    assert min(Image.open(written[2]).size) > 600


def test_the_label_picture_stores_what_the_predictor_says(predictor: Predictor, photo: Path, tmp_path: Path) -> None:
    stored = PictureWriter(predictor, tmp_path).write(photo)[0]
    np.testing.assert_array_equal(read_indices(stored), predictor.predict(photo))
    palette = np.asarray(Image.open(stored).getpalette()).reshape(-1, 3)
    np.testing.assert_array_equal(palette[:11], SPECS["camvid"].classes.palette)


def test_more_than_255_classes_are_stored_in_16_bits(tmp_path: Path) -> None:
    labels = np.array([[0, 255], [256, 40000]], np.int32)
    classes = Classes(tuple(map(str, range(40001))), (RED,) * 40001)
    labels_picture(labels, classes).save(tmp_path / "many.png")
    np.testing.assert_array_equal(read_indices(tmp_path / "many.png"), labels)


def test_the_overlay_mixes_class_colour_and_photo() -> None:
    photo = np.full((100, 1000, 3), 100, np.uint8)
    labels = np.zeros((100, 1000), np.uint8)
    labels[:, 500:] = 2
    classes = Classes(("road", "never seen", "sky"), (RED, BLUE, GREEN))
    picture = np.asarray(overlay(photo, labels, classes))
    np.testing.assert_allclose(picture[50, 200], [185, 45, 45], atol=1)
    np.testing.assert_allclose(picture[50, 800], [45, 155, 45], atol=1)
    below = picture[100:].reshape(-1, 3)
    assert [bool((below == color).all(1).any()) for color in (RED, BLUE, GREEN)] == [True, False, True]


@pytest.mark.parametrize("size", [(1, 1), (5, 40), (40, 5)])
def test_small_and_long_photos(predictor: Predictor, tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size, (90, 120, 200)).save(tmp_path / "odd.png")
    assert len(PictureWriter(predictor, tmp_path / "out").write(tmp_path / "odd.png")) == 3


# ------------------------------------------------------------------------------------------------------------ tokens


def test_the_panels_count_what_the_runtime_merged(
    predictor: Predictor, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = predictor.prediction(photo).token_counts
    panels = panels_of(predictor, photo, monkeypatch)
    assert len(counts) == 2
    assert [panel.title for panel in panels] == [
        "Photo",
        "Window similarity, layer 1",
        "After CLAP, layer 1",
        "After GBM, layer 3",
    ]
    assert [panel.subtitle.split(" tokens")[0] for panel in panels[2:]] == [f"{n} of 128" for n in counts.sum(0)]
    assert len({panel.picture.shape for panel in panels}) == 1


def test_similarity_decides_what_the_runtime_merged(predictor: Predictor, photo: Path) -> None:
    windows = scene(5)[0][:128, :128].transpose(2, 0, 1)[None]
    similarity = module.window_similarity_of(predictor.bundle)(windows)[0]
    token_map = predictor.infer(windows, ("token_map_clap_1",))["token_map_clap_1"].reshape(4, 2, 4, 2)
    merged = (token_map == token_map[:, :1, :, :1]).all((1, 3))
    assert 0 < merged.sum() < 16
    np.testing.assert_array_equal(similarity >= predictor.signature.defaults["clap_threshold"], merged)


@pytest.mark.parametrize(("merge", "title"), [("tome_7", "After ToMe, layer 7"), ("gbm_11", "After GBM, layer 11")])
def test_a_merge_is_called_as_everywhere(merge: str, title: str) -> None:
    assert module._merge_panel(merge, np.array([[1, 2, 3, 1]]), square_mosaic([(0, 0)], (8, 8))).title == title


@pytest.mark.parametrize("tau", [0.5, 1.5, np.inf])
def test_another_threshold_changes_the_similarity_panel(
    tiny_bundle: Bundle, photo: Path, monkeypatch: pytest.MonkeyPatch, tau: float
) -> None:
    with Predictor(tiny_bundle, "torch", tau=tau) as predictor:
        panel = panels_of(predictor, photo, monkeypatch)[1]
    reach = 32 if tau < 1 else 0
    assert panel.subtitle.startswith(f"{reach} of 32 windows")
    assert f"reach {tau:g}" in panel.subtitle


def test_a_merged_token_has_the_mean_colour_of_its_patches() -> None:
    mosaic = square_mosaic([(0, 0)], (8, 8))
    panel = module._merge_panel("gbm_5", np.array([[1, 2, 3, 1]]), mosaic)
    quarter = mosaic.size[0] // 4
    centres = panel.picture[quarter :: 2 * quarter, quarter :: 2 * quarter]
    np.testing.assert_array_equal(centres, [[(128, 0, 128), BLUE], [RED, (128, 0, 128)]])
    assert panel.subtitle == "3 of 4 tokens left (75 %); the largest stands for 2 patches"


def test_of_overlapping_windows_each_shows_its_half() -> None:
    mosaic = square_mosaic([(0, 0), (0, 4)], (8, 12))
    shown = mosaic.spread(np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]), (4, 4))
    pixel = mosaic.size[1] // 12
    assert shown.shape == mosaic.size
    assert shown[0, pixel // 2 :: pixel].tolist() == [1] * 4 + [2] * 2 + [5] * 2 + [6] * 4
    assert shown[-1, 0] == 3
    seams = np.flatnonzero((mosaic.with_seams(np.zeros((*mosaic.size, 3), np.uint8))[0] > 0).any(1))
    assert seams.tolist() == [mosaic.size[1] // 2 - 1, mosaic.size[1] // 2]


def test_patches_outside_all_windows_are_grey() -> None:
    mosaic = replace(square_mosaic([(0, 0)], (8, 8)), patch=2)
    chosen = np.ones((1, 1, 1), bool)
    plan = MergePlan(window=(3, 3))
    panel = module._similarity_panel(np.ones((1, 1, 1), np.float32), mosaic, plan, chosen, 0.9, "reach 0.9")
    sixteenth = mosaic.size[0] // 8
    assert panel.picture[sixteenth, sixteenth].tolist() != [208, 208, 208]
    assert panel.picture[sixteenth, 7 * sixteenth].tolist() == [208, 208, 208]
    assert panel.subtitle.endswith("grey: outside all windows")


def test_maps_that_contradict_the_counts_are_refused(
    predictor: Predictor, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infer = predictor.infer

    def tampered(windows: np.ndarray, outputs: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
        found = infer(windows, outputs)
        return {name: np.ones_like(one) if name.startswith("token_map") else one for name, one in found.items()}

    monkeypatch.setattr(predictor, "infer", tampered)
    with pytest.raises(GateError, match="token map has"):
        PictureWriter(predictor, tmp_path / "out").write(photo)
    assert list((tmp_path / "out").iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.jpg", None, "no such file"),
        ("words.jpg", b"not a picture", "expected a picture"),
        ("cut.jpg", b"\xff\xd8\xff\xe0\x00\x10JFIF", "picture"),
        ("long.png", (10, 100), "times as long as wide"),
    ],
)
def test_bad_photos_write_nothing(
    predictor: Predictor, tmp_path: Path, name: str, content: bytes | tuple[int, int] | None, words: str
) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content:
        Image.new("RGB", content).save(tmp_path / name)
    with pytest.raises(ImageError, match=words) as caught:
        PictureWriter(predictor, tmp_path / "out").write(tmp_path / name)
    assert name in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_in_place_of_the_folder(predictor: Predictor, photo: Path) -> None:
    with pytest.raises(ImageError, match="expected a folder for pictures"):
        PictureWriter(predictor, photo).write(photo)


def test_photos_of_one_name_are_refused(predictor: Predictor, photo: Path, tmp_path: Path) -> None:
    writer = PictureWriter(predictor, tmp_path / "out")
    assert writer.write(photo) == writer.write(photo)
    (tmp_path / "b").mkdir()
    with pytest.raises(ImageError, match="share the names"):
        writer.write(photo.rename(tmp_path / "b" / photo.name))


def test_a_full_disk_leaves_whole_files_only(
    predictor: Predictor, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Image.Image.save

    def limited(picture: Image.Image, path: Path) -> None:
        if picture.mode == "RGB":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(picture, path)

    monkeypatch.setattr(Image.Image, "save", limited)
    with pytest.raises(BundleError, match="No space left"):
        PictureWriter(predictor, tmp_path / "out").write(photo)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["street.labels.png"]
