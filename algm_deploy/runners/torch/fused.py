"""Steps of a transformer as one kernel each, in Triton, which PyTorch's CUDA packages for Linux bring.

Where Triton is not there or has no C compiler, or tensors are not on a CUDA device, the row-wise steps run in PyTorch's
operators: the same results within rounding, more passes over memory. `fits_attention` says where `attention` can be
called.
"""

from __future__ import annotations

import math
from functools import cache
from subprocess import SubprocessError
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.fp8 import E4M3, LARGEST, SMALLEST_ROW, Fp8Linear, Quantised, quantised, saturated
from algm_deploy.native_libraries import say_once
from algm_deploy.ops._rows import wide

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError:
    triton = None

UNIT_EPS = 1e-12  # norms are clamped here, as torch.nn.functional.normalize does
_TILE = 64  # queries of a program, and keys it takes at a time
_LAST_KEYS = 16  # keys at a time of those that do not fill a tile
_KEY_ROWS = 32  # rows of a program that takes the mean of their keys


class _Tiles(NamedTuple):
    """Of a product, with how many programs share a multiprocessor: so one multiplies while another computes GELU."""

    rows: int
    columns: int
    inner: int
    warps: int
    programs: int


_PRODUCT_TILES = {1: _Tiles(128, 128, 128, 4, 2), 2: _Tiles(128, 256, 64, 8, 1)}
"""By bytes of a number: the fastest of 13 and of six on an H200 at widths 384, 768 and 1024."""
_LEAST_TURNS = 4
"""Tiles a program from which the product with GELU is one kernel in 16 bits. From six on it takes 0.80 to 0.87 of what
PyTorch's two take; at 0.2, one picture's rows, it takes longer. In fp8 it gains there too."""


