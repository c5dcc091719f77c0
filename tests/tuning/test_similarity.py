"""Similarity statistics equal those of all pairs written out, and an interrupted measurement ends as a whole one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, DatasetError, ImageError
from algm_deploy.tuning.similarity import (
    Moments,
    Picture,
    attended_tokens,
    class_sums,
    dense_encoder,
    measure_similarity,
    pair_sums,
    patch_classes,
    window_sums,
)

FLOATS = st.lists(st.floats(-1, 1), max_size=20)


def moments(values: Any) -> Moments:
    array = np.asarray(values, np.float64)
    return Moments.of_sums(np.array([array.size, array.sum(), (array**2).sum()]))


def equal(found: Moments, values: Any) -> bool:
    array = np.asarray(values, np.float64)
    return found.count == array.size and np.allclose((found.mean, found.std), (array.mean(), array.std()), atol=1e-7)


@given(FLOATS, FLOATS)
def test_moments_of_two_sets_are_those_of_their_union(first: list[float], second: list[float]) -> None:
    joined = moments(first) + moments(second)
    assert joined.count == len(first) + len(second)
    if joined.count:
        assert equal(joined, first + second)


def test_moments_keep_the_digits_of_a_small_spread() -> None:
    parts = [Moments(1000, 1 - 1e-9 * index, 1000 * 1e-20) for index in range(50)]
    whole = sum(parts, Moments())
    spread = 1e-18 * np.arange(50).var() + 1e-20
    assert whole.std == pytest.approx(spread**0.5, rel=1e-6)


def units(count: int, width: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 1
    rows[0] = 0  # a zero vector stays one: its products are 0, its square is not 1
    return torch.nn.functional.normalize(rows, dim=-1)


@pytest.mark.parametrize(("count", "width"), [(12, 5), (5, 12)])
def test_pairs_without_a_matrix_of_pairs(count: int, width: int) -> None:
    rows = units(count, width)
    written_out = (rows @ rows.T)[torch.triu_indices(count, count, 1).unbind()]
    assert equal(Moments.of_sums(pair_sums(rows)), written_out)


def test_pairs_by_class_leave_out_unlabelled_patches() -> None:
    rows, classes = units(30, 6), torch.arange(30) % 4 - 1
    same, other = class_sums(rows, classes)
    pairs = [(i, j) for i in range(30) for j in range(i) if classes[i] >= 0 and classes[j] >= 0]
    products = {pair: float(rows[pair[0]] @ rows[pair[1]]) for pair in pairs}
    assert equal(Moments.of_sums(same), [v for (i, j), v in products.items() if classes[i] == classes[j]])
    assert equal(Moments.of_sums(other), [v for (i, j), v in products.items() if classes[i] != classes[j]])


def test_pairs_within_windows() -> None:
    grid, side = (5, 7), 2  # the last row and column lie in no window
    rows, classes = units(35, 6), torch.arange(35) % 3 - 1
    expected: dict[bool, list[float]] = {True: [], False: []}
    for i in range(35):
        for j in range(i):
            places = [divmod(index, 7) for index in (i, j)]
            inside = all(r < 4 and c < 6 for r, c in places)
            same_window = len({(r // side, c // side) for r, c in places}) == 1
            if inside and same_window and classes[i] >= 0 and classes[j] >= 0:
                expected[bool(classes[i] == classes[j])].append(float(rows[i] @ rows[j]))
    same, other = window_sums(rows, classes, grid, side)
    assert expected[True] and expected[False]
    assert equal(Moments.of_sums(same), expected[True])
    assert equal(Moments.of_sums(other), expected[False])


def test_patches_take_the_commonest_class() -> None:
    labels = np.full((4, 8), 255, np.uint8)
    labels[:, :4] = [[2, 2, 2, 1]] * 4
    labels[:2, 4:] = 0
    assert patch_classes(labels, 4, 3).tolist() == [2, 0]  # half of the second is labelled
    labels[0, 4] = 255
    assert patch_classes(labels, 4, 3).tolist() == [2, -1]


def test_padded_patches_have_the_class_of_the_picture_in_them() -> None:
    """5 x 10 pixels in patches of 4: one and two rows are added above and below, one column on each side."""
    labels = np.zeros((5, 10), np.uint8)
    labels[3:, :7] = 1
    assert patch_classes(labels, 4, 3).tolist() == [0, 0, 0, -1, 1, -1]


def test_tokens_are_those_behind_the_attention(tiny_bundle: Bundle, blob_images: Callable[[int], np.ndarray]) -> None:
    image = torch.from_numpy(blob_images(2))
    encoder = dense_encoder(tiny_bundle, 2)
    found = dict(attended_tokens(encoder, image, (1, 2)))
    tokens = encoder.embed(image).values
    block = encoder.blocks[0]
    after = tokens + block.attn(block.norm1(tokens), None)
    assert len(encoder.blocks) == 2
    assert torch.equal(found[1], after[:, 1:])
    assert not torch.equal(found[1], found[2])


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    shutil.copytree(tiny_bundle.path, tmp_path / "bundle")
    return Bundle.open(tmp_path / "bundle")


@pytest.fixture
def pictures(blob_images: Callable[[int], np.ndarray], tmp_path: Path) -> list[Picture]:
    """Four photos; the left half of each is class 0, the right class 1."""
    labels = np.repeat([[0, 1]], 64, 1).repeat(128, 0).astype(np.uint8)
    found = []
    for index, pixels in enumerate(blob_images(4)):
        path = tmp_path / f"{index}.png"
        Image.fromarray(pixels.transpose(1, 2, 0)).save(path)
        found.append(Picture(path, lambda: labels))
    return found


def written_out(bundle: Bundle, pictures: list[Picture], layer: int) -> np.ndarray:
    """Cosines of all pairs of patches of every photo, which are of the network's size."""
    encoder, cosines = dense_encoder(bundle, layer), []
    for picture in pictures:
        pixels = torch.from_numpy(np.asarray(Image.open(picture.path)).transpose(2, 0, 1).copy())[None]
        ((_, tokens),) = attended_tokens(encoder, pixels, (layer,))
        unit = torch.nn.functional.normalize(tokens[0].double(), dim=-1)
        cosines.append((unit @ unit.T)[torch.triu_indices(len(unit), len(unit), 1).unbind()].numpy())
    return np.concatenate(cosines)


