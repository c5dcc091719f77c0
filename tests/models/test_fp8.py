"""Products in fp8 as PyTorch computes them without fp8 units."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models import fp8
from algm_deploy.models.fp8 import LARGEST, Fp8Linear, bounds, fitting, quantised, saturated, use_fp8
from algm_deploy.models.vit import Block


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def block(width: int = 64) -> Block:
    made = Block(width, 2).eval().requires_grad_(False)
    for name, weight in made.named_parameters():
        weight.copy_(rows(*weight.shape) * (1.0 if "norm" in name else 0.2))
    return made


def test_rows_keep_three_binary_digits_behind_the_first() -> None:
    x = rows(50, 64) * torch.logspace(-6, 4, 50)[:, None]
    x[7] = 0
    values, scale = quantised(x)
    found = values.float() * scale
    assert values.float().abs().amax(1).tolist() == [LARGEST if i != 7 else 0.0 for i in range(50)]
    normal = x.abs() > scale * 2.0**-6
    assert ((found - x).abs() <= x.abs() / 16)[normal].all()
    assert ((found - x).abs() <= scale * 2.0**-10 * 1.01)[~normal].all()


def test_what_is_beyond_the_range_saturates() -> None:
    values, scale = saturated(torch.tensor([[1e6, -500.0, 448.0, 1.0]]))
    assert values.float().tolist() == [[448.0, -448.0, 448.0, 1.0]]
    assert scale.tolist() == [[1.0]]


def test_a_product_has_a_scale_a_row_and_a_channel() -> None:
    """Rows and channels of very different sizes all keep their digits."""
    layer = nn.Linear(64, 48).requires_grad_(False)
    layer.weight.mul_(torch.logspace(-3, 3, 48)[:, None])
    x = rows(20, 64) * torch.logspace(-3, 3, 20)[:, None]
    bias = layer.bias.clone()
    layer.bias.zero_()
    truth = F.linear(x.double(), layer.weight.double())
    error = ((Fp8Linear(layer)(x) - truth) / truth.norm(dim=1, keepdim=True) / layer.weight.norm(dim=1)).norm()
    usual = (truth / truth.norm(dim=1, keepdim=True) / layer.weight.norm(dim=1)).norm()
    assert error < 0.06 * usual
    layer.bias.copy_(bias)
    gain = torch.logspace(-1, 1, 48)
    torch.testing.assert_close(Fp8Linear(layer, gain)(x), Fp8Linear(layer)(x) * gain, rtol=1e-5, atol=1e-4)


def test_no_row_leaves_its_bounds() -> None:
    """Also the row that looks most like a channel's weight; values of attention, and the MLP's first product."""
    made = block()
    for norm, layer in ((made.norm1, made.attn.qkv), (made.norm2, made.mlp.fc1)):
        found, weight = bounds(norm, layer), layer.weight * norm.weight
        x = torch.cat([rows(500, 64) * 30 + 5, weight, -weight])
        made_of = layer(norm(x)).abs()
        assert (made_of <= found * (1 + 1e-5)).all()
        assert (made_of.amax(0) > 0.7 * found).all(), "bounds that far off would waste the range"


def test_channels_are_brought_into_range_by_powers_of_two() -> None:
    fit = fitting(torch.tensor([448.0, 449.0, 1.0, 1e-9, 0.0]))
    assert fit.tolist() == [1.0, 0.5, 256.0, 512.0, 512.0], "what hardly differs from zero is not blown up"
    assert fitting(torch.zeros(2)).isfinite().all()


def test_fitted_channels_keep_their_digits() -> None:
    """Channels of very different sizes, which one scale a row would lose."""
    layer = nn.Linear(64, 48).requires_grad_(False)
    sizes = torch.logspace(-3, 3, 64)
    layer.weight.div_(sizes)
    x = rows(20, 64) * sizes
    truth = layer(x)
    fitted = Fp8Linear(layer, fit=fitting(x.abs().amax(0)))
    lost = Fp8Linear(layer)
    assert (fitted(x) - truth).norm() < 0.06 * truth.norm() < (lost(x) - truth).norm()


@pytest.mark.parametrize("projected", [False, True])
def test_a_block_errs_as_much_as_its_digits(projected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "PROJECTED_SINCE", 64 if projected else 65)
    made, x = block(), rows(2, 40, 64)
    low = deepcopy(made)
    use_fp8(low)
    assert isinstance(low.attn.proj, Fp8Linear) == projected
    pairs = [
        (made.attn(made.norm1(x), None), low.attn(low.norm1(x), None)),
        (made.mlp(made.norm2(x)), low.mlp(low.norm2(x))),
    ]
    for truth, found in pairs:
        assert 1e-3 < (found - truth).norm() / truth.norm() < 0.08


def test_values_that_are_all_zero_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "PROJECTED_SINCE", 64)
    made = block()
    made.attn.qkv.weight[-64:] = 0
    made.attn.qkv.bias[-64:] = 0
    use_fp8(made)
    torch.testing.assert_close(made.attn(rows(1, 5, 64), None), made.attn.proj.bias.expand(1, 5, -1))


def test_widths_that_no_unit_takes_stay() -> None:
    made = block(40)
    use_fp8(made)
    assert not any(isinstance(module, Fp8Linear) for module in made.modules())
