"""Ranges, rounding and operators that runtimes compute differently: known before anything is built, or reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import ExportError, GateError
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.lowering.tensorrt import TOPK_LIMIT, tensorrt_from_base
from algm_deploy.lowering.tensorrt_precision import retype
from algm_deploy.merging import insert_merging
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.scores import resize, scores_of_masks
from algm_deploy.parity.chain import verify
from algm_deploy.predictor import Predictor
from algm_deploy.recipe.plan import MergePlan

Export = Callable[..., ir.Model]
PLAN = MergePlan(clap_layers=(1,), gbm_layers=(2,))


@pytest.fixture
def exported(random_network: Callable[..., Any], translated: Callable[..., ir.Model]) -> Export:
    """The base graph of a two-block network."""

    def export(plan: MergePlan, change: Callable[[dict[str, Tensor]], object] = lambda weights: None) -> ir.Model:
        model, network = random_network(change)
        return translated(Deployed(insert_merging(model, plan), network, "scores").eval(), plan)

    return export


# --- 16 bits ---------------------------------------------------------------------------------------------------------


def outlier(weights: dict[str, Tensor]) -> None:
    weights["encoder.blocks.1.mlp.fc1.weight"][3, 3] = -70000.0


def hot(weights: dict[str, Tensor]) -> None:
    """Each weight fits into fp16, what they compute does not."""
    weights["encoder.blocks.0.mlp.fc2.weight"] *= 40000.0


def test_a_weight_beyond_fp16_is_named(small_bundle: Callable[..., Bundle]) -> None:
    with pytest.raises(
        ExportError,
        match=r"65504 for float16, encoder.blocks.1.mlp.fc1.weight holds 70000: export with --precision fp32",
    ):
        small_bundle(change=outlier, precision="fp16")


def test_a_weight_beyond_fp16_is_named_for_an_engine(exported: Export) -> None:
    base = exported(PLAN, outlier)
    with pytest.raises(ExportError, match=r"range of float16, .* holds 70000: build in fp32 or bf16"):
        tensorrt_from_base(base, "fp16")
    tensorrt_from_base(base, "bf16")


@pytest.fixture(scope="module")
def hot_bundle(small_bundle: Callable[..., Bundle]) -> Bundle:
    return small_bundle(change=hot, precision="fp16", max_batch=2)


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime-cpu"])
def test_activations_beyond_fp16_never_become_labels(hot_bundle: Bundle, runtime: str) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    with (
        Predictor(hot_bundle, runtime) as predictor,
        pytest.raises(GateError, match=r"fp16.*export with --precision fp32"),
    ):
        predictor.predict(photo)


def test_activations_beyond_fp16_fail_the_chain_with_the_remedy(hot_bundle: Bundle, degenerate: Any) -> None:
    drawn = degenerate(64, 64)
    report = verify(hot_bundle, "onnxruntime-cpu", np.stack([drawn["noise"], drawn["half"]]), progress=False)
    (numbers,) = [link for link in report.links if link.name == "numbers"]
    assert not report.passed
    assert "not finite in this precision: export with fp32" in numbers.measured


def test_norms_and_softmax_are_fp32_in_a_16_bit_graph(hot_bundle: Bundle) -> None:
    model = onnx.load(hot_bundle.path / "model.onnx", load_external_data=False)
    everywhere = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    norms = [node for node in everywhere if node.op_type == "LayerNormalization"]
    assert len(norms) == 5
    # Absent means 1, fp32; a norm written out in parts would sum its squares in fp16.
    assert all(attribute.i == 1 for node in norms for attribute in node.attribute if attribute.name == "stash_type")
    assert not [node for node in model.graph.node if node.op_type in ("Pow", "ReduceMean", "Sqrt")]
    kinds = [_softmax_input(function) for function in model.functions if function.name.startswith("attention")]
    assert kinds
    assert set(kinds) == {TensorProto.FLOAT}


def _softmax_input(function: onnx.FunctionProto) -> int:
    """Type to which the similarities of queries and keys are cast, by way of the mask where there is one."""
    producers = {name: node for node in function.node for name in node.output}
    (softmax,) = [node for node in function.node if node.op_type == "Softmax"]
    node = producers[softmax.input[0]]
    node = producers[node.input[1]] if node.op_type == "Where" else node
    assert node.op_type == "Cast"
    return int(helper.get_attribute_value(node.attribute[0]))


def test_a_norm_of_large_16_bit_rows_is_finite() -> None:
    """300 squared is beyond fp16."""
    x = (np.random.default_rng(0).standard_normal((4, 256)) * 3000).astype(np.float16)
    ones = numpy_helper.from_array(np.ones(256, np.float16), "ones")
    half = TensorProto.FLOAT16
    graph = helper.make_graph(
        [helper.make_node("LayerNormalization", ["x", "ones"], ["y"], epsilon=1e-6)],
        "norm",
        [helper.make_tensor_value_info("x", half, [4, 256])],
        [helper.make_tensor_value_info("y", half, [4, 256])],
        [ones],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = nn.functional.layer_norm(torch.from_numpy(x).float(), (256,), eps=1e-6).numpy()
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=0, atol=4e-3)


# --- variants of one operator ----------------------------------------------------------------------------------------


def test_norms_and_gelu_are_the_networks_own(exported: Export) -> None:
    """Segmenter's epsilon of 1e-5, not timm's 1e-6, and the error function, not its approximation by tanh."""
    portable, (tensorrt, _) = ir.to_proto(exported(PLAN)), tensorrt_from_base(exported(PLAN), "fp32")
    for graph in (portable.graph, tensorrt.graph):
        norms = [node for node in graph.node if node.op_type == "LayerNormalization"]
        epsilons = {attribute.f for node in norms for attribute in node.attribute if attribute.name == "epsilon"}
        assert epsilons == {np.float32(1e-5)}
        kinds = [node.op_type for node in graph.node]
        assert kinds.count("Erf") == 2
        assert "Tanh" not in kinds


def test_another_epsilon_fails_the_chain(small_bundle: Callable[..., Bundle], degenerate: Any) -> None:
    bundle = small_bundle(max_batch=2)
    model = onnx.load(bundle.path / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 1e-6
    entry = bundle.files["model.onnx"]
    with bundle.add("model.onnx", entry.made_from, entry.uses) as path:
        path.write_bytes(model.SerializeToString())
    drawn = degenerate(64, 64)
    report = verify(bundle, "onnxruntime-cpu", np.stack([drawn["noise"], drawn["half"]]), progress=False)
    assert [link.name for link in report.links if not link.passed] == ["numbers"]


# --- interpolation ---------------------------------------------------------------------------------------------------

RESIZES = [
    ((1, 1), (16, 16)),
    ((1, 8), (16, 128)),
    ((8, 1), (128, 16)),
    ((3, 5), (48, 80)),
    ((7, 11), (17, 23)),
    ((4, 4), (4, 4)),
    ((5, 3), (9, 2)),
]


class Resizes(nn.Module):
    """Every case of `RESIZES` with corners aligned and not."""

    def forward(self, *maps: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            resize(x, size, aligned) for x, (_, size) in zip(maps, RESIZES, strict=True) for aligned in (False, True)
        )


def test_interpolation_of_the_graph_is_pytorchs() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = tuple(torch.randn(2, 3, *grid, generator=generator) for grid, _ in RESIZES)
    translated = torch.onnx.export(Resizes().eval(), maps, dynamo=True, opset_version=18, verbose=False)
    assert translated is not None
    content = ir.to_proto(translated.model).SerializeToString()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), maps, strict=True)}
    results = zip(session.run(None, feeds), Resizes()(*maps), strict=True)
    for index, (found, expected) in enumerate(results):
        x = maps[index // 2]
        # Either side rounds positions of up to the grid's side by half a unit; neighbours differ by twice the largest.
        tolerance = max(x.shape[2:]) * 2.0**-23 * 2 * x.abs().max().item()
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=tolerance)


class Queries(nn.Module):
    """Class scores of three queries' masks, which are already of full size."""

    def forward(self, masks: Tensor, classes: Tensor) -> Tensor:
        return scores_of_masks(masks, classes, (masks.shape[2], masks.shape[3]))


