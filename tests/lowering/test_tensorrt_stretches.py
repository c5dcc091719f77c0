"""A graph for TensorRT cut around its merges; that the parts compute the same is in test_tensorrt.py."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
from toys import deployed_toy, toy, with_budgets

from algm_deploy.errors import ExportError
from algm_deploy.lowering.tensorrt import tensorrt_from_base
from algm_deploy.lowering.tensorrt_stretches import stretches
from algm_deploy.recipe.schema import Precision

NETWORK, PLAN = toy("segmenter", "mask_transformer")
Translate = Callable[..., ir.Model]


@pytest.fixture(scope="module")
def base(translated: Translate) -> ir.Model:
    return translated(deployed_toy(NETWORK, PLAN, "labels"), PLAN)


def described(values: object) -> dict[str, tuple[str, tuple[object, ...]]]:
    return {v.name: (str(v.dtype), tuple(d if isinstance(d, int) else str(d) for d in v.shape)) for v in values}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("precision", "tokens"), [("fp32", "FLOAT"), ("fp16", "FLOAT16")])
def test_parts_take_rows_as_an_ordinary_axis(base: ir.Model, precision: Precision, tokens: str) -> None:
    model = ir.from_proto(tensorrt_from_base(base, precision)[0])
    nodes = len(list(model.graph))
    parts, merges = stretches(model)
    assert len(list(model.graph)) == nodes, "the whole graph stays as it is"
    assert [merge.kind for merge in merges] == ["clap", "gbm"]
    assert merges[0].attributes == ((4, 6), (2, 2), 1, "code", "per_image", "published", "threshold", 0)
    assert merges[1].attributes == (1, "adaptive", 2.0, "code", "per_image", 0)
    clap = list(merges[0].outputs)
    assert clap[2] == "token_map_clap_1"
    for part, wanted in zip(parts, [set(), set(), {"label_map"}], strict=True):
        assert {node.op_type for node in part.graph if node.domain == "algm"} == wanted
    first, second, last = (described(part.graph.inputs) for part in parts)
    assert first == {"image": ("UINT8", ("batch", 3, 64, 96))}
    assert second[clap[0]] == (tokens, ("batch", "tokens_clap_1", 64))
    assert second[clap[3]] == ("INT64", ("batch",))
    assert last[merges[1].outputs[0]] == (tokens, ("batch", "tokens_gbm_2", 64))
    handed = described(parts[0].graph.outputs)
    assert handed[merges[0].inputs[0]] == (tokens, ("batch", 25, 64))
    assert handed[merges[0].inputs[1]] == ("FLOAT", ("batch", 25)), "sizes are never 16-bit"
    named = [value.name for value in parts[-1].graph.outputs]
    assert named == ["labels", "token_counts"], "maps are the merges' own"


def test_every_weight_is_in_one_part(base: ir.Model) -> None:
    model = ir.from_proto(tensorrt_from_base(base, "fp16")[0])
    parts, _ = stretches(model)
    large = [name for part in parts for name, value in part.graph.initializers.items() if value.const_value.size > 64]
    whole = [name for name, value in model.graph.initializers.items() if value.const_value.size > 64]
    assert sorted(large) == sorted(whole)


def test_nothing_to_cut_at(translated: Translate) -> None:
    plan = with_budgets(PLAN)
    budgets = ir.from_proto(tensorrt_from_base(translated(deployed_toy(NETWORK, plan, "labels"), plan), "fp32")[0])
    with pytest.raises(ExportError, match="expected a graph with merges to cut at"):
        stretches(budgets)


def test_a_tensor_of_unknown_shape_is_named(base: ir.Model) -> None:
    model = ir.from_proto(tensorrt_from_base(base, "fp32")[0])
    tokens = next(node for node in model.graph if node.op_type == "clap").outputs[0]
    tokens.shape = None
    with pytest.raises(ExportError, match=r"expected type and shape of .*clap:tokens"):
        stretches(model)
