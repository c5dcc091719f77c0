"""What the kernels promise on every device: padding, refusals, labels. Random cases are in the files of a device."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import kernel_cases as cases
import numpy as np
import pytest
from kernel_arrays import INVALID_ARGUMENT, INVALID_MAP, OUT_OF_MEMORY, UNSUPPORTED, KernelError, Kernels
from kernel_memory import DTYPES
from operator_inputs import CLAP, GBM, exact_tokens, mask_inputs, ones

from algm_deploy.errors import ExecutionError
from algm_deploy.ops import kernel_library, reference
from algm_deploy.ops._rows import merge_rows_reference
from algm_deploy.ops.kernel_library import (
    ROWS_ON_DEVICE,
    LabelMapParams,
    bias_skip_norm_params,
    clap_params,
    deformable_attention_params,
    gbm_params,
    label_map_params,
    mask_labels_params,
)
from algm_deploy.ops.schema import WORDS

SMALL: dict[str, Any] = {"grid": (4, 4), "window": (2, 2), **CLAP}
PHOTO: dict[str, Any] = {"grid": (32, 32), "window": (2, 2), **CLAP}


@pytest.mark.parametrize("batch_mode", WORDS["batch"])
def test_a_crowd_of_images(kernels: Kernels, batch_mode: str) -> None:
    for case in cases.crowd(np.float16, batch_mode):
        cases.check_exact(kernels, case)


def small_tokens(seed: int, images: int = 1) -> np.ndarray:
    return cases.random_tokens(np.random.default_rng(seed), (images, 17, 16), np.float32)


def test_an_image_of_a_batch_decides_as_it_does_alone(kernels: Kernels) -> None:
    tokens = small_tokens(3, images=4)
    merged, _, patch_map, length = kernels.clap(tokens, ones(tokens), 0.6, **SMALL)
    for b in range(4):
        alone = kernels.clap(tokens[b : b + 1], ones(tokens[:1]), 0.6, **SMALL)
        np.testing.assert_array_equal(patch_map[b], alone[2][0])
        np.testing.assert_array_equal(merged[b, : length[b]], alone[0][0])
    assert len(set(length.tolist())) > 1, "the images of this test must differ in their row counts"


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_image_gives_the_same_bits_alone_and_in_a_batch(kernels: Kernels, dtype: Any) -> None:
    """Alone and together they take different tiles and different shares of a block."""
    images = 40 if kernels.memory.device == "cuda" else 4
    tokens = cases.random_tokens(np.random.default_rng(2), (images, 1025, 192), dtype)

    def similarities(chosen: slice) -> tuple[np.ndarray, ...]:
        some = tokens[chosen]
        length = np.full(len(some), 641)
        return kernels.clap_similarity(some, **PHOTO), *kernels.gbm_similarity(some[:, :641], length, **GBM)

    together = similarities(slice(None))
    for b in (0, images // 2 - 1, images - 1):
        for one, many_images in zip(similarities(slice(b, b + 1)), together, strict=True):
            np.testing.assert_array_equal(one[0].view(np.int32), many_images[b].view(np.int32))


@pytest.mark.parametrize("step", [1, 7, 16, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_rounded_up_where_they_are_counted(kernels: Kernels, dtype: Any, step: int) -> None:
    """Images lie as many rows apart as the longest has, rounded up to the step, but no more than went in."""
    tokens = exact_tokens(np.random.default_rng(8), "few", (3, 1 + 5 * 7, 64), dtype)
    attributes = SMALL | {"grid": (5, 7)}
    exact = kernels.clap(tokens, ones(tokens), 0.3, **attributes)
    rounded = kernels.clap(tokens, ones(tokens), 0.3, out_rows=-step, **attributes)
    again = kernels.gbm(*exact, 0.5, **GBM), kernels.gbm(*exact, 0.5, out_rows=-step, **GBM)
    for most, few, more in ((36, exact, rounded), (exact[0].shape[1], *again)):
        rows = few[0].shape[1]
        assert rows < most
        assert len(set(few[3].tolist())) > 1, "images must differ in their row counts"
        assert more[0].shape[1] == more[1].shape[1] == min(-(-rows // step) * step, most)
        for shorter, longer in zip(few[:2], more[:2], strict=True):
            np.testing.assert_array_equal(longer[:, :rows], shorter)
            assert not longer[:, rows:].any()
        for one, other in zip(few[2:], more[2:], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_that_the_caller_asks_for_is_zero(kernels: Kernels, dtype: Any) -> None:
    tokens = exact_tokens(np.random.default_rng(4), "constant", (3, 1 + 5 * 7, 64), dtype)
    attributes = SMALL | {"grid": (5, 7)}
    merged = kernels.clap(tokens, ones(tokens), 0.5, **attributes)
    again = kernels.gbm(*merged, 0.5, **GBM)
    for few, more in (
        (merged, kernels.clap(tokens, ones(tokens), 0.5, out_rows=50, **attributes)),
        (again, kernels.gbm(*merged, 0.5, out_rows=50, **GBM)),
    ):
        rows = few[0].shape[1]
        assert rows < 36
        for shorter, longer in zip(few[:2], more[:2], strict=True):
            np.testing.assert_array_equal(longer[:, :rows], shorter)
            assert not longer[:, rows:].astype(np.float32).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 24])
def test_means_of_infinities(kernels: Kernels, width: int, dtype: Any) -> None:
    """IEEE arithmetic among the members, nothing for the other rows: windows and pairs that are told to merge."""
    rng = np.random.default_rng(5)
    tokens = exact_tokens(rng, "signs", (2, 17, width), dtype)
    for row, column, value in (
        (1, 0, np.inf),
        (2, 0, np.inf),
        (3, 1, -np.inf),
        (4, 1, np.inf),
        (7, 3, np.nan),
        (9, 2, -np.inf),
    ):
        tokens[:, row, column] = value
    size = rng.integers(1, 4, size=(2, 17)).astype(np.float32)
    similarity = np.ones((2, 4), np.float32)
    clap = cases.ClapCase(tokens, size, 0.5, SMALL)
    found = kernels.clap(*clap.inputs, given=similarity, **SMALL)
    row = cases.clap_rows_for(similarity, clap)[0]
    expected = merge_rows_reference(tokens, size, row, 5, True)[0]
    np.testing.assert_array_equal(found[0].astype(np.float64), expected.astype(np.float64))
    assert all(test(found[0].astype(np.float32)).any() for test in (np.isposinf, np.isneginf, np.isnan))
    best, best_row = np.ones((2, 8), np.float32), np.tile(np.arange(1, 16, 2, dtype=np.int32), (2, 1))
    for semantics in WORDS["semantics"]:
        plan = GBM | {"prefix": 0, "rule": "fixed", "semantics": semantics}
        some = cases.GbmCase(tokens[:, :16], size[:, :16], np.zeros((2, 1), np.int64), np.full(2, 16), 0.5, plan)
        found = kernels.gbm(*some.inputs, given=(best, best_row), **plan)
        row = np.tile(np.arange(16) // 2, (2, 1))
        expected = merge_rows_reference(some.tokens, some.size, row, 8, semantics == "code")[0]
        np.testing.assert_array_equal(found[0].astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_row_at_all(kernels: Kernels, dtype: Any) -> None:
    """Without a prefix, images without rows leave none, and outputs without rows may be null."""
    tokens = exact_tokens(np.random.default_rng(6), "signs", (2, 6, 16), dtype)
    params = gbm_params(tokens.shape, tokens.dtype.name, 1, **GBM | {"prefix": 0})
    length, count = kernels.memory.empty((2,), np.int64), kernels.memory.empty((), np.int64)
    map, workspace = kernels.memory.empty((2, 1), np.int64), kernels.workspace("gbm", params)
    inputs = [kernels.put(np.zeros((2, 1), np.int64)), kernels.put(np.array([-5, 0])), kernels.put(np.float32(1))]
    given = [kernels.put(tokens), *inputs]
    outputs = map, length, count, None, workspace
    if kernels.memory.device == "cpu":
        with pytest.raises(KernelError, match=f"status {INVALID_MAP}"):  # no map can name a row
            kernels.call("gbm_decide", params, *given, *outputs)
        return
    kernels.call("gbm_decide", params, *given, *outputs)
    assert kernels.memory.fetch(length, (2,), np.int64).tolist() == [0, 0]
    assert kernels.memory.fetch(map, (2, 1), np.int64).tolist() == [[-1], [-1]]
    size = kernels.put(np.ones((2, 6), np.float32))
    kernels.call("gbm_apply", params, given[0], size, None, workspace, 0, None, None)
    kernels.call("gbm_apply", params, given[0], size, None, workspace, ROWS_ON_DEVICE, count, count)


def relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("side", "grid"), [(16, (3, 5)), (14, (4, 2)), (8, (1, 1)), (3, (5, 7))])
def test_patches(kernels: Kernels, side: int, grid: tuple[int, int], dtype: Any) -> None:
    """By packs where a patch's lines can be moved so, else by pixels. Bytes are exact in every type."""
    shape = 2, 3, grid[0] * side, grid[1] * side
    image = np.random.default_rng(side).integers(0, 256, shape).astype(np.float32).astype(dtype)
    plan = {"side": side, "centre": 128.0, "scale": 1 / 128}
    np.testing.assert_array_equal(kernels.patches(image, **plan), reference.patches(image, **plan))