def queries_at(logit: float) -> tuple[onnx.ModelProto, tuple[Tensor, Tensor], np.ndarray]:
    """Their graph, inputs whose masks lie around a logit, and the true scores."""
    generator = torch.Generator().manual_seed(0)
    masks = logit + torch.randn(1, 3, 8, 8, generator=generator)
    inputs = masks, torch.randn(1, 3, 5, generator=generator)
    translated = torch.onnx.export(Queries().eval(), inputs, dynamo=True, opset_version=18, verbose=False)
    assert translated is not None
    probability = inputs[1].double().softmax(-1)[..., :-1]
    truth = torch.einsum("bqk,bqhw->bkhw", probability, masks.double().sigmoid()).numpy()
    return ir.to_proto(translated.model), inputs, truth


@pytest.mark.parametrize("logit", [-85.0, -40.0, -20.0, -12.0, 0.0, 30.0, 90.0])
def test_scores_keep_their_digits_where_no_query_has_a_mask(logit: float) -> None:
    """ONNX Runtime's sigmoid on a CPU is zero below -18, which gives every class the same score."""
    model, inputs, truth = queries_at(logit)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    # A few units in the last place for each of exp, softmax and the sum over queries.
    np.testing.assert_allclose(session.run(None, feeds)[0], truth, rtol=16 * 2.0**-23, atol=2.0**-126)


