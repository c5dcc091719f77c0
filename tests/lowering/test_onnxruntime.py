"""Graphs for ONNX Runtime: every rewrite fires as often as the network has its pattern, and computes the same."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_ir.passes.common import RemoveUnusedNodesPass
from toys import FAMILIES, TAU, pictures

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export
from algm_deploy.errors import ExportError
from algm_deploy.lowering import norms, onnxruntime, patterns
from algm_deploy.lowering.onnxruntime import (
    Provider,
    _key_lengths,
    _unit_rows,
    multiplies_fp32,
    rewrite,
    write_onnxruntime_onnx,
)
from algm_deploy.ops import reference
from algm_deploy.ops.bodies import Body
from algm_deploy.pictures.shipped import scene

BLOCKS = 4 + 2  # encoder and decoder of the tiny network


def rewritten(
    bundle: Bundle, provider: Provider, custom: bool = False, single: bool = False
) -> tuple[ir.Model, Counter]:
    model = ir.load(bundle.file("model.onnx"))
    return model, rewrite(model, provider, custom, single)


def histogram(model: ir.Model) -> dict[str, int]:
    return dict(Counter(f"{n.domain}.{n.op_type}".lstrip(".") for n in model.graph if n.domain))


def test_operators_of_the_cpu_graph(tiny_bundle: Bundle) -> None:
    model, counts = rewritten(tiny_bundle, "cpu", single=True)
    assert counts == {"attention": BLOCKS, "bias_gelu": BLOCKS}
    assert histogram(model) == {
        "com.microsoft.Attention": BLOCKS,
        "com.microsoft.BiasGelu": BLOCKS,
        "algm.clap": 1,
        "algm.gbm": 1,
        "algm.unmerge": 1,
    }
    plain = Counter(n.op_type for n in model.graph if not n.domain)
    # proj and fc2 of every block, proj_dec, and three products of the decoder's class scores
    assert plain["MatMul"] == 2 * BLOCKS + BLOCKS + 1 + 3
    assert plain["Erf"] == 0
    assert plain["LayerNormalization"] == 2 * BLOCKS + 3
    assert plain["Add"] == 4 * BLOCKS + 3  # two biases and two residuals a block; position, proj_dec, row count


def test_operators_of_the_cuda_graph(tiny_bundle: Bundle) -> None:
    model, counts = rewritten(tiny_bundle, "cuda", custom=True)
    # all norms but: the first of encoder and decoder, those behind a merge, the mask norm
    skips = 2 * BLOCKS + 3 - 5
    assert counts == {
        "attention": BLOCKS,
        "bias_gelu": BLOCKS,
        "skip_layer_norm": skips,
        "patch_embedding": 1,
        "unit_rows": 2,
        "clap": 1,
        "gbm": 1,
        "unmerge": 1,
    }
    assert histogram(model)["com.microsoft.SkipLayerNormalization"] == skips
    plain = Counter(n.op_type for n in model.graph if not n.domain)
    assert (plain["Conv"], plain["ReduceL2"], plain["SimplifiedLayerNormalization"]) == (0, 0, 2)
    assert not model.functions, "a function body would hide the custom operator"


def test_the_cpu_keeps_the_bodies_of_merges(tiny_bundle: Bundle) -> None:
    model, counts = rewritten(tiny_bundle, "cpu", custom=True)
    assert counts == {"attention": BLOCKS, "bias_gelu": BLOCKS}
    assert sorted(name for _, name, _ in model.functions) == ["clap", "gbm", "unmerge"]


def test_bodies_stay_without_the_library(tiny_bundle: Bundle) -> None:
    model, _ = rewritten(tiny_bundle, "cuda")
    assert sorted(name for _, name, _ in model.functions) == ["clap", "gbm", "unmerge"]


def test_no_weight_is_written_again(tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    write_onnxruntime_onnx(bundle, "cpu", False, "built.onnx")
    written, portable = (ir.load(bundle.file(name)) for name in ("built.onnx", "model.onnx"))
    places = {n: (v.const_value.location, v.const_value.offset) for n, v in external(portable).items()}
    assert external(written)
    assert all((v.const_value.location, v.const_value.offset) == places[n] for n, v in external(written).items())
    assert bundle.path.joinpath("built.onnx").stat().st_size < 200_000


def external(model: ir.Model) -> dict[str, ir.Value]:
    values = model.graph.initializers.items()
    return {name: value for name, value in values if isinstance(value.const_value, ir.ExternalTensor)}


def copied(bundle: Bundle, folder: Path) -> Bundle:
    shutil.copytree(bundle.path, folder / "bundle")
    return Bundle.open(folder / "bundle")


@pytest.mark.parametrize("images", [1, 2, 3, 8])
@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_equals_the_portable_graph(tiny_bundle: Bundle, tmp_path: Path, images: int, provider: Provider) -> None:
    """What only CUDA gets runs on the CPU too; padded batches with lengths and, on the CPU, image by image."""
    bundle = copied(tiny_bundle, tmp_path)
    image = np.stack([scene(seed)[0][:128, :128].transpose(2, 0, 1) for seed in range(images)])
    expected = run(bundle.path / "model.onnx", image)
    for single in (True, False) if provider == "cpu" else (False,):
        model, _ = rewritten(bundle, provider, single=single)
        ir.save(model, bundle.path / "under_test.onnx")
        pieces = [image[i : i + 1] for i in range(images)] if single else [image]
        found = [run(bundle.path / "under_test.onnx", piece) for piece in pieces]
        for name, value in expected.items():
            got = np.concatenate([f[name] for f in found])
            if name == "scores":
                np.testing.assert_allclose(got, value, atol=2e-4)
            else:
                np.testing.assert_array_equal(got, value, err_msg=name)


@pytest.mark.parametrize(
    ("family", "decoder", "counts"),
    [
        ("dinov2", "linear", {"attention": 3, "bias_gelu": 3, "skip_layer_norm": 4}),
        ("deit", "linear", {"attention": 3, "bias_gelu": 3, "skip_layer_norm": 4}),
        # Two more GELUs after the mask's linear layers.
        ("eomt", "queries", {"attention": 4, "bias_gelu": 6, "skip_layer_norm": 5}),
    ],
)
def test_other_families_are_rewritten(
    exported_toy: Any, tmp_path: Path, family: str, decoder: str, counts: dict[str, int]
) -> None:
    """Several tokens in front of the patches, padded pictures, queries: the same rewrites, the same results."""
    exported = exported_toy(family, decoder)
    images = pictures(exported.deployed.network)
    expected = exported.run_onnx(images)
    of_provider: dict[Provider, dict[str, int]] = {
        "cpu": {name: counts[name] for name in ("attention", "bias_gelu")},
        "cuda": counts | {"patch_embedding": 1},
    }
    for provider, wanted in of_provider.items():
        graph = exported.portable.clone()
        assert rewrite(graph, provider, custom_operators=False, single=False) == wanted
        ir.save(graph, tmp_path / f"{provider}.onnx")
        found = run(tmp_path / f"{provider}.onnx", images, clap=TAU)
        for name, value in expected.items():
            if name == "scores":
                np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-6 * max(10, abs(value).max()))
            else:
                np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_deformable_attention_is_left_to_the_library(exported_toy: Any, ort_library: Path, tmp_path: Path) -> None:
    """By both providers; on the CPU the library's results are those of the bodies."""
    exported = exported_toy("vit_adapter", "upernet")
    images = pictures(exported.deployed.network)
    expected = exported.run_onnx(images)
    providers: tuple[Provider, ...] = ("cuda", "cpu")
    for provider in providers:
        graph = exported.portable.clone()
        assert rewrite(graph, provider, custom_operators=True, single=False)["deformable_attention"] == 10
        assert not [name for _, name, _ in graph.functions if name.startswith("deformable_attention")]
    ir.save(graph, tmp_path / "cpu.onnx")
    found = run(tmp_path / "cpu.onnx", images, clap=TAU, library=ort_library)
    for name, value in expected.items():
        if name == "scores":
            np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-6 * max(10, abs(value).max()))
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