def test_patches_refuse_other_pictures(kernels: Kernels) -> None:
    image, plan = np.zeros((1, 3, 8, 12), np.float32), {"centre": 0.0, "scale": 1.0}
    for side, centre in ((5, 0.0), (12, 0.0), (4, math.nan)):
        with pytest.raises(KernelError, match=f"status {INVALID_ARGUMENT}"):
            kernels.patches(image, **plan | {"side": side, "centre": centre})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("side", "heads"), [(64, 2), (64, 1), (20, 3), (150, 1)])
def test_attention(kernels: Kernels, side: int, heads: int, dtype: Any) -> None:
    """16-bit queries, weights and results are each rounded once, by less than `unit`; fp32 sums have a few roundings in
    a row."""
    rng = np.random.default_rng(side)
    unit = {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}[np.dtype(dtype).name]
    for rows, lengths in ((1, [1]), (65, [65, 1, 0]), (130, [64, 130])):
        length = np.array(lengths)
        plan = {"heads": heads, "scale": 2 * side**-0.5}
        product = rng.standard_normal((len(length), rows, 3 * heads * side)).astype(dtype)
        bias = rng.standard_normal(3 * heads * side).astype(np.float32)
        found = kernels.packed_attention(product, bias, length, **plan)
        exact = reference.packed_attention(product.astype(np.float64), bias, length, **plan)
        assert relative_error(found, exact) < 2 * unit
        whole = kernels.packed_attention(product, None, None, **plan)
        exact = reference.packed_attention(product.astype(np.float64), 0 * bias, None, **plan)
        assert relative_error(whole, exact) < 2 * unit


