"""Cases and checks that the CPU kernels, the CUDA kernels and the plugins share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from kernel_arrays import Kernels, Outputs
from kernel_memory import DTYPES
from operator_inputs import CLAP, GBM, KINDS, assert_mask_labels, exact_tokens, mask_inputs, ones, places_error

from algm_deploy.ops import reference
from algm_deploy.ops.clap import window_members
from algm_deploy.ops.kernel_library import ROWS_ON_DEVICE
from algm_deploy.ops.label_map import interpolation_matrix
from algm_deploy.ops.schema import WORDS

CASES = int(os.environ.get("ALGM_GPU_CASES", "500"))  # for each check and token type
Pick = Callable[[Sequence[Any]], Any]


def pick_from(rng: np.random.Generator) -> Pick:
    """Choices for a plain loop of random cases; hypothesis brings its own."""
    return lambda options: options[int(rng.integers(len(options)))]


def many(dtype: Any, check: Callable[[Pick, np.random.Generator], None], count: int = CASES) -> None:
    """A check on so many cases."""
    for seed in range(count):
        rng = np.random.default_rng([seed, DTYPES.index(dtype)])
        try:
            check(pick_from(rng), rng)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {np.dtype(dtype).name}: {error}") from error


def random_tokens(rng: np.random.Generator, shape: tuple[int, int, int], dtype: Any) -> np.ndarray:
    """Tokens that resemble each other to varying degrees, as those of a photo do."""
    base = (
        rng.standard_normal((shape[0], 1, shape[2]))
        + 0.7 * rng.standard_normal((shape[0], 4, shape[2]))[:, rng.integers(4, size=shape[1])]
    )
    return (base + rng.uniform(0.1, 1.0) * rng.standard_normal(shape)).astype(dtype)


def rounding_bound(width: int, chain: int) -> float:
    """Largest error of a cosine whose products and norms are fp32 sums with `chain` additions in a row.

    The product's sum errs by chain * 2^-24 of the product of the norms, each norm by half of that, and the divisions
    and products by a few units. Tensor cores cut instead of rounding: twice that, in chains of a sixteenth.
    """
    return (2 * chain + 8) * 2.0**-24


@dataclass(frozen=True)
class ClapCase:
    """Arguments of one CLAP."""

    op: ClassVar[str] = "clap"
    weighted: ClassVar[bool] = True
    tokens: np.ndarray
    size: np.ndarray
    threshold: float
    attributes: dict[str, Any]

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.tokens, self.size, self.threshold

    @property
    def layout(self) -> tuple[Any, Any, int]:
        return self.attributes["grid"], self.attributes["window"], self.attributes["prefix"]

    def map_from(self, row: np.ndarray) -> np.ndarray:
        """The map that follows from the output rows (B, S)."""
        return row[:, self.attributes["prefix"] :]


@dataclass(frozen=True)
class GbmCase:
    """Arguments of one GBM."""

    op: ClassVar[str] = "gbm"
    tokens: np.ndarray
    size: np.ndarray
    map: np.ndarray
    length: np.ndarray
    threshold: float
    attributes: dict[str, Any]

    @property
    def weighted(self) -> bool:
        return bool(self.attributes["semantics"] == "code")

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.tokens, self.size, self.map, self.length, self.threshold

    def map_from(self, row: np.ndarray) -> np.ndarray:
        return np.take_along_axis(row, self.map, 1)


Case = ClapCase | GbmCase


def case_tokens(
    pick: Pick, rng: np.random.Generator, images: int, rows: int, dtype: Any, exact: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and sizes."""
    shape = (images, rows, pick((4, 16, 64, 256)) if exact else pick((3, 8, 40, 72, 192)))
    kind = pick(KINDS)
    tokens = exact_tokens(rng, kind, shape, dtype) if exact else random_tokens(rng, shape, dtype)
    return tokens, rng.integers(1, 5, size=shape[:2]).astype(np.float32)