OF_MASKS = [("segvit", "atm"), ("eomt", "queries")]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("family", "decoder"), OF_MASKS)
def test_the_tail_of_masks_is_left_to_the_library(exported_toy: Any, family: str, decoder: str, half: bool) -> None:
    """One node by both providers, that takes masks as they come, and nothing of the picture's size is left."""
    exported = exported_toy(family, decoder, "labels", half)
    providers: tuple[Provider, ...] = ("cuda", "cpu")
    for provider in providers:
        graph = exported.portable.clone()
        assert rewrite(graph, provider, custom_operators=True, single=False)["mask_labels"] == 1
        (tail,) = [node for node in graph.graph if node.op_type == "mask_labels"]
        assert tail.outputs[0] is graph.graph.outputs[0]
        assert tail.attributes["size"].as_ints() == (64, 96)
        masks, classes = tail.inputs
        assert classes.dtype == ir.DataType.FLOAT
        # SegViT adds its masks up in fp32.
        assert masks.dtype == (ir.DataType.FLOAT16 if half and family == "eomt" else ir.DataType.FLOAT)
        assert not {"Resize", "ArgMax"} & {node.op_type for node in graph.graph}
        without = rewrite(exported.portable.clone(), provider, custom_operators=False, single=False)
        assert "mask_labels" not in without