def test_attention_never_reads_what_is_behind_a_length(kernels: Kernels) -> None:
    product = np.random.default_rng(0).standard_normal((2, 70, 3 * 64)).astype(np.float16)
    length, plan = np.array([70, 66]), {"heads": 1, "scale": 0.125}
    clean = kernels.packed_attention(product, None, length, **plan)
    product[1, 66:] = np.nan
    np.testing.assert_array_equal(kernels.packed_attention(product, None, length, **plan), clean)
    assert not clean[1, 66:].any()
    beyond = kernels.packed_attention(product[:, :66], None, np.array([2**40, 66]), **plan)
    assert np.isfinite(beyond.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 256, 2080])
def test_gelu(kernels: Kernels, width: int, dtype: Any) -> None:
    """Results are rounded once, and the error function of 16-bit values is off by no more than 1.5e-7."""
    rng = np.random.default_rng(width)
    product = (3 * rng.standard_normal((3, 7, width))).astype(dtype)
    bias = rng.standard_normal(width).astype(np.float32)
    exact = reference.gelu(product.astype(np.float64), bias)
    unit, off = {"float32": (2.0**-20, 1e-9), "float16": (2.0**-11, 1e-6), "bfloat16": (2.0**-8, 1e-6)}[
        np.dtype(dtype).name
    ]
    found = kernels.gelu(product, bias).astype(np.float64)
    np.testing.assert_allclose(found, exact, rtol=unit, atol=off)


