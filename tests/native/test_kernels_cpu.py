"""The CPU kernels against the golden vectors and the NumPy definitions."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import kernel_cases as cases
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_library import (
    INVALID_ARGUMENT,
    INVALID_MAP,
    UNSUPPORTED,
    HostMemory,
    KernelError,
    Kernels,
)

from algm_deploy.ops import native_kernels

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
FEW = settings(max_examples=40, deadline=None)
CLAP = {"semantics": "code", "batch": "per_image", "order": "published"}
GBM = {"semantics": "code", "batch": "per_image", "mode": "adaptive", "divisor": 5.0}


@pytest.fixture(scope="module")
def kernels(cpu_library: Path) -> Kernels:
    return Kernels(cpu_library, HostMemory())


def chain_of(width: int) -> int:
    return width // 16 + 6  # sixteen partial sums, then a tree


@pytest.mark.parametrize("number", range(8))
def test_golden_vectors(kernels: Kernels, vectors_dir: Path, number: int) -> None:
    golden = np.load(vectors_dir / f"op_{number:02}.npz")
    grid, window = tuple(golden["grid"].tolist()), tuple(golden["window"].tolist())
    size = np.ones(golden["x"].shape[:2], dtype=np.float32)
    attributes = {"semantics": "code", "batch": "batch_min"}
    tokens, size, patch_map, length = kernels.clap(
        golden["x"], size, float(golden["tau"]), grid=grid, window=window, prefix=1, order="published", **attributes
    )
    np.testing.assert_array_equal(patch_map, golden["clap_map"][:, 1:])
    np.testing.assert_array_equal(size, golden["clap_size"])
    np.testing.assert_allclose(tokens, golden["clap_tokens"], rtol=1e-5, atol=1e-5)
    tokens, size, patch_map, length = kernels.gbm(
        tokens,
        size,
        patch_map,
        length,
        1.0,
        prefix=1,
        mode="adaptive",
        divisor=float(golden["gbm_layer"]),
        **attributes,
    )
    np.testing.assert_array_equal(patch_map, golden["token_map"][:, 1:])
    np.testing.assert_array_equal(length, np.full(len(length), golden["gbm_tokens"].shape[1]))
    np.testing.assert_array_equal(size, golden["gbm_size"])
    np.testing.assert_allclose(tokens, golden["gbm_tokens"], rtol=1e-5, atol=1e-5)


@FEW
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_clap_is_exact_where_sums_are(kernels: Kernels, data: Any, seed: int, dtype: Any) -> None:
    case = cases.clap_case(lambda o: data.draw(st.sampled_from(o)), np.random.default_rng(seed), dtype, exact=True)
    cases.check_clap_exact(kernels, case)


@FEW
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_gbm_is_exact_where_sums_are(kernels: Kernels, data: Any, seed: int, dtype: Any) -> None:
    case = cases.gbm_case(lambda o: data.draw(st.sampled_from(o)), np.random.default_rng(seed), dtype, exact=True)
    cases.check_gbm_exact(kernels, case)


@FEW
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_decisions_are_exact_on_given_similarities(kernels: Kernels, data: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def pick(options: Any) -> Any:
        return data.draw(st.sampled_from(options))

    clap = cases.clap_case(pick, rng, np.float32, exact=False)
    grid, window, _ = clap.layout
    windows = (grid[0] // window[0]) * (grid[1] // window[1])
    cases.check_clap_given(kernels, clap, cases.tied_values(pick, rng, (len(clap.tokens), windows)))
    cases.check_gbm_given(kernels, cases.gbm_case(pick, rng, np.float32, exact=False), pick, rng)


@FEW
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_random_tokens_agree_within_rounding(kernels: Kernels, data: Any, seed: int, dtype: Any) -> None:
    rng, seen = np.random.default_rng(seed), cases.Agreement()

    def pick(options: Any) -> Any:
        return data.draw(st.sampled_from(options))

    clap = cases.clap_case(pick, rng, dtype, exact=False)
    cases.check_clap_random(kernels, clap, chain_of(clap.tokens.shape[2]), seen)
    gbm = cases.gbm_case(pick, rng, dtype, exact=False)
    cases.check_gbm_random(kernels, gbm, chain_of(gbm.tokens.shape[2]), seen)


@pytest.mark.parametrize("batch_mode", ["per_image", "batch_min"])
def test_a_crowd_of_images(kernels: Kernels, batch_mode: str) -> None:
    clap, gbm = cases.crowd(np.float16, batch_mode)
    cases.check_clap_exact(kernels, clap)
    cases.check_gbm_exact(kernels, gbm)


def small_clap(rng: np.random.Generator, batch: int = 1) -> cases.ClapCase:
    tokens = cases.random_tokens(rng, (batch, 17, 16), np.float32)
    attributes = {"grid": (4, 4), "window": (2, 2), "prefix": 1, **CLAP}
    return cases.ClapCase(tokens, np.ones(tokens.shape[:2], np.float32), 0.5, attributes)


def test_an_image_of_a_batch_decides_as_it_does_alone(kernels: Kernels) -> None:
    case = small_clap(np.random.default_rng(3), batch=4)
    tokens, _, patch_map, length = kernels.clap(case.tokens, case.size, 0.6, **case.attributes)
    for b in range(4):
        alone = kernels.clap(case.tokens[b : b + 1], case.size[b : b + 1], 0.6, **case.attributes)
        np.testing.assert_array_equal(patch_map[b], alone[2][0])
        np.testing.assert_array_equal(tokens[b, : length[b]], alone[0][0])
    assert len(set(length.tolist())) > 1, "the images of this test must differ in their row counts"


def test_extra_output_rows_are_zero(kernels: Kernels) -> None:
    case = small_clap(np.random.default_rng(4))
    tight = kernels.clap(case.tokens, case.size, 0.5, **case.attributes)
    wide = kernels.clap(case.tokens, case.size, 0.5, out_rows=40, **case.attributes)
    rows = tight[0].shape[1]
    np.testing.assert_array_equal(wide[0][:, :rows], tight[0])
    assert not wide[0][:, rows:].any()
    assert not wide[1][:, rows:].any()


def test_threshold_decides_between_nothing_and_everything(kernels: Kernels) -> None:
    case = small_clap(np.random.default_rng(5))
    assert [int(kernels.clap(case.tokens, case.size, t, **case.attributes)[3][0]) for t in (-1.5, 1.5)] == [5, 17]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_value_survives(kernels: Kernels, dtype: Any) -> None:
    if np.dtype(dtype).itemsize == 4:
        values = np.random.default_rng(0).standard_normal(65536).astype(dtype)
    else:
        values = np.arange(65536, dtype=np.uint16).view(dtype)
    usable = np.abs(np.nan_to_num(values.astype(np.float32), nan=np.inf)) < 1e15  # squares stay below the limit of fp32
    scores = np.where(usable, values, np.zeros_like(values)).reshape(1, 256, 256)
    out = kernels.unmerge(scores, np.arange(256)[None], prefix=0)
    np.testing.assert_array_equal(out.view(np.uint8), scores.view(np.uint8))
    # Means of a value and itself come back as the value: conversion to fp32 and back is exact.
    pairs = np.repeat(np.concatenate([scores.reshape(-1, 1), np.ones((65536, 1), dtype)], 1), 2, axis=0).reshape(
        1024, 128, 2
    )
    attributes = {"grid": (1, 128), "window": (1, 2), "prefix": 0, **CLAP}
    merged = kernels.clap(pairs, np.ones(pairs.shape[:2], np.float32), -2.0, **{**attributes, "order": "raster"})[0]
    np.testing.assert_array_equal(merged.reshape(-1, 2)[:, 0].astype(np.float32), scores.ravel().astype(np.float32))


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
    ],
)
def test_contradictions_are_refused(kernels: Kernels, field: str, value: int, status: int) -> None:
    case = small_clap(np.random.default_rng(6))
    params = kernels.clap_params(case.tokens, **case.attributes)
    setattr(params, field, value)
    buffer = kernels.empty((4096,), np.uint8)
    assert kernels.query("clap_workspace", params) == 0
    with pytest.raises(KernelError) as caught:
        kernels.call("clap_similarity", params, buffer, buffer)
    assert caught.value.status == status
    assert "check the shapes" in str(caught.value) or "smaller batch" in str(caught.value)


def test_windows_of_one_patch_and_null_pointers_are_refused(kernels: Kernels) -> None:
    case = small_clap(np.random.default_rng(7))
    params = kernels.clap_params(case.tokens, **{**case.attributes, "window": (1, 1)})
    with pytest.raises(KernelError, match="status 1"):
        kernels.call("clap_similarity", params, kernels.put(case.tokens), kernels.empty((16,), np.float32))
    params = kernels.clap_params(case.tokens, **case.attributes)
    with pytest.raises(KernelError, match="status 1"):
        kernels.call("clap_similarity", params, None, kernels.empty((16,), np.float32))


def test_too_few_output_rows_are_refused(kernels: Kernels) -> None:
    case = small_clap(np.random.default_rng(8))
    with pytest.raises(KernelError, match="status 1"):
        kernels.clap(case.tokens, case.size, 1.5, out_rows=16, **case.attributes)


def test_a_map_beyond_the_rows_is_refused(kernels: Kernels) -> None:
    values, patch_map = np.ones((1, 3, 2), np.float32), np.array([[0, 1, 3]])
    with pytest.raises(KernelError) as caught:
        kernels.unmerge(values, patch_map, prefix=0)
    assert caught.value.status == INVALID_MAP
    with pytest.raises(KernelError, match="status 3"):
        kernels.label_map(values, patch_map - 1, prefix=0, grid=(1, 3), size=(4, 4))
    tokens, size, length = np.ones((1, 6, 4), np.float32), np.ones((1, 6), np.float32), np.array([4])
    with pytest.raises(KernelError, match="status 3"):
        kernels.gbm(tokens, size, np.array([[1, 5]]), length, 1.0, prefix=1, **GBM)


def test_uint8_labels_hold_256_classes_and_no_more(kernels: Kernels) -> None:
    from kernel_library import LabelMapParams

    buffer = kernels.empty((4096,), np.uint8)
    params = LabelMapParams(1, 1, 257, 1, 1, 2, 2, 0, 0, 0)
    with pytest.raises(KernelError, match="status 1"):
        kernels.call("label_map", params, buffer, buffer, buffer)


@pytest.mark.parametrize("name", ["ClapParams", "GbmParams", "LabelMapParams"])
def test_pytorch_calls_with_the_structs_that_these_tests_call_with(name: str) -> None:
    """The package's own call the CUDA kernels only, so nothing else here would notice that they have gone astray."""
    import kernel_library

    assert getattr(native_kernels, f"_{name}")._fields_ == getattr(kernel_library, name)._fields_


def test_status_texts_say_what_to_do(kernels: Kernels) -> None:
    assert [kernels.status_text(s).split()[0] for s in (0, 1, 2, 3, 99)] == ["The", "A", "The", "The", "An"]


def test_the_header_is_plain_c(root_dir: Path, tmp_path: Path, cpu_library: Path) -> None:
    import subprocess

    source = tmp_path / "header.c"
    source.write_text('#include "algm_kernels.h"\nint main(void) { return algm_cpu_status_text(0) == 0; }\n')
    command = ["g++", "-x", "c", "-std=c99", "-pedantic-errors", "-Wall", "-Werror"]
    include = f"-I{root_dir / 'runtimes' / 'kernels'}"
    subprocess.run([*command, include, "-c", source, "-o", tmp_path / "header.o"], check=True)
    assert ctypes.CDLL(str(cpu_library)).algm_cpu_gbm_decide
