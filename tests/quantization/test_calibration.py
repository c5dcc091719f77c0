"""A calibrated network equals the original until it is quantised; ranges, search and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
import torch

from algm_deploy.bundle.files import ONNX
from algm_deploy.bundle.records import Quantization, QuantizedProduct
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export, parity_windows
from algm_deploy.errors import BundleError, ExportError, RecipeError
from algm_deploy.merging import deployed
from algm_deploy.models.loading import load_network
from algm_deploy.models.quantized import (
    WEIGHT_LEVELS,
    E4m3Linear,
    Int8Attention,
    Int8Linear,
    attention_of,
    e4m3_scale,
    products_of,
    quantized,
    quantized_layers,
)
from algm_deploy.models.vit import VitNetwork
from algm_deploy.ops.attention import Steps
from algm_deploy.ops.quantize import reference
from algm_deploy.quantization import calibration
from algm_deploy.quantization.calibration import calibrate
from algm_deploy.quantization.observing import Observed, observe_attention, thresholds_of
from algm_deploy.quantization.ranges import e4m3_product_of, product_of
from algm_deploy.recipe.plan import DENSE
from algm_deploy.recipe.schema import Recipe


@pytest.fixture(scope="module")
def network(tiny_bundle: Bundle) -> VitNetwork:
    return load_network(tiny_bundle)


@pytest.fixture(scope="module")
def windows(tiny_bundle: Bundle) -> Any:
    return parity_windows(tiny_bundle.recipe, [], 2)


def wanting(bundle: Bundle, agreement: float) -> Recipe:
    gates = replace(bundle.recipe.gates, int8_label_agreement=agreement)
    return replace(bundle.recipe, precision="int8", gates=gates)


# --- a layer ---------------------------------------------------------------------------------------------------------


def test_a_layer_computes_with_levels() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 8)
    x = torch.randn(2, 5, 16)
    ours = Int8Linear(layer, 0.05, 3)
    levels = np.clip(np.rint(x.numpy() / np.float32(0.05)) + 3, -128, 127).astype(np.int64) - 3
    integers = levels @ ours.levels.numpy().astype(np.int64)
    expected = integers * (np.float32(0.05) * ours.steps.numpy()) + layer.bias.detach().numpy()
    assert int(ours.levels.abs().max()) == WEIGHT_LEVELS
    np.testing.assert_allclose(ours(x).detach(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        torch.ops.algm_standard.quantized(x, ours.scale, ours.zero_point), reference(x.numpy(), 0.05, 3)
    )


def test_steps_do_not_depend_on_the_dtype() -> None:
    layer = torch.nn.Linear(16, 8)
    for kind in (Int8Linear, E4m3Linear):
        single, double = kind(layer, 0.125, 0), kind(layer.double(), 0.125, 0)
        assert torch.equal(single.levels.float(), double.levels.float())
        assert torch.equal(single.steps, double.steps)


def test_a_layer_in_e4m3_rounds_to_four_digits() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 8).requires_grad_(False)
    x = torch.randn(64, 16)
    ours = E4m3Linear(layer, 2.0**-6, 0)
    read = ours.levels.float().T * ours.steps[:, None]
    assert (read - layer.weight).abs().max() <= 2.0**-4 * layer.weight.abs().max()
    error, bound = (ours(x) - layer(x)).norm() / layer(x).norm(), 2.0**-4
    assert bound / 8 < error < bound
    beyond = torch.full((1, 16), 1e4)
    torch.testing.assert_close(ours(beyond), ours(torch.full((1, 16), 7.0)))  # 448 / 64


@pytest.mark.parametrize(("largest", "scale"), [(448.0, 1.0), (449.0, 2.0), (7.0, 2.0**-6), (0.0, 2.0**-14)])
def test_scales_of_e4m3_are_powers_of_two(largest: float, scale: float) -> None:
    assert float(e4m3_scale(torch.tensor(largest))) == scale
    seen = Observed(torch.tensor([-largest]), torch.tensor([0.0]), torch.zeros(1, 1))
    assert (e4m3_product_of("p", seen).scale, e4m3_product_of("p", seen).zero_point) == (scale, 0)


def test_two_products_fit_in_16_bits() -> None:
    """What processors without VNNI add up; beyond it they clip."""
    assert 2 * 255 * WEIGHT_LEVELS < 2**15


@pytest.mark.parametrize(
    ("low", "high", "zero_point"),
    [(-1.0, 1.0, 0), (-1.0, 4.0, 0), (-0.17, 10.0, -124), (-10.0, 0.1, 124), (0.5, 2.0, -128), (0.0, 0.0, 0)],
)
def test_levels_reach_what_was_seen(low: float, high: float, zero_point: int) -> None:
    seen = Observed(torch.tensor([low]), torch.tensor([high]), torch.zeros(1, 1))
    product = product_of("p", seen)
    assert product.zero_point == zero_point
    for value in (low, high, 0.0):
        assert abs(reference(np.array(value, np.float32), product.scale, zero_point) - value) <= product.scale / 1.99
    assert reference(np.zeros(1, np.float32), product.scale, zero_point) == 0


# --- a network -------------------------------------------------------------------------------------------------------


def test_balancing_changes_no_bit_and_levels_do(tiny_bundle: Bundle, network: VitNetwork, windows: Any) -> None:
    recipe = wanting(tiny_bundle, 0.0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    balanced, found = calibrate(network, recipe, windows, progress=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert any(not torch.equal(before[name], tensor) for name, tensor in balanced.state_dict().items())
    assert {product.name for product in found.products} == dict(products_of(network)).keys()
    assert (found.high, found.windows) == ((), 2)

    inputs, images = thresholds_of(recipe), torch.from_numpy(windows)
    first, second, low = (
        deployed(model, recipe)(images, inputs)[0]
        for model in (network, balanced, quantized(balanced, found.products, "int8"))
    )
    assert torch.equal(first, second)
    error = (low - first).square().mean().sqrt() / first.square().mean().sqrt()
    assert 1e-4 < error < 0.1


def test_a_wrong_balance_is_refused(
    tiny_bundle: Bundle, network: VitNetwork, windows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = calibration.balance

    def wrong(model: VitNetwork, observed: Any) -> Any:
        factors = right(model, observed)
        model.blocks[0].norm1.weight[0] *= 2
        return factors

    monkeypatch.setattr(calibration, "balance", wrong)
    with pytest.raises(ExportError, match="equal the original bit for bit"):
        calibrate(network, wanting(tiny_bundle, 0.0), windows, progress=False)


def test_what_costs_labels_stays_high(
    tiny_bundle: Bundle, network: VitNetwork, windows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One product with a range far too small: it alone is kept. Nothing merges, so that luck has no part in it."""
    culprit = "encoder.blocks.1.attn.qkv"

    def narrow(name: str, observed: Observed) -> QuantizedProduct:
        product = product_of(name, observed)
        return QuantizedProduct(name=name, scale=product.scale / 30, zero_point=0) if name == culprit else product

    def wanted(agreement: float) -> Recipe:
        return replace(wanting(tiny_bundle, agreement), merging=DENSE)

    windows = windows[:1]
    sound = calibrate(network, wanted(0.0), windows, progress=False)[1].label_agreement
    monkeypatch.setattr(calibration, "product_of", narrow)
    found = calibrate(network, wanted(sound - 0.02), windows, progress=False)[1]
    assert found.high == (culprit,)
    assert found.label_agreement >= sound - 0.02
    assert len(found.products) == len(dict(products_of(network))) - 1


