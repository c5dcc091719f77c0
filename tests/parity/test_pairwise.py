"""Two executables side by side: what counts as a difference, and what does not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from algm_deploy.bundle.signature import Signature, Tensor
from algm_deploy.errors import BundleError
from algm_deploy.parity.pairwise import Comparison, check_comparable, difference, grouped_otherwise

MERGES = ("clap_1", "gbm_5")


def outputs(maps: dict[str, list[int]], labels: list[list[int]], scores: np.ndarray | None = None) -> dict:
    found = {f"token_map_{name}": np.array([one]) for name, one in maps.items()}
    found["token_counts"] = np.array([[len(set(one)) for one in maps.values()]])
    return found | ({"labels": np.array([labels])} if scores is None else {"scores": scores})


def test_groups_count_and_names_of_tokens_do_not() -> None:
    first = np.array([1, 1, 2, 3])
    assert grouped_otherwise(first, np.array([1, 1, 2, 3])) == 0
    assert grouped_otherwise(first, np.array([3, 3, 1, 2])) == 0  # another order of tokens
    assert grouped_otherwise(first, np.array([1, 1, 2, 2])) == 1
    assert grouped_otherwise(first, np.array([1, 2, 3, 4])) == 1
    assert grouped_otherwise(first, np.array([1, 1, 1, 1])) == 2


def test_the_first_merge_that_decides_otherwise_is_named() -> None:
    one = outputs({"clap_1": [1, 1, 2, 3], "gbm_5": [1, 1, 2, 2]}, [[0, 1], [2, 3]])
    other = outputs({"clap_1": [1, 1, 2, 3], "gbm_5": [1, 1, 2, 3]}, [[0, 1], [2, 2]])
    found = difference((MERGES, MERGES), (one, other))
    assert found.patches_grouped_otherwise == {"clap_1": 0, "gbm_5": 1}
    assert found.first_merge == "gbm_5"
    assert found.labels_equal_percent == 75.0
    assert found.tokens == ({"clap_1": 3, "gbm_5": 2}, {"clap_1": 3, "gbm_5": 3})
    assert found.scores_difference_max is None


def test_scores_are_compared_where_both_have_them_and_a_dense_network_has_no_merge() -> None:
    scores = np.zeros((1, 2, 1, 2), np.float32)
    scores[0, 1, 0, 1] = 1
    one = outputs({"clap_1": [1, 1], "gbm_5": [1, 1]}, [], scores)
    dense = {"token_counts": np.zeros((1, 0), np.int64), "scores": scores + np.float32(0.25)}
    found = difference((MERGES, ()), (one, dense))
    assert (found.patches_grouped_otherwise, found.first_merge) == ({}, None)
    assert (found.labels_equal_percent, found.scores_difference_max) == (100.0, 0.25)


def test_what_cannot_be_compared_is_refused() -> None:
    one = outputs({"clap_1": [1, 1]}, [[0, 1]])
    with pytest.raises(BundleError, match="expected the output token_map_clap_1, got labels, token_counts"):
        difference((("clap_1",), ("clap_1",)), (one, {"labels": np.zeros((1, 1, 2)), "token_counts": np.zeros((1, 1))}))
    with pytest.raises(BundleError, match="label maps of one size"):
        difference((("clap_1",), ("clap_1",)), (one, outputs({"clap_1": [1, 1]}, [[0]])))
    signature = Signature(
        (Tensor("image", "uint8", (-1, 3, 64, 64)),),
        (Tensor("labels", "uint8", (-1, 64, 64)), Tensor("token_counts", "int64", (-1, 0))),
        {},
        (),
        1,
    )
    check_comparable(signature, signature)
    wide = dataclasses.replace(signature, inputs=(Tensor("image", "uint8", (-1, 3, 64, 96)),))
    with pytest.raises(BundleError, match=r"the same windows, got uint8 \(3, 64, 64\) and uint8 \(3, 64, 96\)"):
        check_comparable(signature, wide)


def test_a_comparison_fails_by_a_decision_or_by_labels() -> None:
    same = outputs({"clap_1": [1, 1]}, [[0, 1]])
    alike = difference((("clap_1",), ("clap_1",)), (same, same))
    assert Comparison("a", "b", (alike,), 99.9).alike
    for worse in (
        dataclasses.replace(alike, labels_equal_percent=99.8),
        dataclasses.replace(alike, patches_grouped_otherwise={"clap_1": 1}),
    ):
        assert not Comparison("a", "b", (alike, worse), 99.9).alike
