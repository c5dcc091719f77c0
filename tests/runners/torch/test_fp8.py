"""fp8 in the torch runtime: packed rows against the modules, on a CUDA device the kernels, and who executes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

from algm_deploy.bundle.records import Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import NotExecutedError, RuntimeUnavailableError
from algm_deploy.merging import insert_merging, merge_inputs
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.fp8 import Fp8Linear, quantised, saturated, use_fp8
from algm_deploy.models.loading import network_class
from algm_deploy.models.quantized import E4m3Linear
from algm_deploy.native_libraries import say_once
from algm_deploy.parity import chain
from algm_deploy.parity.chain import verify
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.report.records import artifact_of
from algm_deploy.runners.contract import runner
from algm_deploy.runners.registry import RUNTIMES, row_of
from algm_deploy.runners.torch import fused as torch_fused
from algm_deploy.runners.torch.packed import PackedNetwork
from algm_deploy.runners.torch.runner import TorchRunner

Images = Callable[[int], np.ndarray]
PLAN = MergePlan((1,), (3,))


@pytest.fixture(scope="module")
def fp8_bundle(tiny_bundle: Bundle) -> Bundle:
    """The tiny network as a bundle that asks for fp8; its files hold fp32, which are read in fp16."""
    recipe = replace(tiny_bundle.recipe, precision="fp8", max_batch=2)
    signature = replace(tiny_bundle.signature, max_batch=2)
    return Bundle(tiny_bundle.path, structs.replace(tiny_bundle.manifest, recipe=recipe, signature=signature))


def deployed(dtype: torch.dtype, device: str = "cpu") -> Deployed:
    shape = Network("segmenter", 128, 4, 2, 11, (128, 128))
    model = network_class(shape)(shape).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    return Deployed(insert_merging(model.to(dtype), PLAN), shape, "scores").eval().to(device)


def scores_of(packed: PackedNetwork, image: Tensor) -> Tensor:
    with packed.run(image, 0.9, 0.0) as merged:
        rows = [row.index_select(0, map) for row, map in zip(merged.scores.scores, merged.scores.map - 1, strict=True)]
        return torch.stack(rows).float().cpu()


def assert_fp8_like_modules(dtype: torch.dtype, device: str, images: Images) -> None:
    """Two ways to the same numbers part where a number lies between two of e4m3, by less than e4m3 costs."""
    exact, low = deployed(torch.float32), deployed(dtype)
    use_fp8(low)
    image = torch.from_numpy(images(2))
    truth = scores_of(PackedNetwork(exact, torch.uint8), image)
    with torch.inference_mode():
        result = low.model(image, merge_inputs(0.9, 0.0))
    assert result.stages[-1].length.min() < 60, "nothing merges"
    modules = torch.stack([r.index_select(0, m) for r, m in zip(result.scores, result.map - 1, strict=True)]).float()
    found = scores_of(PackedNetwork(low.to(device), torch.uint8), image)
    error = (modules - truth).norm()
    assert 1e-3 * truth.norm() < error < 0.4 * truth.norm()
    assert (found - truth).norm() < 1.5 * error
    assert (found - modules).norm() < 1.5 * error


def test_packed_rows_like_the_modules(blob_images: Images) -> None:
    assert_fp8_like_modules(torch.float32, "cpu", blob_images)


# --- who executes it -------------------------------------------------------------------------------------------------


def test_one_runtime_executes_fp8_and_others_the_weights_as_stored(fp8_bundle: Bundle) -> None:
    def executing(calibrated: bool) -> list[str]:
        return [name for name, row in RUNTIMES.items() if row.executes("fp8", calibrated)]

    assert executing(False) == ["torch"]
    assert executing(True) == ["tensorrt", "tensorrt-rtx"]  # torch computes their levels in floating point
    as_stored = [row for name, row in RUNTIMES.items() if name not in executing(False) + executing(True)]
    assert {row.precision_of("fp8") for row in as_stored} == {"fp16"}
    assert row_of("onnxruntime-cpu").precision_of("fp32") == "fp32"


def test_another_runtime_says_what_it_does(fp8_bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    getattr(say_once, "cache_clear", lambda: None)()
    with caplog.at_level(logging.WARNING, "algm_deploy"), runner(fp8_bundle, "onnxruntime-cpu") as run:
        assert run.precision == "fp16"
    (line,) = [r.getMessage() for r in caplog.records if "fp8" in r.getMessage()]
    assert "onnxruntime-cpu" in line and "in fp16" in line and "--runtime torch" in line


def test_without_units_it_says_so(fp8_bundle: Bundle) -> None:
    with TorchRunner(fp8_bundle, device="cpu") as run:
        assert run.precision == "fp8"
        assert run.execution == {"rows": "plain modules", "fp8": "computed in fp32"}


def test_records_name_what_was_executed(fp8_bundle: Bundle) -> None:
    for runtime, precision in (("torch", "fp8"), ("onnxruntime-cpu", "fp16")):
        record = Parity(runtime=runtime, images=1, batches=(1,), links=())
        assert artifact_of(fp8_bundle, record).precision == precision


def test_a_gpu_without_fp8_is_refused(fp8_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(TorchRunner, "device_name", "Old")
    with (
        pytest.raises(NotExecutedError, match=r"8\.9 or newer .* Old has 8\.6: use --runtime onnxruntime-cuda"),
        runner(fp8_bundle, "torch"),
    ):
        pass


# --- parity ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The runtime's scales of one layer's channels are four times too large; the reference's are right."""

    class Wrong(TorchRunner):
        def _open(self) -> None:
            super()._open()
            assert self._model is not None
            layer = self._model.model.encoder.blocks[1].mlp.fc2
            assert isinstance(layer, Fp8Linear)
            layer.scale *= 4

    monkeypatch.setattr(chain, "runner", lambda bundle, name: Wrong(bundle))
    return