def test_values_that_are_not_finite(tiny_bundle: Bundle, windows: Any) -> None:
    network = load_network(tiny_bundle)
    network.blocks[0].mlp.fc1.weight[0, 0] = torch.inf
    with pytest.raises(ExportError, match="finite values to calibrate on"):
        calibrate(network, tiny_bundle.recipe, windows, progress=False)


# --- a bundle --------------------------------------------------------------------------------------------------------


def test_a_bundle_in_int8(int8_bundle: Bundle) -> None:
    found = int8_bundle.manifest.quantization
    assert isinstance(found, Quantization)
    assert len(dict(quantized_layers(load_network(int8_bundle)))) == len(found.products)
    assert not dict(quantized_layers(load_network(int8_bundle, quantize=False)))
    levels = load_network(int8_bundle, torch.float64).blocks[0].attn.qkv
    assert (levels.levels.dtype, levels.weight.dtype) == (torch.int8, torch.float64)


def test_attention_of_a_bundle_in_int8(int8_bundle: Bundle) -> None:
    """Every block's, and of no network that is not asked for it."""
    found = int8_bundle.manifest.quantization
    assert found is not None and found.label_agreement_attention is not None
    plain, inside = load_network(int8_bundle), load_network(int8_bundle, attention=True)
    assert [one.name for one in found.attention] == [name for name, _ in attention_of(plain)]
    layers = {name: layer for name, layer in inside.named_modules() if isinstance(layer, Int8Attention)}
    assert list(layers) == [one.name for one in found.attention]
    assert not any(isinstance(layer, Int8Attention) for layer in plain.modules())
    for one in found.attention:
        assert [float(getattr(layers[one.name], step)) for step in Steps._fields] == [one.query, one.key, one.value]