def rows_to_norm(width: int, dtype: Any) -> list[np.ndarray]:
    """Product, bias, residual, weight and shift, of rows that lie far from zero."""
    rng = np.random.default_rng(width)
    product, residual = (rng.standard_normal((3, 7, width)).astype(dtype) for _ in range(2))
    bias, weight, shift = (rng.standard_normal(width).astype(np.float32) for _ in range(3))
    return [product, bias, (residual + np.asarray(2, dtype)), weight, shift]


# Packs a lane of a warp holds, of 16-bit values and of fp32: 1, 1; 2, 3; 3, 6; 4, 8 (too many); 6, 11; too many.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 67, 256, 384, 768, 1024, 1408, 2080])
def test_bias_skip_norm(kernels: Kernels, width: int, dtype: Any) -> None:
    """The sum is rounded once, and so is what is normalised of it."""
    inputs = rows_to_norm(width, dtype)
    normed, total = kernels.bias_skip_norm(*inputs, epsilon=1e-6)
    unit = {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}[np.dtype(dtype).name]
    product, bias, residual, weight, shift = inputs
    one_by_one = residual.astype(np.float32) + (product.astype(np.float32) + bias)
    np.testing.assert_array_equal(total, one_by_one.astype(dtype))
    exact = reference.layer_norm(total.astype(np.float64), weight, shift, epsilon=1e-6)
    np.testing.assert_allclose(normed.astype(np.float64), exact, rtol=unit, atol=4e-6)
    np.testing.assert_array_equal(kernels.bias_skip(product, bias, residual), total)
    np.testing.assert_array_equal(kernels.layer_norm(total, weight, shift, epsilon=1e-6), normed)


def test_equal_values_normalise_to_the_shift(kernels: Kernels) -> None:
    """The root is of epsilon alone there."""
    product, bias, residual, weight, shift = rows_to_norm(64, np.float32)
    normed, total = kernels.bias_skip_norm(0 * product, 0 * bias, 0 * residual + 3, weight, shift, epsilon=1e-6)
    assert (total == 3).all()
    np.testing.assert_array_equal(normed, np.broadcast_to(shift, normed.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 150, 1032])
def test_unmerge_copies_bits(kernels: Kernels, width: int, dtype: Any) -> None:
    rng = np.random.default_rng(width)
    values = rng.standard_normal((3, 9, width)).astype(dtype)
    patch_map = rng.integers(5, 14, size=(3, 40))
    expected = np.take_along_axis(values, patch_map[:, :, None] - 5, axis=1)
    np.testing.assert_array_equal(kernels.unmerge(values, patch_map, prefix=5).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("grid", "size", "classes"), cases.LABEL_SHAPES)
def test_label_map(kernels: Kernels, grid: tuple[int, int], size: tuple[int, int], classes: int, dtype: Any) -> None:
    rng = np.random.default_rng(classes)
    for prefix in (0, 1):
        attributes = {"prefix": prefix, "grid": grid, "size": size}
        cases.check_label_map(kernels, *cases.label_inputs(rng, grid, classes, prefix, dtype, False), **attributes)
        scores, patch_map = cases.label_inputs(rng, grid, classes, prefix, dtype, True)
        differing = cases.check_label_map(kernels, scores, patch_map, **attributes)
        whole = all(s % g == 0 and (s // g) & (s // g - 1) == 0 for g, s in zip(grid, size, strict=True))
        assert differing == 0 or not whole, "integer scores at power-of-two ratios have exact interpolations"


def test_label_ties_and_nan(kernels: Kernels) -> None:
    scores = np.zeros((1, 4, 6), dtype=np.float32)
    patch_map = np.arange(4)[None]
    attributes: dict[str, Any] = {"prefix": 0, "grid": (2, 2), "size": (32, 32)}
    assert not kernels.label_map(scores, patch_map, **attributes).any()
    scores[..., 0] = np.nan
    scores[..., 4] = 1
    assert (kernels.label_map(scores, patch_map, **attributes) == 4).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "grid", "size", "classes"), cases.MASK_SHAPES)
