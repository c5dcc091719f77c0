"""Bundles: what is written, weights outside the graph and shared, and failures that leave nothing behind."""

from __future__ import annotations

import io
import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from algm_deploy.bundle.files import ONNX, ONNX_DATA, ONNX_INLINED, WEIGHTS, sha256_of
from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, CheckpointError, ExportError
from algm_deploy.lowering.writing import ALIGNMENT, EXTERNAL_BYTES, move_weights, write_bundle
from algm_deploy.merging import deployed, merge_inputs
from algm_deploy.models.checkpoints.reading import read_checkpoint
from algm_deploy.models.loading import load_network


def external(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and bytes of each weight outside the graph; all lie in the one data file."""
    model = onnx.load(path, load_external_data=False)
    found = {}
    for tensor in model.graph.initializer:
        facts = {entry.key: entry.value for entry in tensor.external_data}
        if facts:
            assert facts["location"] == ONNX_DATA
            found[tensor.name] = (int(facts["offset"]), int(facts["length"]))
    return found


def test_contents(tiny_bundle: Bundle) -> None:
    assert {WEIGHTS, ONNX, ONNX_INLINED, ONNX_DATA} <= set(tiny_bundle.files)
    tiny_bundle.verify()
    manifest = tiny_bundle.manifest
    assert tiny_bundle.signature == signature_of(tiny_bundle.recipe)
    assert manifest.unused_checkpoint_keys == ()
    assert manifest.position_embedding_resized_from is None
    assert tiny_bundle.files[ONNX].uses == (ONNX_DATA,)
    assert tiny_bundle.files[ONNX].made_from == {WEIGHTS: tiny_bundle.files[WEIGHTS].sha256}
    assert list(tiny_bundle.files[WEIGHTS].made_from) == ["checkpoint.pth"]


def test_the_manifest_names_plan_and_defaults(tiny_bundle: Bundle) -> None:
    manifest = json.loads((tiny_bundle.path / "manifest.json").read_text())
    plan = manifest["recipe"]["merging"]
    assert {plan["semantics"], plan["batch"], plan["order"]} == {"code", "per_image", "published"}
    assert manifest["signature"]["defaults"] == {"clap_threshold": 0.9, "gbm_threshold": 1.0}
    assert manifest["signature"]["merges"] == ["clap_1", "gbm_3"]


def test_weights_lie_outside_the_graph(tiny_bundle: Bundle) -> None:
    found = external(tiny_bundle.path / ONNX)
    spans = sorted(found.values())
    assert len(spans) > 20
    assert all(offset % ALIGNMENT == 0 and size >= EXTERNAL_BYTES for offset, size in spans)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] == (tiny_bundle.path / ONNX_DATA).stat().st_size
    assert (tiny_bundle.path / ONNX).stat().st_size < 200_000


def test_a_second_graph_shares_the_weights(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """An ONNX file made from the first one refers to the same data: nothing is written twice."""
    folder = shutil.copytree(tiny_bundle.path, tmp_path / "bundle")
    ir.save(ir.load(folder / ONNX), folder / "other.onnx")
    assert external(folder / "other.onnx") == external(folder / ONNX)
    assert sha256_of(folder / ONNX_DATA) == tiny_bundle.files[ONNX_DATA].sha256


def test_a_graph_without_its_weights_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_bundle.path, tmp_path / "bundle")
    data = bytearray((folder / ONNX_DATA).read_bytes())
    data[100] ^= 1
    (folder / ONNX_DATA).write_bytes(data)
    with pytest.raises(BundleError, match=ONNX_DATA):
        Bundle.open(folder).file(ONNX)
    (folder / ONNX_DATA).unlink()
    with pytest.raises(BundleError, match=ONNX_DATA):
        Bundle.open(folder)


def test_moved_weights_are_the_same_weights() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "small": rng.random(4, np.float32),
        "a": rng.random((33, 17), np.float32),
        "b": rng.random(999, np.float32),
    }
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 18}), ir_version=10)
    for name, array in arrays.items():
        model.graph.register_initializer(ir.Value(name=name, const_value=ir.tensor(array, name=name)))
    data = io.BytesIO()
    move_weights(model, data, "weights.data")
    assert isinstance(model.graph.initializers["small"].const_value, ir.Tensor)
    for name in ("a", "b"):
        tensor = model.graph.initializers[name].const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert tensor.offset % ALIGNMENT == 0
        content = data.getvalue()[tensor.offset : tensor.offset + tensor.length]
        assert content == arrays[name].tobytes()
        assert tuple(tensor.shape.numpy()) == arrays[name].shape


def test_the_network_comes_back(tiny_bundle: Bundle, tiny_checkpoint: Path) -> None:
    stored = read_checkpoint(tiny_checkpoint).state_dict
    network = load_network(tiny_bundle)
    assert all(torch.equal(value, stored[name]) for name, value in network.state_dict().items())
    assert load_network(tiny_bundle, torch.float64).encoder.cls_token.dtype == torch.float64
    assert not network.training


@pytest.fixture(scope="module")
def half_bundle(tiny_bundle: Bundle, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    recipe = replace(tiny_bundle.recipe, precision="fp16", output="labels", max_batch=2)
    return write_bundle(read_checkpoint(tiny_checkpoint), recipe, tmp_path_factory.mktemp("half") / "bundle", "42")


def test_a_checkpoint_is_released_before_the_graph_is_made(
    tiny_bundle: Bundle, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = read_checkpoint(tiny_checkpoint)
    mapped = [weakref.ref(value) for value in checkpoint.state_dict.values()]

    def stop(*_: Any) -> None:
        raise ExportError(f"{sum(value() is not None for value in mapped)} of {len(mapped)} live")

    monkeypatch.setattr("algm_deploy.lowering.writing.base_onnx", stop)
    with pytest.raises(ExportError, match=r"^0 of \d\d+ live"):
        write_bundle(checkpoint, tiny_bundle.recipe, tmp_path / "bundle", "")


def test_half_precision_halves_the_weights(half_bundle: Bundle, tiny_bundle: Bundle, blob_images: Any) -> None:
    for name in (WEIGHTS, ONNX_DATA):
        ratio = half_bundle.files[name].size_bytes / tiny_bundle.files[name].size_bytes
        assert 0.45 < ratio < 0.55
    assert half_bundle.manifest.preprocessing_sha256 == "42"
    assert half_bundle.signature.outputs[0].dtype == "uint8"
    tail, _, _ = deployed(load_network(half_bundle), half_bundle.recipe)(
        torch.from_numpy(blob_images(1)), merge_inputs(0.7, 1.0)
    )
    assert tail.dtype == torch.uint8


def test_bf16_is_stored_as_it_is_and_written_as_fp32(tiny_export: Callable[..., Bundle], tiny_bundle: Bundle) -> None:
    """Every reader of opset 18 takes the graph; its weights are those of the network in bf16."""
    bundle = tiny_export({"precision": "bf16"})
    sizes = {name: bundle.files[name].size_bytes / tiny_bundle.files[name].size_bytes for name in (WEIGHTS, ONNX_DATA)}
    assert 0.45 < sizes[WEIGHTS] < 0.55
    assert sizes[ONNX_DATA] == 1
    assert load_network(bundle).encoder.pos_embed.dtype == torch.bfloat16
    weights = [value.const_value for value in ir.load(bundle.file(ONNX)).graph.initializers.values()]
    values = [torch.from_numpy(w.numpy().copy()) for w in weights if w is not None and w.nbytes > 1024]
    assert {value.dtype for value in values} == {torch.float32}
    rounded = [torch.equal(value, value.bfloat16().float()) for value in values]
    assert sum(rounded) >= len(rounded) - 2, "the two matrices of the interpolation are no weights"


def test_both_graphs_are_one_network(tiny_bundle: Bundle, blob_images: Any) -> None:
    """One has functions, one has none; they merge alike and refer to the same weights. ONNX Runtime fuses other
    operators where it sees the bodies, so scores may differ in their last digits."""
    inlined = onnx.load(tiny_bundle.path / ONNX_INLINED, load_external_data=False)
    assert not inlined.functions
    assert [(entry.domain, entry.version) for entry in inlined.opset_import] == [("", 18)]
    assert tiny_bundle.files[ONNX_INLINED].uses == (ONNX_DATA,)
    assert tiny_bundle.files[ONNX_INLINED].size_bytes < tiny_bundle.files[ONNX_DATA].size_bytes / 4
    thresholds = {"clap_threshold": np.array(0.8, np.float32), "gbm_threshold": np.array(1, np.float32)}
    feeds = {"image": blob_images(2), **thresholds}
    one, other = (
        ort.InferenceSession(tiny_bundle.file(name), providers=["CPUExecutionProvider"]).run(None, feeds)
        for name in (ONNX, ONNX_INLINED)
    )
    np.testing.assert_allclose(one[0], other[0], rtol=0, atol=2e-5)
    for first, second in zip(one[1:], other[1:], strict=True):
        np.testing.assert_array_equal(first, second)


def test_weights_that_do_not_fit_leave_nothing_behind(
    tiny_bundle: Bundle, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    recipe = tiny_bundle.recipe
    other = replace(recipe, network=replace(recipe.network, classes=12), class_names=(), palette=())
    with pytest.raises(CheckpointError):
        write_bundle(read_checkpoint(tiny_checkpoint), other, tmp_path / "bundle", "")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_export_leaves_nothing_behind(
    tiny_bundle: Bundle, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ExportError("no")

    monkeypatch.setattr("algm_deploy.lowering.writing.base_onnx", fail)
    with pytest.raises(ExportError, match="no"):
        write_bundle(read_checkpoint(tiny_checkpoint), tiny_bundle.recipe, tmp_path / "bundle", "")
    assert list(tmp_path.iterdir()) == []
