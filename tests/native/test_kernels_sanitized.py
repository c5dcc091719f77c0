"""The CPU kernels under the address and the undefined-behaviour sanitizer, on what a network gives them and what not.

They run in a process of their own, which loads the sanitizer first; results are compared here.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_cases as cases
import numpy as np
import pytest
from kernel_arrays import UNSUPPORTED, KernelError, Kernels
from kernel_memory import DTYPES, HostMemory
from native_build import locked
from operator_inputs import CLAP, GBM, mask_inputs, ones

from algm_deploy.native_libraries import cache_folder
from algm_deploy.ops.kernel_library import (
    LabelMapParams,
    MaskLabelsParams,
    UnmergeParams,
    attention_params,
    bias_skip_norm_params,
    clap_params,
    deformable_attention_params,
    gbm_params,
    gelu_params,
    patches_params,
)

FLAGS = "-std=c++17 -O1 -g1 -fPIC -shared -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all"
CASES = 60  # for each token type


def encoded(content: bytes) -> str:
    return b64encode(content).decode()


class ExactMemory(HostMemory):
    """Nothing behind an output: the sanitizer sees whoever writes there."""

    guard = 0


class SanitizedKernels(Kernels):
    """Calls are made in the other process, on copies of the buffers."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes], shifted: bool = False) -> None:
        super().__init__(path, ExactMemory(shifted))
        self._process = process

    def call(self, name: str, params: ctypes.Structure, *arguments: Any) -> None:
        process, arrays = self._process, [a for a in arguments if isinstance(a, np.ndarray)]
        assert process.stdin and process.stdout and process.stderr
        sent = [(encoded(a.tobytes()), a.ctypes.data % 16) if isinstance(a, np.ndarray) else a for a in arguments]
        process.stdin.write(json.dumps([name, encoded(bytes(params)), sent]).encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, process.stderr.read().decode()[:4000]
        status, contents = json.loads(answer)
        for array, content in zip(arrays, contents, strict=True):
            array[:] = np.frombuffer(b64decode(content), np.uint8)
        if status:
            raise KernelError(status, self.library.status_text(status))


@pytest.fixture(scope="module")
def library(root_dir: Path) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = cache_folder() / "sanitized"
    path = folder / "libalgm_kernels.so"
    with locked(folder):
        if not path.is_file():
            sources = sorted((root_dir / "runtimes" / "kernels" / "cpu").glob("*.cpp"))
            made = path.with_suffix(".part")
            subprocess.run([compiler, *FLAGS.split(), "-o", made, *sources], check=True)
            made.replace(path)
    return path


def started(library: Path) -> subprocess.Popen[bytes]:
    name = ["g++", "-print-file-name=libasan.so"]
    sanitizer = subprocess.run(name, capture_output=True, text=True, check=True).stdout.strip()
    script = Path(__file__).with_name("sanitized_call.py")
    settings = {"LD_PRELOAD": sanitizer, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, script, library], env=os.environ | settings, **pipes)


@pytest.fixture(scope="module")
def process(library: Path) -> Iterator[subprocess.Popen[bytes]]:
    with started(library) as process:
        yield process
        process.stdin.close()  # type: ignore[union-attr]


