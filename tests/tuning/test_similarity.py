"""Similarity statistics equal those of all pairs written out, and an interrupted measurement ends as a whole one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from algm_deploy.bundle.records import BlockSimilarity, PairSimilarity, RuleTuning
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, DatasetError, ImageError
from algm_deploy.evaluation.datasets import Dataset
from algm_deploy.tuning.similarity import (
    Moments,
    attended_tokens,
    class_sums,
    dense_encoder,
    pair_sums,
    patch_classes,
    tune_by_rule,
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


def test_tokens_are_those_after_the_attention(tiny_bundle: Bundle, blob_images: Callable[[int], np.ndarray]) -> None:
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
def halved(dataset: Dataset) -> Dataset:
    """Four photos; the left half of each is class 0, the right class 1."""
    samples = []
    for sample in dataset.samples:
        path = sample.label_path.with_suffix(".bmp")  # of one size whatever it shows
        Image.fromarray(np.repeat([[0, 1]], 64, 1).repeat(128, 0).astype(np.uint8)).save(path)
        samples.append(replace(sample, label_path=path))
    return replace(dataset, samples=tuple(samples))


def measured(bundle: Bundle, photos: Dataset | list[Path], layers: tuple[int, ...]) -> RuleTuning:
    return tune_by_rule(bundle, photos, layers, progress=False)


def moments_of(found: PairSimilarity) -> Moments:
    return Moments(found.pairs, found.mean, found.std**2 * found.pairs)


def written_out(bundle: Bundle, halved: Dataset, layer: int) -> np.ndarray:
    """Cosines of all pairs of patches of every photo, which are of the network's size."""
    encoder, cosines = dense_encoder(bundle, layer), []
    for sample in halved.samples:
        pixels = torch.from_numpy(np.asarray(Image.open(sample.image_path)).transpose(2, 0, 1).copy())[None]
        ((_, tokens),) = attended_tokens(encoder, pixels, (layer,))
        unit = torch.nn.functional.normalize(tokens[0].double(), dim=-1)
        cosines.append((unit @ unit.T)[torch.triu_indices(len(unit), len(unit), 1).unbind()].numpy())
    return np.concatenate(cosines)


def test_the_rule_is_mean_plus_deviation_over_all_pairs(bundle: Bundle, halved: Dataset) -> None:
    first = measured(bundle, halved, (1,))
    cosines = written_out(bundle, halved, 1)
    assert first.clap_threshold == pytest.approx(cosines.mean() + cosines.std(), abs=1e-9)
    both = measured(bundle, halved, (1, 3))
    pooled = np.concatenate([cosines, written_out(bundle, halved, 3)])
    assert both.clap_threshold == pytest.approx(pooled.mean() + pooled.std(), abs=1e-9)
    assert both.blocks[0] == first.blocks[0]


def test_labels_part_the_pairs(bundle: Bundle, halved: Dataset) -> None:
    (block,) = measured(bundle, halved, (1,)).blocks
    by_side = {one.side: one for one in block.by_class}
    assert [*by_side] == [2, 3, 4, 5, 6, 7, 8, None]
    whole = by_side[None]
    assert whole.same is not None and whole.other is not None
    assert whole.same.pairs + whole.other.pairs == block.every.pairs == 4 * 64 * 63 // 2
    assert equal(moments_of(whole.same) + moments_of(whole.other), written_out(bundle, halved, 1))
    assert by_side[2].other is None  # the border between the classes lies between windows: no pair, no figure
    assert by_side[3].other is not None
    bare = [sample.image_path for sample in halved.samples]
    assert measured(bundle, bare, (1,)).blocks == (BlockSimilarity(block=1, every=block.every),)


