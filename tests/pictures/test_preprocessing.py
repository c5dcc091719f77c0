"""Photos become the published canvas and windows, and whatever is no photo is refused by name."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from algm_deploy.bundle.signature import signature_of
from algm_deploy.errors import ImageError
from algm_deploy.pictures.preprocessing import (
    MAX_ASPECT,
    canvas_of,
    enlarged_size,
    preprocessing_fingerprint,
    published_size,
    read_indices,
    read_photo,
    resize_bilinear,
    window_anchors,
)
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import Protocol

ADE = Protocol("ade20k", short_side=512, window=512, stride=480, max_ratio=4)
CITYSCAPES = Protocol("cityscapes", short_side=1024, window=768, stride=512, max_ratio=2)
SETR_CITYSCAPES = Protocol("cityscapes", short_side=1025, window=768, stride=512, max_ratio=2049 / 1025)


def picture(height: int = 20, width: int = 30) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("protocol", "size", "resized"),
    [
        (ADE, (360, 480), (512, 683)),  # factor 1.4222, 682.67 rounds up
        (ADE, (2000, 1500), (683, 512)),
        (ADE, (100, 1000), (205, 2048)),  # the long limit rules
        (CITYSCAPES, (1024, 2048), (1024, 2048)),
        (SETR_CITYSCAPES, (1024, 2048), (1025, 2049)),
        (Protocol("x", 22, 22, 22, max_ratio=30 / 22), (100, 1000), (3, 30)),  # 30 / 22 * 22 is 29.99..
    ],
)
def test_published_size(protocol: Protocol, size: tuple[int, int], resized: tuple[int, int]) -> None:
    assert published_size(size, protocol) == resized


def test_enlarging_raises_the_short_side_to_the_window_and_never_shrinks() -> None:
    assert enlarged_size((512, 683), 640) == (640, 853)  # int(853.75)
    assert enlarged_size((683, 512), 640) == (853, 640)
    assert enlarged_size((700, 700), 640) == (700, 700)


def test_a_canvas_is_uint8_unless_it_was_enlarged() -> None:
    photo = picture(36, 48)
    assert canvas_of(photo, Protocol("x", 64, 64, 32)).dtype == np.uint8
    double_resize = canvas_of(photo, Protocol("x", 64, 80, 32))
    assert (double_resize.dtype, double_resize.shape) == (np.float32, (80, 106, 3))


def test_double_and_single_resize_of_the_large_network() -> None:
    """Segmenter-L on ADE20K: 512 then 640 as published by default, or 640 at once; both numerically, pixel by pixel."""
    photo = picture(600, 801)
    double = recipe("segmenter_vit_l16_ade20k").protocol
    assert (double.resize, double.short_side, double.window) == ("double", 512, 640)
    shrunk = cv2.resize(photo, (684, 512), interpolation=cv2.INTER_LINEAR)  # int(801 * 512 / 600 + 0.5)
    assert shrunk.dtype == np.uint8
    planes = torch.from_numpy(shrunk).permute(2, 0, 1)[None].float()
    interpolated = torch.nn.functional.interpolate(planes, (640, 855), mode="bilinear")  # int(684 / 512 * 640)
    twice = canvas_of(photo, double)
    assert twice.dtype == np.float32
    assert np.abs(twice - interpolated[0].permute(1, 2, 0).numpy()).max() < 0.03

    single = replace(double, resize="single")
    once = canvas_of(photo, single)
    assert once.dtype == np.uint8
    assert (once == cv2.resize(photo, (854, 640), interpolation=cv2.INTER_LINEAR)).all()
    assert (once == canvas_of(photo, replace(double, short_side=640))).all()
    assert np.abs(once[:, :854].astype(float) - twice[:, :854]).max() > 50  # noise that the detour blurs
    # The name of a way that leads to the same pixels is none of the facts behind them.
    assert preprocessing_fingerprint(single) == preprocessing_fingerprint(replace(double, short_side=640))
    assert preprocessing_fingerprint(single) != preprocessing_fingerprint(double)
    assert preprocessing_fingerprint(replace(ADE, resize="single")) == preprocessing_fingerprint(ADE)


def test_a_single_resize_keeps_pixels_whole() -> None:
    double = replace(recipe("segmenter_vit_l16_ade20k"), precision="fp32")
    single = replace(double, protocol=replace(double.protocol, resize="single"))
    assert [signature_of(one).image.dtype for one in (double, single)] == ["float32", "uint8"]


def test_the_published_resize_is_opencvs_not_pillows() -> None:
    """Comparable tools lost accuracy to another resize, so a swap of the library must show."""
    photo = picture(200, 300)
    protocol = Protocol("x", 100, 100, 50)
    canvas = canvas_of(photo, protocol)
    assert (canvas == cv2.resize(photo, (150, 100), interpolation=cv2.INTER_LINEAR)).all()
    pillows = np.asarray(Image.fromarray(photo).resize((150, 100), Image.Resampling.BILINEAR))
    assert np.abs(canvas.astype(int) - pillows).max() > 20


@pytest.mark.parametrize(
    ("size", "target"), [((37, 53), (64, 91)), ((512, 683), (640, 853)), ((64, 64), (48, 31)), ((1, 1), (5, 7))]
)
def test_bilinear_equals_torch(size: tuple[int, int], target: tuple[int, int]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3)).astype(np.float32)
    expected = torch.nn.functional.interpolate(torch.from_numpy(pixels).permute(2, 0, 1)[None], target, mode="bilinear")
    assert np.abs(resize_bilinear(pixels, target) - expected[0].permute(1, 2, 0).numpy()).max() / 255 < 1e-4


def test_a_picture_too_long_for_bounded_memory_is_refused() -> None:
    canvas_of(picture(4, 4 * MAX_ASPECT), Protocol("x", 16, 16, 16))
    with pytest.raises(ImageError, match="crop"):
        canvas_of(picture(4, 4 * MAX_ASPECT + 1), Protocol("x", 16, 16, 16))


@pytest.mark.parametrize("size", [(1, 1), (1, 8), (3, 2)])
def test_tiny_pictures_fill_a_window(size: tuple[int, int]) -> None:
    canvas = canvas_of(picture(*size), ADE)
    assert min(canvas.shape[:2]) == 512


def test_cityscapes_has_eight_windows() -> None:
    anchors = window_anchors((1024, 2048), CITYSCAPES)
    assert anchors == [(top, left) for top in (0, 256) for left in (0, 512, 1024, 1280)]


@given(st.integers(16, 80), st.integers(16, 80), st.integers(1, 16))
def test_windows_cover_every_pixel_and_stay_inside(height: int, width: int, stride: int) -> None:
    cover = np.zeros((height, width), int)
    for top, left in window_anchors((height, width), Protocol("x", 16, 16, stride)):
        assert top >= 0
        assert left >= 0
        assert cover[top : top + 16, left : left + 16].shape == (16, 16)
        cover[top : top + 16, left : left + 16] += 1
    assert cover.min() == 1 or stride < 16


def test_windows_of_real_photos_are_the_published_ones(shared_dir: Path) -> None:
    golden = np.load(shared_dir / "models" / "segmenter_vit_s16_camvid" / "golden.npz")
    photos = shared_dir / "data" / "camvid" / "images" / "test"
    protocol = Protocol("camvid", short_side=512, window=512, stride=480)
    anchors = []
    for name in sorted(set(golden["names"].tolist())):
        canvas = canvas_of(read_photo(photos / f"{name}.jpg"), protocol)
        anchors += [(name, left) for _, left in window_anchors(canvas.shape[:2], protocol)]
    assert anchors == list(zip(golden["names"].tolist(), golden["anchor"].tolist(), strict=True))


def test_sides_in_whole_multiples_are_resized_twice() -> None:
    """As mmsegmentation does: to the short side, then each side up to a multiple."""
    photo = np.random.default_rng(0).integers(0, 256, (60, 81, 3), dtype=np.uint8)
    protocol = Protocol("x", short_side=64, window=64, stride=48)
    once, twice = canvas_of(photo, protocol), canvas_of(photo, replace(protocol, multiple=32))
    assert (once.shape, twice.shape) == ((64, 86, 3), (64, 96, 3))
    assert np.array_equal(twice, cv2.resize(once, (96, 64), interpolation=cv2.INTER_LINEAR))
    assert np.array_equal(canvas_of(photo[:, :60], replace(protocol, multiple=32)), canvas_of(photo[:, :60], protocol))


def test_the_fingerprint_holds_what_changes_pixels() -> None:
    print_of = preprocessing_fingerprint
    assert print_of(replace(ADE, dataset="other", max_ratio=4.0)) == print_of(ADE)
    changed = [
        replace(ADE, short_side=640),
        replace(ADE, window=640),
        replace(ADE, stride=512),
        replace(ADE, max_ratio=2.0),
        replace(ADE, multiple=32),
    ]
    assert len({print_of(protocol) for protocol in (ADE, *changed)}) == 6
    # A change of any rule must be deliberate: it makes existing bundles unusable.
    assert print_of(ADE) == "43494ae03baeeb730fea37304dc569071e8082deff7ec25514da221fc6c33ea0"


# ------------------------------------------------------------------------------------------------------- reading


def save(tmp_path: Path, image: Image.Image, name: str, **options: object) -> Path:
    path = tmp_path / name
    image.save(path, **options)  # type: ignore[arg-type]
    return path


def test_rgb_is_read_as_it_is(tmp_path: Path) -> None:
    pixels = picture()
    photo = read_photo(save(tmp_path, Image.fromarray(pixels), "a.png"))
    assert photo.dtype == np.uint8
    assert (photo == pixels).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    upright = np.repeat(np.repeat(np.array([[[250, 0, 0], [0, 250, 0], [0, 0, 250]]], np.uint8), 16, 0), 16, 1)
    # How the camera stored it, per orientation: the inverse of what a viewer does.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo = read_photo(save(tmp_path, Image.fromarray(np.ascontiguousarray(stored)), "a.png", exif=exif))
    assert photo.shape == upright.shape
    assert (photo == upright).all()


def test_grey_and_palette_pictures_are_expanded(tmp_path: Path) -> None:
    grey = picture()[..., 0]
    assert (read_photo(save(tmp_path, Image.fromarray(grey), "g.png")) == grey[..., None]).all()
    palette = Image.fromarray(picture() // 64 * 64).quantize(64)
    expected = np.asarray(palette.convert("RGB"))
    assert (read_photo(save(tmp_path, palette, "p.png")) == expected).all()
    bits = Image.fromarray(grey > 127)
    assert set(np.unique(read_photo(save(tmp_path, bits, "b.png")))) == {0, 255}


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_an_opaque_alpha_channel_is_dropped(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(picture()).convert(mode)
    expected = np.asarray(Image.fromarray(picture()).convert(mode.rstrip("A")).convert("RGB"))
    assert (read_photo(save(tmp_path, image, "a.png")) == expected).all()


def test_transparent_pixels_are_refused(tmp_path: Path) -> None:
    image = Image.fromarray(picture()).convert("RGBA")
    image.putpixel((3, 4), (1, 2, 3, 254))
    with pytest.raises(ImageError, match="flatten"):
        read_photo(save(tmp_path, image, "a.png"))
    palette = Image.fromarray(picture()).quantize(16)
    with pytest.raises(ImageError, match="flatten"):
        read_photo(save(tmp_path, palette, "p.png", transparency=0))


def test_cmyk_and_ycbcr_are_converted(tmp_path: Path) -> None:
    blue = Image.new("CMYK", (16, 16), (255, 255, 0, 0))
    assert (np.abs(read_photo(save(tmp_path, blue, "a.jpg")).astype(int) - [0, 0, 255]) < 4).all()
    assert (read_photo(save(tmp_path, Image.new("RGB", (16, 16), "red"), "b.jpg"))[..., 0] > 250).all()


def test_sixteen_bit_channels_keep_their_high_byte(tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(0, 65536, (8, 9), dtype=np.uint16)
    assert (read_photo(save(tmp_path, Image.fromarray(values), "g.png"))[..., 0] == values >> 8).all()
    (tmp_path / "c.png").write_bytes(cv2.imencode(".png", np.dstack([values] * 3))[1].tobytes())
    assert (read_photo(tmp_path / "c.png")[..., 1] == values >> 8).all()


def test_a_colour_space_without_a_rule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="mode F"):
        read_photo(save(tmp_path, Image.new("F", (4, 4)), "f.tiff"))
    with pytest.raises(ImageError, match="mode LAB"):
        read_photo(save(tmp_path, Image.new("LAB", (4, 4)), "l.tiff"))


@pytest.mark.parametrize("ending", ["gif", "webp", "png", "tiff"])
def test_an_animation_is_refused(tmp_path: Path, ending: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green")]
    path = save(tmp_path, frames[0], f"a.{ending}", save_all=True, append_images=frames[1:])
    with pytest.raises(ImageError, match=r"a\.\w+: expected a single picture, got 2 frames"):
        read_photo(path)
    assert read_photo(save(tmp_path, frames[0], f"one.{ending}")).shape == (8, 8, 3)


def test_a_phones_picture_with_previews_is_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), "red"), Image.new("RGB", (4, 4), "green")]
    path = save(tmp_path, frames[0], "a.mpo", save_all=True, append_images=frames[1:])
    assert read_photo(path)[0, 0, 0] > 250


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "bmp", "tiff", "gif"])
def test_a_truncated_file_never_becomes_a_picture(tmp_path: Path, ending: str) -> None:
    whole = save(tmp_path, Image.fromarray(picture(40, 50)), f"whole.{ending}").read_bytes()
    cut = tmp_path / f"cut.{ending}"
    for share in np.linspace(0, 0.9, 19):
        cut.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ImageError, match="cut"):
            read_photo(cut)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_bytes_raise_nothing_but_image_errors(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    path = tmp_path / "damaged"
    for ending in ("jpeg", "png", "tiff", "gif", "avif"):
        buffer = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(picture()).save(buffer, ending, **({} if ending == "gif" else {"exif": exif}))
        for _ in range(60):
            content = bytearray(buffer.getvalue())
            for place in random.integers(0, min(len(content), 400), 6):
                content[place] = random.integers(256)
            path.write_bytes(content)
            with contextlib.suppress(ImageError):
                read_photo(path)


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_what_is_no_picture_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.jpg").write_text("not a picture")
    (tmp_path / "empty.jpg").touch()
    for name, words in {
        "notes.jpg": "no such format",
        "empty.jpg": "no such format",
        "gone.jpg": "no such file",
    }.items():
        with pytest.raises(ImageError, match=f"{name}.*{words}"):
            read_photo(tmp_path / name)
    with pytest.raises(ImageError, match="cannot be decoded"):
        read_photo(tmp_path)
    path = save(tmp_path, Image.fromarray(picture(40, 50)), "huge.png")
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", refuse)
        with pytest.raises(ImageError, match=r"huge\.png: expected a picture that can be read, got Permission denied"):
            read_photo(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ImageError, match=r"huge.png: .*shrink"):
        read_photo(path)


def test_label_indices_are_never_colours(tmp_path: Path) -> None:
    indices = np.arange(12, dtype=np.uint8).reshape(3, 4)
    palette = Image.fromarray(indices, "P")
    palette.putpalette(list(range(255, -1, -1)) * 3)
    assert (read_indices(save(tmp_path, palette, "p.png")) == indices).all()
    assert (read_indices(save(tmp_path, Image.fromarray(indices), "g.png")) == indices).all()
    assert read_indices(save(tmp_path, Image.fromarray(indices > 5), "b.png")).max() == 1
    with pytest.raises(ImageError, match="one class index a pixel"):
        read_indices(save(tmp_path, Image.fromarray(picture()), "rgb.png"))
