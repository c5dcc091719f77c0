"""The fused steps against PyTorch's operators, on a CUDA device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.readout import heads_of
from algm_deploy.runners.torch import fused as torch_fused
from algm_deploy.runners.torch import layout as torch_layout
from algm_deploy.runners.torch.layout import Layout

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton", reason="PyTorch's CUDA packages for Linux bring it")


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to("cuda", dtype)


def both(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> tuple[Any, Any]:
    """Results of the kernels and of the operators."""
    fused = call()
    with monkeypatch.context() as patch:
        patch.setattr(torch_fused, "_fusible", lambda x: False)
        return fused, call()


def assert_no_worse(found: Tensor, expected: Tensor, truth: Tensor) -> None:
    """At most twice the operators' error, and one rounding."""
    found_error, expected_error = ((x.double() - truth).abs().max() for x in (found, expected))
    assert found_error <= 2 * expected_error + torch.finfo(found.dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 150, 384, 1024])
def test_norms_err_no_more_than_the_operators(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = nn.LayerNorm(width, 1e-5).to("cuda", dtype).requires_grad_(False)
    norm.weight.copy_(rows(width))
    norm.bias.copy_(rows(width))
    x, delta = rows(77, width, dtype=dtype), rows(77, width, dtype=dtype).flip(0)
    for added in (delta, None):
        found, expected = both(monkeypatch, lambda added=added: torch_fused.residual_norm(x, added, norm))
        assert torch.equal(found[0], expected[0])
        affine = norm.weight.double(), norm.bias.double()
        assert_no_worse(found[1], expected[1], F.layer_norm(found[0].double(), (width,), *affine, norm.eps))
    found, expected = both(monkeypatch, lambda: torch_fused.unit(x.view(7, 11, width)))
    assert_no_worse(found, expected, F.normalize(x.double(), dim=-1).view(found.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width", "hidden"), [(77, 64, 256), (129, 72, 200), (1025, 384, 1536)])
def test_a_product_ends_with_gelu(
    count: int, width: int, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where tiles reach beyond rows, channels or what is summed over; a row that is NaN stays alone."""
    monkeypatch.setattr(torch_fused, "_LEAST_TURNS", 0)
    layer = nn.Linear(width, hidden).to("cuda", dtype).requires_grad_(False)
    layer.weight.copy_(rows(hidden, width) / width**0.5)
    x = rows(count, width, dtype=dtype)
    x[-1] = torch.nan
    found, expected = (each[:-1] for each in both(monkeypatch, lambda: torch_fused.linear_gelu(x, layer)))
    assert_no_worse(found, expected, F.gelu(F.linear(x[:-1].double(), layer.weight.double(), layer.bias.double())))


def test_rows_of_one_picture_take_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object) -> None:
        raise AssertionError("one kernel, which is slower here")

    monkeypatch.setattr(torch_fused, "_launch_product_gelu", launch)
    layer = nn.Linear(384, 1536).to("cuda", torch.float16).requires_grad_(False)
    assert torch_fused.linear_gelu(rows(1025, 384, dtype=torch.float16), layer).shape == (1025, 1536)


def test_large_rows_do_not_overflow() -> None:
    """Their squares would in 16 bits; a row of zeros stays zero."""
    x = torch.full((2, 64), 60000.0, dtype=torch.float16, device="cuda")
    x[1] = 0
    found = torch_fused.unit(x)
    torch.testing.assert_close(found[0], torch.full_like(found[0], 0.125))
    assert not found[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pixels", [torch.uint8, torch.float32])
def test_pixels_become_patches(dtype: torch.dtype, pixels: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.randint(0, 256, (3, 3, 48, 80), generator=torch.Generator().manual_seed(0)).to("cuda", pixels)
    found, expected = both(monkeypatch, lambda: torch_fused.patches(image, 16, 1 / 128, dtype))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("classes", "prefix"), [(11, 1), (1, 1), (3, 0)])
def test_rows_move_as_by_index(classes: int, prefix: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN behind the last image stays out of the rows of images."""
    lengths, width = [5, 2, 9], 96
    starts = torch.tensor([0, 5, 7, 16], dtype=torch.int32, device="cuda")
    layout, valid = Layout(3, 12, starts), sum(lengths)
    x, delta = rows(valid + 4, width, dtype=dtype), rows(valid + 4, width, dtype=dtype).flip(0)
    x[valid:] = torch.nan
    merged, embeddings = rows(3, 12, width, dtype=dtype), rows(classes, width, dtype=dtype)

    def moved() -> list[Tensor]:
        behind, _ = torch_layout.with_front(embeddings, x, layout, prefix)
        parts = [torch_layout.packed(merged, layout, valid + 4)[:valid], behind[: valid + 3 * (classes - prefix)]]
        for first, count, added in ((1, 8, None), (0, 12, delta)):
            padded = torch_layout.apart(x, layout, first, count, added)
            parts += [row[: length - first] for row, length in zip(padded, lengths, strict=True)]
        return parts

    fused, expected = both(monkeypatch, moved)
    for a, b in zip(fused, expected, strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("asking", "heads", "side"), [(150, 3, 32), (64, 2, 64), (19, 1, 128)])
def test_queries_attend_to_the_valid_rows(asking: int, heads: int, side: int, dtype: torch.dtype) -> None:
    """Of as many keys as are valid, whatever lies behind them; or of all."""
    lengths, width, scale = [1, 64, 200, 129], heads * side, side**-0.5
    query = rows(4, asking, width, dtype=dtype)
    key, value = rows(4, 200, width, dtype=dtype), rows(4, 200, width, dtype=dtype).flip(1)
    valid = torch.arange(200, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    cut = [torch.where(valid[..., None], x, torch.nan) for x in (key, value)]
    for found, kept in (
        (torch_fused.crossed(query, *cut, valid, heads, scale), valid),
        (torch_fused.crossed(query, key, value, None, heads, scale), None),
    ):
        parts = [heads_of(x, heads) for x in (query, key, value)]
        mask = None if kept is None else kept[:, None, None]
        expected = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale).transpose(1, 2).flatten(2)
        exact = (part.double() for part in parts)
        truth = F.scaled_dot_product_attention(*exact, attn_mask=mask, scale=scale).transpose(1, 2).flatten(2)
        assert_no_worse(found, expected, truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("images", "count", "heads", "side"), [(3, 200, 2, 64), (1, 17, 3, 32)])
def test_a_key_may_count_several_times(images: int, count: int, heads: int, side: int, dtype: torch.dtype) -> None:
    width, scale = heads * side, side**-0.5
    qkv = rows(images * count, 3 * width, dtype=dtype)
    size = torch.randint(1, 60, (images, count), generator=torch.Generator().manual_seed(1)).float().cuda()
    found = torch_fused.proportional_attention(qkv, size, heads, scale).view(images, count, width)
    parts = [heads_of(x, heads) for x in qkv.view(images, count, 3 * width).split(width, 2)]
    bias = size.double().log()[:, None, None]
    operators = F.scaled_dot_product_attention(*parts, attn_mask=bias.to(dtype), scale=scale)
    exact = F.scaled_dot_product_attention(*(part.double() for part in parts), attn_mask=bias, scale=scale)
    assert_no_worse(found, operators.transpose(1, 2).flatten(2), exact.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "heads", "side"), [(77, 6, 64), (33, 3, 24), (1, 16, 80)])
def test_the_mean_of_keys(
    count: int, heads: int, side: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where tiles reach beyond rows or columns; a row that is NaN stays alone."""
    qkv = rows(count + 1, 3 * heads * side, dtype=dtype)
    qkv[-1] = torch.nan
    found, expected = (each[:-1] for each in both(monkeypatch, lambda: torch_fused.mean_keys(qkv, heads)))
    assert_no_worse(found, expected, qkv[:-1].double().view(count, 3, heads, side)[:, 1].mean(1))


def test_without_a_c_compiler_pytorch_runs_it_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def launch(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch_fused, "_unit_kernel", {(1,): launch})
    monkeypatch.setattr(torch_fused, "_triton_compiles", cache(torch_fused._triton_compiles.__wrapped__))
    x = rows(5, 64, dtype=torch.float16)
    with caplog.at_level(logging.INFO, "algm_deploy"):
        found = torch_fused.unit(x)
        assert not torch_fused.fits_attention(x, 64)
    assert torch.equal(found, F.normalize(x.float(), dim=-1).half())
    assert [r.getMessage() for r in caplog.records if "Failed to find C compiler" in r.getMessage()]