def test_an_interrupted_measurement_goes_on(bundle: Bundle, halved: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    from algm_deploy.evaluation import datasets

    whole = measured(bundle, halved, (1, 2))
    for state in (bundle.path / "reports").glob("similarity-*.json"):
        state.unlink()
    read, seen = datasets.read_photo, []

    def stopping(path: Path) -> np.ndarray:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(path)
        return read(path)

    monkeypatch.setattr(datasets, "read_photo", stopping)
    with pytest.raises(KeyboardInterrupt):
        measured(bundle, halved, (1, 2))
    monkeypatch.setattr(datasets, "read_photo", lambda path: seen.append(path) or read(path))
    assert measured(bundle, halved, (1, 2)) == whole
    assert seen == [sample.image_path for sample in halved.samples]
    assert measured(bundle, halved.subset(3), (1, 2)) != whole


def test_a_photo_that_changed_is_measured_again(bundle: Bundle, halved: Dataset) -> None:
    before = measured(bundle, halved, (1,))
    Image.fromarray(np.full((128, 128, 3), 90, np.uint8)).save(halved.samples[1].image_path)
    assert measured(bundle, halved, (1,)).clap_threshold != before.clap_threshold


def test_a_label_that_was_repaired_is_measured_again(bundle: Bundle, halved: Dataset) -> None:
    before = measured(bundle, halved, (1,))
    path = halved.samples[1].label_path
    size = path.stat().st_size
    Image.fromarray(np.repeat([[0], [1]], 64, 0).repeat(128, 1).astype(np.uint8)).save(path)
    assert path.stat().st_size == size
    after = measured(bundle, halved, (1,))
    assert after.blocks[0].every == before.blocks[0].every
    assert after.blocks[0].by_class != before.blocks[0].by_class
    assert measured(bundle, halved, (1,)) == after


def test_photos_are_known_by_their_content(bundle: Bundle, halved: Dataset) -> None:
    before = measured(bundle, halved, (1,))
    moved = [
        replace(one, image_path=one.image_path.rename(one.image_path.with_stem(f"moved{one.name}")))
        for one in halved.samples
    ]
    assert measured(bundle, replace(halved, samples=tuple(moved)), (1,)) == before
    assert len(list((bundle.path / "reports").glob("similarity-*.json"))) == 1


def test_a_photo_that_is_gone_is_named(bundle: Bundle, halved: Dataset) -> None:
    halved.samples[1].image_path.unlink()
    with pytest.raises(ImageError, match=r"1\.png: expected a photo or its labels, got No such file"):
        measured(bundle, halved, (1,))


def test_what_a_label_means_is_part_of_the_measurement(bundle: Bundle, halved: Dataset) -> None:
    before = measured(bundle, halved, (1,))
    one_class = halved.lookup.copy()
    one_class[1] = 0
    (block,) = measured(bundle, replace(halved, lookup=one_class), (1,)).blocks
    assert block.every == before.blocks[0].every
    assert [one.other for one in block.by_class] == [None] * 8


@pytest.mark.parametrize("damage", [lambda text: text[:-20], lambda _: '{"done": 1, "layers": {}}', lambda _: "[]"])
def test_a_damaged_state_file_is_named(bundle: Bundle, halved: Dataset, damage: Callable[[str], str]) -> None:
    measured(bundle, halved, (1,))
    (state,) = (bundle.path / "reports").glob("similarity-*.json")
    state.write_text(damage(state.read_text()))
    with pytest.raises(BundleError, match=r"similarity-.*delete the file"):
        measured(bundle, halved, (1,))


def test_photos_must_be_there_and_fit_their_labels(bundle: Bundle, halved: Dataset) -> None:
    for nothing in ([], replace(halved, samples=())):
        with pytest.raises(DatasetError, match="expected photos to measure, got none"):
            measured(bundle, nothing, (1,))
    Image.fromarray(np.zeros((3, 3), np.uint8)).save(halved.samples[0].label_path)
    with pytest.raises(DatasetError, match=r"0\.bmp: expected .*\(128, 128\), got \(3, 3\)"):
        measured(bundle, halved, (1,))


def test_photos_that_cannot_be_read_are_named_when_the_others_are_measured(bundle: Bundle, halved: Dataset) -> None:
    for index in (0, 2):
        halved.samples[index].image_path.write_bytes(b"no picture")
    for _ in range(2):  # measured, and read from the state file
        with pytest.raises(DatasetError, match=r"2 cannot be \(.*0\.png: expected a picture.*; .*2\.png: expected"):
            measured(bundle, halved, (1,))


def test_the_record_is_json(bundle: Bundle, dataset: Dataset) -> None:
    found = measured(bundle, dataset, (1, 2))
    assert (found.dataset, found.split, found.images) == ("folder", "all", 4)
    record = json.loads(msgspec.json.encode(found))
    assert record["clap_threshold"] == found.clap_threshold
    assert record["blocks"][0]["every"]["pairs"] == 4 * 64 * 63 // 2
    assert msgspec.json.decode(msgspec.json.encode(found), type=RuleTuning) == found
