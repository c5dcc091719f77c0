"""ELViT's clustering: every implementation against the reference, and what the reference promises by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch

from algm_deploy.ops.elvit import outside, pooling

every, compared = cases.implementations("elvit")
PLAIN: dict[str, Any] = {
    "grid": [4, 6],
    "centroids": [2, 3],
    "prefix": 1,
    "iterations": 3,
    "window": 3,
    "temperature": 0.3,
    "neighbours": 3,
    "semantics": "code",
}
# An fp32 sum of 24 patches, whose values reach 6: 24 x 6 x 2^-24.
TOLERANCE = 1e-5


def tokens(seed: int = 0, rows: int = 25, width: int = 8) -> np.ndarray:
    """Patches far enough apart that no two centroids are as near to one."""
    return np.random.default_rng(seed).standard_normal((2, rows, width)).astype(np.float32) * 2


@compared
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"semantics": "paper", "neighbours": 1},
        {"centroids": [3, 5], "window": 1, "neighbours": 15},  # cells that overlap
        {"centroids": [4, 5], "iterations": 0},
        {"grid": [3, 8], "centroids": [3, 1], "window": 5, "temperature": 0.01},
        {"grid": [5, 5], "prefix": 0},
    ],
    ids=str,
)
def test_equals_the_reference(run: Any, change: dict[str, Any]) -> None:
    attributes = PLAIN | change
    x = tokens()
    cases.assert_same(run("elvit", [x], **attributes), cases.run_reference("elvit", [x], **attributes), TOLERANCE)


@compared
def test_16_bit_tokens_are_clustered_in_fp32(run: Any) -> None:
    """The weights are those of the same values in fp32; centroids are rounded once."""
    x = tokens().astype(np.float16)
    rows, chosen, weights = run("elvit", [x], **PLAIN)
    expected = cases.run_reference("elvit", [x.astype(np.float32)], **PLAIN)
    assert rows.dtype == np.float16
    np.testing.assert_allclose(rows, expected[0], rtol=2**-10, atol=1e-6)
    np.testing.assert_array_equal(chosen, expected[1])
    np.testing.assert_allclose(weights, expected[2], atol=TOLERANCE)


@every
def test_equal_patches_by_hand(run: Any) -> None:
    """All distances are zero: cells are equal, the lower centroids count, and weights are the same for all."""
    x = np.zeros((1, 25, 2), np.float32)
    rows, chosen, weights = run("elvit", [x], **PLAIN | {"neighbours": 4})
    np.testing.assert_array_equal(rows, np.zeros((1, 7, 2)))
    assert set(chosen.ravel()) == {4}  # the prefix and centroids 0 to 3
    np.testing.assert_allclose(weights[0], np.tile([0.5, 0.5, 0.5, 0.5, 0, 0], (24, 1)), atol=1e-6)
    _, _, shares = run("elvit", [x], **PLAIN | {"neighbours": 4, "semantics": "paper"})
    np.testing.assert_allclose(shares.sum(2), 1, atol=1e-6)


@every
def test_large_distances_leave_weights(run: Any) -> None:
    """exp(-temperature x distance) is zero for all in fp32; relative to the nearest it is not."""
    x = tokens() * 1000
    _, _, weights = run("elvit", [x], **PLAIN | {"iterations": 0})
    np.testing.assert_allclose(np.square(weights).sum(2), 1, atol=1e-5)


@every
def test_prefix_rows_are_handed_on(run: Any) -> None:
    x = tokens(rows=27)
    rows, chosen, _ = run("elvit", [x], **PLAIN | {"prefix": 3})
    np.testing.assert_array_equal(rows[:, :3], x[:, :3])
    assert chosen.min() >= 3
    assert chosen.max() < 9


def test_windows_and_cells_are_those_of_pytorch() -> None:
    """The published code calls adaptive pooling and nearest interpolation."""
    for cells, side in ((28, 40), (32, 48), (20, 30), (15, 30), (3, 7), (5, 6), (4, 4)):
        line = torch.randn(1, 1, side)
        pooled = torch.nn.functional.adaptive_avg_pool1d(line, cells)
        torch.testing.assert_close(
            torch.from_numpy(pooling(cells, side)).float() @ line[0, 0], pooled[0, 0], atol=1e-6, rtol=0
        )
        own = torch.nn.functional.interpolate(torch.arange(cells)[None, None].float(), size=side, mode="nearest")[0, 0]
        far = (own - torch.arange(cells)[:, None]).abs() > 2
        np.testing.assert_array_equal(outside(cells, side, 5), far.numpy())


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.algm.elvit.default, (torch.from_numpy(tokens()), *PLAIN.values()))