@pytest.mark.parametrize(("family", "decoder"), OF_MASKS)
def test_labels_of_masks_are_those_of_the_portable_graph(
    exported_toy: Any, ort_library: Path, tmp_path: Path, family: str, decoder: str
) -> None:
    """But for two classes that are as good up to rounding."""
    exported, with_scores = (exported_toy(family, decoder, output) for output in ("labels", "scores"))
    images = pictures(exported.deployed.network)
    models = {"own": exported.portable.clone(), "portable": exported.portable, "scores": with_scores.portable}
    for name, model in models.items():
        surer(model)
        if name == "own":
            assert rewrite(model, "cpu", custom_operators=True, single=False)["mask_labels"] == 1
        ir.save(model, tmp_path / f"{name}.onnx")
    found, expected, scored = (run(tmp_path / f"{n}.onnx", images, clap=TAU, library=ort_library) for n in models)
    labels, wanted = found.pop("labels"), expected.pop("labels")
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert (labels.shape, labels.dtype) == (wanted.shape, wanted.dtype)
    assert len(np.unique(wanted)) > 1
    chosen, best = (np.take_along_axis(scored["scores"], x[:, None].astype(np.int64), 1) for x in (labels, wanted))
    np.testing.assert_allclose(chosen, best, rtol=4e-6)


def surer(model: ir.Model) -> None:
    """Makes queries surer of their classes, so that not all pixels of a network of random weights have the same."""
    weight = model.graph.initializers["decoder.classes.constant"]
    weight.const_value = ir.tensor(12 * weight.const_value.numpy(), name=weight.name)


def test_other_tails_are_no_tails_of_masks(exported_toy: Any) -> None:
    """Scores; masks that are weighted before they are enlarged; labels of more than eight bits; another sigmoid."""
    portable = exported_toy("segvit", "atm", "labels").portable
    cases = {
        "scores": exported_toy("segvit", "atm").portable,
        "enlarged later": exported_toy("eva", "mask2former", "labels").portable,
        "int32": changed(
            portable, "Cast", lambda node: setattr(node.outputs[0], "type", ir.TensorType(ir.DataType.INT32))
        ),
        "last of equals": changed(portable, "ArgMax", lambda node: put(node, "select_last_index", 1)),
        "corners": changed(portable, "Resize", lambda n: put(n, "coordinate_transformation_mode", "align_corners")),
        "equation": changed(portable, "Einsum", lambda node: put(node, "equation", "bqk,bqhw->bkwh")),
        "half of it": changed(portable, "Min", lambda node: node.replace_input_with(1, node.inputs[0])),
    }
    for name, model in cases.items():
        counts = rewrite(model.clone(), "cuda", custom_operators=True, single=False)
        assert "mask_labels" not in counts, name
    assert rewrite(portable.clone(), "cuda", custom_operators=True, single=False)["mask_labels"] == 1


def changed(model: ir.Model, op_type: str, change: Callable[[ir.Node], None]) -> ir.Model:
    """A copy in which the last node of a type is changed."""
    model = model.clone()
    change([node for node in model.graph if node.op_type == op_type][-1])
    return model


def put(node: ir.Node, name: str, value: str | int) -> None:
    node.attributes[name] = ir.AttrString(name, value) if isinstance(value, str) else ir.AttrInt64(name, value)