def test_ranges_of_attention_are_those_of_what_enters_its_products(tiny_bundle: Bundle, windows: Any) -> None:
    network = load_network(tiny_bundle)
    name, layer = next(iter(attention_of(network)))
    seen: list[torch.Tensor] = []
    with_hook = layer.qkv.register_forward_hook(lambda _, __, out: seen.append(out.chunk(3, dim=-1)))
    with torch.inference_mode():
        deployed(network, tiny_bundle.recipe)(torch.from_numpy(windows[:1]), thresholds_of(tiny_bundle.recipe))
    with_hook.remove()
    found = observe_attention(network, tiny_bundle.recipe, windows[:1])[name]
    query, key, value = (part.abs().max() for part in seen[0])
    torch.testing.assert_close(found, torch.stack([query * layer.scale, key, value]))


def test_attention_that_costs_labels_stays_high(tiny_bundle: Bundle, network: VitNetwork, windows: Any) -> None:
    """Nothing may change: products are left out until nothing does, and so is attention."""
    found = calibrate(network, wanting(tiny_bundle, 1.0), windows[:1], progress=False)[1]
    assert found.label_agreement == 1.0
    assert found.label_agreement_attention in (None, 1.0)


def test_a_product_that_is_not_there(int8_bundle: Bundle) -> None:
    model = load_network(int8_bundle, quantize=False)
    with pytest.raises(BundleError, match="quantised products of this network"):
        quantized(model, [QuantizedProduct(name="encoder.blocks.9.attn.qkv", scale=1.0, zero_point=0)], "int8")
    with pytest.raises(BundleError, match="in int8 or fp8 alone, this one is in fp16"):
        quantized(model, [QuantizedProduct(name="encoder.blocks.1.attn.qkv", scale=1.0, zero_point=0)], "fp16")


def test_a_bundle_in_fp8_with_ranges(measured_fp8_bundle: Bundle) -> None:
    """Weights are as they were, the graph for every runtime holds no levels, and PyTorch computes with them."""
    bundle = measured_fp8_bundle
    found = bundle.manifest.quantization
    assert found is not None
    assert (found.weight_levels, found.balance_alpha, found.high) == (None, None, ())
    assert all(np.log2(product.scale) % 1 == 0 and product.zero_point == 0 for product in found.products)
    layers = dict(quantized_layers(load_network(bundle)))
    assert layers.keys() == {product.name for product in found.products}
    layer = layers["encoder.blocks.0.attn.qkv"]
    assert (layer.weight.dtype, layer.levels.dtype) == (torch.float16, torch.float8_e4m3fn)
    assert "QuantizeLinear" not in {node.op_type for node in onnx.load(bundle.file(ONNX)).graph.node}


@pytest.mark.parametrize(
    ("settings", "photos", "message"),
    [({"precision": "int8"}, [], "--calibrate"), ({}, ["photo.png"], "int8 or fp8 alone, got some for fp32")],
)
def test_photos_and_precision_belong_together(
    tiny_checkpoint: Path, tmp_path: Path, settings: dict[str, Any], photos: list[str], message: str
) -> None:
    for name in photos:
        cv2.imwrite(str(tmp_path / name), np.zeros((64, 96, 3), np.uint8))
    with pytest.raises(RecipeError, match=message):
        export(tiny_checkpoint, tmp_path / "bundle", None, settings, calibrate=[tmp_path / name for name in photos])
    assert not (tmp_path / "bundle").exists()


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from algm_deploy import deployment
    from algm_deploy.cli import main

    given: dict[str, Any] = {}

    def refuse(*_: Any, **keywords: Any) -> None:
        given.update(keywords)
        raise RecipeError("seen")

    monkeypatch.setattr(deployment, "export", refuse)
    flags = [
        "export",
        "x.pth",
        "-o",
        str(tmp_path / "b"),
        "--precision",
        "int8",
        "--calibrate",
        "day",
        "--calibrate",
        "night",
    ]
    assert main(flags) == 2
    assert given["calibrate"] == [Path("day"), Path("night")]


@pytest.mark.parametrize(("runtime", "precision"), [("tensorrt-rtx", "fp8"), ("onnxruntime-cuda", "int8")])
def test_a_precision_that_a_runtime_refuses_is_told_before_the_export(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runtime: str, precision: str
) -> None:
    from algm_deploy.cli import main

    assert main(["deploy", "x.pth", "-o", str(tmp_path / "b"), "--precision", precision, "--runtime", runtime]) == 2
    assert f"for {runtime}" in capsys.readouterr().err