def test_the_rule_is_mean_plus_deviation_over_all_pairs(bundle: Bundle, pictures: list[Picture]) -> None:
    first = measure_similarity(bundle, pictures, (1,), progress=False)
    cosines = written_out(bundle, pictures, 1)
    assert first.threshold == pytest.approx(cosines.mean() + cosines.std(), abs=1e-9)
    both = measure_similarity(bundle, pictures, (1, 3), progress=False)
    pooled = np.concatenate([cosines, written_out(bundle, pictures, 3)])
    assert both.threshold == pytest.approx(pooled.mean() + pooled.std(), abs=1e-9)
    assert both.layers[1] == first.layers[1]


def test_labels_part_the_pairs(bundle: Bundle, pictures: list[Picture]) -> None:
    groups = measure_similarity(bundle, pictures, (1,), progress=False).layers[1]
    assert groups["global same"].count + groups["global other"].count == groups["all"].count == 4 * 64 * 63 // 2
    assert equal(groups["global same"] + groups["global other"], written_out(bundle, pictures, 1))
    assert groups["2x2 other"].count == 0  # the border between the classes lies between windows
    assert groups["3x3 other"].count > 0
    bare = [Picture(picture.path) for picture in pictures]
    assert measure_similarity(bundle, bare, (1,), progress=False).layers[1] == {"all": groups["all"]}


def test_an_interrupted_measurement_goes_on(
    bundle: Bundle, pictures: list[Picture], monkeypatch: pytest.MonkeyPatch
) -> None:
    from algm_deploy.tuning import similarity

    whole = measure_similarity(bundle, pictures, (1, 2), progress=False)
    for state in (bundle.path / "reports").glob("similarity-*.json"):
        state.unlink()
    read, seen = similarity.read_photo, []

    def stopping(path: Path) -> np.ndarray:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(path)
        return read(path)

    monkeypatch.setattr(similarity, "read_photo", stopping)
    with pytest.raises(KeyboardInterrupt):
        measure_similarity(bundle, pictures, (1, 2), progress=False)
    monkeypatch.setattr(similarity, "read_photo", lambda path: seen.append(path) or read(path))
    assert measure_similarity(bundle, pictures, (1, 2), progress=False) == whole
    assert seen == [picture.path for picture in pictures]
    assert measure_similarity(bundle, pictures[:3], (1, 2), progress=False) != whole


def test_a_photo_that_changed_is_measured_again(bundle: Bundle, pictures: list[Picture]) -> None:
    before = measure_similarity(bundle, pictures, (1,), progress=False)
    Image.fromarray(np.full((128, 128, 3), 90, np.uint8)).save(pictures[1].path)
    assert measure_similarity(bundle, pictures, (1,), progress=False).threshold != before.threshold


def test_a_photo_that_is_gone_is_named(bundle: Bundle, pictures: list[Picture]) -> None:
    pictures[1].path.unlink()
    with pytest.raises(ImageError, match=r"1\.png: no such file"):
        measure_similarity(bundle, pictures, (1,), progress=False)


def test_a_damaged_state_file_is_named(bundle: Bundle, pictures: list[Picture]) -> None:
    measure_similarity(bundle, pictures, (1,), progress=False)
    (state,) = (bundle.path / "reports").glob("similarity-*.json")
    state.write_text(state.read_text()[:-20])
    with pytest.raises(BundleError, match=r"similarity-.*delete the file"):
        measure_similarity(bundle, pictures, (1,), progress=False)


def test_photos_must_be_alike(bundle: Bundle, pictures: list[Picture]) -> None:
    with pytest.raises(DatasetError, match="all have labels or all have none, got 2"):
        measure_similarity(bundle, [pictures[0], Picture(pictures[1].path)], (1,), progress=False)
    with pytest.raises(DatasetError, match="got 0 photos"):
        measure_similarity(bundle, [], (1,), progress=False)
    wrong = Picture(pictures[0].path, lambda: np.zeros((3, 3), np.uint8))
    with pytest.raises(DatasetError, match=r"\(128, 128\), got \(3, 3\)"):
        measure_similarity(bundle, [wrong], (1,), progress=False)


def test_the_record_is_json(bundle: Bundle, pictures: list[Picture]) -> None:
    result = measure_similarity(bundle, pictures, (1,), progress=False)
    record = json.loads(json.dumps(result.record(), allow_nan=False))
    assert record["clap_threshold"] == result.threshold
    assert record["layers"]["1"]["all"]["pairs"] == 4 * 64 * 63 // 2
    assert "2x2 other" not in record["layers"]["1"]  # no pair, no figure
