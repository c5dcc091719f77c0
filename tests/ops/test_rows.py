"""Means of rows that hold infinities and NaN: IEEE arithmetic among the members, nothing for anybody else."""

from __future__ import annotations

import numpy as np
import op_cases as cases
import torch

from algm_deploy.ops._rows import merge_rows, merge_rows_reference

INF, NAN = np.inf, np.nan
# Rows of five values; the first three join row 0, the next two row 1, the last one vanishes.
ROW = np.array([[0, 0, 0, 1, 1, -1]])
TOKENS = np.float32(
    [[[1, INF, INF, NAN, 2], [1, 1, -INF, 1, -0.0], [4, 1, 1, 1, 1], [-INF, 2, 2, 2, 2], [0, 4, 4, 4, INF], [NAN] * 5]]
)
SIZE = np.float32([[2, 1, 1, 3, 1, 0]])
EXPECTED = np.float32([[[1.75, INF, NAN, NAN, 1.25], [-INF, 2.5, 2.5, 2.5, INF]]])


def test_torch_and_reference() -> None:
    np.testing.assert_array_equal(merge_rows_reference(TOKENS, SIZE, ROW, 2, True)[0], EXPECTED)
    tensors = [torch.from_numpy(x) for x in (TOKENS, SIZE, ROW)]
    np.testing.assert_array_equal(merge_rows(*tensors, 2).numpy(), EXPECTED)


def test_onnx() -> None:
    share = np.float32([[[2, 1, 1, 0, 0, 0], [0, 0, 0, 3, 1, 0]]])
    (sums,) = cases.run_steps("member sums", lambda body, *x: [body.member_sums(*x)], share, TOKENS)
    np.testing.assert_array_equal(sums / share.sum(2, keepdims=True), EXPECTED)
