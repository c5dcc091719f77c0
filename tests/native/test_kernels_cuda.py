"""The CUDA kernels against the NumPy definitions: thousands of random cases, large shapes, the same bits always."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import kernel_cases as cases
import numpy as np
import pytest
import torch
from kernel_arrays import UNSUPPORTED, KernelError, Kernels
from kernel_code import EARLIER_CARDS, code_in, library_for
from kernel_memory import DTYPES, DeviceMemory, HostMemory
from operator_inputs import CLAP, GBM, exact_tokens, mask_inputs, ones

from algm_deploy.ops.clap import window_members
from algm_deploy.ops.kernel_library import clap_params, gbm_params
from algm_deploy.ops.schema import WORDS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["this card", *EARLIER_CARDS])
def library(request: pytest.FixtureRequest) -> Path:
    """The kernels for this card, and the code of earlier ones, which the driver translates for this one."""
    if request.param == "this card":
        return cast(Path, request.getfixturevalue("cuda_library"))
    return library_for(request.param)


@pytest.fixture(scope="module")
def kernels(library: Path) -> Kernels:
    return Kernels(library, DeviceMemory())


@pytest.mark.parametrize("card", EARLIER_CARDS)
def test_a_library_for_an_earlier_card_holds_its_ptx_alone(card: str) -> None:
    assert code_in(library_for(card)) == {f"sm_{EARLIER_CARDS[card].architecture}.ptx"}


def call_apart(library: Path, translating: bool) -> subprocess.CompletedProcess[str]:
    """A process that calls a kernel, where the driver may translate PTX or must not."""
    # Without the cache, from which a translation of earlier would come.
    environment = os.environ | {"CUDA_DISABLE_PTX_JIT": str(int(not translating)), "CUDA_CACHE_DISABLE": "1"}
    command = [sys.executable, Path(__file__).with_name("gelu_call.py"), library]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("card", EARLIER_CARDS)
def test_code_of_earlier_cards_runs_only_where_the_driver_translates_it(card: str) -> None:
    library = library_for(card)
    translated, refused = (call_apart(library, translating) for translating in (True, False))
    assert translated.returncode == 0, translated.stderr
    assert refused.returncode == 1
    assert re.search(r"^status 1\d{3}: ", refused.stderr, re.MULTILINE), refused.stderr  # an error of CUDA's


def test_code_for_this_card_runs_where_nothing_is_translated(cuda_library: Path) -> None:
    done = call_apart(cuda_library, translating=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
def test_clap_is_exact_where_sums_are(kernels: Kernels, dtype: Any) -> None:
    cases.many(dtype, lambda pick, rng: cases.check_exact(kernels, cases.clap_case(pick, rng, dtype, exact=True)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gbm_is_exact_where_sums_are(kernels: Kernels, dtype: Any) -> None:
    cases.many(dtype, lambda pick, rng: cases.check_exact(kernels, cases.gbm_case(pick, rng, dtype, exact=True)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decisions_are_exact_on_given_similarities(kernels: Kernels, dtype: Any) -> None:
    def check(pick: cases.Pick, rng: np.random.Generator) -> None:
        cases.check_clap_given(kernels, cases.clap_case(pick, rng, dtype, exact=False), pick, rng)
        cases.check_gbm_given(kernels, cases.gbm_case(pick, rng, dtype, exact=False), pick, rng)

    cases.many(dtype, check)


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

    cases.many(dtype, check)
    print(np.dtype(dtype).name, "clap", clap_seen, "gbm", gbm_seen)  # noqa: T201 - shown by -s, for the record


@pytest.mark.parametrize("dtype", DTYPES)
def test_deformable_attention(versions: tuple[Kernels, Kernels], dtype: Any) -> None:
    """Against the reference; and against the host's kernel, on whatever memory can hold."""

    def check(pick: cases.Pick, rng: np.random.Generator) -> None:
        for exact in (True, False):
            case = cases.places_case(pick, rng, dtype, exact)
            cases.check_places(versions[0], case, exact)
        case = cases.wild_places(cases.places_case(pick, rng, dtype, exact=True), pick, rng)
        found, expected = (case.run(some).astype(np.float64) for some in versions)
        np.testing.assert_array_equal(found, expected, strict=True)

    cases.many(dtype, check, cases.CASES // 5)


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
        case = cases.GbmCase(tokens, size, token_map, length, 1.0, GBM)
        plain = dtype == np.float32
        cases.check_gbm_random(kernels, case, width if plain else width // 4 + 8, cases.Agreement())


@pytest.mark.parametrize("kind", ["few", "constant", "signs"])
@pytest.mark.parametrize("batch", WORDS["batch"])
def test_images_too_large_for_shared_memory(kernels: Kernels, batch: str, kind: str) -> None:
    """More windows and rows than a block holds; `few` and `constant` make hundreds of rows join a single one."""
    rng = np.random.default_rng(3)
    tokens = exact_tokens(rng, kind, (2, 2 + 48 * 90, 16), np.float16)
    size = rng.integers(1, 5, size=tokens.shape[:2]).astype(np.float32)
    common = {"prefix": 2, "batch": batch}
    for order in WORDS["order"]:
        attributes = CLAP | common | {"grid": (48, 90), "window": (2, 2), "order": order}
        cases.check_exact(kernels, cases.ClapCase(tokens, size, 0.25, attributes))
    token_map = rng.integers(2, tokens.shape[1], size=(2, 4320))
    length = np.array([tokens.shape[1], 2500])
    token_map[1] %= 2500
    size[1, 2500:] = 0
    cases.check_exact(kernels, cases.GbmCase(tokens, size, token_map, length, 0.5, GBM | common | {"rule": "fixed"}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_the_same_bits_on_every_run(kernels: Kernels, dtype: Any) -> None:
    rng = np.random.default_rng(1)
    tokens = cases.random_tokens(rng, (8, 1025, 384), dtype)
    attributes = {"grid": (32, 32), "window": (2, 2), **CLAP}

    def run() -> list[np.ndarray]:
        clap = kernels.clap(tokens, ones(tokens), 0.6, **attributes)
        gbm = kernels.gbm(*clap, 1.0, **GBM)
        labels = kernels.label_map(gbm[0], gbm[2], prefix=0, grid=(32, 32), size=(512, 512))
        return [array.view(np.uint8) for array in (*clap, *gbm, labels)]

    first = run()
    for _ in range(5):
        for mine, theirs in zip(run(), first, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_device_and_host_agree_on_exact_sums(kernels: Kernels, library: Path) -> None:
    host = Kernels(library, HostMemory())
    for seed in range(50):
        rng = np.random.default_rng(seed)
        case = cases.clap_case(cases.pick_from(rng), rng, np.float16, exact=True)
        found, expected = (some.clap(*case.inputs, **case.attributes) for some in (kernels, host))
        cases.assert_equal_outputs(found, expected)


@pytest.fixture(params=[False, True], ids=["aligned", "shifted"])
def versions(request: pytest.FixtureRequest, library: Path) -> tuple[Kernels, Kernels]:
    """The kernels for the device and those for the host, on memory that is aligned to 16 bytes or not."""
    memories = DeviceMemory(request.param), HostMemory(request.param)
    device, host = (Kernels(library, memory) for memory in memories)
    return device, host


@pytest.mark.parametrize("dtype", DTYPES)
def test_device_and_host_agree_on_all_that_memory_can_hold(versions: tuple[Kernels, Kernels], dtype: Any) -> None:
    """NaN, infinities, -0.0, lengths of any 64 bits, on shapes of one to many tiles."""

    def check(pick: cases.Pick, rng: np.random.Generator) -> None:
        for made in (cases.clap_case, cases.gbm_case, cases.long_gbm_case):
            cases.check_same(*versions, cases.wild(made(pick, rng, dtype, exact=True), pick, rng))

    cases.many(dtype, check)


@pytest.mark.parametrize("dtype", DTYPES)
def test_device_and_host_agree_on_given_similarities(versions: tuple[Kernels, Kernels], dtype: Any) -> None:
    """Where rows with infinities do merge."""

    def check(pick: cases.Pick, rng: np.random.Generator) -> None:
        clap = cases.wild(cases.clap_case(pick, rng, dtype, exact=True), pick, rng)
        shape = (len(clap.tokens), len(window_members(*clap.layout[:2])))
        cases.check_same(*versions, clap, cases.tied_values(pick, rng, shape))
        gbm = cases.gbm_case(pick, rng, dtype, exact=True)
        best, best_row = versions[1].gbm_similarity(gbm.tokens, gbm.length, **gbm.attributes)
        best = np.where(best_row >= 0, cases.tied_values(pick, rng, best.shape), -np.inf).astype(np.float32)
        same = {"length": gbm.length, "map": gbm.map}
        cases.check_same(*versions, replace(cases.wild(gbm, pick, rng), **same), (best, best_row))

    cases.many(dtype, check)


def test_lengths_that_32_bits_cannot_hold(kernels: Kernels, library: Path) -> None:
    """Of 641 rows, as they once led a tile of tensor cores out of memory."""
    host = Kernels(library, HostMemory())
    for dtype in DTYPES:
        tokens = exact_tokens(np.random.default_rng(0), "pairs", (3, 641, 64), dtype)
        length = np.array([0xFFFFFFFF00F00000 - 2**64, 641 + 2**32, -(2**31) - 1])
        case = cases.GbmCase(tokens, ones(tokens), np.zeros((3, 640), np.int64), length, 0.5, GBM | {"rule": "fixed"})
        cases.check_same(kernels, host, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_too_few_output_rows_are_nan_and_nothing_behind_them(kernels: Kernels, dtype: Any) -> None:
    """The guard behind every output is checked when it is fetched."""
    tokens = exact_tokens(np.random.default_rng(0), "signs", (2, 17, 64), dtype)
    layout = {"grid": (4, 4), "window": (2, 2)}
    for out_rows in (1, 4, 16):
        for tokens_out, size_out, *_ in (
            kernels.clap(tokens, ones(tokens), 1.5, out_rows=out_rows, **CLAP | layout),
            kernels.gbm(
                tokens, ones(tokens), np.zeros((2, 1), np.int64), np.full(2, 17), 9.0, out_rows=out_rows, **GBM
            ),
        ):
            assert np.isnan(tokens_out.astype(np.float32)).all()
            assert np.isnan(size_out).all()


def test_threads_with_windows_of_different_sizes(library: Path) -> None:
    """Their kernel is one, and so is the shared memory that it may ask for."""
    tokens = cases.random_tokens(np.random.default_rng(0), (1, 17, 16), np.float32)

    def failures(window: tuple[int, int]) -> int:
        kernels = Kernels(library, DeviceMemory())
        params = clap_params(tokens.shape, "float32", **CLAP | {"grid": (4, 4), "window": window})
        given, similarity = (
            ctypes.c_void_p((held := kernels.put(tokens)).data_ptr()),
            kernels.memory.empty((8,), np.float32),
        )
        out = ctypes.c_void_p(similarity.data_ptr())
        failed = sum(kernels.library.call("clap_similarity", params, given, out) != 0 for _ in range(50_000))
        torch.cuda.synchronize()
        del held
        return failed

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(failures, [(1, 2), (2, 2), (1, 2), (2, 2)])) == [0, 0, 0, 0]


def test_a_sequence_longer_than_a_grid_is_refused(kernels: Kernels) -> None:
    params = gbm_params((1, 1 << 26, 8), "float32", 1, **GBM)
    buffer = kernels.memory.empty((64,), np.uint8)
    with pytest.raises(KernelError) as caught:
        kernels.call("gbm_similarity", params, buffer, buffer, buffer, buffer, buffer)
    assert caught.value.status == UNSUPPORTED


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_labels_of_random_masks(kernels: Kernels, dtype: Any) -> None:
    cases.many(dtype, lambda pick, rng: cases.check_random_masks(kernels, pick, rng, dtype), cases.CASES // 5)


# As SegViT has them, as EoMT, in two groups of classes, for a kernel without tensor cores on any card, in few pixels.
FULL_SIZES = [
    (150, 40, 640, 150, np.float32),
    (100, 128, 512, 150, np.float16),
    (100, 64, 512, 171, np.float16),
    (100, 256, 256, 19, np.float16),
    (1000, 32, 128, 150, np.float32),
    (200, 130, 56, 133, np.float32),
]


@pytest.mark.parametrize(("queries", "grid", "size", "classes", "dtype"), FULL_SIZES)
def test_mask_labels_at_full_size(
    kernels: Kernels, library: Path, queries: int, grid: int, size: int, classes: int, dtype: Any
) -> None:
    """Device and host agree on masks of smooth shapes; an image has the same bits alone, in a batch, and once more."""
    rng = np.random.default_rng(queries)
    places, radius = rng.uniform(0, grid, (2, 3, queries, 1, 1)), rng.uniform(0.05, 0.3, (3, queries, 1, 1)) * grid
    down, across = np.mgrid[:grid, :grid]
    far = np.hypot(down - places[0], across - places[1]) - radius
    masks = (-60 / grid * far + 0.3 * rng.standard_normal(far.shape)).astype(dtype)
    _, shares = mask_inputs(rng, (3, queries, 1, 1), classes, np.float32, 1.0)
    cases.check_masks_like(kernels, Kernels(library, HostMemory()), masks, shares, (size, size))
    together = kernels.mask_labels(masks, shares, size=(size, size))
    np.testing.assert_array_equal(kernels.mask_labels(masks, shares, size=(size, size)), together)
    for image in (0, 2):
        one = slice(image, image + 1)
        np.testing.assert_array_equal(
            kernels.mask_labels(masks[one], shares[one], size=(size, size))[0], together[image]
        )


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
