"""Convolutions whose maps lie as rows do, and what comes behind them: in kernels against PyTorch's operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import deployed_toy, toy

from algm_deploy.merging import merge_inputs
from algm_deploy.models.readout import PLAIN, ReadNetwork
from algm_deploy.recipe.plan import DENSE
from algm_deploy.runners.torch import maps as torch_maps
from algm_deploy.runners.torch.packed import _lay_out_like_rows

HEADS = ["naive", "naive_mmseg", "pup", "mla", "mla_mmseg"]
# Of maps: channels, grid, and how much they are enlarged, with corners aligned or not.
CASES = [
    (256, (5, 7), 2, False),
    (150, (3, 4), 4, True),
    (16, (4, 4), 1, True),
    (24, (1, 3), 2, False),
    (300, (9, 2), 2, True),
    (8, (1, 1), 4, True),
]


class Layouts(TorchDispatchMode):
    """Whether what enters and what leaves each step on maps of several cells has its channels side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool, bool]] = []

    def __torch_dispatch__(self, step, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = step(*args, **(kwargs or {}))
        name = step._schema.name.removeprefix("aten::")
        if name in ("conv2d", "relu", "upsample_bilinear2d", "cat", "add"):
            given = args[0] if isinstance(args[0], list) else args[:1]
            if all(x.ndim == 4 and x.shape[2:].numel() > 1 for x in given):
                self.seen.append((name, all(map(side_by_side, given)), side_by_side(out)))
        return out


def side_by_side(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


def case(channels: int, grid: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[nn.Conv2d, Tensor]:
    """A convolution that is laid out like rows, and unmerged rows as maps."""
    generator = torch.Generator().manual_seed(channels)
    conv = nn.Conv2d(12, channels, 3, padding=1).requires_grad_(False)
    for weight in conv.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    rows = torch.randn(3, grid[0] * grid[1], 12, generator=generator)
    conv.to(device, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return conv, rows.to(device, dtype).mT.unflatten(2, grid)


@pytest.mark.parametrize("decoder", HEADS)
def test_no_map_of_a_head_is_laid_out_anew(decoder: str) -> None:
    """From unmerged rows to the scores; and the scores are the same."""
    shape, _ = toy("setr", decoder)
    made = deployed_toy(shape, DENSE, "labels").model
    assert isinstance(made, ReadNetwork)
    levels = [torch.randn(2, shape.grid[0] * shape.grid[1], shape.embed_dim) for _ in made.decoder.levels()]
    maps = [level.mT.unflatten(2, shape.grid) for level in levels]
    with torch.inference_mode():
        before = made.decoder(maps, PLAIN)
        _lay_out_like_rows(made)
        with Layouts() as layouts:
            after = made.decoder(maps, PLAIN._replace(rectified=torch_maps.rectified))
    torch.testing.assert_close(after, before)
    assert len(layouts.seen) >= 3
    assert [step for step in layouts.seen if not all(step)] == []


def test_an_adapter_does_not_enlarge_planes() -> None:
    """Nor do the rows of its patches, and all sums of them, lie across each other."""
    shape, _ = toy("vit_adapter", "upernet")
    made = deployed_toy(shape, DENSE, "scores")
    image = torch.randint(0, 256, (2, 3, *shape.image_size), dtype=torch.uint8)
    with torch.inference_mode():
        before = made(image, merge_inputs(0.0, 0.0))[0]
        made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        assert made.model.encoder.embed(image).values.is_contiguous()
        with Layouts() as layouts:
            after = made.model(image)
        torch.testing.assert_close(made(image, merge_inputs(0.0, 0.0))[0], before, rtol=0, atol=1e-4)
    assert side_by_side(after.scores)
    enlarged = [left for step, _, left in layouts.seen if step == "upsample_bilinear2d"]
    assert len(enlarged) > 6
    assert all(enlarged)


@pytest.mark.parametrize(("channels", "grid", "factor", "aligned"), CASES)
def test_on_a_cpu_nothing_changes(channels: int, grid: tuple[int, int], factor: int, aligned: bool) -> None:
    conv, maps = case(channels, grid, torch.float32, "cpu")
    (found,) = torch_maps.rectified([conv], [maps], factor, aligned)
    (expected,) = PLAIN.rectified([conv], [maps], factor, aligned)
    assert torch.equal(found, expected)


def test_other_convolutions_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges that are not zeros, no bias, and what is more than a convolution."""
    monkeypatch.setattr(torch_maps, "fits_fused", lambda _: True)
    conv, maps = case(8, (4, 5), torch.float32, "cpu")
    mirrored = nn.Conv2d(12, 8, 3, padding=1, padding_mode="reflect")
    for other in (mirrored, nn.Conv2d(12, 8, 3, bias=False), nn.Sequential(conv)):
        (found,) = torch_maps.rectified([other], [maps], 2, False)
        assert torch.equal(found, PLAIN.rectified([other], [maps], 2, False)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("channels", "grid", "factor", "aligned"), CASES)
def test_one_kernel_errs_no_more_than_three(
    channels: int, grid: tuple[int, int], factor: int, aligned: bool, dtype: torch.dtype
) -> None:
    """At most twice the operators' error, and one rounding; a NaN stays one."""
    pytest.importorskip("triton", reason="PyTorch's CUDA packages for Linux bring it")
    conv, maps = case(channels, grid, dtype, "cuda")
    with torch.backends.cudnn.flags(allow_tf32=False):
        (found,) = torch_maps.rectified([conv], [maps], factor, aligned)
        (expected,) = PLAIN.rectified([conv], [maps], factor, aligned)
    assert side_by_side(found)
    (truth,) = PLAIN.rectified([conv.double()], [maps.double()], factor, aligned)
    errors = [(x.double() - truth).abs().max() for x in (found, expected)]
    assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps * truth.abs().max()
    assert torch_maps.rectified([conv.to(dtype)], [maps * torch.nan], factor, aligned)[0].isnan().all()
