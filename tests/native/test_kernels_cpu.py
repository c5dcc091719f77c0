"""The CPU kernels against the NumPy definitions on random cases, and what only they refuse."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_arrays import INVALID_MAP, OUT_OF_MEMORY, KernelError, Kernels
from kernel_memory import DTYPES, HostMemory
from operator_inputs import CLAP, GBM, ones

FEW = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def kernels(cpu_library: Path) -> Kernels:
    return Kernels(cpu_library, HostMemory())


def chain_of(width: int) -> int:
    return width // 16 + 6  # sixteen partial sums, then a tree


def picking(data: Any) -> cases.Pick:
    return lambda options: data.draw(st.sampled_from(options))


@FEW
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_clap_is_exact_where_sums_are(kernels: Kernels, data: Any, seed: int, dtype: Any) -> None:
    cases.check_exact(kernels, cases.clap_case(picking(data), np.random.default_rng(seed), dtype, exact=True))


@FEW
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_gbm_is_exact_where_sums_are(kernels: Kernels, data: Any, seed: int, dtype: Any) -> None:
    cases.check_exact(kernels, cases.gbm_case(picking(data), np.random.default_rng(seed), dtype, exact=True))


@FEW
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_decisions_are_exact_on_given_similarities(kernels: Kernels, data: Any, seed: int) -> None:
    pick, rng = picking(data), np.random.default_rng(seed)
    cases.check_clap_given(kernels, cases.clap_case(pick, rng, np.float32, exact=False), pick, rng)
    cases.check_gbm_given(kernels, cases.gbm_case(pick, rng, np.float32, exact=False), pick, rng)


@FEW
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_random_tokens_agree_within_rounding(kernels: Kernels, data: Any, seed: int, dtype: Any) -> None:
    pick, rng, seen = picking(data), np.random.default_rng(seed), cases.Agreement()
    clap = cases.clap_case(pick, rng, dtype, exact=False)
    cases.check_clap_random(kernels, clap, chain_of(clap.tokens.shape[2]), seen)
    gbm = cases.gbm_case(pick, rng, dtype, exact=False)
    cases.check_gbm_random(kernels, gbm, chain_of(gbm.tokens.shape[2]), seen)


@FEW
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES), exact=st.booleans())
def test_deformable_attention(kernels: Kernels, data: Any, seed: int, dtype: Any, exact: bool) -> None:
    pick, rng = picking(data), np.random.default_rng(seed)
    case = cases.places_case(pick, rng, dtype, exact)
    cases.check_places(kernels, case, exact)
    if exact:
        cases.check_places(kernels, cases.wild_places(case, pick, rng), exact)


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
    attributes = CLAP | {"grid": (1, 128), "window": (1, 2), "prefix": 0, "order": "raster"}
    merged = kernels.clap(pairs, ones(pairs), -2.0, **attributes)[0]
    np.testing.assert_array_equal(merged.reshape(-1, 2)[:, 0].astype(np.float32), scores.ravel().astype(np.float32))


def test_too_few_output_rows_are_refused(kernels: Kernels) -> None:
    tokens = cases.random_tokens(np.random.default_rng(8), (1, 17, 16), np.float32)
    with pytest.raises(KernelError, match="status 1"):
        kernels.clap(tokens, ones(tokens), 1.5, out_rows=16, grid=(4, 4), window=(2, 2), **CLAP)


def test_a_map_beyond_the_rows_is_refused(kernels: Kernels) -> None:
    values, patch_map = np.ones((1, 3, 2), np.float32), np.array([[0, 1, 3]])
    with pytest.raises(KernelError) as caught:
        kernels.unmerge(values, patch_map, prefix=0)
    assert caught.value.status == INVALID_MAP
    with pytest.raises(KernelError, match="status 3"):
        kernels.label_map(values, patch_map - 1, prefix=0, grid=(1, 3), size=(4, 4))
    tokens, size, length = np.ones((1, 6, 4), np.float32), np.ones((1, 6), np.float32), np.array([4])
    with pytest.raises(KernelError, match="status 3"):
        kernels.gbm(tokens, size, np.array([[1, 5]]), length, 1.0, **GBM)


WITHOUT_MEMORY = """
import resource, sys
from kernel_arrays import Kernels, KernelError
from kernel_memory import HostMemory
from algm_deploy.ops.kernel_library import deformable_attention_params, label_map_params, mask_labels_params

kernels = Kernels(sys.argv[1], HostMemory())
room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (room, room))
masks = mask_labels_params((1, 1 << 10, 1, 1), "float32", 1 << 19, (8, 8), True)
labels = label_map_params((1, 1, 1 << 29), "float32", 0, (1, 1), (8, 8), True)
places = deformable_attention_params((1, 1, 1, 1), "float32", (1, 1, 1, 1, 1 << 28), (1, 1))
buffer = bytearray(4096)
for name, params, count in (("mask_labels", masks, 3), ("label_map", labels, 3), ("deformable_attention", places, 4)):
    try:
        kernels.call(name, params, *[kernels.put(buffer, "u1")] * count)
    except KernelError as error:
        print(name, error.status)
"""


def test_out_of_memory_is_a_status(cpu_library: Path) -> None:
    """In a process of its own that may take little more; no exception leaves what threads of a pool call."""
    helpers = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY, cpu_library],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": helpers},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{name} {OUT_OF_MEMORY}" for name in ("mask_labels", "label_map", "deformable_attention")
    ]


def test_the_header_is_plain_c(root_dir: Path, tmp_path: Path, cpu_library: Path) -> None:
    source = tmp_path / "header.c"
    source.write_text('#include "algm_kernels.h"\nint main(void) { return algm_cpu_status_text(0) == 0; }\n')
    command = ["g++", "-x", "c", "-std=c99", "-pedantic-errors", "-Wall", "-Werror"]
    include = f"-I{root_dir / 'runtimes' / 'kernels'}"
    subprocess.run([*command, include, "-c", source, "-o", tmp_path / "header.o"], check=True)
    assert ctypes.CDLL(str(cpu_library)).algm_cpu_gbm_decide
