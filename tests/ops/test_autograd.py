"""The operators inside PyTorch: fake kernels, dispatch, and gradients with the decisions held fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from op_cases import sequence
from operator_inputs import CLAP, GBM, similar_tokens
from torch import Tensor

WINDOWS: dict[str, Any] = {"grid": [4, 5], "window": [2, 2], **CLAP}
HEADS = {"heads": 2, "scale": 0.5}


def doubles(images: int, rows: int, width: int) -> Tensor:
    tokens = similar_tokens(np.random.default_rng(0), images, rows, width)
    return torch.from_numpy(tokens).double().requires_grad_()


def clap_inputs() -> tuple[Tensor, Tensor, Tensor]:
    size = torch.from_numpy(np.random.default_rng(1).integers(1, 4, (2, 21))).float()
    return doubles(2, 21, 4), size, torch.tensor(0.2)


def gbm_inputs() -> tuple[Tensor, ...]:
    rng = np.random.default_rng(1)
    _, _, patch_row, length = sequence(similar_tokens(rng, 2, 21, 4), 1, rng, padded=True)
    size = torch.from_numpy(rng.integers(1, 4, (2, 21))).float()
    return doubles(2, 21, 4), size, torch.from_numpy(patch_row), torch.from_numpy(length), torch.tensor(0.5)


def tome_inputs() -> tuple[Tensor, ...]:
    rng = np.random.default_rng(1)
    tokens, size, patch_row, _ = sequence(similar_tokens(rng, 2, 21, 4), 1, rng)
    return doubles(2, 21, 4), *(torch.from_numpy(x) for x in (size, patch_row, tokens))


CASES: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "clap": (clap_inputs, WINDOWS),
    "gbm": (gbm_inputs, GBM),
    "attention": (lambda: (doubles(2, 5, 12), torch.tensor([5, 3])), HEADS),
    "proportional_attention": (lambda: (doubles(2, 5, 12), torch.tensor([[1.0, 2, 1, 4, 1]] * 2)), HEADS),
    "tome": (tome_inputs, {"r": 6, "prefix": 1}),
    "unmerge": (lambda: (doubles(2, 3, 4), torch.tensor([[1, 1, 3, 2], [2, 3, 1, 1]])), {"prefix": 1}),
}


def first(found: Any) -> Tensor:
    result: Tensor = found[0] if isinstance(found, tuple) else found
    return result


def singles(op: str) -> tuple[Any, ...]:
    """The inputs of a case in fp32, tokens still asking for a gradient."""
    tokens, *rest = CASES[op][0]()
    return tokens.detach().float().requires_grad_(), *rest


@pytest.mark.parametrize("op", CASES)
def test_opcheck(op: str) -> None:
    tokens, *rest = singles(op)
    torch.library.opcheck(getattr(torch.ops.algm, op).default, (tokens.detach(), *rest), CASES[op][1])


@pytest.mark.parametrize("op", CASES)
def test_opcheck_with_gradient(op: str) -> None:
    """Without AOT dispatch: its partitioner cannot hand a token count that only the data knows to the backward."""
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = getattr(torch.ops.algm, op).default
    torch.library.opcheck(operator, singles(op), CASES[op][1], test_utils=utilities)


def test_opcheck_of_attention_without_lengths() -> None:
    torch.library.opcheck(torch.ops.algm.attention.default, (torch.randn(2, 5, 12), None), HEADS)


def test_opcheck_of_label_map() -> None:
    arguments = torch.randn(2, 3, 5), torch.tensor([[1, 1, 3, 2], [2, 3, 1, 1]])
    torch.library.opcheck(torch.ops.algm.label_map.default, arguments, {"prefix": 1, "grid": [2, 2], "size": [6, 6]})


def test_opcheck_of_mask_labels() -> None:
    arguments = torch.randn(2, 3, 2, 2), torch.rand(2, 3, 5)
    torch.library.opcheck(torch.ops.algm.mask_labels.default, arguments, {"size": [6, 6]})


@pytest.mark.parametrize("op", CASES)
def test_gradients_equal_finite_differences(op: str) -> None:
    """Far from a threshold the decisions hold still, so differences show the gradient of the merge alone."""
    inputs, attributes = CASES[op]
    tokens, *rest = inputs()
    operator = getattr(torch.ops.algm, op)
    assert torch.autograd.gradcheck(lambda x: first(operator(x, *rest, **attributes)), tokens, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("semantics", ["code", "paper"])
@pytest.mark.parametrize("op", ["clap", "gbm"])
def test_gradients_equal_plain_autograd(op: str, semantics: str) -> None:
    """Against the same merge written as a product with a constant matrix."""
    (tokens, *rest), attributes = singles(op), CASES[op][1]
    merged, _, patch_row, length = getattr(torch.ops.algm, op)(tokens, *rest, **attributes | {"semantics": semantics})
    assert int(length.min()) < 21
    size, map_in = rest[0], rest[1] if op == "gbm" else torch.arange(1, 21).expand(2, -1)
    weight = torch.ones_like(size) if (op, semantics) == ("gbm", "paper") else size
    share = torch.zeros(2, merged.shape[1], 21)
    share[:, 0, 0] = 1
    for image in range(2):
        for row_in, row_out in zip(map_in[image].tolist(), patch_row[image].tolist(), strict=True):
            share[image, row_out, row_in] = weight[image, row_in]
    plain = share / share.sum(2, keepdim=True).clamp(min=1) @ tokens
    torch.testing.assert_close(merged, plain, rtol=0, atol=1e-6)
    cotangent = torch.randn(merged.shape, generator=torch.Generator().manual_seed(0))
    (found,) = torch.autograd.grad(merged, tokens, cotangent)
    (expected,) = torch.autograd.grad(plain, tokens, cotangent)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_padded_rows_get_no_gradient() -> None:
    tokens, *rest = gbm_inputs()
    out = torch.ops.algm.gbm(tokens, *rest, **GBM)[0]
    (grad,) = torch.autograd.grad(out.square().sum(), tokens)
    length = int(rest[2][1])
    assert length < 21
    assert bool(grad[1, :length].any())
    assert not bool(grad[1, length:].any())


def test_counts_are_symbols_for_the_exporter() -> None:
    """The token count of a merge is unknown to the fake kernel; a specialised one would bake one photo into a graph."""

    class Merge(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return first(torch.ops.algm.clap(x, torch.ones(2, 21), torch.tensor(0.0), **WINDOWS))

    program = torch.export.export(Merge(), (torch.from_numpy(np.ones((2, 21, 4), np.float32)),))
    output = next(node for node in program.graph.nodes if node.op == "output")
    merged = output.args[0][0].meta["val"]
    assert merged.shape[0] == 2
    assert isinstance(merged.shape[1], torch.SymInt)
