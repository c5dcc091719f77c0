"""Budgets make every shape static: in the portable graph, in that for TensorRT, and without a threshold to feed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest

from algm_deploy.bundle.signature import threshold_defaults
from algm_deploy.errors import ExportError
from algm_deploy.lowering import tensorrt
from algm_deploy.lowering.portable import add_function_bodies, has_budget
from algm_deploy.lowering.tensorrt import tensorrt_from_base
from algm_deploy.merging import merge_budgets
from algm_deploy.recipe.plan import MergePlan

COUNTED = MergePlan(clap="budget", clap_budget=110, gbm="budget", gbm_budget=156)


def unknown(model: onnx.ModelProto, images: int | None) -> list[str]:
    """Tensors of an inlined model whose shape shape inference does not find once the batch is known."""
    model = onnx.inliner.inline_local_functions(model)
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        if images and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_value = images
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True, strict_mode=True).graph
    shapes = {v.name: v.type.tensor_type.shape for v in (*inferred.value_info, *inferred.output)}
    made = [name for node in inferred.node for name in node.output if name]
    assert len(made) > 100
    return [n for n in made if n not in shapes or not all(d.HasField("dim_value") for d in shapes[n].dim)]


def test_every_shape_but_the_batch_is_known(exported: Callable[[str], Any]) -> None:
    model = onnx.ModelProto.FromString(exported("budgets").content)
    assert unknown(model, None), "shapes of an unknown batch are not"
    assert unknown(model, 3) == []


def test_the_graph_names_no_token_axis_and_reads_the_image_alone(exported: Callable[[str], Any]) -> None:
    found = exported("budgets")
    assert [value.name for value in found.base.graph.inputs] == ["image"]
    axes = {d for node in found.base.graph for v in node.outputs if v.shape for d in v.shape if not isinstance(d, int)}
    assert {str(axis) for axis in axes} == {"batch"}


def test_every_picture_keeps_as_many_tokens(
    exported: Callable[[str], Any], blob_images: Callable[[int], np.ndarray]
) -> None:
    """3 windows of 4 patches, then a fifth of the tokens twice, rounded: also in a picture without any difference."""
    found = exported("budgets")
    images = blob_images(3)
    images[1] = 90
    counts = found.run_onnx(images)["token_counts"]
    network = found.deployed.network
    patches = network.grid[0] * network.grid[1]
    after = patches - 3 * 3
    first = int(0.2 * after + 0.5)
    expected = [after, after - first, after - first - int(0.2 * (after - first) + 0.5)]
    assert counts.tolist() == [expected] * 3


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_for_tensorrt_merges_are_standard_operators(exported: Callable[[str], Any], precision: Any) -> None:
    model, counts = tensorrt_from_base(exported("budgets").base, precision)
    own = [node.op_type for node in model.graph.node if node.domain]
    assert own == ["label_map"]  # the tail, which is faster as a plugin
    assert not model.functions
    assert {"clap", "gbm"} & set(counts) == set()
    assert sum(node.op_type == "TopK" for node in model.graph.node) == 3


def test_a_budget_beyond_tensorrts_sorting_is_refused(
    exported: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt, "TOPK_LIMIT", 2)
    with pytest.raises(ExportError, match="at most 2 values with TopK, this budget asks for 3"):
        tensorrt_from_base(exported("budgets").base, "fp32")


def test_nodes_with_other_numbers_of_rows_get_bodies_of_their_own(exported: Callable[[str], Any]) -> None:
    functions = exported("budgets").portable.functions.values()
    assert sorted(f.name for f in functions if f.name.startswith(("clap", "gbm"))) == ["clap", "gbm", "gbm_2"]
    shapes = [v.shape for f in functions for v in (*f.inputs, *f.outputs)]
    assert shapes == [None] * len(shapes)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (COUNTED, {1: 110, 5: 156}),
        (replace(COUNTED, clap_budget=0.43, gbm_budget=0.225), {1: 110, 5: 156}),  # of 256 windows, of 694 tokens
        (replace(COUNTED, clap_budget=9999, gbm_budget=9999), {1: 256, 5: 128}),  # never more than there are
        (replace(COUNTED, clap_budget=1.0, gbm_budget=1.0), {1: 256, 5: 128}),
        (replace(COUNTED, gbm="adaptive", gbm_budget=0), {1: 110}),
        (replace(COUNTED, clap_layers=(), gbm_layers=(3, 5)), {3: 156, 5: 156}),
        (replace(COUNTED, window=(3, 5), clap_budget=0.5), {1: 30, 5: 156}),  # 10 x 6 whole windows
    ],
)
def test_budgets_of_a_plan(plan: MergePlan, expected: dict[int, int]) -> None:
    assert merge_budgets(plan, (32, 32), 1) == expected


def test_a_threshold_is_an_input_only_of_a_merge_that_reads_one() -> None:
    assert threshold_defaults(COUNTED) == {}
    assert threshold_defaults(replace(COUNTED, gbm="fixed", gbm_budget=0, gbm_threshold=0.9)) == {"gbm_threshold": 0.9}
    assert COUNTED.static
    assert not replace(COUNTED, gbm="fixed", gbm_budget=0).static
    assert not MergePlan().static


def test_a_body_is_for_the_nodes_that_are_wanted(exported: Callable[[str], Any]) -> None:
    model = exported("budgets").base.clone()
    assert add_function_bodies(model, has_budget) == 3
    bare = [n.op_type for n in model.graph if n.domain == "algm" and n.op_identifier() not in model.functions]
    assert set(bare) == {"attention", "label_map"}