def residual_norm(x: Tensor, delta: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The sum of x and delta, rows (T, D) of any floating dtype, and that sum normalised; delta None adds nothing."""
    if not _fusible(x):
        total = x if delta is None else x + delta
        return total, norm(total)
    total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    _launch_residual_norm(x, delta, norm, total, normed, None)
    return total, normed


def residual_norm_fp8(x: Tensor, delta: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Quantised]:
    """The same with normalised rows in e4m3, each with a scale of its own."""
    if not _fusible(x):
        total = x if delta is None else (x + delta).to(x.dtype)
        return total, quantised(norm(total))
    total, rows = x if delta is None else torch.empty_like(x), _empty_fp8(x)
    _launch_residual_norm(x, delta, norm, total, *rows)
    return total, rows


def _launch_residual_norm(
    x: Tensor, delta: Tensor | None, norm: nn.LayerNorm, total: Tensor, normed: Tensor, scale: Tensor | None
) -> None:
    width, adds = x.shape[1], delta is not None
    block = triton.next_power_of_2(width)
    tensors = x, delta if adds else x, norm.weight, norm.bias, total, normed, normed if scale is None else scale
    _residual_norm_kernel[(len(x),)](
        *tensors, norm.eps, width, block, adds, scale is not None, LARGEST, SMALLEST_ROW, num_warps=_warps(block)
    )


def gelu_fp8(x: Tensor, fit: Tensor) -> Quantised:
    """GELU of rows (T, K), its channels times `fit` (K) fp32, in e4m3: with it they lie in its range."""
    if not _fusible(x):
        return saturated(F.gelu(x).float() * fit)
    rows, (count, width) = _empty_fp8(x), x.shape
    tile = 8, 512
    _gelu_kernel[(-(-count // tile[0]), -(-width // tile[1]))](x, *rows, fit, count, width, *tile, num_warps=4)
    return rows


def product_gelu_fp8(rows: Quantised, layer: Fp8Linear, fit: Tensor) -> Quantised:
    """GELU of what the layer makes of rows (T, K), channels times `fit` (N) fp32, (T, N) in e4m3.

    On Hopper one kernel, which writes one byte a number where two kernels move five.
    """
    if not _fits_product(rows.values):
        return gelu_fp8(product_fp8(rows, layer), fit)
    out = Quantised(rows.values.new_empty(len(rows.values), len(layer.weight)), torch.empty_like(rows.scale))
    scales = rows.scale, layer.scale, fit, out.scale
    _launch_product_gelu(rows.values, layer.weight, layer.bias, out.values, scales)
    return out


def linear_gelu(x: Tensor, layer: nn.Module) -> Tensor:
    """GELU of what a linear layer makes of rows (T, K): (T, N). On Hopper in 16 bits one kernel, given rows enough."""
    if not isinstance(layer, nn.Linear) or layer.bias is None or x.element_size() != 2 or not _fits_product(x):
        return F.gelu(layer(x))
    tiles, programs = _grid(len(x), layer.out_features, _PRODUCT_TILES[2], x.device)
    if tiles < _LEAST_TURNS * programs:
        return F.gelu(layer(x))
    out = x.new_empty(len(x), layer.out_features)
    _launch_product_gelu(x, layer.weight, layer.bias, out, None)
    return out


def _fits_product(x: Tensor) -> bool:
    """Whether the copy engine can load rows, which are multiples of 16 bytes; measured on Hopper alone."""
    return x.is_cuda and _capability(x.device)[0] == 9 and x.shape[1] * x.element_size() % 16 == 0 and _fusible(x)


def _grid(rows: int, columns: int, tiles: _Tiles, device: torch.device) -> tuple[int, int]:
    """Tiles of a product, and programs that the device runs at once."""
    count = -(-rows // tiles.rows) * -(-columns // tiles.columns)
    return count, tiles.programs * _multiprocessors(device)


def _launch_product_gelu(
    x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, scales: tuple[Tensor, Tensor, Tensor, Tensor] | None
) -> None:
    """`scales`, in fp8: of the rows, of the channels, `fit`, and room for those of the result."""
    tiles = _PRODUCT_TILES[x.element_size()]
    (count, inner), columns = x.shape, len(weight)
    tensors = [
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.inner]),
        TensorDescriptor.from_tensor(weight, [tiles.columns, tiles.inner]),
        TensorDescriptor.from_tensor(out, [tiles.rows, tiles.columns]),
    ]
    grid, programs = _grid(count, columns, tiles, x.device)
    _product_gelu_kernel[(min(grid, programs),)](
        *tensors, bias, *(scales or (bias,) * 4), count,
        columns, inner, programs, *tiles[:3], scales is not None, num_warps=tiles.warps, num_stages=3,
    )  # fmt: skip


def product_fp8(rows: Quantised, layer: Fp8Linear) -> Tensor:
    """What the layer makes of rows (T, K), on fp8 units: (T, N) in 16 bits."""
    dtype = _product_dtype(rows.values.device)
    bias = layer.bias.to(dtype)
    return torch._scaled_mm(
        rows.values, layer.weight.mT, rows.scale, layer.scale, bias, out_dtype=dtype, use_fast_accum=True
    )


@cache
def _product_dtype(device: torch.device) -> torch.dtype:
    """fp16, or bf16 where PyTorch's product with a scale a row gives nothing else."""
    one = torch.zeros(16, 16, dtype=E4M3, device=device)
    scale = torch.ones(16, device=device)
    try:
        torch._scaled_mm(one, one.mT, scale[:, None], scale[None], out_dtype=torch.float16)
    except (RuntimeError, ValueError):
        return torch.bfloat16
    return torch.float16


def _empty_fp8(x: Tensor) -> Quantised:
    return Quantised(torch.empty_like(x, dtype=E4M3), x.new_empty(len(x), 1, dtype=torch.float32))


def unit(x: Tensor) -> Tensor:
    """Rows (..., D) scaled to length one; the norm is taken in fp32, where 16-bit squares cannot overflow."""
    if not _fusible(x):
        return F.normalize(wide(x), dim=-1).to(x.dtype)
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    _unit_kernel[(x.numel() // width,)](x, out, UNIT_EPS, width, block, num_warps=_warps(block))
    return out


def patches(image: Tensor, side: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Pixels (B, 3, H, W) of whole patches as rows (B, N, 3 * side * side) of `dtype`: scale times a pixel, minus 1."""
    images, _, height, width = image.shape
    grid = height // side, width // side
    out = torch.empty(images, grid[0] * grid[1], 3 * side * side, dtype=dtype, device=image.device)
    if _fusible(image):
        block = triton.next_power_of_2(width)
        _patches_kernel[(images * grid[0], 3 * side)](image, out, scale, height, width, side, block)
        return out
    apart = image.view(images, 3, grid[0], side, grid[1], side).permute(0, 2, 4, 1, 3, 5)
    one = torch.ones((), dtype=dtype, device=image.device)
    torch.add(-one, apart, alpha=scale, out=out.view(apart.shape))
    return out


def fits_attention(qkv: Tensor, side: int) -> bool:
    """Whether `attention` takes rows of this kind, for heads of width `side`: 16-bit, since Ampere."""
    if not qkv.is_cuda or qkv.element_size() != 2 or side not in (16, 32, 64, 128):
        return False
    return _capability(qkv.device) >= (8, 0) and _triton_compiles()


def attention(qkv: Tensor, starts: Tensor | None, images: int, longest: int, heads: int, scale: float) -> Tensor:
    """Attention (T, D) of packed rows (T, 3D) within each image; rows that belong to none are left as they are.

    For the few hundred rows of an image it is faster than PyTorch's flash attention and than cuDNN's, because its tiles
    are smaller: more of them run at once, and less of the last one is empty.

    Args:
        qkv: rows laid out [query | key | value], each [head][side]; 16-bit, contiguous.
        starts: (images + 1) int32, first row of each image and the end of the last; without it each has `longest` rows.
        images, longest: how many, and the most rows one has.
        heads, scale: as of the operator.
    """
    out = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
    _launch_attention(qkv, starts, None, (images, longest), heads, scale, (out, out))
    return out


def proportional_attention(qkv: Tensor, size: Tensor, heads: int, scale: float) -> Tensor:
    """The same where a key counts as often as `size` (images, rows) fp32 says, in images of one length."""
    out = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
    images, longest = size.shape
    _launch_attention(qkv, None, size.contiguous(), (images, longest), heads, scale, (out, out))
    return out


def mean_keys(qkv: Tensor, heads: int) -> Tensor:
    """The mean over heads (T, side) of the keys in rows (T, 3D), which are laid out as for `attention`."""
    count, side = len(qkv), qkv.shape[1] // (3 * heads)
    if not _fusible(qkv):
        return qkv.view(count, 3, heads, side)[:, 1].mean(1)
    out = qkv.new_empty(count, side)
    block = triton.next_power_of_2(side)
    _mean_keys_kernel[(-(-count // _KEY_ROWS),)](qkv, out, count, heads, side, block, _KEY_ROWS, num_warps=4)
    return out


def attention_fp8(qkv: Tensor, starts: Tensor | None, images: int, longest: int, heads: int, scale: float) -> Quantised:
    """The same in e4m3, for values that lie in its range: the scales of the rows are one."""
    rows = Quantised(
        qkv.new_empty(len(qkv), qkv.shape[1] // 3, dtype=E4M3), qkv.new_empty(len(qkv), 1, dtype=torch.float32)
    )
    _launch_attention(qkv, starts, None, (images, longest), heads, scale, rows)
    return rows


def _launch_attention(
    qkv: Tensor, starts: Tensor | None, size: Tensor | None, count: tuple[int, int], heads: int, scale: float,
    out: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """`count`: images and rows of the longest. `out`: rows and, in fp8, their scales."""
    images, longest = count
    side = qkv.shape[1] // (3 * heads)
    given = [qkv if one is None else one for one in (starts, size)]
    sizes = side, _TILE, _TILE, _LAST_KEYS, starts is not None, size is not None, out[0].dtype == E4M3
    _attention_kernel[(-(-longest // _TILE), images * heads)](
        qkv, *given, *out, longest, heads, scale * math.log2(math.e), *sizes, num_warps=4, num_stages=3
    )


def crossed(query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, heads: int, scale: float) -> Tensor:
    """Attention (B, K, D) of queries (B, K, D) to valid rows of keys and values (B, S, D), by the tiles of `attention`.

    Args:
        query, key, value: rows laid out [head][side], which `fits_attention`; 16-bit, contiguous.
        valid: (B, S) bool, the first rows of every image; without it all are.
        heads, scale: as of the operator.
    """
    (images, asking, width), rows = query.shape, key.shape[1]
    out, counts = torch.empty_like(query), valid is not None
    told = query if valid is None else valid.view(torch.uint8)
    sizes = triton.next_power_of_2(rows), width // heads, _TILE, _TILE, _LAST_KEYS, counts
    _crossed_kernel[(-(-asking // _TILE), images * heads)](
        query, key, value, told, out, asking, rows, heads, scale * math.log2(math.e), *sizes, num_warps=4, num_stages=3
    )
    return out


def fits_moving(x: Tensor) -> bool:
    """Whether `packed` and `apart` take these rows."""
    return _fusible(x)


def fits_fused(x: Tensor) -> bool:
    """Whether a kernel in Triton can be had for a tensor."""
    return x.is_cuda and _triton_compiles()


def packed(x: Tensor, bases: Tensor | int, starts: Tensor, size: tuple[int, int], head: Tensor, skipped: int) -> Tensor:
    """Rows of every image one behind the other, each image's behind the same head; rows that belong to none are open.

    Args:
        x: (..., D), the first row of each image at `bases` (images,) int32, or every so many rows.
        starts: (images + 1) int32, first row of each image in the result, and the end of the last.
        size: rows of the result, and a bound on the rows of one image.
        head: (K, D), put in front of every image; may be empty.
        skipped: rows of each image in `x` that are left out, the first ones.
    """
    rows, longest = size
    out = x.new_empty(rows, x.shape[-1])
    block = triton.next_power_of_2(x.shape[-1])
    at_bases, stride = (bases, 0) if isinstance(bases, Tensor) else (starts, bases)
    _pack_kernel[(longest, len(starts) - 1)](
        x, at_bases, stride, starts, out, head, len(head), skipped, x.shape[-1], block, stride == 0,
        num_warps=_warps(block),
    )  # fmt: skip
    return out


def apart(x: Tensor, delta: Tensor | None, starts: Tensor, first: int, count: int) -> Tensor:
    """Rows first to first + count of every image (images, count, D), x plus delta; behind its end they are anything.

    x and delta (T, D); starts as for `packed`.
    """
    images, width, adds = len(starts) - 1, x.shape[1], delta is not None
    out = x.new_empty(images, count, width)
    block = triton.next_power_of_2(width)
    tensors = x, delta if adds else x, starts, out
    _apart_kernel[(count, images)](*tensors, first, len(x), width, block, adds, num_warps=_warps(block))
    return out


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _fusible(x: Tensor) -> bool:
    """One program holds a whole row."""
    return x.is_cuda and x.is_contiguous() and x.numel() > 0 and x.shape[-1] <= 8192 and _triton_compiles()


@cache
def _triton_compiles() -> bool:
    """Whether kernels can be had: Triton calls a C compiler of the machine for what launches them."""
    if triton is None:
        return False
    one = torch.ones(1, device="cuda")
    try:
        _unit_kernel[(1,)](one, torch.empty_like(one), UNIT_EPS, 1, 1, num_warps=1)
    except (OSError, RuntimeError, SubprocessError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        say_once(
            "torch: the transformer runs in PyTorch's operators, slower, as Triton cannot compile its kernels "
            f"({reason[:200]}); faster with: a C compiler, such as gcc"
        )
        return False
    return True


def _warps(block: int) -> int:
    """So many that every thread loads 16 bytes of 16-bit values."""
    return min(max(block // 256, 1), 8)


if triton is not None:
    # Triton evaluates annotations and knows no others than its own.
    @triton.jit
    def _residual_norm_kernel(  # type: ignore[no-untyped-def]
        x, delta, weight, bias, total, normed, scales, eps,
        width: tl.constexpr, block: tl.constexpr, adds: tl.constexpr,
        quantises: tl.constexpr, largest: tl.constexpr, smallest_row: tl.constexpr,
    ):  # fmt: skip
        column = tl.arange(0, block)
        inside = column < width
        at = tl.program_id(0).to(tl.int64) * width + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if adds:
            value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
            rounded = value.to(total.dtype.element_ty)
            tl.store(total + at, rounded, mask=inside)
            value = rounded.to(tl.float32)  # what is normalised is what was stored
        mean = tl.sum(value, 0) / width
        centred = tl.where(inside, value - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        result = centred * scale * gain + shift
        if quantises:
            row = tl.maximum(tl.max(tl.abs(result), 0), smallest_row) / largest
            tl.store(scales + tl.program_id(0), row)
            result *= 1.0 / row
        tl.store(normed + at, result.to(normed.dtype.element_ty), mask=inside)

    @triton.jit
    def _gelu(value):  # type: ignore[no-untyped-def]
        """With the normal distribution as 1/2 plus a polynomial, fitted to 1e-5 where it is not 0 or 1."""
        near = tl.minimum(tl.maximum(value, -4.5), 4.5)
        square = near * near
        share = 7.23576213e-14 * square - 9.34637585e-12
        share = share * square + 5.45768445e-10
        share = share * square - 1.92227166e-08
        share = share * square + 4.61385416e-07
        share = share * square - 8.11112116e-06
        share = share * square + 0.000109617572
        share = share * square - 0.00117142041
        share = share * square + 0.0099489961
        share = share * square - 0.0664727111
        share = share * square + 0.398938508
        return value * (0.5 + near * share)

    @triton.jit
    def _coarse_gelu(x):  # type: ignore[no-untyped-def]
        """For e4m3: with half a hyperbolic tangent of a polynomial, fitted to 3e-4, by the instruction for it."""
        half = 0.5 * x
        inner = x * (0.80015692 + 0.03470094 * x * x)
        instruction: tl.constexpr = "tanh.approx.f32 $0, $1;"
        bent = tl.inline_asm_elementwise(instruction, "=f,f", [inner], dtype=tl.float32, is_pure=True, pack=1)
        return half + half * bent

    @triton.jit
    def _gelu_kernel(  # type: ignore[no-untyped-def]
        x, rows, scales, fit, count, width: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
    ):  # fmt: skip
        """One program: one tile of the rows."""
        row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
        column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        inside = (row[:, None] < count) & (column[None, :] < width)
        value = _coarse_gelu(tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
        value *= tl.load(fit + column, mask=column < width, other=0.0)[None, :]
        tl.store(rows + at, value.to(rows.dtype.element_ty), mask=inside)
        first = (row < count) & (tl.program_id(1) == 0)
        tl.store(scales + row, tl.full([tile_rows], 1.0, tl.float32), mask=first)

    @triton.jit
    def _product_gelu_kernel(  # type: ignore[no-untyped-def]
        rows, weight, out, bias, row_scale, scale, fit, out_scales, count,
        width: tl.constexpr, inner: tl.constexpr, programs: tl.constexpr,
        tile_rows: tl.constexpr, tile_columns: tl.constexpr, tile_inner: tl.constexpr, quantises: tl.constexpr,
    ):  # fmt: skip
        """One program: every so many tiles of the result. `rows`, `weight` and `out` are descriptors of tensors."""
        across: tl.constexpr = (width + tile_columns - 1) // tile_columns
        for tile in tl.range(tl.program_id(0), tl.cdiv(count, tile_rows) * across, programs, flatten=True):
            first_row, first_column = tile // across * tile_rows, tile % across * tile_columns
            total = tl.zeros([tile_rows, tile_columns], tl.float32)
            for at in range(0, inner, tile_inner):
                part = rows.load([first_row, at])
                total = tl.dot(part, tl.trans(weight.load([first_column, at])), total)
            row = first_row + tl.arange(0, tile_rows)
            column = first_column + tl.arange(0, tile_columns)
            exists = column < width
            if quantises:
                total *= tl.load(row_scale + row, mask=row < count, other=0.0)[:, None]
                total *= tl.load(scale + column, mask=exists, other=0.0)[None, :]
            total += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)[None, :]
            if quantises:
                total = _coarse_gelu(total) * tl.load(fit + column, mask=exists, other=0.0)[None, :]
                ones = tl.full([tile_rows], 1.0, tl.float32)
                tl.store(out_scales + row, ones, mask=(row < count) & (first_column == 0))
            else:
                total = _gelu(total)
            out.store([first_row, first_column], total.to(out.dtype))

    @triton.jit
    def _unit_kernel(x, out, eps, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        column = tl.arange(0, block)
        inside = column < width
        at = tl.program_id(0).to(tl.int64) * width + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        length = tl.maximum(tl.sqrt(tl.sum(value * value, 0)), eps)
        tl.store(out + at, (value / length).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _pack_kernel(  # type: ignore[no-untyped-def]
        x, bases, stride, starts, out, head, classes, skipped,
        width: tl.constexpr, block: tl.constexpr, based: tl.constexpr,
    ):  # fmt: skip
        """One program: one row of one image."""
        row, image = tl.program_id(0), tl.program_id(1)
        to = tl.load(starts + image) + row
        if to < tl.load(starts + image + 1):
            column = tl.arange(0, block)
            inside = column < width
            if row < classes:
                value = tl.load(head + row * width + column, mask=inside)
            else:
                base = tl.load(bases + image) if based else image * stride
                source = (base + skipped + row - classes).to(tl.int64)
                value = tl.load(x + source * width + column, mask=inside)
            tl.store(out + to.to(tl.int64) * width + column, value, mask=inside)

    @triton.jit
    def _apart_kernel(  # type: ignore[no-untyped-def]
        x, delta, starts, out, first, rows, width: tl.constexpr, block: tl.constexpr, adds: tl.constexpr
    ):
        """One program: one row of one image."""
        row, image = tl.program_id(0), tl.program_id(1)
        source = tl.minimum(tl.load(starts + image) + first + row, rows - 1).to(tl.int64) * width
        column = tl.arange(0, block)
        inside = column < width
        value = tl.load(x + source + column, mask=inside, other=0.0).to(tl.float32)
        if adds:
            value += tl.load(delta + source + column, mask=inside, other=0.0).to(tl.float32)
        to = (image.to(tl.int64) * tl.num_programs(0) + row) * width
        tl.store(out + to + column, value.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _patches_kernel(image, out, scale, height, width, side, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program: a line of one colour through all patches of a row of patches."""
        patch_row, line = tl.program_id(0), tl.program_id(1)  # counted over the images; over the lines of a patch
        down, across = height // side, width // side
        column = tl.arange(0, block)
        inside = column < width
        plane = (patch_row // down).to(tl.int64) * 3 + line // side
        pixel_row = patch_row % down * side + line % side
        pixel = tl.load(image + (plane * height + pixel_row) * width + column, mask=inside, other=0)
        patch = patch_row.to(tl.int64) * across + column // side
        at = patch * (3 * side * side) + line * side + column % side
        value = pixel.to(tl.float32) * scale - 1
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _attention_step(  # type: ignore[no-untyped-def]
        query, keys, values, size, first, count, stride, scale, most, total, mixed,
        side: tl.constexpr, keys_each: tl.constexpr, weighs: tl.constexpr, masked: tl.constexpr,
    ):  # fmt: skip
        """Keys first to first + keys_each of a softmax that has its largest score and its sums so far."""
        row = first + tl.arange(0, keys_each)
        at = row[:, None] * stride + tl.arange(0, side)[None, :]
        if masked:
            key = tl.load(keys + at, mask=row[:, None] < count, other=0.0)
            value = tl.load(values + at, mask=row[:, None] < count, other=0.0)
        else:
            key = tl.load(keys + at)
            value = tl.load(values + at)
        score = tl.dot(query, tl.trans(key))
        if weighs:
            score = score * scale + tl.log2(tl.load(size + row, mask=row < count, other=1.0))[None, :]
        if masked:
            score = tl.where(row[None, :] < count, score, float("-inf"))
        if weighs:
            largest = tl.maximum(most, tl.max(score, 1))
            weight = tl.exp2(score - largest[:, None])
        else:
            largest = tl.maximum(most, tl.max(score, 1) * scale)
            weight = tl.exp2(score * scale - largest[:, None])
        fading = tl.exp2(most - largest)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fading[:, None])
        return largest, total * fading + tl.sum(weight, 1), mixed

    @triton.jit
    def _attended(  # type: ignore[no-untyped-def]
        query, keys, values, size, count, stride, scale,
        queries: tl.constexpr, side: tl.constexpr, keys_each: tl.constexpr, last_keys: tl.constexpr,
        weighs: tl.constexpr,
    ):  # fmt: skip
        """What queries (queries, side) make of the first `count` keys and values, `stride` numbers apart. `weighs`:
        a key counts `size` times."""
        most = tl.full([queries], float("-inf"), tl.float32)
        total = tl.zeros([queries], tl.float32)
        mixed = tl.zeros([queries, side], tl.float32)
        whole = count // keys_each * keys_each
        for first in range(0, whole, keys_each):
            most, total, mixed = _attention_step(
                query, keys, values, size, first, count, stride, scale, most, total, mixed,
                side, keys_each, weighs, False,
            )  # fmt: skip
        for first in range(whole, count, last_keys):
            most, total, mixed = _attention_step(
                query, keys, values, size, first, count, stride, scale, most, total, mixed,
                side, last_keys, weighs, True,
            )  # fmt: skip
        return mixed / total[:, None]

    @triton.jit
    def _mean_keys_kernel(  # type: ignore[no-untyped-def]
        qkv, out, count, heads: tl.constexpr, side: tl.constexpr, block: tl.constexpr, tile: tl.constexpr
    ):
        """One program: `tile` rows. Sums are in fp32."""
        row = (tl.program_id(0) * tile + tl.arange(0, tile)).to(tl.int64)[:, None]
        column = tl.arange(0, block)[None, :]
        inside = (row < count) & (column < side)
        keys = qkv + (3 * row + 1) * (heads * side) + column
        total = tl.zeros([tile, block], tl.float32)
        for head in tl.static_range(heads):
            total += tl.load(keys + head * side, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * side + column, (total / heads).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _crossed_kernel(  # type: ignore[no-untyped-def]
        query, key, value, valid, out, asking, rows, heads, scale,
        block: tl.constexpr, side: tl.constexpr, queries: tl.constexpr, keys_each: tl.constexpr,
        last_keys: tl.constexpr, counts: tl.constexpr,
    ):  # fmt: skip
        """One program: `queries` of the `asking` rows of one head of one image. `scale` as below."""
        image, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
        count = rows
        if counts:
            every = tl.arange(0, block)
            count = tl.sum(tl.load(valid + image * rows + every, mask=every < rows, other=0).to(tl.int32), 0)
        width = heads * side
        row = tl.program_id(0) * queries + tl.arange(0, queries)
        at = (image * asking + row[:, None]) * width + head * side + tl.arange(0, side)[None, :]
        inside = row[:, None] < asking
        first = image * rows * width + head * side
        result = _attended(
            tl.load(query + at, mask=inside, other=0.0), key + first, value + first, valid,
            count, width, scale, queries, side, keys_each, last_keys, False,
        )  # fmt: skip
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _attention_kernel(  # type: ignore[no-untyped-def]
        qkv, starts, size, out, scales, longest, heads, scale,
        side: tl.constexpr, queries: tl.constexpr, keys_each: tl.constexpr, last_keys: tl.constexpr,
        packed: tl.constexpr, weighs: tl.constexpr, quantises: tl.constexpr,
    ):  # fmt: skip
        """One program: `queries` rows of one head of one image. `scale` holds the base of the logarithm, two."""
        image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
        if packed:
            start = tl.load(starts + image)
            count = tl.load(starts + image + 1) - start
        else:
            start = image * longest
            count = longest
        row = tl.program_id(0) * queries + tl.arange(0, queries)
        if tl.program_id(0) * queries < count:
            width = heads * side
            stride = 3 * width
            column = tl.arange(0, side)
            base = qkv + start.to(tl.int64) * stride + head * side
            inside = row[:, None] < count
            query = tl.load(base + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
            result = _attended(
                query, base + width, base + 2 * width, size + start, count, stride, scale,
                queries, side, keys_each, last_keys, weighs,
            )  # fmt: skip
            to = out + start.to(tl.int64) * width + head * side
            if quantises:  # noqa: SIM102 - the one is known to the compiler, the other is not
                if head == 0:
                    tl.store(scales + start + row, tl.full([queries], 1.0, tl.float32), mask=row < count)
            # Of another rank than what is loaded, or Triton would load with as many numbers a thread as e4m3 is stored.
            place = to + row[None, :, None] * width + column[None, None, :]
            tl.store(place, result.to(out.dtype.element_ty)[None], mask=inside[None])