def test_links_hold_fp8_to_fp8(fp8_bundle: Bundle, blob_images: Images) -> None:
    report = verify(fp8_bundle, "torch", blob_images(2), progress=False)
    assert report.passed, [link for link in report.links if not link.passed]
    numbers, labels = report.links[3], report.links[5]
    assert "PyTorch in fp8 is" in numbers.measured and "from fp64" in numbers.measured
    assert 0.005 < numbers.facts["pytorch_error_mean"] < 0.3
    assert "PyTorch in fp8" in labels.gate


def test_links_hold_measured_fp8_to_the_same_levels(measured_fp8_bundle: Bundle, blob_images: Images) -> None:
    """PyTorch computes with the levels, ONNX Runtime with the weights as stored, and each is held to that."""
    report = verify(measured_fp8_bundle, "torch", blob_images(1), progress=False)
    assert report.passed, [link for link in report.links if not link.passed]
    assert report.links[5].measured.endswith("% as in fp32")
    with runner(measured_fp8_bundle, "torch") as run:
        assert run.execution["fp8"] == "computed in fp32"


@pytest.mark.parametrize(("number", "factor"), [("steps", 2), ("scale", 1 / 64)], ids=["a step", "clipped outliers"])
def test_a_wrong_measured_number_breaks_the_numbers(
    measured_fp8_bundle: Bundle, blob_images: Images, monkeypatch: pytest.MonkeyPatch, number: str, factor: float
) -> None:
    class Wrong(TorchRunner):
        def _open(self) -> None:
            super()._open()
            assert self._model is not None
            layer = self._model.model.encoder.blocks[1].mlp.fc2
            assert isinstance(layer, E4m3Linear)
            getattr(layer, number).mul_(factor)

    monkeypatch.setattr(chain, "runner", lambda bundle, name: Wrong(bundle))
    report = verify(measured_fp8_bundle, "torch", blob_images(1), progress=False)
    assert "numbers" in {link.name for link in report.links if not link.passed}


def test_tensorrt_asks_for_ranges(fp8_bundle: Bundle) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"with measured ranges for tensorrt-rtx.*--calibrate PHOTOS"):
        runner(fp8_bundle, "tensorrt-rtx")