def test_mask_labels(
    kernels: Kernels, queries: int, grid: tuple[int, int], size: tuple[int, int], classes: int, dtype: Any
) -> None:
    """On masks about zero, on some that are all far below it somewhere, and on some that are steps."""
    rng = np.random.default_rng(classes)
    for reach in (4.0, 30.0, 1e4):
        masks, shares = mask_inputs(rng, (2, queries, *grid), classes, np.float32, reach)
        masks[1] -= reach / 2
        cases.check_mask_labels(kernels, masks.astype(dtype), shares, size)


@pytest.mark.parametrize("lines", [1, 3, 17, 64])
@pytest.mark.parametrize(
    ("grid", "size"), [((5, 7), (40, 63)), ((9, 4), (37, 50)), ((12, 12), (5, 9)), ((1, 1), (70, 3))]
)
def test_lines_are_those_of_the_whole_however_it_is_split(
    kernels: Kernels, grid: tuple[int, int], size: tuple[int, int], lines: int
) -> None:
    """Bit by bit, at any line of a cell, of several images: of masks, and of scores of which many nearly tie."""
    rng = np.random.default_rng(0)
    masks, classes = mask_inputs(rng, (3, 20, *grid), 30, np.float32, 5.0)
    cases.check_lines(kernels.mask_labels, lines, masks, classes, size=size)
    scores, patch_map = cases.label_inputs(rng, grid, 150, 1, np.float32, False)
    cases.check_lines(kernels.label_map, lines, 1e-6 * scores + 1, patch_map, prefix=1, grid=grid, size=size)


def test_mask_labels_ties_and_nothing_there(kernels: Kernels) -> None:
    classes = np.float32([[[0.25, 0.5, 0.5, 0.25], [0.5, 0.25, 0.25, 0.5]]])
    masks = np.float32([[[[2, -2]], [[-2, 2]]]])
    assert kernels.mask_labels(masks, classes, size=(1, 2)).tolist() == [[[1, 0]]]
    assert not kernels.mask_labels(np.full((1, 2, 3, 3), -2e4, np.float32), classes, size=(7, 40)).any()
    same = np.full((1, 40, 200), 0.004, np.float32)
    assert not kernels.mask_labels(np.zeros((1, 40, 2, 2), np.float32), same, size=(9, 33)).any()


def test_mask_labels_of_what_is_no_number_are_labels(kernels: Kernels) -> None:
    """Any, but one that there is; where all masks around are finite they are as ever."""
    masks, classes = mask_inputs(np.random.default_rng(4), (1, 9, 4, 4), 12, np.float32, 5.0)
    clean = kernels.mask_labels(masks, classes, size=(32, 32))
    for value in (np.nan, np.inf, -np.inf):
        masks[0, 3, 1, 1] = value
        found = kernels.mask_labels(masks, classes, size=(32, 32))
        assert (found < 12).all()
        np.testing.assert_array_equal(found[0, 20:], clean[0, 20:])
    assert (kernels.mask_labels(masks, -classes, size=(32, 32)) < 12).all()
    assert (kernels.mask_labels(masks, classes * np.float32("nan"), size=(32, 32)) < 12).all()


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("batch", 0, INVALID_ARGUMENT),
        ("rows", 16, INVALID_ARGUMENT),
        ("window_h", 0, INVALID_ARGUMENT),
        ("dtype", 3, INVALID_ARGUMENT),
        ("semantics", 2, INVALID_ARGUMENT),
        ("order", -1, INVALID_ARGUMENT),
        ("prefix", -1, INVALID_ARGUMENT),
        ("batch", 1 << 40, UNSUPPORTED),
        ("grid_h", 1 << 62, UNSUPPORTED),
        ("window_w", 1 << 63, INVALID_ARGUMENT),
        ("window_w", 1 << 62, UNSUPPORTED),
        ("prefix", 1 << 32, UNSUPPORTED),
    ],
)
def test_contradictions_are_refused(kernels: Kernels, field: str, value: int, status: int) -> None:
    params = clap_params((1, 17, 16), "float32", **SMALL)
    setattr(params, field, value)
    buffer = kernels.memory.empty((4096,), np.uint8)
    assert kernels.library.query("clap_workspace", params) == 0
    with pytest.raises(KernelError) as caught:
        kernels.call("clap_similarity", params, buffer, buffer)
    assert caught.value.status == status
    assert "check the shapes" in str(caught.value) or "smaller batch" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("queries", 0, INVALID_ARGUMENT),
        ("classes", 257, INVALID_ARGUMENT),
        ("dtype", 3, INVALID_ARGUMENT),
        ("label_type", 2, INVALID_ARGUMENT),
        ("grid_w", 1 << 40, UNSUPPORTED),
        ("queries", 1 << 40, UNSUPPORTED),
        ("batch", 1 << 40, UNSUPPORTED),
    ],
)
def test_contradicting_masks_are_refused(kernels: Kernels, field: str, value: int, status: int) -> None:
    params = mask_labels_params((1, 3, 4, 4), "float32", 5, (16, 16), False)
    buffer = kernels.memory.empty((4096,), np.uint8)
    with pytest.raises(KernelError, match=f"status {INVALID_ARGUMENT}"):
        kernels.call("mask_labels", params, buffer, None, buffer)
    setattr(params, field, value)
    with pytest.raises(KernelError) as caught:
        kernels.call("mask_labels", params, buffer, buffer, buffer)
    assert caught.value.status == status