def clap_case(pick: Pick, rng: np.random.Generator, dtype: Any, exact: bool) -> ClapCase:
    grid = (pick((1, 2, 3, 4, 5, 8)), pick((1, 2, 3, 4, 6, 7)))
    window = pick(((2, 2), (2, 1), (1, 2), (2, 4), (3, 3), (1, 7)))
    prefix, images = pick((0, 1, 2, 5)), pick((1, 2, 3))
    tokens, size = case_tokens(pick, rng, images, prefix + grid[0] * grid[1], dtype, exact)
    words = {name: pick(WORDS[name]) for name in ("semantics", "batch", "order")}
    similarities = reference.window_similarity(tokens, grid, window, prefix).ravel()
    # An observed similarity is the tie that `>=` and `>` decide; -1 and 1.5 merge everything and nothing.
    observed = float(similarities[int(rng.integers(similarities.size))]) if similarities.size else 0.0
    counted = {"rule": pick(("threshold", "budget")), "budget": pick((0, 1, 3, 99))}
    attributes = {"grid": grid, "window": window, "prefix": prefix, **words, **counted}
    return ClapCase(tokens, size, pick((observed, 0.0, -1.0, 1.5, 0.5)), attributes)


def gbm_case(
    pick: Pick, rng: np.random.Generator, dtype: Any, exact: bool, sizes: Sequence[int] = (5, 6, 7, 8, 13, 40, 75)
) -> GbmCase:
    prefix, images, rows = pick((0, 1, 2, 5)), pick((1, 2, 3)), pick(sizes)
    tokens, size = case_tokens(pick, rng, images, rows, dtype, exact)
    shortest = min(rows, prefix + 1)
    length = rng.integers(shortest, rows + 1, size=images) if pick((True, False)) else np.full(images, rows)
    length[int(rng.integers(images))] = rows
    length = np.maximum(length, shortest).astype(np.int64)
    size[np.arange(rows) >= length[:, None]] = 0
    low = np.minimum(prefix, length - 1)[:, None]
    token_map = (low + (rng.random((images, 50)) * (length[:, None] - low)).astype(np.int64)).astype(np.int64)
    words = {name: pick(WORDS[name]) for name in ("semantics", "batch")}
    words["rule"] = pick(("adaptive", "fixed", "budget"))
    attributes = {"prefix": prefix, "divisor": pick((1.0, 5.0, 7.0)), "budget": pick((0, 1, 3, 99)), **words}
    best = np.concatenate(reference.gbm_similarity(tokens, length, prefix, words["semantics"])[0])
    observed = float(best[int(rng.integers(best.size))]) if best.size else 0.0
    threshold = pick((1.0, 0.0, -3.0, 9.0)) if words["rule"] == "adaptive" else pick((observed, 0.0, -1.0, 1.5))
    return GbmCase(tokens, size, token_map, length, threshold if np.isfinite(threshold) else 0.0, attributes)


def long_gbm_case(pick: Pick, rng: np.random.Generator, dtype: Any, exact: bool) -> GbmCase:
    """One whose rows are several tiles of a device."""
    return gbm_case(pick, rng, dtype, exact, (129, 257, 400, 641))


def wild(case: Case, pick: Pick, rng: np.random.Generator) -> Case:
    """The same with what no network should produce: NaN, infinities, rows of -0.0, lengths that cannot be."""
    tokens = case.tokens.copy()
    images, rows, width = tokens.shape
    tokens[rng.integers(images), rng.integers(rows)] = -0.0
    for _ in range(pick((0, 1, 4))):
        tokens[rng.integers(images), rng.integers(rows), rng.integers(width)] = pick((np.nan, np.inf, -np.inf))
    size = np.maximum(case.size, 1)
    if isinstance(case, ClapCase):
        return replace(case, tokens=tokens, size=size)
    prefix = case.attributes["prefix"]
    none = (-1, 0, -(2**63), 0xFFFFFFFF00F00000 - 2**64, -(2**32) + rows) if prefix else ()  # a map needs a row to name
    lengths = (*none, rows, rows + 1, 2**32 + 1, 2**63 - 1, *case.length.tolist())
    length = np.array([pick(lengths) for _ in range(images)])
    exist = np.clip(length, prefix, rows)[:, None]
    token_map = (rng.random(case.map.shape) * exist).astype(np.int64)
    return replace(case, tokens=tokens, size=size, length=length, map=token_map)