@pytest.mark.usefixtures("wrong_scale")
def test_a_wrong_scale_breaks_the_numbers(fp8_bundle: Bundle, blob_images: Images) -> None:
    report = verify(fp8_bundle, "torch", blob_images(2), progress=False)
    assert "numbers" in {link.name for link in report.links if not link.passed}


# --- kernels, on a CUDA device ---------------------------------------------------------------------------------------


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to("cuda", torch.float16)


def assert_same_digits(found: object, expected: object) -> None:
    """But where a number lies between two of e4m3."""
    (values, scale), (others, other) = found, expected  # type: ignore[misc]
    torch.testing.assert_close(scale, other, rtol=1e-3, atol=0)
    a, b = values.float() * scale, others.float() * other
    assert (a - b).norm() < 0.01 * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 192, 384, 1024])
def test_steps_write_what_their_operators_quantise_to(width: int) -> None:
    pytest.importorskip("triton", reason="PyTorch's CUDA packages for Linux bring it")
    norm = nn.LayerNorm(width).to("cuda", torch.float16).requires_grad_(False)
    norm.weight.copy_(rows(width))
    norm.bias.copy_(rows(width))
    x, delta = rows(77, width), rows(77, width).flip(0)
    for added in (delta, None):
        total, found = torch_fused.residual_norm_fp8(x, added, norm)
        assert torch.equal(total, x if added is None else x + delta)
        affine = norm.weight.float(), norm.bias.float()
        assert_same_digits(found, quantised(F.layer_norm(total.float(), (width,), *affine, norm.eps)))
    hidden = rows(77, 4 * width) * 3
    fit = torch.logspace(1, 6, 4 * width, base=2.0, device="cuda")
    assert_same_digits(torch_fused.gelu_fp8(hidden, fit), saturated(F.gelu(hidden.float()) * fit))
    heads = width // 64
    qkv, starts = rows(150, 3 * width) * 40, torch.tensor([0, 100, 101, 140], dtype=torch.int32, device="cuda")
    where = qkv, starts, 3, 100, heads, 0.01
    found, plain = torch_fused.attention_fp8(*where), torch_fused.attention(*where)
    valid = [part[:140] for part in found]
    assert_same_digits(valid, saturated(plain[:140]))


@pytest.mark.gpu
def test_products_use_both_scales_and_the_bias() -> None:
    layer = nn.Linear(384, 128).to("cuda", torch.float16).requires_grad_(False)
    layer.weight.mul_(torch.logspace(-1, 1, 128, device="cuda")[:, None])
    low = Fp8Linear(layer)
    x = rows(77, 384) * torch.logspace(-1, 1, 77, device="cuda")[:, None]
    found, expected = torch_fused.product_fp8(quantised(x), low), low(x.float())
    assert ((found - expected).norm(dim=1) < 0.01 * expected.norm(dim=1)).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "width", "hidden"), [(77, 64, 256), (300, 192, 768), (16416, 384, 1536), (129, 80, 208)]
)
def test_a_product_ends_with_gelu(count: int, width: int, hidden: int) -> None:
    """Also where tiles reach beyond rows, channels or what is summed over."""
    pytest.importorskip("triton", reason="PyTorch's CUDA packages for Linux bring it")
    layer = nn.Linear(width, hidden).to("cuda", torch.float16).requires_grad_(False)
    layer.weight.mul_(torch.logspace(-1, 1, hidden, device="cuda")[:, None])
    low, given = Fp8Linear(layer), quantised(rows(count, width) * torch.logspace(-1, 1, count, device="cuda")[:, None])
    fit = torch.logspace(0, 4, hidden, base=2.0, device="cuda")
    hidden_rows = given.values.float() @ low.weight.float().mT * given.scale * low.scale + low.bias
    expected = saturated(F.gelu(hidden_rows) * fit)
    assert_same_digits(torch_fused.product_gelu_fp8(given, low, fit), expected)
    assert_same_digits(torch_fused.gelu_fp8(torch_fused.product_fp8(given, low), fit), expected)


@pytest.mark.gpu
def test_the_network_errs_no_more_than_on_the_cpu(blob_images: Images) -> None:
    assert_fp8_like_modules(torch.float16, "cuda", blob_images)
