"""CLAP: golden vectors, decisions on given similarities, and what must hold for every input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_inputs import CLAP, Array, exact_tokens, ones, similar_tokens
from torch._subclasses.fake_tensor import FakeTensorMode

from algm_deploy.ops import reference
from algm_deploy.ops.clap import _onnx_places, _onnx_similarity, clap_decisions, window_members, window_similarity

PLAIN: dict[str, Any] = {"grid": [4, 4], "window": [2, 2], **CLAP}
every, compared = cases.implementations("clap")


@pytest.mark.parametrize("name", [f"op_{i:02}" for i in range(8)])
@every
def test_golden_vectors(vectors_dir: Path, run: Any, name: str) -> None:
    golden = np.load(vectors_dir / f"{name}.npz")
    attributes = PLAIN | {"batch": "batch_min", "grid": golden["grid"].tolist(), "window": golden["window"].tolist()}
    tokens, size, patch_row, length = run("clap", [golden["x"], ones(golden["x"]), golden["tau"]], **attributes)
    np.testing.assert_allclose(tokens, golden["clap_tokens"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(size, golden["clap_size"])
    np.testing.assert_array_equal(patch_row, golden["clap_map"][:, 1:])
    assert (length == golden["clap_tokens"].shape[1]).all()


# ------------------------------------------------------------------------------------- similarities within tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 4e-7), ("float16", 4e-7)])
@pytest.mark.parametrize("grid", cases.GRIDS)
def test_similarities_agree(grid: tuple[int, int], dtype: str, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    window = (1, 2) if grid[0] == 1 else (2, 2)
    tokens = similar_tokens(rng, 3, 1 + grid[0] * grid[1], 64).astype(dtype)
    expected = reference.window_similarity(tokens, grid, window, 1)
    found = window_similarity(torch.from_numpy(tokens), list(grid), list(window), 1).numpy()
    members = window_members(grid, window)
    (body,) = cases.run_steps(
        ("window", grid, dtype), lambda body, x: [_onnx_similarity(body, x, members, 1)[1]], tokens
    )
    assert expected.shape == (3, len(members))
    cases.assert_same([found, body], [expected, expected], tolerance)


def test_a_tracer_leaves_nothing_behind() -> None:
    """Its tensors hold no values, and a table made of them would break every later call."""
    with FakeTensorMode():
        window_similarity(torch.zeros(1, 13, 8), [3, 4], [1, 2], 1)
    found = window_similarity(torch.ones(1, 13, 8), [3, 4], [1, 2], 1)
    torch.testing.assert_close(found, torch.ones(1, 6))


def test_zero_tokens_have_similarity_zero() -> None:
    tokens = np.zeros((1, 5, 4), np.float32)
    assert window_similarity(torch.from_numpy(tokens), [2, 2], [2, 2], 1).tolist() == [[0.0]]
    assert reference.window_similarity(tokens, (2, 2), (2, 2), 1).tolist() == [[0.0]]


def test_small_differences_survive() -> None:
    """The shortcut through the norm of the sum would lose them."""
    tokens = np.ones((1, 4, 64), np.float32)
    tokens[0, 3, 0] += 2e-3
    x = tokens[0].astype(np.float64)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    expected = ((unit @ unit.T).sum() - 4) / 12
    found = window_similarity(torch.from_numpy(tokens), [2, 2], [2, 2], 0).item()
    assert abs(found - expected) < 1e-7
    assert 0 < 1 - expected < 1e-6


# ------------------------------------------------------------------------------- decisions, given equal similarities

levels = [-np.inf, -1.0, -0.25, 0.0, 0.5, 0.5000001, 0.9999999, 1.0, np.inf, np.nan]


def places(merged: list[list[int]], windows: int) -> Array:
    place = np.full((len(merged), windows), -1, np.int64)
    for image, order in enumerate(merged):
        place[image, order] = np.arange(len(order))
    return place


@cases.PROPERTY
@given(
    seed=cases.seeds,
    images=st.integers(1, 4),
    windows=st.integers(1, 12),
    distinct=st.integers(1, 6),
    threshold=st.sampled_from(levels),
    semantics=cases.semantics,
    batch=cases.batches,
    order=cases.orders,
    rule=st.sampled_from(["threshold", "budget"]),
    budget=st.integers(0, 6),
)
def test_decisions_are_a_function_of_the_similarities(
    seed: int,
    images: int,
    windows: int,
    distinct: int,
    threshold: float,
    semantics: str,
    batch: str,
    order: str,
    rule: str,
    budget: int,
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.choice(np.float32(levels[1:-2]), size=distinct)  # few values: many ties
    similarity = rng.choice(values, size=(images, windows))
    tau = np.float32(threshold)
    attributes = {"semantics": semantics, "batch": batch, "order": order, "rule": rule}
    most = min(budget, windows)
    expected = places(reference.clap_decisions(similarity, tau, **attributes, budget=budget), windows)
    found = clap_decisions(torch.from_numpy(similarity), torch.tensor(tau), **attributes, budget=budget)
    (body,) = cases.run_steps(
        ("places", *attributes.values(), most),
        lambda body, s, t: [body("Identity", _onnx_places(body, s, t, attributes, most))],
        similarity,
        tau,
    )
    np.testing.assert_array_equal(found.numpy(), expected)
    np.testing.assert_array_equal(body, expected)


def test_ties_go_to_the_lower_window() -> None:
    similarity = np.float32([[0.5, 0.9, 0.5, 0.9], [0.1, 0.1, 0.1, 0.8]])
    published = reference.clap_decisions(similarity, 0.5, "code", "per_image", "published")
    assert published == [[1, 3, 0, 2], [3]]
    assert reference.clap_decisions(similarity, 0.5, "code", "per_image", "raster") == [[0, 1, 2, 3], [3]]
    assert reference.clap_decisions(similarity, 0.5, "paper", "per_image", "raster") == [[1, 3], [3]]
    assert reference.clap_decisions(similarity, 0.5, "code", "batch_min", "published") == [[1], [3]]


@pytest.mark.parametrize("windows", [100, 1024, 5000])
def test_many_ties(windows: int) -> None:
    """Sorting algorithms change with the size; the tie rule does not."""
    similarity = np.random.default_rng(0).choice(np.float32([0.25, 0.5, 0.75]), size=(2, windows))
    attributes = {"semantics": "code", "batch": "batch_min", "order": "published", "rule": "threshold"}
    expected = places(reference.clap_decisions(similarity, 0.5, *attributes.values()), windows)
    found = clap_decisions(torch.from_numpy(similarity), torch.tensor(0.5), *attributes.values())
    (body,) = cases.run_steps(
        ("places", *attributes.values()),
        lambda body, s, t: [body("Identity", _onnx_places(body, s, t, attributes, 0))],
        similarity,
        np.float32(0.5),
    )
    np.testing.assert_array_equal(found.numpy(), expected)
    np.testing.assert_array_equal(body, expected)


# -------------------------------------------------------------------------------------------------------- end to end


@compared
@cases.PROPERTY
@given(
    attributes=cases.clap_attributes(),
    seed=cases.seeds,
    kind=cases.kinds,
    images=st.integers(1, 3),
    tau=st.sampled_from(levels),
)
def test_equals_the_reference_where_sums_are_exact(
    run: Any, attributes: dict[str, Any], seed: int, kind: str, images: int, tau: float
) -> None:
    rng = np.random.default_rng(seed)
    tokens = exact_tokens(rng, kind, (images, cases.clap_rows_in(attributes), 4 ** int(rng.integers(1, 4))))
    inputs = [tokens, ones(tokens), np.float32(tau)]
    expected = cases.run_reference("clap", inputs, **attributes)
    cases.assert_same(run("clap", inputs, **attributes), expected, 0)
    cases.assert_partition(*expected[1:], attributes["prefix"])


@cases.PROPERTY
@given(attributes=cases.clap_attributes(), seed=cases.seeds, kind=cases.kinds, tau=st.sampled_from([-0.25, 0.0, 0.5]))
def test_every_image_decides_alone(attributes: dict[str, Any], seed: int, kind: str, tau: float) -> None:
    """`per_image`: a permuted batch permutes the results, and each member equals a batch of its own."""
    attributes["batch"] = "per_image"
    rng = np.random.default_rng(seed)
    tokens = exact_tokens(rng, kind, (3, cases.clap_rows_in(attributes), 16))
    tokens[1] = 1  # one image merges everything, so the others are padded differently in every batch
    inputs = [tokens, ones(tokens), np.float32(tau)]
    together = cases.run_torch("clap", inputs, **attributes)
    order = rng.permutation(3)
    permuted = cases.run_torch("clap", [tokens[order], ones(tokens), np.float32(tau)], **attributes)
    cases.assert_same(permuted, [x[order] for x in together], 0)
    for image in range(3):
        alone = cases.run_torch("clap", [tokens[image : image + 1], ones(tokens[:1]), np.float32(tau)], **attributes)
        rows = alone[0].shape[1]
        cut = [together[0][[image], :rows], together[1][[image], :rows], together[2][[image]], together[3][[image]]]
        cases.assert_same(alone, cut, 0)
        assert not together[0][image, rows:].any()


@every
@pytest.mark.parametrize(("tau", "semantics", "merges"), [(1.0, "code", True), (1.0, "paper", False)])
def test_a_constant_image_reaches_one_and_does_not_pass_it(run: Any, tau: float, semantics: str, merges: bool) -> None:
    tokens = np.ones((2, 17, 16), np.float32)
    found = run("clap", [tokens, ones(tokens), np.float32(tau)], **PLAIN | {"semantics": semantics})
    assert found[3].tolist() == [1 + (4 if merges else 16)] * 2
    assert (found[0] == 1).all()


@every
@pytest.mark.parametrize(("tau", "length"), [(np.nan, 17), (np.inf, 17), (1.5, 17), (-1.5, 5), (-np.inf, 5)])
def test_extreme_thresholds(run: Any, tau: float, length: int) -> None:
    tokens = similar_tokens(np.random.default_rng(0), 2, 17)
    found = run("clap", [tokens, ones(tokens), np.float32(tau)], **PLAIN)
    assert found[3].tolist() == [length] * 2
    cases.assert_partition(*found[1:], 1)


@every
def test_one_token_can_be_all_that_is_left(run: Any) -> None:
    tokens = similar_tokens(np.random.default_rng(0), 2, 4)
    attributes = PLAIN | {"grid": [2, 2], "prefix": 0}
    found = run("clap", [tokens, ones(tokens), np.float32(-2)], **attributes)
    assert found[0].shape == (2, 1, 8)
    assert found[1].tolist() == [[4], [4]]
    np.testing.assert_allclose(found[0][:, 0], tokens.mean(1), rtol=0, atol=1e-6)


@every
def test_border_patches_stay(run: Any) -> None:
    """A 3x5 grid has two whole 2x2 windows; the last column and the last row remain."""
    tokens = np.ones((1, 15, 4), np.float32)
    found = run("clap", [tokens, ones(tokens), np.float32(0)], **PLAIN | {"grid": [3, 5], "prefix": 0})
    assert found[2].reshape(3, 5).tolist() == [[0, 0, 1, 1, 2], [0, 0, 1, 1, 3], [4, 5, 6, 7, 8]]


@every
def test_means_are_weighted_by_size(run: Any) -> None:
    tokens = np.float32([[[1, 0], [4, 0]]])
    found = run(
        "clap", [tokens, np.float32([[1, 3]]), np.float32(0)], **PLAIN | {"grid": [1, 2], "window": [1, 2], "prefix": 0}
    )
    assert found[0].tolist() == [[[3.25, 0]]]
    assert found[1].tolist() == [[4]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_tokens_in_torch(dtype: torch.dtype) -> None:
    """The same decisions as on the rounded values in fp32; means rounded once."""
    tokens = torch.from_numpy(similar_tokens(np.random.default_rng(0), 2, 17, 64)).to(dtype)
    wide = tokens.float()
    arguments = torch.ones(2, 17), torch.tensor(0.4)
    low = torch.ops.algm.clap(tokens, *arguments, **PLAIN)
    high = torch.ops.algm.clap(wide, *arguments, **PLAIN)
    assert low[3].tolist() == [14, 11]
    assert low[0].dtype == dtype
    assert torch.equal(low[0], high[0].to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(low[1:], high[1:], strict=True))


def test_16_bit_tokens_in_onnx() -> None:
    tokens = exact_tokens(np.random.default_rng(0), "few", (2, 17, 16), np.float16)
    inputs = [tokens, ones(tokens), np.float32(0.28)]
    expected = cases.run_reference("clap", inputs, **PLAIN)
    assert expected[3].tolist() == [8, 11]
    for run in cases.IMPLEMENTATIONS.values():
        cases.assert_same(run("clap", inputs, **PLAIN), expected, 0)


@compared
def test_by_budget_what_is_not_finite_comes_last(run: Any) -> None:
    tokens = exact_tokens(np.random.default_rng(0), "few", (2, 17, 16))
    tokens[0, 4, 3], tokens[0, 7, 5], tokens[1, 6, 1] = np.inf, -np.inf, np.nan
    for budget in (2, 4):
        inputs, attributes = [tokens, ones(tokens), None], PLAIN | {"rule": "budget", "budget": budget}
        expected = cases.run_reference("clap", inputs, **attributes)
        assert expected[3].tolist() == [17 - 3 * budget] * 2
        assert int((~np.isfinite(expected[0])).sum()) == 3
        cases.assert_same(run("clap", inputs, **attributes), expected, 0)


@compared
def test_what_is_not_finite_stays_in_its_row(run: Any) -> None:
    tokens = exact_tokens(np.random.default_rng(0), "few", (2, 17, 16))
    tokens[0, 4, 3], tokens[0, 7, 5], tokens[1, 6, 1] = np.inf, -np.inf, np.nan
    inputs = [tokens, ones(tokens), np.float32(0.28)]
    expected = cases.run_reference("clap", inputs, **PLAIN)
    assert [int(test(expected[0]).sum()) for test in (np.isposinf, np.isneginf, np.isnan)] == [1, 1, 1]
    assert expected[3].min() < 17
    cases.assert_same(run("clap", inputs, **PLAIN), expected, 0)