@pytest.mark.parametrize("logit", [-13.0, -11.0, 0.0, 13.0])
def test_an_engine_in_16_bits_tells_classes_apart_where_no_query_has_a_mask(logit: float) -> None:
    """The graph for TensorRT, written in fp16 from an fp32 bundle: exp(12) is infinite there."""
    model, inputs, truth = queries_at(logit)
    low, _ = retype(model, "fp16")
    feeds = {i.name: x.numpy() for i, x in zip(low.graph.input, inputs, strict=True)}
    (found,) = ReferenceEvaluator(low).run(None, feeds)
    assert (found > 0).all()
    assert (found.argmax(1) == truth.argmax(1)).mean() > 0.95  # 16 bits hold a logit of 13 to 0.008: ties


# --- limits of TensorRT ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, batch="batch_min", order="raster")], ids=["code", "batch_min"])
def test_the_graph_for_tensorrt_sorts_and_selects_nothing(exported: Export, plan: MergePlan) -> None:
    """Plugins merge, so that no limit of TopK and no data-dependent NonZero stands in the way."""
    base = exported(plan)
    model, counts = tensorrt_from_base(base, "fp16")
    operators = {node.op_type for node in model.graph.node}
    assert not operators & {"TopK", "NonZero", "ScatterND", "ScatterElements", "If", "Loop"}
    assert not model.functions
    constants = {tensor.name for tensor in model.graph.initializer}
    assert all(n.input[1] in constants for n in model.graph.node if n.op_type.startswith("Reduce") and len(n.input) > 1)
    assert counts["clap"] == counts["gbm"] == 1
    add_function_bodies(base)
    assert "TopK" in {node.op_type for function in base.functions.values() for node in function}


def sorting(k: int | None) -> ir.Model:
    """A graph with a TopK whose K is constant, or an input."""
    values = {"x": [1, 5000], "k": [1], "best": [1, "k"], "place": [1, "k"]}
    kinds = {"k": TensorProto.INT64, "place": TensorProto.INT64}
    infos = {n: helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), s) for n, s in values.items()}
    graph = helper.make_graph(
        [helper.make_node("TopK", ["x", "k"], ["best", "place"], name="decoder.queries/TopK")],
        "sorting",
        [infos["x"], *([infos["k"]] if k is None else [])],
        [infos["best"], infos["place"]],
        [] if k is None else [numpy_helper.from_array(np.array([k]), "k")],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))


@pytest.mark.parametrize(("k", "came"), [(TOPK_LIMIT + 1, "3841"), (None, "a number known only at run time")])
def test_a_sort_beyond_tensorrts_limit_is_named_before_the_build(k: int | None, came: str) -> None:
    with pytest.raises(ExportError, match=f"node decoder.queries/TopK: .*at most {TOPK_LIMIT} .*{came}"):
        tensorrt_from_base(sorting(k), "fp32")


def test_a_sort_within_tensorrts_limit_passes() -> None:
    tensorrt_from_base(sorting(TOPK_LIMIT), "fp32")
