"""The CUDA kernels against the NumPy definitions: thousands of random cases, large shapes, the same bits always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kernel_cases as cases
import numpy as np
import pytest
from kernel_arrays import UNSUPPORTED, KernelError, Kernels
from kernel_memory import DTYPES, DeviceMemory, HostMemory
from operator_inputs import CLAP, GBM, exact_tokens, ones

from algm_deploy.ops.schema import WORDS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels(cuda_library: Path) -> Kernels:
    return Kernels(cuda_library, DeviceMemory())


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
    cases.check_exact(kernels, cases.GbmCase(tokens, size, token_map, length, 0.5, GBM | common | {"mode": "fixed"}))


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


def test_device_and_host_agree_on_exact_sums(kernels: Kernels, cuda_library: Path) -> None:
    host = Kernels(cuda_library, HostMemory())
    for seed in range(50):
        rng = np.random.default_rng(seed)
        case = cases.clap_case(cases.pick_from(rng), rng, np.float16, exact=True)
        found, expected = (some.clap(*case.inputs, **case.attributes) for some in (kernels, host))
        cases.assert_equal_outputs(found, expected)


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