@pytest.fixture
def any_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library computes of rows wherever it can stand: small networks are fp32, with narrow heads."""
    monkeypatch.setattr(onnxruntime, "_fits_packed_attention", lambda node, linear: True)
    for module in (onnxruntime, norms):
        monkeypatch.setattr(module, "fits_rows", lambda values: len(values.shape) == 3)
    monkeypatch.setattr(patterns, "_fits_patches", lambda weight: True)


def test_heads_of_64_in_fp16_get_own_attention(tiny_export: Callable[..., Bundle], tiny_bundle: Bundle) -> None:
    """Those of the decoder alone; all else is the library's everywhere. Without it, or in fp32, nothing is."""
    half = tiny_export({"precision": "fp16"})
    model, counts = rewritten(half, "cuda", custom=True)
    assert (counts["attention"], counts["packed_attention"]) == (4, 2)
    assert (counts["bias_gelu"], counts["gelu"]) == (0, BLOCKS)
    assert (counts["patch_embedding"], counts["patches"]) == (1, 1)
    kinds = histogram(model)
    assert kinds["algm.bias_skip_norm"] == counts["bias_skip_norm"] > counts["skip_layer_norm"] == 0
    assert kinds["algm.layer_norm"] == counts["layer_norm"] > 0
    assert kinds["algm.bias_skip"] == counts["bias_skip"] == 2, "one for each merge"
    assert not [node for node in model.graph if node.op_type in ("LayerNormalization", "SkipLayerNormalization")]
    (cut,) = [node for node in model.graph if node.op_type == "patches"]
    assert {name: value.value for name, value in cut.attributes.items()} == {
        "side": 16,
        "centre": 128,
        "scale": 1 / 128,
    }
    assert cut.inputs[0].producer().op_type == "Cast", "pixels are centred and scaled there"
    for bundle, custom, provider in ((half, False, "cuda"), (half, True, "cpu"), (tiny_bundle, True, "cuda")):
        model, counts = rewritten(bundle, provider, custom=custom)
        assert not {"packed_attention", "gelu", "patches"} & set(counts)
        assert not {"algm.bias_skip", "algm.bias_skip_norm", "algm.layer_norm"} & set(histogram(model))


def gelu_of_maps(sides: list[Any]) -> ir.Model:
    """GELU of 16-bit maps (B, *sides), as the exporter writes it."""
    half = ir.DataType.FLOAT16
    tape = ir.tape.Tape()
    x = ir.Value(name="x", shape=ir.Shape(["batch", *sides]), type=ir.TensorType(half))
    root, one, share = (
        tape.initializer(ir.tensor(np.float16(value)), name) for name, value in (("r", 2**0.5), ("o", 1), ("h", 0.5))
    )
    normal = tape.op("Mul", [tape.op("Add", [tape.op("Erf", [tape.op("Div", [x, root])]), one]), share])
    out = tape.op("Mul", [x, normal])
    out.name, out.shape, out.type = "out", x.shape, x.type
    for number, node in enumerate(tape.nodes):
        node.name = f"node_{number}"
    graph = ir.Graph([x], [out], nodes=tape.nodes, initializers=tape.initializers, opset_imports={"": 18}, name="g")
    return ir.Model(graph, ir_version=10)


def test_gelu_of_maps_is_rounded_once(ort_library: Path, tmp_path: Path) -> None:
    """One by one, operators of 16 bits make -0.00090 of -3.668, where GELU is -0.00045."""
    model = gelu_of_maps([2, 4, 8])
    assert rewrite(model, "cuda", custom_operators=True, single=False)["gelu"] == 1
    ir.save(model, tmp_path / "maps.onnx")
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(ort_library))
    session = ort.InferenceSession(tmp_path / "maps.onnx", options, providers=["CPUExecutionProvider"])
    x = np.linspace(-6, 6, 3 * 64).reshape(3, 2, 4, 8).astype(np.float16)
    (found,) = session.run(None, {"x": x})
    expected = reference.gelu(x.reshape(1, 6, 32).astype(np.float64), np.zeros(32)).reshape(x.shape)
    np.testing.assert_allclose(found, expected, rtol=2.0**-10, atol=1e-6)