@pytest.fixture(params=[False, True], ids=["aligned", "shifted"])
def kernels(request: pytest.FixtureRequest, cpu_library: Path, process: subprocess.Popen[bytes]) -> Kernels:
    return SanitizedKernels(cpu_library, process, request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merges_of_all_that_memory_can_hold(kernels: Kernels, dtype: Any) -> None:
    def check(pick: cases.Pick, rng: np.random.Generator) -> None:
        for made in (cases.clap_case, cases.gbm_case):
            case = made(pick, rng, dtype, exact=True)
            cases.check_exact(kernels, cases.wild(case, pick, rng))

    cases.many(dtype, check, CASES)


def test_random_tokens_and_given_similarities(kernels: Kernels) -> None:
    def check(pick: cases.Pick, rng: np.random.Generator) -> None:
        clap = cases.clap_case(pick, rng, np.float32, exact=False)
        cases.check_clap_random(kernels, clap, clap.tokens.shape[2] // 16 + 6, cases.Agreement())
        cases.check_clap_given(kernels, clap, pick, rng)
        cases.check_gbm_given(kernels, cases.gbm_case(pick, rng, np.float32, exact=False), pick, rng)

    cases.many(np.float32, check, CASES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_labels_and_unmerge(kernels: Kernels, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for grid, size, classes in cases.LABEL_SHAPES[:3]:
        scores, patch_map = cases.label_inputs(rng, grid, classes, 1, dtype, False)
        cases.check_label_map(kernels, scores, patch_map, prefix=1, grid=grid, size=size)
        cases.check_lines(kernels.label_map, 7, scores, patch_map, prefix=1, grid=grid, size=size)
        found = kernels.unmerge(scores, patch_map, prefix=1)
        np.testing.assert_array_equal(found, np.take_along_axis(scores, patch_map[:, :, None] - 1, axis=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_labels(kernels: Kernels, dtype: Any) -> None:
    cases.many(dtype, lambda pick, rng: cases.check_random_masks(kernels, pick, rng, dtype), 15)
    masks, classes = mask_inputs(np.random.default_rng(0), (1, 5, 3, 3), 9, np.float32, 4.0)
    for value in (np.nan, np.inf):
        masks[0, :, 1] = value
        assert (kernels.mask_labels(masks, classes, size=(20, 9), lines=(3, 20)) < 9).all()


def test_deformable_attention_of_all_that_memory_can_hold(kernels: Kernels) -> None:
    def check(pick: cases.Pick, rng: np.random.Generator) -> None:
        case = cases.places_case(pick, rng, np.float16, exact=True)
        cases.check_places(kernels, cases.wild_places(case, pick, rng), exact=True)

    cases.many(np.float16, check, CASES)


HUGE = (1 << 32, (1 << 32) + 1, 1 << 62, (1 << 63) - 1, -(1 << 63))


@pytest.mark.parametrize("value", HUGE)
def test_huge_numbers_are_refused_before_anything_is_multiplied(kernels: Kernels, value: int) -> None:
    buffer = kernels.memory.empty((64,), np.uint8)
    plain = clap_params((1, 17, 16), "float32", **CLAP | {"grid": (4, 4), "window": (2, 2)})
    for name, made, arguments in (
        ("clap_decide", plain, 7),
        ("gbm_decide", gbm_params((1, 17, 16), "float32", 16, **GBM), 9),
        ("unmerge", UnmergeParams(1, 17, 16, 16, 1, 0), 3),
        ("label_map", LabelMapParams(1, 17, 5, 4, 4, 8, 8, 0, 8, 1, 0, 1), 3),
        ("mask_labels", MaskLabelsParams(1, 3, 5, 4, 4, 8, 8, 0, 8, 0, 1), 3),
        ("attention", attention_params((1, 17, 24), "float32", 2, 0.5), 4),
        ("gelu", gelu_params((1, 17, 16), "float32"), 3),
        ("bias_skip_norm", bias_skip_norm_params((1, 17, 16), "float32", 1e-6), 7),
        ("patches", patches_params((1, 3, 8, 8), "float32", 4, 128.0, 0.5), 2),
        (
            "deformable_attention",
            deformable_attention_params((1, 32, 2, 4), "float32", (1, 5, 2, 2, 4), (4, 6, 2, 4)),
            4,
        ),
    ):
        # A budget may be any: no more merges than there is.
        longs = [field for field, kind in made._fields_ if kind is ctypes.c_int64 and field != "budget"]
        for several in ([field] for field in longs), (["grid_h", "grid_w"], ["window_h", "window_w"], longs):
            for fields in several:
                params = type(made).from_buffer_copy(made)
                for field in set(fields) & set(longs):
                    setattr(params, field, value)
                if bytes(params) == bytes(made):
                    continue
                with pytest.raises(KernelError, match=r"status [12]"):
                    kernels.call(name, params, *[buffer] * arguments)
    with pytest.raises(KernelError) as caught:
        kernels.call("clap_apply", plain, buffer, buffer, buffer, max(value, 1 << 40), buffer, buffer)
    assert caught.value.status == UNSUPPORTED


def test_a_fault_is_found(cpu_library: Path, library: Path) -> None:
    """A row that the caller does not have."""
    tokens = cases.random_tokens(np.random.default_rng(0), (1, 17, 16), np.float32)
    with started(library) as process:
        kernels = SanitizedKernels(cpu_library, process)
        kernels.gbm(tokens, ones(tokens), np.arange(1, 17)[None], np.array([17]), 1.0, **GBM)
        params = clap_params((1, 17, 16), "float32", **CLAP | {"grid": (4, 4), "window": (2, 2)})
        similarity = kernels.memory.empty((4,), np.float32)
        with pytest.raises(AssertionError, match="heap-buffer-overflow"):
            kernels.call("clap_similarity", params, kernels.put(tokens[:, :16]), similarity)
