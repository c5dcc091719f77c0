"""The operators by the kernel library on a CUDA device, against their bodies in PyTorch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operator_inputs import places_error
from torch import Tensor

from algm_deploy.errors import ExecutionError
from algm_deploy.ops import clap, deformable_attention, gbm, label_map, tome
from algm_deploy.ops.native_kernels import use_kernels

pytestmark = pytest.mark.gpu
WINDOWS = {"semantics": "code", "batch": "per_image", "order": "published"}


@pytest.fixture(autouse=True)
def _library() -> None:
    if use_kernels() is None:
        pytest.skip("the kernel library is not built here: algm-deploy build-native kernels")


def exact_tokens(dtype: torch.dtype, seed: int) -> Tensor:
    """Of +-1 and a width that is a power of four: products are whole numbers, norms a power of two."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 2, (3, 65, 64), generator=generator) * 2 - 1
    tokens[:, 1::2] = torch.where(torch.rand(3, 32, 64, generator=generator) < 0.1, -tokens[:, :-1:2], tokens[:, :-1:2])
    return tokens.to("cuda", dtype)


def both(operator: Any, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Results of the kernels and of the body."""
    kernels = operator(*arguments)
    with operator.set_kernel_enabled("cuda", enabled=False):
        return kernels, operator(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", ["per_image", "batch_min"])
@pytest.mark.parametrize("semantics", ["code", "paper"])
def test_merges_are_those_of_the_bodies(dtype: torch.dtype, batch: str, semantics: str) -> None:
    counts = set()
    for seed in range(8):
        tokens, size = exact_tokens(dtype, seed), torch.ones(3, 65, device="cuda")
        order = ("published", "raster")[seed % 2]
        threshold = torch.tensor(0.3, device="cuda")
        found, expected = both(
            clap, tokens, size, threshold, [8, 8], [2, 2], 1, semantics, batch, order, "threshold", 0
        )
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        tokens, size, map, length = expected
        rule = ("adaptive", "fixed")[seed % 2]
        scale = torch.tensor(0.5, device="cuda")
        found, expected = both(gbm, tokens, size, map, length, scale, 1, rule, 2.0, semantics, batch, 0)
        assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=torch.finfo(dtype).eps)
        counts.add(tuple(expected[3].tolist()))
    assert len(counts) > 1


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tome_is_that_of_the_body(dtype: torch.dtype, prefix: int) -> None:
    """Block after block, also from a CUDA graph; by keys of which many are as similar, and some are no numbers."""
    generator, rounded = torch.Generator().manual_seed(prefix), dtype != torch.float32
    tokens = (torch.randint(0, 2, (3, prefix + 512, 384), generator=generator) * 2 - 1).to("cuda", dtype)
    size, map = tokens.new_ones(3, prefix + 512, dtype=torch.float32), torch.arange(prefix, prefix + 512).cuda()
    map = map.expand(3, -1)
    for r in (43, 43, 0, 100):
        keys = torch.randint(0, 2, (3, tokens.shape[1], 64), generator=generator) * 2.0 - 1
        keys[0, 4], keys[1, 5, 3], keys[2] = torch.nan, torch.inf, keys[2] if r < 100 else torch.nan
        arguments = tokens, size, map, keys.to("cuda", dtype), r, prefix
        found, expected = both(tome, *arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = tome(*arguments)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))
        # At most r + 1 tokens of up to 1 are added up in fp32, then rounded.
        bound = (r + 1) * torch.finfo(torch.float32).eps + rounded * torch.finfo(dtype).eps
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=bound)
        tokens, size, map = expected


@pytest.mark.parametrize("classes", [11, 300])
def test_labels_are_those_of_the_body(classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 20, classes, generator=generator).cuda()
    map = torch.randint(1, 21, (2, 48), generator=generator).cuda()
    found, expected = both(label_map, scores, map, 1, [6, 8], [96, 128])
    assert found.dtype == expected.dtype == (torch.uint8 if classes <= 255 else torch.int32)
    assert (found != expected).double().mean() < 1e-4  # near ties of two classes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_deformable_attention_is_that_of_the_body(dtype: torch.dtype) -> None:
    """Grids and heads of EVA at full size, values that are not contiguous, and the same from a CUDA graph."""
    generator, shapes = torch.Generator().manual_seed(0), [112, 112, 56, 56, 28, 28]
    shares = torch.rand(1, 3136, 16, 3, 4, generator=generator).flatten(3).softmax(3).reshape(1, 3136, 16, 3, 4).cuda()
    locations = (torch.rand(*shares.shape, 2, generator=generator) * 2 - 0.5).cuda()
    value = torch.randn(1, 16, 16464, 44, generator=generator).to("cuda", dtype).transpose(1, 2)
    found, expected = both(deformable_attention, value, locations, shares, shapes)
    bound = places_error(*(x.float().cpu().numpy() for x in (value, shares)), shapes, torch.finfo(dtype).eps / 2)
    # Both round, and both may be as far from exact arithmetic.
    error = (found - expected).abs().float().unflatten(2, (16, 44)).amax(3).cpu()
    assert (error <= 2 * torch.from_numpy(bound)).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = deformable_attention(value, locations, shares, shapes)
    again.zero_()
    graph.replay()
    assert torch.equal(again, found)
    with pytest.raises(ExecutionError, match=r"expected a value of \(images, 16464, heads, width\)"):
        deformable_attention(value[:, 1:], locations, shares, shapes)


def test_inputs_need_not_be_contiguous() -> None:
    tokens, size = exact_tokens(torch.float16, 0), torch.ones(3, 65, device="cuda")
    turned = tokens.mT.contiguous().mT
    threshold = torch.tensor(0.3, device="cuda")
    arguments = size, threshold, [8, 8], [2, 2], 1, "code", "per_image", "published", "threshold", 0
    for a, b in zip(clap(turned, *arguments), clap(tokens, *arguments), strict=True):
        assert torch.equal(a, b)


def test_a_refusal_is_an_error() -> None:
    """An order of rows that the grid does not have."""
    tokens, size = exact_tokens(torch.float16, 0), torch.ones(3, 65, device="cuda")
    with pytest.raises(ExecutionError, match="clap_decide"):
        clap(
            tokens,
            size,
            torch.tensor(0.3, device="cuda"),
            [8, 7],
            [2, 2],
            1,
            "code",
            "per_image",
            "published",
            "threshold",
            0,
        )