@pytest.mark.parametrize(("first", "lines"), [(-1, 4), (0, 0), (0, 17), (16, 1), (3, 14), (1, 1 << 62), (1 << 62, 1)])
def test_lines_that_no_picture_has_are_refused(kernels: Kernels, first: int, lines: int) -> None:
    buffer = kernels.memory.empty((4096,), np.uint8)
    masks = mask_labels_params((1, 3, 4, 4), "float32", 5, (16, 16), False)
    scores = label_map_params((1, 16, 5), "float32", 0, (4, 4), (16, 16), False)
    for name, params in (("mask_labels", masks), ("label_map", scores)):
        params.first, params.lines = first, lines
        with pytest.raises(KernelError, match=f"status {INVALID_ARGUMENT}"):
            kernels.call(name, params, buffer, buffer, buffer)


def test_windows_of_one_patch_null_pointers_and_more_classes_than_fit_are_refused(kernels: Kernels) -> None:
    buffer = kernels.memory.empty((4096,), np.uint8)
    one_patch = clap_params((1, 17, 16), "float32", **SMALL | {"window": (1, 1)})
    windows = clap_params((1, 17, 16), "float32", **SMALL)
    labels = LabelMapParams(1, 1, 257, 1, 1, 2, 2, 0, 2, 0, 0, 0)  # uint8 labels hold 256 classes and no more
    beyond = LabelMapParams(1, 1, 5, 1, 1, 2, 2, 0, 2, 1 << 32, 0, 0)  # a prefix of which 32 bits are 0
    with pytest.raises(KernelError, match="status 2"):
        kernels.call("label_map", beyond, buffer, buffer, buffer)
    norm = bias_skip_norm_params((1, 3, 8), "float32", 1e-6)
    for name, params, *arguments in (
        ("clap_similarity", one_patch, buffer, buffer),
        ("clap_similarity", windows, None, buffer),
        ("label_map", labels, buffer, buffer, buffer),
        ("bias_skip_norm", norm, buffer, None, buffer, buffer, buffer, buffer, None),  # a residual, and no bias
        ("bias_skip_norm", norm, buffer, None, None, buffer, buffer, buffer, buffer),  # a sum of nothing
        ("bias_skip_norm", norm, buffer, buffer, buffer, buffer, buffer, buffer, None),  # no room for the sum
        ("bias_skip_norm", norm, buffer, None, None, None, buffer, buffer, None),  # a shift, and no weight
        ("bias_skip_norm", norm, buffer, buffer, buffer, None, None, buffer, buffer),  # a norm by nothing
        ("bias_skip_norm", norm, buffer, None, None, None, None, None, None),  # neither
    ):
        with pytest.raises(KernelError, match="status 1"):
            kernels.call(name, params, *arguments)


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("cells", 31, INVALID_ARGUMENT),
        ("levels", 0, INVALID_ARGUMENT),
        ("levels", 9, INVALID_ARGUMENT),
        ("points", 0, INVALID_ARGUMENT),
        ("dtype", 3, INVALID_ARGUMENT),
        ("sides", (0, 8, 1, 1), INVALID_ARGUMENT),
        ("sides", ((1 << 31) - 1,) * 16, UNSUPPORTED),
        ("queries", 1 << 30, UNSUPPORTED),
    ],
)
def test_contradicting_levels_are_refused(kernels: Kernels, field: str, value: Any, status: int) -> None:
    params = deformable_attention_params((1, 32, 2, 4), "float32", (1, 5, 2, 2, 4), (4, 6, 2, 4))
    buffer = kernels.memory.empty((1 << 16,), np.uint8)
    kernels.call("deformable_attention", params, *[buffer] * 3, kernels.memory.empty((1 << 12,), np.uint8))
    if field == "sides":
        params.sides[: len(value)] = value
    else:
        setattr(params, field, value)
    with pytest.raises(KernelError) as caught:
        kernels.call("deformable_attention", params, *[buffer] * 4)
    assert caught.value.status == status


