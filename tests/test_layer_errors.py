"""`benchmarks/layer_errors.py` finds the layer that errs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir
import pytest
from torch import nn
from toys import deployed_toy, toy

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import build, parity_windows
from algm_deploy.lowering.onnxruntime import Provider, rewrite
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.models.deployed import Deployed
from algm_deploy.recipe.plan import DENSE

ORT = "onnxruntime-cpu"
NEAR = 10  # what rounds in another order errs no more than that times PyTorch's error


@pytest.fixture
def layer_errors(script: Callable[[str], ModuleType]) -> ModuleType:
    pytest.importorskip("onnxruntime")
    return script("layer_errors.py")


@pytest.fixture
def dense(tiny_export: Callable[..., Bundle], copied: Callable[..., Bundle]) -> Bundle:
    bundle = copied(tiny_export({"merging.clap_layers": (), "merging.gbm_layers": ()}))
    build(bundle, ORT)
    return bundle


def layers_of(model: Deployed, kinds: tuple[type[nn.Module], ...]) -> set[str]:
    return {name for name, module in model.model.named_modules() if isinstance(module, kinds)}


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [("segmenter", "mask_transformer"), ("setr", "naive"), ("setr", "pup")])
def test_norms_and_convolutions_are_found_in_the_graph_that_runs(
    layer_errors: ModuleType, translated: Callable[..., ir.Model], kind: tuple[str, str], provider: Provider
) -> None:
    network, _ = toy(*kind)
    model = deployed_toy(network, DENSE)
    graph = translated(model, DENSE)
    add_function_bodies(graph)
    rewrite(graph, provider, provider == "cuda", provider == "cpu")
    values = layer_errors.hand_out(graph)
    assert set(values) >= layers_of(model, (nn.LayerNorm, nn.Conv2d))
    outputs = [output.name for output in graph.graph.outputs]
    assert set(values.values()) <= set(outputs)
    assert len(set(outputs)) == len(outputs)


def test_errors_are_small_and_in_the_order_of_the_layers(layer_errors: ModuleType, dense: Bundle) -> None:
    found = layer_errors.layer_errors(dense, ORT, parity_windows(dense.recipe, [], 2))
    rows = found["layers"]
    assert next(iter(rows)) == "encoder.blocks.0.norm1"
    assert list(rows)[-2:] == ["scores", "scores, nothing handed out"]
    assert rows["scores"]["pytorch"] == rows["scores, nothing handed out"]["pytorch"]
    assert all(0 < row["pytorch"] < 1e-5 * row["size"] for row in rows.values())
    assert all(row["ratio"] < NEAR for row in rows.values())


def test_a_layer_that_errs_shows_behind_it(
    layer_errors: ModuleType, dense: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input of a layer is rounded to fp16 after it was handed out."""
    worse, hand_out = "encoder.blocks.1.mlp.fc1", layer_errors.hand_out

    def rounded(model: ir.Model) -> dict[str, str]:
        values: dict[str, str] = hand_out(model)
        node = next(node for node in model.graph if node.name == f"{worse}/MatMul")
        narrow = ir.node("Cast", [node.inputs[0]], {"to": ir.DataType.FLOAT16})
        wide = ir.node("Cast", narrow.outputs, {"to": ir.DataType.FLOAT})
        narrow.outputs[0].name, wide.outputs[0].name = "narrow", "wide"
        model.graph.insert_before(node, [narrow, wide])
        node.replace_input_with(0, wide.outputs[0])
        return values

    monkeypatch.setattr(layer_errors, "hand_out", rounded)
    found: dict[str, Any] = layer_errors.layer_errors(dense, ORT, parity_windows(dense.recipe, [], 1))
    layers = list(found["layers"])
    first = next(layer for layer in layers if found["layers"][layer]["ratio"] > NEAR)
    assert layers.index(first) == layers.index(worse) + 1
    assert found["layers"]["scores"]["ratio"] > NEAR > found["layers"]["scores, nothing handed out"]["ratio"]
    assert not found["scores_unchanged"]


def test_the_command_writes_a_record(
    layer_errors: ModuleType,
    dense: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(layer_errors, "dense_bundle", lambda *_: dense)
    target = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["layer_errors.py", "demo", "--runtime", ORT, "-o", str(target)])
    layer_errors.main()
    assert list(json.loads(target.read_text())["networks"]["demo"]) == ["scores_unchanged", "layers"]
    assert "encoder.blocks.0.norm1" in capsys.readouterr().out
