"""The CUDA kernels against the NumPy definitions: the checks of the CPU kernels, thousands of times, on a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_cases as cases
import ml_dtypes
import numpy as np
import pytest
from kernel_library import INVALID_ARGUMENT, UNSUPPORTED, DeviceMemory, HostMemory, KernelError, Kernels

pytestmark = pytest.mark.gpu

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
CLAP = {"semantics": "code", "batch": "per_image", "order": "published"}
GBM = {"semantics": "code", "batch": "per_image", "mode": "adaptive", "divisor": 5.0}
CASES = int(os.environ.get("ALGM_GPU_CASES", "500"))  # for each check and token type


@pytest.fixture(scope="module")
def kernels(cuda_library: Path) -> Kernels:
    return Kernels(cuda_library, DeviceMemory())


def many(dtype: Any, check: Callable[[cases.Pick, np.random.Generator], None]) -> None:
    for seed in range(CASES):
        rng = np.random.default_rng([seed, DTYPES.index(dtype)])
        try:
            check(cases.pick_from(rng), rng)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES)
def test_clap_is_exact_where_sums_are(kernels: Kernels, dtype: Any) -> None:
    many(dtype, lambda pick, rng: cases.check_clap_exact(kernels, cases.clap_case(pick, rng, dtype, exact=True)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gbm_is_exact_where_sums_are(kernels: Kernels, dtype: Any) -> None:
    many(dtype, lambda pick, rng: cases.check_gbm_exact(kernels, cases.gbm_case(pick, rng, dtype, exact=True)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_clap_decisions_are_exact_on_given_similarities(kernels: Kernels, dtype: Any) -> None:
    def check(pick: cases.Pick, rng: np.random.Generator) -> None:
        case = cases.clap_case(pick, rng, dtype, exact=False)
        grid, window, _ = case.layout
        windows = (grid[0] // window[0]) * (grid[1] // window[1])
        cases.check_clap_given(kernels, case, cases.tied_values(pick, rng, (len(case.tokens), windows)))

    many(dtype, check)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gbm_decisions_are_exact_on_given_similarities(kernels: Kernels, dtype: Any) -> None:
    many(
        dtype,
        lambda pick, rng: cases.check_gbm_given(kernels, cases.gbm_case(pick, rng, dtype, exact=False), pick, rng),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_tokens_agree_within_rounding(kernels: Kernels, dtype: Any) -> None:
    clap_seen, gbm_seen = cases.Agreement(), cases.Agreement()

    def check(pick: cases.Pick, rng: np.random.Generator) -> None:
        clap = cases.clap_case(pick, rng, dtype, exact=False)
        cases.check_clap_random(kernels, clap, clap.tokens.shape[2] // 32 + 13, clap_seen)
        gbm = cases.gbm_case(pick, rng, dtype, exact=False)
        # fp32 sums in the order of the values; tensor cores cut off after every sixteen products
        width = gbm.tokens.shape[2]
        plain = dtype == np.float32 or width % 8 != 0
        cases.check_gbm_random(kernels, gbm, width if plain else width // 4 + 8, gbm_seen)

    many(dtype, check)
    print(np.dtype(dtype).name, "clap", clap_seen, "gbm", gbm_seen)  # noqa: T201 - shown by -s, for the record


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1025, 192), (641, 1024), (300, 64), (257, 768), (70, 1032)])
def test_sequences_of_many_tiles(kernels: Kernels, rows: int, width: int, dtype: Any) -> None:
    """Every tile size and its edges, with one image and with enough of them for the large tiles."""
    for batch in (1, 24):
        rng = np.random.default_rng([rows, width, batch])
        tokens = cases.random_tokens(rng, (batch, rows, width), dtype)
        length = np.full(batch, rows) - rng.integers(0, rows // 2, size=batch) * (batch > 1)
        length[0] = rows
        token_map = np.minimum(np.arange(1, rows)[None], length[:, None] - 1)
        size = (np.arange(rows) < length[:, None]).astype(np.float32)
        case = cases.GbmCase(tokens, size, token_map, length, 1.0, {"prefix": 1, **GBM})
        plain = dtype == np.float32
        cases.check_gbm_random(kernels, case, width if plain else width // 4 + 8, cases.Agreement())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_image_gives_the_same_bits_alone_and_in_a_batch(kernels: Kernels, dtype: Any) -> None:
    """Alone and together they take different tiles and different shares of a block."""
    rng = np.random.default_rng(2)
    tokens = cases.random_tokens(rng, (40, 1025, 192), dtype)
    grid = {"grid": (32, 32), "window": (2, 2), "prefix": 1, **CLAP}
    length = np.full(40, 641)
    together = (
        kernels.clap_similarity(tokens, **grid),
        *kernels.gbm_similarity(tokens[:, :641], length, prefix=1, **GBM),
    )
    for b in (0, 17, 39):
        alone = (
            kernels.clap_similarity(tokens[b : b + 1], **grid),
            *kernels.gbm_similarity(tokens[b : b + 1, :641], length[:1], prefix=1, **GBM),
        )
        for one, many_images in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0].view(np.int32), many_images[b].view(np.int32))


@pytest.mark.parametrize("kind", ["few", "constant", "signs"])
@pytest.mark.parametrize("batch_mode", ["per_image", "batch_min"])
def test_images_too_large_for_shared_memory(kernels: Kernels, batch_mode: str, kind: str) -> None:
    """More windows and rows than a block holds; `few` and `constant` make hundreds of rows join a single one."""
    rng = np.random.default_rng(3)
    tokens = cases.exact_tokens(rng, kind, (2, 2 + 48 * 90, 16), np.float16)
    size = rng.integers(1, 5, size=tokens.shape[:2]).astype(np.float32)
    common = {"prefix": 2, "semantics": "code", "batch": batch_mode}
    for order in ("published", "raster"):
        layout = {"grid": (48, 90), "window": (2, 2), "order": order}
        cases.check_clap_exact(kernels, cases.ClapCase(tokens, size, 0.25, {**layout, **common}))
    token_map = rng.integers(2, tokens.shape[1], size=(2, 4320))
    length = np.array([tokens.shape[1], 2500])
    token_map[1] %= 2500
    size[1, 2500:] = 0
    attributes = {"mode": "fixed", "divisor": 1.0, **common}
    cases.check_gbm_exact(kernels, cases.GbmCase(tokens, size, token_map, length, 0.5, attributes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_that_the_caller_asks_for_is_zero(kernels: Kernels, dtype: Any) -> None:
    rng = np.random.default_rng(4)
    tokens = cases.exact_tokens(rng, "constant", (3, 1 + 5 * 7, 64), dtype)
    size = np.ones(tokens.shape[:2], np.float32)
    attributes: dict[str, Any] = {"grid": (5, 7), "window": (2, 2), "prefix": 1, **CLAP}
    merged = kernels.clap(tokens, size, 0.5, **attributes)
    again = kernels.gbm(*merged, 0.5, prefix=1, **GBM)
    for few, more in (
        (merged, kernels.clap(tokens, size, 0.5, out_rows=50, **attributes)),
        (again, kernels.gbm(*merged, 0.5, out_rows=50, prefix=1, **GBM)),
    ):
        rows = few[0].shape[1]
        assert rows < 36
        for shorter, longer in zip(few[:2], more[:2], strict=True):
            np.testing.assert_array_equal(longer[:, :rows], shorter)
            assert not longer[:, rows:].astype(np.float32).any()


@pytest.mark.parametrize("batch_mode", ["per_image", "batch_min"])
def test_a_crowd_of_images(kernels: Kernels, batch_mode: str) -> None:
    clap, gbm = cases.crowd(np.float16, batch_mode)
    cases.check_clap_exact(kernels, clap)
    cases.check_gbm_exact(kernels, gbm)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_the_same_bits_on_every_run(kernels: Kernels, dtype: Any) -> None:
    rng = np.random.default_rng(1)
    tokens = cases.random_tokens(rng, (8, 1025, 384), dtype)
    size, attributes = np.ones(tokens.shape[:2], np.float32), {"grid": (32, 32), "window": (2, 2), "prefix": 1, **CLAP}

    def run() -> list[np.ndarray]:
        clap = kernels.clap(tokens, size, 0.6, **attributes)
        gbm = kernels.gbm(*clap, 1.0, prefix=1, **GBM)
        labels = kernels.label_map(gbm[0], gbm[2], prefix=0, grid=(32, 32), size=(512, 512))
        return [array.view(np.uint8) for array in (*clap, *gbm, labels)]

    first = run()
    for _ in range(5):
        for mine, theirs in zip(run(), first, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_device_and_host_agree_on_exact_sums(kernels: Kernels, cuda_library: Path) -> None:
    host = Kernels(cuda_library, HostMemory())
    for seed in range(50):
        rng = np.random.default_rng(seed)
        case = cases.clap_case(cases.pick_from(rng), rng, np.float16, exact=True)
        arguments = (case.tokens, case.size, case.threshold)
        cases.assert_equal_outputs(
            kernels.clap(*arguments, **case.attributes), host.clap(*arguments, **case.attributes)
        )


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


def test_a_thousand_classes_fit_and_ten_thousand_are_refused(kernels: Kernels) -> None:
    rng, patch_map = np.random.default_rng(0), np.arange(4)[None]
    attributes: dict[str, Any] = {"prefix": 0, "grid": (2, 2), "size": (32, 32)}
    cases.check_label_map(kernels, rng.standard_normal((1, 4, 1000)).astype(np.float32), patch_map, **attributes)
    with pytest.raises(KernelError) as caught:
        kernels.label_map(np.zeros((1, 4, 10000), np.float32), patch_map, **attributes)
    assert caught.value.status == UNSUPPORTED


def test_a_map_beyond_the_rows_reads_zeros(kernels: Kernels) -> None:
    values, patch_map = np.ones((1, 3, 8), np.float16), np.array([[0, 1, 3, -1, 1 << 40]])
    np.testing.assert_array_equal(kernels.unmerge(values, patch_map, prefix=0)[0, :, 0], [1, 1, 0, 0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 150, 1032])
def test_unmerge_copies_bits(kernels: Kernels, width: int, dtype: Any) -> None:
    rng = np.random.default_rng(width)
    values = rng.standard_normal((3, 9, width)).astype(dtype)
    patch_map = rng.integers(5, 14, size=(3, 40))
    expected = np.take_along_axis(values, patch_map[:, :, None] - 5, axis=1)
    np.testing.assert_array_equal(kernels.unmerge(values, patch_map, prefix=5).view(np.uint8), expected.view(np.uint8))


def test_contradictions_are_refused_before_any_launch(kernels: Kernels) -> None:
    tokens = np.ones((1, 17, 16), np.float32)
    params = kernels.clap_params(tokens, grid=(4, 5), window=(2, 2), prefix=1, **CLAP)
    with pytest.raises(KernelError) as caught:
        kernels.call("clap_similarity", params, kernels.put(tokens), kernels.empty((64,), np.uint8))
    assert caught.value.status == INVALID_ARGUMENT
