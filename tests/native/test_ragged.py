"""Ragged rows: images one behind the other give what they give apart, and nobody reads what is left behind the last."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_arrays import INVALID_ARGUMENT, KernelError, Kernels
from kernel_memory import DTYPES, HostMemory
from operator_inputs import CLAP, GBM, exact_tokens, ones

from algm_deploy.ops.kernel_library import RAGGED_IN, RAGGED_OUT, apart_params, reframe_params

GRID = (5, 7)
WINDOWS: dict[str, Any] = CLAP | {"grid": GRID, "window": (2, 2)}
IMAGES = [1, 3, 40]  # in one warp's reach, and beyond


def joined(values: np.ndarray, length: np.ndarray, rows: int, left: float = np.nan) -> np.ndarray:
    """(B, S, ...) of which images have `length` rows each, one behind the other as (B, rows, ...)."""
    behind = np.full((len(values) * rows, *values.shape[2:]), left, values.dtype)
    together = np.concatenate([one[:count] for one, count in zip(values, length, strict=True)])
    behind[: len(together)] = together
    return behind.reshape(len(values), rows, *values.shape[2:])


def mean_rows(length: np.ndarray, step: int = 1) -> int:
    """Rows for each image, so that they are enough for all."""
    mean = -(-int(length.sum()) // len(length))
    return -(-mean // step) * step


def merged(kernels: Kernels, images: int, dtype: Any, width: int = 64) -> tuple[np.ndarray, ...]:
    """Tokens and what CLAP makes of them, with images of different lengths."""
    rng = np.random.default_rng(8)
    tokens = np.concatenate([exact_tokens(rng, "few", (1, 36, width), dtype) for _ in range(images)])
    out = kernels.clap(tokens, ones(tokens), 0.3, **WINDOWS)
    assert images == 1 or len(set(out[3].tolist())) > 1, "images must differ in their row counts"
    assert out[3].mean() < 36, "nothing merged"
    return tokens, *out


def assert_joined(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...], rows: int) -> None:
    values, size, map, length = expected
    for one, other in zip(found[:2], (values, size), strict=True):
        np.testing.assert_array_equal(one, joined(other, length, rows, left=0))
    np.testing.assert_array_equal(found[2], map)
    np.testing.assert_array_equal(found[3], length)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.parametrize("step", [None, 1, 8, 1000])
def test_clap_leaves_them_ragged(kernels: Kernels, images: int, step: int | None, dtype: Any) -> None:
    tokens, *expected = merged(kernels, images, dtype)
    out_rows = None if step is None else -step
    found = kernels.clap(tokens, ones(tokens), 0.3, out_rows=out_rows, ragged=RAGGED_OUT, **WINDOWS)
    assert_joined(found, tuple(expected), min(mean_rows(expected[3], step or 1), 36))


@pytest.mark.parametrize("width", [64, 24, 7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("images", IMAGES)
def test_gbm_takes_and_leaves_them_ragged(kernels: Kernels, images: int, dtype: Any, width: int) -> None:
    _, tokens, size, map, length = merged(kernels, images, dtype, width)
    expected = kernels.gbm(tokens, size, map, length, 0.5, **GBM)
    assert expected[3].sum() < length.sum(), "nothing merged"
    rows = mean_rows(length, 3)
    ragged = [joined(x, length, rows) for x in (tokens, size)]
    found = kernels.gbm(*ragged, map, length, 0.5, ragged=RAGGED_IN, **GBM)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    both = RAGGED_IN | RAGGED_OUT
    for step in (1, 5, 1000):
        found = kernels.gbm(*ragged, map, length, 0.5, out_rows=-step, ragged=both, **GBM)
        assert_joined(found, expected, min(mean_rows(expected[3], step), rows))
    found = kernels.gbm(tokens, size, map, length, 0.5, out_rows=50, ragged=RAGGED_OUT, **GBM)
    assert_joined(found, expected, 50)


def test_too_few_rows_for_all(kernels: Kernels) -> None:
    """The host refuses them; a device, which learns the count too late, leaves nothing but NaN."""
    tokens, *expected = merged(kernels, 3, np.float32)
    given = {"out_rows": mean_rows(expected[3]) - 1, "ragged": RAGGED_OUT}
    if kernels.memory.device == "cpu":
        with pytest.raises(KernelError, match=f"status {INVALID_ARGUMENT}"):
            kernels.clap(tokens, ones(tokens), 0.3, **given, **WINDOWS)
        return
    values, size, *_ = kernels.clap(tokens, ones(tokens), 0.3, **given, **WINDOWS)
    assert np.isnan(values).all()
    assert np.isnan(size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("side", "heads"), [(64, 2), (20, 3)])
def test_attention_within_each_image(kernels: Kernels, side: int, heads: int, dtype: Any) -> None:
    rng = np.random.default_rng(side)
    for lengths in ([130], [65, 1, 130, 0, 64, 7], rng.integers(0, 90, size=70).tolist()):
        length = np.array(lengths)
        plan: dict[str, Any] = {"heads": heads, "scale": 2 * side**-0.5}
        product = rng.standard_normal((len(length), max(lengths), 3 * heads * side)).astype(dtype)
        bias = rng.standard_normal(3 * heads * side).astype(np.float32)
        apart = kernels.packed_attention(product, bias, length, **plan)
        for rows in {mean_rows(length), mean_rows(length, 100)}:
            found = kernels.packed_attention(joined(product, length, rows), bias, length, ragged=True, **plan)
            np.testing.assert_array_equal(found, joined(apart, length, rows, left=0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 200])
@pytest.mark.parametrize("images", IMAGES)
def test_leading_rows_are_exchanged(kernels: Kernels, images: int, width: int, dtype: Any) -> None:
    rng = np.random.default_rng(width)
    length = rng.integers(3, 20, size=images)
    values = rng.standard_normal((images, 20, width)).astype(dtype)
    for skip, put in ((1, 11), (3, 0), (0, 2), (3, 3)):
        front = rng.standard_normal((put, width)).astype(np.float32)
        exchanged = [
            np.concatenate([front.astype(dtype), one[skip:count]]) for one, count in zip(values, length, strict=True)
        ]
        for rows in {mean_rows(length), mean_rows(length, 8)}:
            found = kernels.reframe(joined(values, length, rows), length, front, skip=skip)
            expected = np.zeros((images * (rows - skip + put), width), dtype)
            together = np.concatenate(exchanged)
            expected[: len(together)] = together
            np.testing.assert_array_equal(found.reshape(-1, width), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 200])
@pytest.mark.parametrize("images", IMAGES)
def test_images_are_taken_apart(kernels: Kernels, images: int, width: int, dtype: Any) -> None:
    rng = np.random.default_rng(width)
    length = rng.integers(0, 20, size=images)
    values = rng.standard_normal((images, 20, width)).astype(dtype)
    ragged = joined(values, length, mean_rows(length, 4))
    for first, count in ((0, 1), (0, 11), (1, 19), (3, 70)):
        expected = np.zeros((images, count, width), dtype)
        for one, image, rows in zip(expected, values, length, strict=True):
            taken = image[first : min(rows, first + count)]
            one[: len(taken)] = taken
        np.testing.assert_array_equal(kernels.apart(ragged, length, first=first, count=count), expected)


def test_images_without_rows(kernels: Kernels) -> None:
    """An array without elements may have no address."""
    nothing, length = np.zeros((2, 0, 8), np.float16), np.zeros(2, np.int64)
    params = apart_params(nothing.shape, "float16", 0, 3)
    out = kernels.memory.empty((2, 3, 8), np.float16)
    kernels.call("apart", params, None, kernels.put(length), out)
    assert not kernels.memory.fetch(out, (2, 3, 8), np.float16).any()
    kernels.call("reframe", reframe_params(nothing.shape, "float16", 0, 0), None, kernels.put(length), None, None)


@pytest.mark.parametrize("plan", [{"rule": "fixed"}, {"semantics": "paper"}, {"rule": "budget", "budget": 4}])
@pytest.mark.parametrize("prefix", [0, 2, 5])
def test_gbm_by_other_plans(kernels: Kernels, prefix: int, plan: dict[str, Any]) -> None:
    """And of an array with more rows than an image can have."""
    rng = np.random.default_rng(prefix)
    length, plan = np.array([prefix + 9, prefix + 20, prefix + 1]), GBM | plan | {"prefix": prefix}
    tokens = np.concatenate([exact_tokens(rng, "few", (1, prefix + 20, 16), np.float16) for _ in length])
    map = np.stack([np.minimum(np.arange(20) + prefix, count - 1) for count in length])
    expected = kernels.gbm(tokens, ones(tokens), map, length, 0.6, **plan)
    rows = prefix + 50
    ragged = [joined(x, length, rows) for x in (tokens, ones(tokens))]
    found = kernels.gbm(*ragged, map, length, 0.6, ragged=RAGGED_IN, **plan)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    found = kernels.gbm(*ragged, map, length, 0.6, out_rows=-rows, ragged=RAGGED_IN | RAGGED_OUT, **plan)
    assert_joined(found, expected, rows)


def test_rows_apart_cannot_be_rounded_up_where_nobody_knows_their_limit(kernels: Kernels) -> None:
    values, patch_map, length = np.zeros((2, 4, 8), np.float32), np.ones((2, 6), np.int64), np.array([4, 4])
    for out_rows in (-1, -32):
        with pytest.raises(KernelError, match=f"status {INVALID_ARGUMENT}"):
            kernels.gbm(values, ones(values), patch_map, length, 1.0, ragged=RAGGED_IN, out_rows=out_rows, **GBM)


def test_lengths_that_the_rows_cannot_hold_are_refused(cpu_library: Any) -> None:
    """On the host, which can read them."""
    kernels = Kernels(cpu_library, HostMemory())
    values, front = np.zeros((2, 4, 3 * 8), np.float32), np.zeros((1, 3 * 8), np.float32)
    patch_map = np.zeros((2, 6), np.int64)
    for length in (np.array([5, 4]), np.array([-1, 3]), np.array([2**62, 2**62])):
        for call in (
            lambda length=length: kernels.apart(values, length, first=0, count=2),
            lambda length=length: kernels.reframe(values, length, front, skip=0),
            lambda length=length: kernels.packed_attention(values, None, length, heads=1, scale=1.0, ragged=True),
            lambda length=length: kernels.gbm(values, ones(values), patch_map, length, 1.0, ragged=RAGGED_IN, **GBM),
        ):
            with pytest.raises(KernelError, match=f"status {INVALID_ARGUMENT}"):
                call()
    with pytest.raises(KernelError, match=f"status {INVALID_ARGUMENT}"):  # an image without the rows that go
        kernels.reframe(values, np.array([1, 4]), front, skip=2)
    for length in (np.array([0, 4]), np.array([8, 0])):  # without its prefix, and more than a map can tell apart
        with pytest.raises(KernelError, match=f"status {INVALID_ARGUMENT}"):
            kernels.gbm(values, ones(values), patch_map, length, 1.0, ragged=RAGGED_IN, **GBM)
