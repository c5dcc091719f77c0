"""GBM: golden vectors, decisions on given similarities, and what must hold for every input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_inputs import GBM as PLAIN
from operator_inputs import Array, exact_tokens, similar_tokens

from algm_deploy.errors import ExportError
from algm_deploy.ops import reference
from algm_deploy.ops.gbm import (
    _onnx_decisions,
    _onnx_rows,
    first_source,
    gbm_decisions,
    gbm_rows,
    gbm_similarity,
    most_joins,
    onnx_similarity,
)

every, compared = cases.implementations("gbm")
thresholds = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 5.0, -1000.0, np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("name", [f"op_{i:02}" for i in range(8)])
@every
def test_golden_vectors(vectors_dir: Path, run: Any, name: str) -> None:
    golden = np.load(vectors_dir / f"{name}.npz")
    rows = golden["clap_tokens"].shape[1]
    length = np.full(len(golden["x"]), rows)
    inputs = [golden["clap_tokens"], golden["clap_size"], golden["clap_map"][:, 1:], length, np.float32(1)]
    attributes = PLAIN | {"divisor": float(golden["gbm_layer"]), "batch": "batch_min"}
    tokens, size, patch_row, length = run("gbm", inputs, **attributes)
    np.testing.assert_allclose(tokens, golden["gbm_tokens"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(size, golden["gbm_size"])
    np.testing.assert_array_equal(patch_row, golden["token_map"][:, 1:])
    assert (length == golden["gbm_tokens"].shape[1]).all()


# ------------------------------------------------------------------------------------- similarities within tolerance


def as_lists(best: Array, match: Array, length: Array, prefix: int, semantics: str) -> tuple[list[Array], list[Array]]:
    """Best similarities and the rows that have them, of the A rows that may merge, as the reference gives them."""
    first = first_source(semantics, prefix)
    rows = first + 2 * np.arange(best.shape[1])
    allowed = [(rows >= prefix) & (rows < n) for n in length]
    return [b[a] for b, a in zip(best, allowed, strict=True)], [
        (first + 1 + 2 * m)[a] for m, a in zip(match, allowed, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("semantics", ["code", "paper"])
def test_similarities_agree(semantics: str, prefix: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    tokens, _, _, length = cases.sequence(similar_tokens(rng, 3, 24, 64).astype(dtype), prefix, rng, padded=True)
    best, match = reference.gbm_similarity(tokens, length, prefix, semantics)
    found = [x.numpy() for x in gbm_similarity(torch.from_numpy(tokens), torch.from_numpy(length), prefix, semantics)]
    rows = np.arange(tokens.shape[1])
    allowed = (rows >= prefix) & (rows < length[:, None])
    first = first_source(semantics, prefix)
    key, build = ("gbm similarity", first, dtype), lambda body, *x: onnx_similarity(body, *x, first)
    bodies = [cases.run_steps(key, build, tokens, allowed, processor=processor) for processor in (False, True)]
    assert {len(b) for b in best} != {len(best[0])}  # lengths differ
    for similarity, partner in (found, *bodies):
        values, partners = as_lists(similarity, partner, length, prefix, semantics)
        for a, b, expected, other in zip(values, partners, best, match, strict=True):
            np.testing.assert_allclose(a, expected, rtol=0, atol=4e-7)
            np.testing.assert_array_equal(b, other)


# ------------------------------------------------------------------------------- decisions, given equal similarities


def ragged(best: Array) -> list[Array]:
    """The A rows of every image: -inf marks rows that may not merge."""
    return [row[row > -np.inf] for row in best]


@cases.PROPERTY
@given(
    seed=cases.seeds,
    images=st.integers(1, 4),
    sources=st.integers(1, 12),
    distinct=st.integers(1, 6),
    threshold=thresholds,
    rule=cases.limits,
    divisor=st.sampled_from([1.0, 5.0]),
    semantics=cases.semantics,
    batch=cases.batches,
)
def test_decisions_are_a_function_of_the_similarities(
    seed: int,
    images: int,
    sources: int,
    distinct: int,
    threshold: float,
    rule: str,
    divisor: float,
    semantics: str,
    batch: str,
) -> None:
    rng = np.random.default_rng(seed)
    best = rng.choice(rng.uniform(-1, 1, distinct).astype(np.float32), size=(images, sources))
    for image in range(1, images):
        best[image, rng.integers(0, sources + 1) :] = -np.inf
    tau = np.float32(threshold)
    attributes = {"rule": rule, "divisor": divisor, "semantics": semantics, "batch": batch}
    expected = reference.gbm_decisions(ragged(best), tau, **attributes)
    found = gbm_decisions(torch.from_numpy(best), torch.tensor(tau), **attributes).numpy()
    (body,) = cases.run_steps(
        ("gbm decisions", *attributes.values()),
        lambda body, b, t: [_onnx_decisions(body, b, t, attributes)],
        best,
        tau,
    )
    for image, merged in enumerate(expected):
        for flags in (found[image], body[image]):
            np.testing.assert_array_equal(flags[: len(merged)], merged)
            assert not flags[len(merged) :].any()


@cases.PROPERTY
@given(seed=cases.seeds, rows=st.integers(7, 14), prefix=cases.prefixes, semantics=cases.semantics)
def test_rows_are_a_function_of_the_decisions(seed: int, rows: int, prefix: int, semantics: str) -> None:
    """Whichever rows merge, all implementations number the output rows alike."""
    rng = np.random.default_rng(seed)
    first = first_source(semantics, prefix)
    length = np.array([rows, rng.integers(prefix + 1, rows + 1)])
    merged, match = [], []
    flags = np.zeros((2, len(range(first, rows, 2))), bool)
    partners = np.zeros(flags.shape, np.int64)
    for image in range(2):
        sources, targets = reference_split(rows, int(length[image]), prefix, semantics)
        joins = rng.random(len(sources)) < 0.5 if len(targets) else np.zeros(len(sources), bool)
        partner = rng.choice(targets, len(sources)) if len(targets) else np.zeros(len(sources), np.int64)
        merged.append(joins)
        match.append(partner)
        flags[image, (sources - first) // 2] = joins
        if len(targets):
            partners[image, (sources - first) // 2] = (partner - first - 1) // 2
    expected, length_out = reference.gbm_rows(merged, match, rows, length, prefix, semantics)
    found, lengths = gbm_rows(*(torch.from_numpy(x) for x in (flags, partners, length)), rows, prefix, semantics)
    np.testing.assert_array_equal(found.numpy(), expected)
    np.testing.assert_array_equal(lengths.numpy(), length_out)
    valid = np.arange(rows) < length[:, None]
    body, joins = cases.run_steps(
        ("gbm rows", prefix, first), lambda b, *x: _onnx_rows(b, *x, prefix, first), flags, partners, valid
    )
    np.testing.assert_array_equal(np.where(valid, body, -1), expected)
    np.testing.assert_array_equal((valid & ~joins).sum(1), length_out)


def reference_split(rows: int, length: int, prefix: int, semantics: str) -> tuple[Array, Array]:
    """A and B, written out once more."""
    first = prefix if semantics == "paper" else 0
    allowed = [row for row in range(rows) if prefix <= row < length]
    return (
        np.array([row for row in allowed if (row - first) % 2 == 0], np.int64),
        np.array([row for row in allowed if (row - first) % 2 == 1], np.int64),
    )


# -------------------------------------------------------------------------------------------------------- end to end


@compared
@cases.PROPERTY
@given(
    attributes=cases.gbm_attributes(),
    seed=cases.seeds,
    kind=cases.kinds,
    images=st.integers(1, 3),
    patches=st.integers(1, 16),
    threshold=thresholds,
)
def test_equals_the_reference_where_sums_are_exact(
    run: Any, attributes: dict[str, Any], seed: int, kind: str, images: int, patches: int, threshold: float
) -> None:
    rng = np.random.default_rng(seed)
    prefix = attributes["prefix"]
    tokens = exact_tokens(rng, kind, (images, prefix + patches, 4 ** int(rng.integers(1, 4))))
    inputs = [*cases.sequence(tokens, prefix, rng, padded=True), np.float32(threshold)]
    expected = cases.run_reference("gbm", inputs, **attributes)
    cases.assert_same(run("gbm", inputs, **attributes), expected, 0)
    cases.assert_partition(*expected[1:], prefix)


@cases.PROPERTY
@given(attributes=cases.gbm_attributes(), seed=cases.seeds, kind=cases.kinds, threshold=thresholds)
def test_every_image_decides_alone(attributes: dict[str, Any], seed: int, kind: str, threshold: float) -> None:
    """`per_image`: a permuted batch permutes the results, and each member equals itself unpadded and alone."""
    attributes["batch"] = "per_image"
    rng = np.random.default_rng(seed)
    tokens = exact_tokens(rng, kind, (3, attributes["prefix"] + 12, 16))
    inputs = cases.sequence(tokens, attributes["prefix"], rng, padded=True)
    tau = np.float32(threshold)
    together = cases.run_torch("gbm", [*inputs, tau], **attributes)
    order = rng.permutation(3)
    permuted = cases.run_torch("gbm", [*(x[order] for x in inputs), tau], **attributes)
    cases.assert_same(permuted, [x[order] for x in together], 0)
    for image in range(3):
        rows = int(inputs[3][image])
        cut = [inputs[0][[image], :rows], inputs[1][[image], :rows], inputs[2][[image]], inputs[3][[image]]]
        alone = cases.run_torch("gbm", [*cut, tau], **attributes)
        rows = alone[0].shape[1]
        member = [together[0][[image], :rows], together[1][[image], :rows], together[2][[image]], together[3][[image]]]
        cases.assert_same(alone, member, 0)
        assert not together[0][image, rows:].any()


@every
def test_split_of_the_code_counts_the_prefix(run: Any) -> None:
    """Code: rows 2 and 4 look among 1, 3, 5. Paper: the split starts behind the prefix, 1, 3, 5 look among 2, 4."""
    tokens = np.zeros((1, 6, 4), np.float32)
    tokens[0, [0, 1, 2], 0] = 1  # cls equals rows 1 and 2, and never takes part
    tokens[0, [3, 4, 5], [1, 2, 3]] = 1
    inputs = [*cases.sequence(tokens, 1), np.float32(0.5)]
    code = run("gbm", inputs, **PLAIN | {"rule": "fixed"})
    paper = run("gbm", inputs, **PLAIN | {"rule": "fixed", "semantics": "paper"})
    # Code: row 2 joins row 1; order 4 | 1 3 5. Paper: row 1 joins row 2; order 3 5 | 2 4.
    assert code[2].tolist() == [[2, 2, 3, 1, 4]]
    assert paper[2].tolist() == [[3, 3, 1, 4, 2]]
    assert code[1].tolist() == [[1, 1, 2, 1, 1]]
    assert paper[1].tolist() == [[1, 1, 1, 2, 1]]


@every
def test_code_weighs_by_size_and_paper_does_not(run: Any) -> None:
    tokens, size = np.float32([[[4, 0], [1, 0]]]), np.float32([[3, 1]])
    inputs = [tokens, size, np.array([[0, 0, 0, 1]]), np.array([2]), np.float32(0.5)]
    attributes = PLAIN | {"prefix": 0, "rule": "fixed"}
    assert run("gbm", inputs, **attributes)[0].tolist() == [[[3.25, 0]]]
    paper = run("gbm", inputs, **attributes | {"semantics": "paper"})
    assert paper[0].tolist() == [[[2.5, 0]]]
    assert paper[1].tolist() == [[4]]


@every
def test_argmax_ties_go_to_the_lower_row(run: Any) -> None:
    tokens = np.ones((1, 7, 4), np.float32)
    found = run("gbm", [*cases.sequence(tokens, 1), np.float32(0.5)], **PLAIN | {"rule": "fixed"})
    assert found[2].tolist() == [[1, 1, 2, 1, 3, 1]]


@compared
@pytest.mark.parametrize("batch", ["per_image", "batch_min"])
def test_many_ties(run: Any, batch: str) -> None:
    """A thousand tokens of three kinds: nearly every argmax and every rank is a tie."""
    tokens = exact_tokens(np.random.default_rng(0), "few", (2, 1025, 16))
    inputs = [*cases.sequence(tokens, 1), np.float32(0.5)]
    attributes = PLAIN | {"rule": "fixed", "batch": batch}
    expected = cases.run_reference("gbm", inputs, **attributes)
    assert expected[3].max() < 600
    cases.assert_same(run("gbm", inputs, **attributes), expected, 0)


@every
@pytest.mark.parametrize(("semantics", "merges"), [("code", True), ("paper", False)])
def test_a_constant_image_reaches_its_mean(run: Any, semantics: str, merges: bool) -> None:
    tokens = np.ones((2, 9, 16), np.float32)
    found = run("gbm", [*cases.sequence(tokens, 1), np.float32(1)], **PLAIN | {"semantics": semantics})
    assert found[3].tolist() == [9 - 4 * merges] * 2


@every
def test_the_deviation_of_one_row_is_undefined(run: Any) -> None:
    """Prefix 1 and three rows: one A row. Adaptive merges nothing, fixed may."""
    tokens = np.ones((1, 3, 4), np.float32)
    assert run("gbm", [*cases.sequence(tokens, 1), np.float32(-9)], **PLAIN)[3].tolist() == [3]
    assert run("gbm", [*cases.sequence(tokens, 1), np.float32(-9)], **PLAIN | {"rule": "fixed"})[3].tolist() == [2]


@every
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("semantics", ["code", "paper"])
def test_too_few_rows_to_merge(run: Any, rows: int, semantics: str) -> None:
    """Cls alone with no partner on one side: nothing merges and nothing fails."""
    tokens = np.ones((2, rows, 4), np.float32)
    attributes = PLAIN | {"prefix": rows - 1, "rule": "fixed", "semantics": semantics}
    found = run("gbm", [*cases.sequence(tokens, rows - 1), np.float32(-2)], **attributes)
    assert found[3].tolist() == [rows] * 2
    cases.assert_same(found[:1], [tokens], 0)


@every
def test_batch_min_shares_threshold_and_count(run: Any) -> None:
    """Image 0 alone would merge one row, image 1 three; together one each, the most similar."""
    unit = np.eye(8, dtype=np.float32)
    tokens = np.stack([unit[[0, 0, 1, 2, 3, 4, 5, 6]], unit[[0, 0, 1, 1, 2, 2, 3, 4]]])
    attributes = PLAIN | {"prefix": 0, "rule": "fixed"}
    alone = run("gbm", [*cases.sequence(tokens, 0), np.float32(0.5)], **attributes)
    together = run("gbm", [*cases.sequence(tokens, 0), np.float32(0.5)], **attributes | {"batch": "batch_min"})
    assert alone[3].tolist() == [7, 5]
    assert together[3].tolist() == [7, 7]
    assert together[2][1, :4].tolist() == [3, 3, 0, 4]  # of three equal similarities the lower row merges


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_tokens_in_torch(dtype: torch.dtype) -> None:
    """The same decisions as on the rounded values in fp32; means rounded once."""
    arrays = cases.sequence(similar_tokens(np.random.default_rng(0), 2, 33, 64), 1)
    tokens, *rest = (torch.from_numpy(x) for x in arrays)
    low = torch.ops.algm.gbm(tokens.to(dtype), *rest, torch.tensor(1.0), **PLAIN)
    high = torch.ops.algm.gbm(tokens.to(dtype).float(), *rest, torch.tensor(1.0), **PLAIN)
    assert 17 < int(low[3].min()) < 33
    assert low[0].dtype == dtype
    assert torch.equal(low[0], high[0].to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(low[1:], high[1:], strict=True))


def test_16_bit_tokens_in_onnx() -> None:
    tokens = exact_tokens(np.random.default_rng(0), "few", (2, 17, 16), np.float16)
    inputs = [*cases.sequence(tokens, 1), np.float32(0.5)]
    expected = cases.run_reference("gbm", inputs, **PLAIN | {"rule": "fixed"})
    assert expected[3].max() < 17
    for run in cases.IMPLEMENTATIONS.values():
        cases.assert_same(run("gbm", inputs, **PLAIN | {"rule": "fixed"}), expected, 0)


@compared
@pytest.mark.parametrize("semantics", ["code", "paper"])
def test_any_length_is_one_that_can_be(run: Any, semantics: str) -> None:
    """Below zero, beyond the rows, and numbers of which 32 bits are a length that can be."""
    lengths = [-1, 0, 1, 9, 9 + 2**32, -(2**32) + 9, 0xFFFFFFFF00F00000 - 2**64, -(2**63), 2**63 - 1]
    tokens = np.repeat(exact_tokens(np.random.default_rng(0), "few", (1, 9, 16)), len(lengths), axis=0)
    maps = np.zeros((len(lengths), 8), np.int64)
    inputs = [tokens, np.ones((len(lengths), 9), np.float32), maps, np.array(lengths), np.float32(0.5)]
    attributes = PLAIN | {"rule": "fixed", "prefix": 2, "semantics": semantics}
    found, expected = run("gbm", inputs, **attributes), cases.run_reference("gbm", inputs, **attributes)
    assert expected[3].tolist() == [2, 2, 2, n := expected[3][3], n, 2, 2, 2, n]
    assert 2 < n < 9
    cases.assert_same(found, expected, 0)


@compared
def test_what_is_not_finite_stays_in_its_row(run: Any) -> None:
    """Its similarities are NaN: it merges with nobody, and keeps nobody from merging."""
    tokens = exact_tokens(np.random.default_rng(0), "few", (2, 17, 16))
    tokens[0, 4, 3], tokens[0, 7, 5], tokens[1, 6, 1] = np.inf, -np.inf, np.nan
    inputs = [*cases.sequence(tokens, 1), np.float32(0.5)]
    expected = cases.run_reference("gbm", inputs, **PLAIN | {"rule": "fixed"})
    assert [int(test(expected[0]).sum()) for test in (np.isposinf, np.isneginf, np.isnan)] == [1, 1, 1]
    assert expected[3].max() < 15
    cases.assert_same(run("gbm", inputs, **PLAIN | {"rule": "fixed"}), expected, 0)


# ------------------------------------------------------------------------------------------------------------ budgets


@compared
@cases.PROPERTY
@given(
    seed=cases.seeds,
    kind=cases.kinds,
    patches=st.sampled_from([1, 2, 8, 13]),
    prefix=st.sampled_from([0, 1]),
    semantics=cases.semantics,
    batch=cases.batches,
    budget=st.sampled_from([0, 3, 99]),
)
def test_a_budget_equals_the_reference(
    run: Any, seed: int, kind: str, patches: int, prefix: int, semantics: str, batch: str, budget: int
) -> None:
    """Every image merges as many rows, ties and rows without a partner included; the threshold is left out."""
    rng = np.random.default_rng(seed)
    tokens = exact_tokens(rng, kind, (2, prefix + patches, 16))
    inputs = [*cases.sequence(tokens, prefix), None]
    attributes = {"prefix": prefix, "rule": "budget", "divisor": 5.0, "semantics": semantics, "batch": batch}
    attributes["budget"] = budget
    expected = cases.run_reference("gbm", inputs, **attributes)
    left = prefix + patches - min(budget, most_joins(prefix + patches, prefix, semantics))
    assert expected[3].tolist() == [left] * 2
    cases.assert_same(run("gbm", inputs, **attributes), expected, 0)


@every
def test_a_budget_takes_the_most_similar_and_the_lower_of_equals(run: Any) -> None:
    """Rows 2, 4, 6 look among 1, 3, 5: two of them find their equal, and one of two is enough."""
    unit = np.eye(8, dtype=np.float32)
    tokens = unit[None, [7, 0, 1, 1, 0, 2, 3]]
    attributes = PLAIN | {"rule": "budget"}
    one, two, all_three = (
        run("gbm", [*cases.sequence(tokens, 1), None], **attributes | {"budget": budget}) for budget in (1, 2, 9)
    )
    assert one[2].tolist() == [[3, 4, 4, 1, 5, 2]]  # row 2 joins row 3
    assert two[2].tolist() == [[2, 3, 3, 2, 4, 1]]
    assert all_three[2].tolist() == [[1, 2, 2, 1, 3, 1]]  # no more than there are; the last one joins the first


@compared
@pytest.mark.parametrize("prefix", [1, 2])
def test_by_budget_what_is_not_finite_comes_last_and_joins_the_first(run: Any, prefix: int) -> None:
    """As many rows merge, whatever they hold; those of the prefix never do."""
    tokens = exact_tokens(np.random.default_rng(0), "few", (2, 17, 16))
    tokens[0, 4, 3], tokens[0, 7, 5], tokens[1, 6, 1] = np.inf, -np.inf, np.nan
    for budget in (3, 9):
        inputs = [*cases.sequence(tokens, prefix), None]
        attributes = PLAIN | {"prefix": prefix, "rule": "budget", "budget": budget}
        expected = cases.run_reference("gbm", inputs, **attributes)
        assert expected[3].tolist() == [17 - min(budget, most_joins(17, prefix, "code"))] * 2
        row = expected[2][1]  # of patches, and the sixth row is one without any other's similarity
        assert (row[6 - prefix] == row[(1 if prefix == 1 else 3) - prefix]) == (budget == 9)
        cases.assert_same(run("gbm", inputs, **attributes), expected, 0)


def test_a_budget_needs_a_known_number_of_rows() -> None:
    attributes = PLAIN | {"rule": "budget", "budget": 1}
    kinds = [(np.dtype(np.float32), 3), (np.dtype(np.float32), 2), (np.dtype(np.int64), 2), (np.dtype(np.int64), 1)]
    with pytest.raises(ExportError, match="known number of rows"):
        cases.operator_model("gbm", attributes, kinds)