@pytest.mark.parametrize("sides", [[2, "h", 8], [8]])
def test_gelu_of_maps_whose_sides_are_not_known_stays(sides: list[Any]) -> None:
    model = gelu_of_maps(sides)
    assert rewrite(model, "cuda", custom_operators=True, single=False)["gelu"] == 0
    assert "Erf" in {node.op_type for node in model.graph}


# EVA's blocks are those of ViT-Adapter, and its graph is by far the largest; what DToP prunes has those of SegViT.
WITH_BLOCKS_OF_THEIR_OWN = [case for case in FAMILIES if case[1] not in ("mask_transformer", "mask2former", "prune")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "decoder"), WITH_BLOCKS_OF_THEIR_OWN)
def test_the_librarys_layers_compute_the_same_in_every_family(
    any_layer: None, exported_toy: Any, ort_library: Path, tmp_path: Path, family: str, decoder: str
) -> None:
    exported = exported_toy(family, decoder)
    images, graph = pictures(exported.deployed.network), exported.portable.clone()
    expected = exported.run_onnx(images)
    counts = rewrite(graph, "cuda", custom_operators=True, single=False)
    assert counts["packed_attention"] > counts["attention"] == 0
    assert counts["gelu"] > counts["bias_gelu"] == 0
    assert counts["patches"] == 1
    assert histogram(graph)["algm.bias_skip_norm"] == counts["bias_skip_norm"] > counts["skip_layer_norm"] == 0
    ir.save(graph, tmp_path / "own.onnx")
    found = run(tmp_path / "own.onnx", images, clap=TAU, library=ort_library)
    assert len(set(expected["token_counts"][:, 0])) > 1, "nothing was padded"
    for name, value in expected.items():
        if name == "scores":
            np.testing.assert_allclose(found[name], value, rtol=0, atol=4e-6 * max(10, abs(value).max()))
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_row_of_zeros_scaled_to_length_one_stays_zero(tmp_path: Path) -> None:
    x = ir.Value(name="x", shape=ir.Shape([2, 3, 8]), type=ir.TensorType(ir.DataType.FLOAT))
    body = Body()
    norm = body("ReduceL2", x, [-1], keepdims=1)
    tiny = body("Expand", body("Clip", norm, body.number(1e-12)), np.array([2, 3, 8]))
    unit = body("Div", x, tiny)
    unit.name, unit.shape, unit.type = "unit", x.shape, x.type
    norm.producer().inputs[0].shape = x.shape
    graph = ir.Graph([x], [unit], nodes=body.nodes, opset_imports={"": 18})
    counts: Counter[str] = Counter()
    _unit_rows(graph, counts)
    assert counts["unit_rows"] == 1
    assert "SimplifiedLayerNormalization" in [n.op_type for n in graph]
    model = ir.Model(graph, ir_version=10)
    RemoveUnusedNodesPass()(model)
    ir.save(model, tmp_path / "unit.onnx")
    values = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    values[0, 1] = 0
    values[1, 2] *= 1e-6
    (found,) = ort.InferenceSession(tmp_path / "unit.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": values})
    expected = values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-12)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def run(path: Path, image: np.ndarray, clap: float = 0.9, library: Path | None = None) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    wanted = {"image": image, "clap_threshold": np.float32(clap), "gbm_threshold": np.float32(1.0)}
    feeds = {i.name: np.asarray(wanted[i.name], "uint8" if i.name == "image" else "f4") for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_a_single_image_graph_refuses_two(tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    write_onnxruntime_onnx(bundle, "cpu", False, "built.onnx")
    with pytest.raises(Exception, match="Expected: 1"):
        run(bundle.file("built.onnx"), np.zeros((2, 3, 128, 128), np.uint8))


def test_images_that_decide_together_stay_a_batch(tiny_checkpoint: Path, tmp_path: Path) -> None:
    bundle = export(tiny_checkpoint, tmp_path / "coupled", None, {"merging.batch": "batch_min"}).bundle
    write_onnxruntime_onnx(bundle, "cpu", False, "built.onnx")
    model = ir.load(bundle.file("built.onnx"))
    assert str(model.graph.inputs[0].shape[0]) == "batch"
    attentions = [n for n in model.graph if n.op_type == "Attention"]
    assert all(len(n.inputs) == 3 for n in attentions), "equal lengths need no mask"


def test_lengths_of_the_cuda_attention(tmp_path: Path) -> None:
    """key_len[B], then the first row of each image and the end, once for queries and once for keys."""
    length = ir.Value(name="length", shape=ir.Shape([None]), type=ir.TensorType(ir.DataType.INT64))
    x = ir.Value(name="x", shape=ir.Shape([None, None, 8]), type=ir.TensorType(ir.DataType.FLOAT))
    last = ir.node("Identity", [x])
    last.outputs[0].name = "y"
    graph = ir.Graph([length, x], last.outputs, nodes=[last], opset_imports={"": 18})
    keys = _key_lengths(graph, last, "cuda", length, x)
    keys.shape, keys.type = ir.Shape([None]), ir.TensorType(ir.DataType.INT32)
    graph.outputs[0] = keys
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "lengths.onnx")
    session = ort.InferenceSession(tmp_path / "lengths.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"length": np.array([5, 7, 4]), "x": np.zeros((3, 7, 8), np.float32)})
    assert found.tolist() == [5, 7, 4, 0, 7, 14, 21, 0, 7, 14, 21]
    assert found.dtype == np.int32


def test_attention_without_its_layer_is_refused(tiny_bundle: Bundle) -> None:
    model = ir.load(tiny_bundle.file("model.onnx"))
    attention = next(n for n in model.graph if n.op_type == "attention")
    (bias,) = [v for v in attention.inputs[0].producer().inputs if v.is_initializer()]
    bias.replace_all_uses_with(attention.inputs[0].producer().inputs[0])
    with pytest.raises(ExportError, match="from one linear layer"):
        rewrite(model, "cpu", False, True)


def test_another_activation_is_left_alone(tiny_bundle: Bundle) -> None:
    model = ir.load(tiny_bundle.file("model.onnx"))
    for name, value in model.graph.initializers.items():
        if value.const_value.size == 1 and abs(float(value.const_value.numpy().item()) - 2**0.5) < 1e-6:
            value.const_value = ir.tensor(np.float32(1.7), name=name)
    assert rewrite(model, "cpu", False, True)["bias_gelu"] == 0


@pytest.mark.parametrize(
    ("family", "decoder"), [("setr", "pup"), ("eomt", "queries"), ("segmenter", "mask_transformer")]
)
def test_in_16_bits_only_bodies_multiply_fp32(exported_toy: Any, family: str, decoder: str) -> None:
    """Similarities are fp32 there. With the library nothing is left that TF32 would round, so convolutions may use
    tensor cores."""
    portable = exported_toy(family, decoder, "labels", True).portable
    for custom in (True, False):
        graph = portable.clone()
        rewrite(graph, "cuda", custom, single=False)
        assert multiplies_fp32(graph) == (not custom), custom


def test_products_in_fp32_are_found(tiny_bundle: Bundle) -> None:
    model, _ = rewritten(tiny_bundle, "cuda", custom=True)
    assert multiplies_fp32(model)


def product(dtype: ir.DataType | None, inside: bool) -> ir.Model:
    """A product of numbers of this type, in the graph or in a body."""
    x = ir.Value(name="x", shape=ir.Shape([2, 2]), type=None if dtype is None else ir.TensorType(dtype))
    node = ir.node("MatMul", [x, x], name="product")
    out = node.outputs[0]
    if not inside:
        return ir.Model(ir.Graph([x], [out], nodes=[node], opset_imports={"": 18}, name="g"), ir_version=10)
    body = ir.Function("algm", "body", graph=ir.Graph([x], [out], nodes=[node], opset_imports={"": 18}), attributes=[])
    outer = ir.Value(name="y", shape=ir.Shape([2, 2]), type=ir.TensorType(ir.DataType.FLOAT16))
    call = ir.node("body", [outer], domain="algm", name="call")
    graph = ir.Graph([outer], [call.outputs[0]], nodes=[call], opset_imports={"": 18, "algm": 1}, name="g")
    return ir.Model(graph, ir_version=10, functions=[body])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(ir.DataType.FLOAT, True), (ir.DataType.FLOAT16, False), (ir.DataType.BFLOAT16, False), (None, True)],
)
def test_a_product_of_numbers_of_unknown_type_may_be_fp32(
    dtype: ir.DataType | None, expected: bool, inside: bool
) -> None:
    assert multiplies_fp32(product(dtype, inside)) == expected
