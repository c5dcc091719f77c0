"""Bundles get engines of TensorRT-RTX, GPU or not; and what is told before the work. Nothing is executed here."""

from __future__ import annotations

import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from algm_deploy.bundle.records import Engine
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BuildError, NotExecutedError, RuntimeUnavailableError
from algm_deploy.lowering.tensorrt import TENSORRT_ONNX
from algm_deploy.parity.links import graph_link
from algm_deploy.runners.registry import RUNTIMES, row_of
from algm_deploy.runners.tensorrt import build as tensorrt_build
from algm_deploy.runners.tensorrt import engine as tensorrt_engine
from algm_deploy.runners.tensorrt import runner as tensorrt_runner
from algm_deploy.runners.tensorrt.build import build_engine
from algm_deploy.runners.tensorrt.digest import kept_digest
from algm_deploy.runners.tensorrt.engine import RTX_TARGETS, EngineOptions
from algm_deploy.runners.tensorrt.runner import TensorRTRtxRunner


@pytest.mark.slow
def test_a_bundle_gets_its_engine(rtx: None, tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    TensorRTRtxRunner.build(bundle)
    (first,) = bundle.manifest.engines
    assert first.compute_capabilities == RTX_TARGETS
    # Building again replaces; for a single GPU, which takes less time.
    lines = TensorRTRtxRunner.build(bundle, in_parts=True, compute_capabilities=("8.9",))
    assert lines[0].endswith("bundle/engines/tensorrt-rtx.engine")
    assert "tensorrt-rtx" in lines[1]
    assert lines[2] == "plugins in the network: clap, gbm, unmerge"
    assert re.fullmatch(r"\d+ attention layers were not fused, .*: fuse them with --engine-precision fp16", lines[3])
    assert "plugins in the network: unmerge" in lines
    again = Bundle.open(bundle.path)
    again.verify()
    (facts,), (parts,) = again.manifest.engines, again.manifest.engine_stretches
    assert [[p.plugin for p in part.parsed_network.plugins] for part in parts.engines] == [[], [], ["unmerge"]]
    assert sum(part.attention_in_parts or 0 for part in parts.engines) == facts.attention_in_parts
    rows = [tensor.shape[1] for tensor in parts.engines[1].parsed_network.inputs if len(tensor.shape) == 3]
    assert rows == [-1], "no size tensor: rows are an axis of an input"
    assert facts.batches == (1, bundle.recipe.max_batch, bundle.recipe.max_batch)
    assert facts.compute_capabilities == ("8.9",)
    assert again.files["engines/tensorrt-rtx.engine"].made_from == {"model.tensorrt.onnx": facts.onnx_hash}
    assert facts.usual_rows_of == "2 drawn scenes"
    assert all(1 < rows < 65 for rows in facts.usual_rows.values())
    assert kept_digest(again, "tensorrt-rtx").image.shape == (2, 3, 128, 128)
    graph = again.files["model.tensorrt.onnx"]
    assert graph.uses == ("model.onnx.data",)  # the weights are not stored twice
    assert graph.size_bytes < again.files["model.onnx.data"].size_bytes / 4
    if not torch.cuda.is_available():
        with pytest.raises(NotExecutedError, match="built and not executed"):
            TensorRTRtxRunner(again).__enter__()


def test_an_fp32_bundle_in_fp16(
    rtx: None, tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    options = EngineOptions(batches=(1, 1, 1), compute_capabilities=("8.9",))
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # Python tells every module that the builder's process imports
    built = build_engine(bundle, "tensorrt-rtx", options, precision="fp16", progress=False)
    assert built.parsed_network.layers["ATTENTION_INPUT"].keys() == {"HALF"}
    assert TensorRTRtxRunner(bundle).precision == "fp16", "what its numbers are held to"
    assert bundle.found(Engine, "tensorrt-rtx") == built
    assert (built.precision, built.rewrites["weight"] > 10) == ("fp16", True)
    imported = set(re.findall(r"^import time:.*\|\s*(\w+)$", capfd.readouterr().err, re.MULTILINE))
    assert {"onnx", "tensorrt_rtx_bindings"} <= imported
    assert imported.isdisjoint({"torch", "onnxruntime", "openvino", "cv2"}), "a builder starts in less than a second"


@pytest.mark.usefixtures("bindings", "no_native_libraries")
def test_what_is_missing_shows_before_the_export(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_build, "write_tensorrt_onnx", lambda *_: pytest.fail("exported first"))
    with pytest.raises(BuildError, match="the library trt_plugin is not built"):
        build_engine(tiny_bundle, "tensorrt-rtx", progress=False)


def test_an_engine_in_int8_has_its_quantisers(rtx: None, int8_bundle: Bundle, copied: Any) -> None:
    options = EngineOptions(batches=(1, 2, 2), compute_capabilities=("8.9",))
    quantization = int8_bundle.manifest.quantization
    assert quantization is not None
    bundle = copied(int8_bundle)
    parsed = build_engine(bundle, "tensorrt-rtx", options, progress=False).parsed_network
    assert parsed.layers["QUANTIZE"] == {"INT8": len(quantization.products)}
    assert graph_link(bundle, row_of("tensorrt-rtx").own).facts["problems"] == []
    in_fp8 = structs.replace(parsed, layers=parsed.layers | {"QUANTIZE": {"FP8": len(quantization.products)}})
    with pytest.raises(BuildError, match=r"expected TensorRT to quantise .* 0 times"):
        tensorrt_engine._check_quantizers(in_fp8, bundle.file(TENSORRT_ONNX), "int8")


def test_fp8_is_built_for_gpus_that_have_it(bindings: None, measured_fp8_bundle: Bundle, tiny_bundle: Bundle) -> None:
    default = tensorrt_engine._targets(EngineOptions(), "tensorrt-rtx", "fp8", None)
    assert default == tuple(target for target in RTX_TARGETS if target != "8.6")
    with pytest.raises(BuildError, match=r"of compute capability 8\.9 or newer .* got 8\.6, which has no fp8 units"):
        build_engine(measured_fp8_bundle, "tensorrt-rtx", EngineOptions(compute_capabilities=("8.6", "8.9")))
    with pytest.raises(RuntimeUnavailableError, match="got one without: export it again"):
        build_engine(tiny_bundle, "tensorrt-rtx", precision="fp8")


def test_every_option_of_an_engine_is_one_of_a_runtime() -> None:
    """And a runner's `build` takes them by name, as the command line hands them on."""
    known = {name for row in RUNTIMES.values() for name in row.build_options}
    assert known == {"precision", "in_parts", *(field.name for field in fields(EngineOptions))}


def test_a_runner_builds_with_the_options_of_its_row(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []

    def stopped(*arguments: Any) -> None:
        told.append(arguments)
        raise BuildError("stopped here")

    monkeypatch.setattr(tensorrt_runner, "build_engine", stopped)
    with pytest.raises(BuildError, match="stopped here"):
        TensorRTRtxRunner.build(tiny_bundle, level=0, precision="fp16")
    largest = tiny_bundle.recipe.max_batch
    options = EngineOptions(batches=(1, largest, largest), level=0)
    assert told == [(tiny_bundle, "tensorrt-rtx", options, "fp16")]
    with pytest.raises(BuildError, match="no build option timing_cache"):
        TensorRTRtxRunner.build(tiny_bundle, timing_cache=Path("cache"))
