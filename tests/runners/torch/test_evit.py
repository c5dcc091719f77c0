"""EViT's kernels against the operators' references; on a CPU the operators stand where they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import algm_deploy.ops  # noqa: F401  registers torch.ops.algm
from algm_deploy.ops.cls_attention import reference as cls_attention_reference
from algm_deploy.ops.elvit import squared_distances
from algm_deploy.ops.evit import reference as evit_reference
from algm_deploy.runners.torch.evit import cls_attention, evit

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Images, rows and how many of them stay, rows in front, patches, width: also where a tile reaches beyond each of them.
SHAPES = [
    (1, 9, 5, 1, 12, 6),
    (3, 100, 61, 1, 100, 72),
    (8, 70, 69, 0, 96, 64),
    (2, 150, 1, 5, 150, 130),
    (1, 1024, 820, 1, 1024, 384),
]
each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)

Given = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _triton(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        pytest.importorskip("triton", reason="PyTorch's CUDA packages for Linux bring it")


def exact(shape: tuple[int, ...], dtype: torch.dtype) -> Given:
    """Tokens, maps and attention whose products and sums no precision rounds; many rows tie in both."""
    images, rows, _, prefix, patches, width = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def drawn(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, (images, *size), generator=generator)

    few = drawn(-3, 4, 7, width).gather(1, drawn(0, 7, prefix + rows, 1).expand(-1, -1, width))
    return few.to(dtype), drawn(0, prefix + rows, patches), drawn(1, 100, prefix + rows) / 128


def run(given: Given, shape: tuple[int, ...], device: str) -> tuple[Tensor, ...]:
    _, rows, keep, prefix, patches, _ = shape
    found = evit(*(each.to(device) for each in given), patches, rows, keep, prefix)
    return tuple(each.cpu() for each in found)


def expected(given: Given, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """By the NumPy reference; its sums are rounded once."""
    _, rows, keep, prefix, patches, _ = shape
    tokens, map, attention = (each.float().numpy() if each.is_floating_point() else each.numpy() for each in given)
    attributes = {"rows": rows, "keep": keep, "prefix": prefix, "patches": patches}
    with np.errstate(invalid="ignore"):  # infinities and NaN, where a test has some
        values, *maps = evit_reference(tokens, map, attention, **attributes)
    return torch.from_numpy(values).to(given[0].dtype), *(torch.from_numpy(each) for each in maps)


def assert_equal(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@each_device
@each_dtype
@each_shape
def test_equals_the_reference_where_nothing_is_rounded(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    given = exact(shape, dtype)
    assert_equal(run(given, shape, device), expected(given, shape))


@each_device
def test_ties_go_to_the_lower_row(device: str) -> None:
    """All attention and all rows equal: the first rows stay, and all others are restored from the first."""
    _, rows, keep, prefix, patches, width = shape = SHAPES[1]
    given = torch.ones(3, prefix + rows, width), torch.arange(patches).expand(3, -1), torch.ones(3, prefix + rows)
    source = run(given, shape, device)[2]
    assert source[1].tolist() == [*range(prefix, prefix + keep), *[prefix] * (rows - keep)]


@each_device
@each_dtype
def test_what_is_no_number_comes_last(dtype: torch.dtype, device: str) -> None:
    """NaN is as little attention as minus infinity, and no row is nearest to a NaN, but where all are as far."""
    shape = SHAPES[1]
    tokens, map, attention = exact(shape, dtype)
    attention[:, 3:40:3], attention[:, 4] = torch.nan, -torch.inf
    attention[0, 1:] = torch.nan
    tokens[:, 5], tokens[:, 50], tokens[1, 7] = torch.nan, torch.inf, -torch.inf
    attention[1:, [5, 50]] = 2  # these stay
    found, wanted = run((tokens, map, attention), shape, device), expected((tokens, map, attention), shape)
    assert_equal(found, wanted)
    assert (wanted[2][1:, [4, 49]] == torch.tensor([5, 50])).all(), "rows that are no numbers do not stay"


@each_device
def test_zeros_of_both_signs_tie(device: str) -> None:
    shape = SHAPES[0]
    tokens, map, attention = exact(shape, torch.float32)
    attention[:] = 0
    attention[:, 1:5] = -0.0
    assert_equal(run((tokens, map, attention), shape, device), expected((tokens, map, attention), shape))


@each_device
@each_dtype
@each_shape
def test_the_nearest_row_within_rounding(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Of any numbers those stay that should; the row that others are restored from may be a hair farther."""
    images, rows, keep, prefix, patches, width = shape
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(images, prefix + rows, width, generator=generator).to(dtype)
    attention = torch.randn(images, prefix + rows, generator=generator).softmax(1)
    map = torch.arange(prefix, prefix + rows).expand(images, -1)[:, :patches]
    patches = map.shape[1]
    values, map_out, source = run((tokens, map, attention), (images, rows, keep, prefix, patches, width), device)
    chosen, index = source[:, :rows] - prefix, torch.arange(rows)
    best = attention[:, prefix:].topk(keep).indices.sort(1).values
    stays = chosen == index
    assert torch.equal(index.expand(images, -1)[stays].view(images, -1), best)
    x = tokens[:, prefix:].double()
    distance = squared_distances(x, x)
    taken = distance.gather(2, chosen[..., None])[..., 0]
    nearest = distance.masked_fill(~stays[:, None], torch.inf).amin(2)
    rounding = 8 * torch.finfo(torch.float32).eps * x.square().sum(2).max()
    assert (taken - nearest)[~stays].max() <= rounding
    assert torch.equal(map_out, prefix + (stays.cumsum(1) - 1).gather(1, chosen))
    kept = torch.cat([torch.arange(prefix).expand(images, -1), prefix + best], 1)
    assert torch.equal(values[:, :-1], tokens.gather(1, kept[..., None].expand(-1, -1, width)))
    weights = torch.where(stays, 0, attention[:, prefix:]).double()
    fused, sizes = (torch.einsum("br,brd->bd", weights, each) for each in (x, x.abs()))
    kind = torch.finfo(dtype)
    summing = (rows - keep) * torch.finfo(torch.float32).eps * sizes
    assert ((values[:, -1].double() - fused).abs() <= summing + kind.eps * (fused.abs() + kind.tiny)).all()


@each_device
@each_dtype
@pytest.mark.parametrize("sharpness", [1, 30])
@pytest.mark.parametrize(("images", "rows", "heads", "side"), [(1, 65, 2, 16), (3, 129, 3, 72), (8, 1025, 6, 64)])
def test_what_cls_attends_to(
    images: int, rows: int, heads: int, side: int, sharpness: int, dtype: torch.dtype, device: str
) -> None:
    """No farther from the truth than twice what the operator is, and one rounding."""
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(images, rows, 3 * heads * side, generator=generator).to(dtype)
    scale = sharpness * side**-0.5
    truth = cls_attention_reference(qkv.float().numpy(), heads=heads, scale=scale)
    operators = torch.ops.algm.cls_attention(qkv, heads, scale)
    found = cls_attention(qkv.to(device), heads, scale).cpu()
    assert found.dtype == torch.float32
    error, allowed = ((each.numpy() - truth).astype(np.float64) for each in (found, operators))
    assert np.abs(error).max() <= 2 * np.abs(allowed).max() + torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.sum(1), torch.ones(images))