def test_more_levels_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(ExecutionError, match="at most 8 levels of deformable attention, got 9"):
        deformable_attention_params((1, 9, 1, 1), "float32", (1, 1, 1, 9, 1), (1, 1) * 9)


def test_status_texts_say_what_to_do(kernels: Kernels) -> None:
    firsts = [kernels.library.status_text(status).split()[0] for status in (0, 1, 2, 3, OUT_OF_MEMORY, 99)]
    assert firsts == ["The", "A", "The", "The", "The", "An"]
    assert "out of memory" in kernels.library.status_text(OUT_OF_MEMORY)


# --- the C interface -------------------------------------------------------------------------------------------------


def declared_fields(header: str, struct: str) -> Iterator[tuple[str, str]]:
    """Name and C type of every field of a struct."""
    body = re.search(rf"typedef struct {{([^}}]*)}} {struct};", header)
    assert body
    for kind, names in re.findall(r"(int64_t|int32_t|double|float) ([^;]+);", body[1]):
        for name in names.split(","):
            field, bracket, count = name.strip().partition("[")
            yield field, kind + bracket + count


@pytest.mark.parametrize(
    "name",
    [
        "ClapParams",
        "GbmParams",
        "AttentionParams",
        "GeluParams",
        "BiasSkipNormParams",
        "PatchesParams",
        "UnmergeParams",
        "LabelMapParams",
        "MaskLabelsParams",
        "DeformableAttentionParams",
    ],
)
def test_python_has_the_structs_of_the_header(header: str, name: str) -> None:
    struct = "algm_" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    kinds = {
        "c_long": "int64_t",
        "c_int": "int32_t",
        "c_double": "double",
        "c_float": "float",
        "c_int_Array_16": "int32_t[16]",
    }
    fields = [(field, kinds[kind.__name__]) for field, kind in getattr(kernel_library, name)._fields_]
    assert fields == list(declared_fields(header, struct))


def test_python_has_the_numbers_of_the_header(header: str) -> None:
    numbers = {name: int(value) for name, value in re.findall(r"ALGM_(\w+)\s*=\s*(\d+)", header)}
    for attribute, words in WORDS.items():
        constants = [f"{attribute}_{word.removeprefix('batch_')}".upper() for word in words]
        assert [numbers[constant] for constant in constants] == list(range(len(words))), attribute
    assert {name: numbers[name.upper()] for name in kernel_library.DTYPES} == kernel_library.DTYPES
    assert f"ALGM_MAX_LEVELS {kernel_library.MAX_LEVELS}\n" in header
    assert f"ALGM_ROWS_ON_DEVICE ({kernel_library.ROWS_ON_DEVICE})" in header