def crowd(dtype: Any, batch: str) -> tuple[ClapCase, GbmCase]:
    """Seventy images, more than a block of the decision kernels has warps, whose counts all differ in principle."""
    rng, images = np.random.default_rng(70), 70
    tokens = exact_tokens(rng, "few", (images, 37, 16), dtype)
    tokens[:, 1::2] = np.where(rng.random((images, 18, 1)) < 0.4, tokens[:, 2::2], tokens[:, 1::2])
    token_map, length = 1 + rng.integers(36, size=(images, 36)), np.full(images, 37)
    layout = {"grid": (6, 6), "window": (2, 2)}
    clap = ClapCase(tokens, ones(tokens), 0.5, layout | CLAP | {"batch": batch})
    return clap, GbmCase(tokens, ones(tokens), token_map, length, 0.5, GBM | {"batch": batch})


def tied_values(pick: Pick, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Similarities to decide on: many ties, all equal, or none equal."""
    levels = pick((1, 2, 5, 0))
    values = rng.standard_normal(shape) if levels == 0 else rng.integers(-levels, levels + 1, size=shape) / levels
    return np.clip(values, -1, 1).astype(np.float32)


# --- what the outputs must be ----------------------------------------------------------------------------------------


def merged_rows(
    tokens: np.ndarray, size: np.ndarray, row: np.ndarray, rows_out: int, weighted: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Means in fp64 (B, S', D) and sizes (B, S') of the rows that share an output row."""
    batch, _, width = tokens.shape
    weights = size.astype(np.float64) if weighted else np.ones(size.shape)
    images, rows = np.nonzero(row >= 0)
    target = (images, row[images, rows])
    sums, total = np.zeros((batch, rows_out, width)), np.zeros((batch, rows_out))
    sizes = np.zeros((batch, rows_out))
    np.add.at(sums, target, weights[images, rows, None] * tokens[images, rows].astype(np.float64))
    np.add.at(total, target, weights[images, rows])
    np.add.at(sizes, target, size[images, rows])
    return sums / np.where(total > 0, total, 1)[..., None], sizes.astype(np.float32)


def assert_merged(case: Case, out: Outputs, row: np.ndarray) -> None:
    """Sizes exact, padding zero, means within one rounding of fp32 sums and one of the token type."""
    tokens, size, _, length = out
    mean, sizes = merged_rows(case.tokens, case.size, row, tokens.shape[1], case.weighted)
    np.testing.assert_array_equal(size, sizes)
    padding = np.arange(tokens.shape[1]) >= length[:, None]
    assert not tokens[padding].astype(np.float32).any()
    largest = np.abs(case.tokens.astype(np.float64)).max(initial=0.0)
    unit = {2: 2.0**-10, 4: 2.0**-23}[tokens.dtype.itemsize] if tokens.dtype != "bfloat16" else 2.0**-7
    members = max(np.bincount(r[r >= 0]).max(initial=1) for r in row)
    error = np.abs(tokens.astype(np.float64) - mean)
    assert (error <= unit * np.abs(mean) + (members + 4) * 2.0**-23 * largest + 1e-7).all(), error.max()


def assert_equal_outputs(actual: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    """Map and length first: they say why tokens differ."""
    for name, index in (("length", 3), ("map", 2), ("size", 1), ("tokens", 0)):
        np.testing.assert_array_equal(
            actual[index].astype(np.float64), expected[index].astype(np.float64), err_msg=name, strict=True
        )


# --- checks ----------------------------------------------------------------------------------------------------------


def check_exact(kernels: Kernels, case: Case) -> None:
    """End to end equal to the reference, bit for bit, with the row count from the host and from the device."""
    expected = getattr(reference, case.op)(*case.inputs, **case.attributes)
    for out_rows in (None, ROWS_ON_DEVICE):
        assert_equal_outputs(getattr(kernels, case.op)(*case.inputs, out_rows=out_rows, **case.attributes), expected)


def check_same(kernels: Kernels, others: Kernels, case: Case, given: Any = None) -> None:
    """Two versions of the kernels give equal outputs, NaN where the other has NaN."""
    versions = (kernels, others)
    found, expected = (getattr(some, case.op)(*case.inputs, given=given, **case.attributes) for some in versions)
    assert_equal_outputs(found, expected)


def check_decided(kernels: Kernels, case: Case, rows: tuple[np.ndarray, np.ndarray], given: Any = None) -> None:
    """Decisions exact: output rows and lengths are those that follow from the kernel's or the given similarities."""
    row, length = rows
    out = getattr(kernels, case.op)(*case.inputs, given=given, **case.attributes)
    np.testing.assert_array_equal(out[3], length)
    np.testing.assert_array_equal(out[2], case.map_from(row))
    assert_merged(case, out, row)


def clap_rows_for(similarity: np.ndarray, case: ClapCase) -> tuple[np.ndarray, np.ndarray]:
    a = case.attributes
    rule = a["semantics"], a["batch"], a["order"], a["rule"], a["budget"]
    merged = reference.clap_decisions(similarity, case.threshold, *rule)
    return reference.clap_rows(merged, *case.layout)


def check_clap_given(kernels: Kernels, case: ClapCase, pick: Pick, rng: np.random.Generator) -> None:
    """Decisions exact on similarities that no token produced."""
    windows = len(window_members(*case.layout[:2]))
    similarity = tied_values(pick, rng, (len(case.tokens), windows))
    check_decided(kernels, case, clap_rows_for(similarity, case), similarity)


def split_best(case: GbmCase, best: np.ndarray, best_row: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The kernels' padded arrays as the reference's lists."""
    prefix, semantics = case.attributes["prefix"], case.attributes["semantics"]
    first = prefix if semantics == "paper" else prefix + prefix % 2
    counts = [len(range(first, int(n), 2)) for n in case.length]
    return [b[:n] for b, n in zip(best, counts, strict=True)], [
        np.maximum(r[:n].astype(np.int64), 0) for r, n in zip(best_row, counts, strict=True)
    ]


def gbm_rows_for(best: list[np.ndarray], match: list[np.ndarray], case: GbmCase) -> tuple[np.ndarray, np.ndarray]:
    a = case.attributes
    rule = a["rule"], a["divisor"], a["semantics"], a["batch"], a["budget"]
    merged = reference.gbm_decisions(best, case.threshold, *rule)
    return reference.gbm_rows(merged, match, case.tokens.shape[1], case.length, a["prefix"], a["semantics"])


def check_gbm_given(kernels: Kernels, case: GbmCase, pick: Pick, rng: np.random.Generator) -> None:
    """Decisions exact on similarities that no token produced: ties, and rows of B that several rows of A join."""
    _, real_rows = kernels.gbm_similarity(case.tokens, case.length, **case.attributes)
    best = np.where(real_rows >= 0, tied_values(pick, rng, real_rows.shape), -np.inf).astype(np.float32)
    check_decided(kernels, case, gbm_rows_for(*split_best(case, best, real_rows), case), (best, real_rows))


@dataclass
class Agreement:
    """What a long run of random cases saw beside passing."""

    cases: int = 0
    similarities: int = 0
    worst_error_of_bound: float = 0.0
    differing_cases: int = 0

    def note(self, found: np.ndarray, exact: np.ndarray, bound: float) -> None:
        error = np.abs(found.astype(np.float64) - exact)
        assert (error <= bound).all(), (error.max(), bound)
        self.cases += 1
        self.similarities += error.size
        self.worst_error_of_bound = max(self.worst_error_of_bound, float(error.max(initial=0.0)) / bound)


def check_clap_random(kernels: Kernels, case: ClapCase, chain: int, seen: Agreement) -> None:
    """Similarities within the bound, decisions exact on the kernel's own, a difference only below the bound."""
    bound = rounding_bound(case.tokens.shape[2], chain)
    similarity = kernels.clap_similarity(case.tokens, **case.attributes)
    exact = reference.window_similarity(case.tokens, *case.layout)
    seen.note(similarity, exact, bound)
    rows = clap_rows_for(similarity, case)
    check_decided(kernels, case, rows)
    if not np.array_equal(rows[0], clap_rows_for(exact, case)[0]):
        seen.differing_cases += 1
        gaps = [
            np.abs(exact - np.float32(case.threshold)).min(),
            *(np.diff(np.sort(e)).min() for e in exact if e.size > 1),
        ]
        assert min(gaps) <= 2 * bound, (gaps, bound)


def check_gbm_random(kernels: Kernels, case: GbmCase, chain: int, seen: Agreement) -> None:
    a = case.attributes
    bound = rounding_bound(case.tokens.shape[2], chain)
    best, match = split_best(case, *kernels.gbm_similarity(case.tokens, case.length, **a))
    exact_best, _ = reference.gbm_similarity(case.tokens, case.length, a["prefix"], a["semantics"])
    for b, (mine, theirs) in enumerate(zip(best, exact_best, strict=True)):
        finite = np.isfinite(theirs)
        np.testing.assert_array_equal(np.isfinite(mine), finite)
        seen.note(mine[finite], theirs[finite], bound)
        assert_matches(case, b, finite, match[b], theirs, bound)
    check_decided(kernels, case, gbm_rows_for(best, match, case))


def assert_matches(
    case: GbmCase, image: int, finite: np.ndarray, match: np.ndarray, best: np.ndarray, bound: float
) -> None:
    """The row that was chosen has, in fp64, a cosine within the bound of the best one."""
    x = case.tokens[image].astype(np.float64)
    x = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-8)
    prefix = case.attributes["prefix"]
    first = prefix if case.attributes["semantics"] == "paper" else prefix + prefix % 2
    rows = first + 2 * np.flatnonzero(finite)
    assert ((match[finite] - first) % 2 == 1).all()
    cosine = np.einsum("id,id->i", x[rows], x[match[finite]])
    assert (best[finite] - cosine <= 2 * bound).all()


# --- deformable attention ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacesCase:
    """Arguments of one deformable attention."""

    value: np.ndarray
    locations: np.ndarray
    shares: np.ndarray
    shapes: list[int]

    def run(self, kernels: Any) -> np.ndarray:
        """By the kernels, or by the reference."""
        out: np.ndarray = kernels.deformable_attention(self.value, self.locations, self.shares, shapes=self.shapes)
        return out


def places_case(
    pick: Pick, rng: np.random.Generator, dtype: Any, exact: bool, counts: Sequence[int] = (1, 2, 7)
) -> PlacesCase:
    """Places up to half a grid outside, and as many queries as one of the counts.

    Exact: on quarters of a cell, in grids whose sides are powers of two, so that every share and sum is a whole number
    of sixteenths.
    """
    sides = (1, 2, 4, 8) if exact else (1, 2, 3, 5, 7)
    images, queries, heads, points = pick((1, 3)), pick(counts), pick((1, 2, 3)), pick((1, 4))
    shapes = [pick(sides) for _ in range(2 * pick((1, 2, 3)))]
    cells, places = int(np.prod(np.reshape(shapes, (-1, 2)), axis=1).sum()), (images, queries, heads, len(shapes) // 2)
    value = rng.integers(-3, 4, (images, cells, heads, pick((1, 3, 8, 12, 44)))).astype(np.float64)
    shares = rng.integers(0, 3, (*places, points)).astype(np.float64)
    locations = rng.uniform(-0.5, 1.5, (*places, points, 2))
    if exact:
        quarters = 4 * np.reshape(shapes, (-1, 2))[:, None, ::-1]
        locations = np.round(locations * quarters) / quarters
    else:
        value, shares = value + rng.standard_normal(value.shape), shares * rng.random(shares.shape)
    return PlacesCase(value.astype(dtype), locations.astype(np.float32), shares.astype(np.float32), shapes)


def check_places(kernels: Any, case: PlacesCase, exact: bool) -> None:
    """Equal to the reference: bit for bit, or within what rounding of places, shares and sums explains."""
    found, expected = (case.run(some).astype(np.float64) for some in (kernels, reference))
    if exact:
        np.testing.assert_array_equal(found, expected, strict=True)
        return
    unit = 0.0 if case.value.dtype == np.float32 else {"float16": 2.0**-11, "bfloat16": 2.0**-8}[case.value.dtype.name]
    bound = places_error(case.value, case.shares, case.shapes, unit).repeat(case.value.shape[3], 2)
    assert (np.abs(found - expected) <= bound).all(), (np.abs(found - expected) / bound).max()


def wild_places(case: PlacesCase, pick: Pick, rng: np.random.Generator) -> PlacesCase:
    """The same with what no network should produce: NaN, infinities and places far away."""
    changed = [case.value.copy(), case.locations.copy(), case.shares.copy()]
    infinite = (np.nan, np.inf, -np.inf)
    for array, wild_values in zip(changed, (infinite, (*infinite, 1e30), (np.nan,)), strict=True):
        for _ in range(pick((0, 1, 3))):
            array.reshape(-1)[rng.integers(array.size)] = pick(wild_values)
    return PlacesCase(*changed, case.shapes)


# --- label maps ------------------------------------------------------------------------------------------------------

LABEL_SHAPES = (
    # grid, size, classes
    ((4, 4), (64, 64), 7),
    ((3, 5), (48, 80), 150),
    ((2, 3), (28, 42), 21),  # patches of 14
    ((2, 2), (6, 10), 3),  # odd patches: pixels on patch centres
    ((1, 1), (16, 16), 2),
    ((4, 4), (3, 2), 5),  # smaller than the grid
    ((3, 3), (100, 37), 255),  # no whole ratio
    ((2, 3), (64, 96), 300),  # int32 labels, more classes than a list holds
    ((2, 2), (80, 80), 1),
)


MASK_SHAPES = (
    # queries, grid, size, classes
    (150, (5, 4), (80, 64), 150),  # as SegViT has them
    (100, (16, 12), (64, 48), 150),  # as EoMT has them
    (1, (3, 3), (9, 100), 1),
    (1, (2, 2), (16, 16), 255),
    (17, (1, 1), (5, 33), 19),
    (33, (3, 5), (21, 37), 171),  # no whole ratio
    (40, (9, 70), (9, 70), 21),  # no larger than the masks
    (16, (40, 70), (17, 33), 60),  # smaller
    (8, (3, 40), (6, 2), 24),  # fewer columns than a cell of it has masks
    (5, (2, 3), (64, 96), 300),  # int32 labels
    (300, (2, 2), (24, 40), 88),
)


def factor_rounding(kernels: Kernels) -> float:
    """Unit of the factors of mask labels: on a device they are two bf16 each, of 16 digits or more together."""
    return 2.0 ** (-24 if kernels.memory.device == "cpu" else -17)


def check_mask_labels(kernels: Kernels, masks: np.ndarray, classes: np.ndarray, size: tuple[int, int]) -> None:
    """Labels of the largest sums."""
    labels = kernels.mask_labels(masks, classes, size=size)
    assert labels.dtype == (np.uint8 if classes.shape[2] <= 255 else np.int32)
    assert labels.shape == (len(masks), *size)
    assert_mask_labels(labels, masks, classes, factor_rounding(kernels))


def check_random_masks(kernels: Kernels, pick: Pick, rng: np.random.Generator, dtype: Any) -> None:
    """Of few and many queries and classes, larger and smaller than the picture."""
    queries, classes = pick((1, 7, 16, 17, 48, 100)), pick((1, 2, 19, 24, 25, 88, 89, 152, 153, 171, 255, 300))
    grid, size = pick(((1, 1), (3, 4), (9, 2), (20, 33))), pick(((1, 1), (8, 31), (16, 64), (33, 97), (5, 300)))
    shape = pick((1, 3)), queries, *grid
    masks, shares = mask_inputs(rng, shape, classes, np.float32, pick((1.0, 8.0, 60.0, 1e4)))
    check_mask_labels(kernels, (masks - pick((0.0, 10.0))).astype(dtype), shares, size)


def check_masks_like(
    kernels: Kernels, other: Kernels, masks: np.ndarray, classes: np.ndarray, size: tuple[int, int]
) -> None:
    """Labels differ from those of another implementation only where both classes are as good, by 2^-15 of their sums.

    That is what factors of 2^-17 leave of two sums; what their members add to it is far from its bound where there are
    many, as their errors have either sign.
    """
    mine, theirs = (run.mask_labels(masks, classes, size=size) for run in (kernels, other))
    assert_mask_labels(mine, masks, classes, factor_rounding(kernels), expected=theirs, most=2.0**-16)


def label_inputs(
    rng: np.random.Generator, grid: tuple[int, int], classes: int, prefix: int, dtype: Any, integers: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Scores (2, S, K) and map (2, N) into them."""
    patches = grid[0] * grid[1]
    rows = max(1, patches - 1)
    shape = (2, rows, classes)
    scores = rng.integers(-3, 4, size=shape) if integers else rng.standard_normal(shape)
    return scores.astype(dtype), prefix + rng.integers(rows, size=(2, patches))


def check_lines(label: Callable[..., np.ndarray], lines: int, *inputs: np.ndarray, **attributes: Any) -> None:
    """Labels of so many lines at a time are, bit by bit, those of the whole picture."""
    whole = label(*inputs, **attributes)
    height = whole.shape[1]
    for first in range(0, height, lines):
        end = min(first + lines, height)
        np.testing.assert_array_equal(label(*inputs, **attributes, lines=(first, end)), whole[:, first:end])


def check_label_map(kernels: Kernels, scores: np.ndarray, map: np.ndarray, **attributes: Any) -> int:
    """Differs from the definition only where two classes are equal up to rounding; returns how many pixels do."""
    labels = kernels.label_map(scores, map, **attributes)
    expected = reference.label_map(scores, map, **attributes)
    assert labels.dtype == expected.dtype
    differs = labels != expected
    if differs.any():
        grid, size = attributes["grid"], attributes["size"]
        patches = np.take_along_axis(scores, map[:, :, None] - attributes["prefix"], axis=1).astype(np.float64)
        patches = patches.transpose(0, 2, 1).reshape(len(scores), -1, *grid)
        down, across = (interpolation_matrix(g, s).astype(np.float64) for g, s in zip(grid, size, strict=True))
        full = down @ patches @ across.T
        value = {
            name: np.take_along_axis(full, labelled[:, None].astype(np.int64), 1)[:, 0]
            for name, labelled in (("mine", labels), ("best", expected))
        }
        gap = np.abs(value["best"] - value["mine"])[differs]
        assert (gap <= 20 * 2.0**-24 * np.abs(patches).max()).all(), gap.max()
    return int(differs.sum())
