"""What cls attends to: every implementation against the reference, and against attention itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch

from algm_deploy.ops.attention import attention_reference

every, compared = cases.implementations("cls_attention")
PLAIN: dict[str, Any] = {"heads": 2, "scale": 0.5}


def qkv(dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, 9, 24)).astype(dtype)


@compared
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_equals_the_reference(run: Any, dtype: str) -> None:
    x = qkv(dtype)
    (weights,) = run("cls_attention", [x], **PLAIN)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, cases.run_reference("cls_attention", [x], **PLAIN)[0], atol=1e-6)


@every
def test_it_is_the_first_row_of_attention(run: Any) -> None:
    """Where every value row is a unit vector, attention returns its weights: here of one head."""
    rows = np.random.default_rng(1).standard_normal((1, 4, 12)).astype(np.float32)
    rows[0, :, 8:] = np.eye(4)
    (weights,) = run("cls_attention", [rows], heads=1, scale=0.7)
    np.testing.assert_allclose(weights[0], attention_reference(rows[0], 1.0, 1, 0.7)[0], atol=1e-6)
    assert not np.allclose(weights[0], attention_reference(rows[0], 1.0, 1, 0.7)[1], atol=1e-3)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.algm.cls_attention.default, (torch.from_numpy(qkv()), 2, 0.5))
