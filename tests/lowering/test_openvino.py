"""The graph for OpenVINO: no functions, one image without masks, and bf16 where products may have it, nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest

from algm_deploy.bundle.files import ONNX, ONNX_DATA
from algm_deploy.bundle.records import QuantizedAttention
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError
from algm_deploy.lowering.openvino import MOVES, rewrite, write_openvino_onnx
from algm_deploy.lowering.portable import load_portable

BF16, FP32 = ir.DataType.BFLOAT16, ir.DataType.FLOAT
ATTENTIONS, LINEARS = 6, 6 * 4 + 1  # of the tiny network; `proj_dec` is a linear layer of its own
KNOWN = 1  # attentions whose number of rows is: before the first merge


@pytest.fixture
def portable(tiny_bundle: Bundle) -> ir.Model:
    return load_portable(tiny_bundle.file(ONNX))


def test_no_function_is_left_and_no_mask(portable: ir.Model) -> None:
    counts = rewrite(portable, single=True, bf16=False)
    unmasked = ATTENTIONS - 1  # the first attention has no lengths
    assert counts == {"inlined": ATTENTIONS + 3, "patch_embedding": 1, "unmasked": unmasked}
    assert not portable.functions
    assert portable.graph.opset_imports == {"": 18}
    assert {node.domain for node in portable.graph} == {""}
    assert portable.graph.inputs[0].shape is not None
    assert portable.graph.inputs[0].shape[0] == 1


def test_rows_that_join_others_are_added_to_them(portable: ir.Model) -> None:
    rewrite(portable, single=True, bf16=False)
    added = [node for node in portable.graph if node.op_type == "ScatterND"]
    assert [node.attributes["reduction"].as_string() for node in added] == ["add", "add"], "sizes and values of GBM"


def test_images_that_decide_together_keep_their_batch(portable: ir.Model) -> None:
    assert rewrite(portable, single=False, bf16=False) == {"inlined": ATTENTIONS + 3, "patch_embedding": 1}
    assert str(portable.graph.inputs[0].shape[0]) == "batch"  # type: ignore[index]


@pytest.mark.parametrize("attention", [True, False])
def test_products_are_bf16_and_what_decides_is_fp32(portable: ir.Model, attention: bool) -> None:
    names = [value.name for value in portable.graph.outputs]
    counts = rewrite(portable, single=True, bf16=True, attention_bf16=attention)
    assert counts["bf16_linear"] == LINEARS
    assert counts["bf16_attention"] == (ATTENTIONS if attention else 0)
    low = [node for node in portable.graph if any(output.dtype == BF16 for output in node.outputs)]
    ends = {"Reshape"} if attention else set()  # of attention
    assert {node.op_type for node in low} == {"Cast", "MatMul", "Add"} | ends
    weighted = [node for node in low if node.op_type == "MatMul"]
    assert len(weighted) == LINEARS
    for node in portable.graph:
        for value in node.inputs:
            if value is not None and value.dtype == BF16 and node.op_type in {"LayerNormalization", "Softmax", "Erf"}:
                raise AssertionError(f"{node.name} reads bf16")
    assert [value.name for value in portable.graph.outputs] == names
    assert {value.dtype for value in portable.graph.outputs} == {FP32, ir.DataType.INT64}
    assert {value.dtype for value in portable.graph.initializers.values()} <= {FP32, ir.DataType.INT64}


def test_attention_in_int8(int8_bundle: Bundle) -> None:
    found = int8_bundle.manifest.quantization
    assert found is not None
    counts = {}
    for steps in ((), found.attention):
        model = load_portable(int8_bundle.file(ONNX))
        fired = rewrite(model, single=True, bf16=False, attention_int8=steps)
        assert (fired["int8_attention"], fired["cast_shares"]) == (len(steps), KNOWN if steps else 0)
        counts[len(steps)] = sum(node.op_type == "QuantizeLinear" for node in model.graph)
    assert counts[ATTENTIONS] == counts[0] + 2 * ATTENTIONS - KNOWN, "rows are written once, and shares"
    assert {f"{one.name}.query" for one in found.attention} <= model.graph.initializers.keys()
    assert not any(node.op_type == "Softmax" for node in model.graph)


@pytest.mark.parametrize("inside", [True, False])
def test_levels_are_laid_out_and_not_numbers(int8_bundle: Bundle, inside: bool) -> None:
    """Whether attention is in int8 or not, what it mixed is rounded before it becomes rows."""
    found = int8_bundle.manifest.quantization
    assert found is not None
    model = load_portable(int8_bundle.file(ONNX))
    counts = rewrite(model, single=True, bf16=False, attention_int8=found.attention if inside else ())
    assert counts["levels_moved"] == ATTENTIONS
    moved = 0
    for node in (node for node in model.graph if node.op_type == "QuantizeLinear"):
        before, behind = node.inputs[0].producer(), node.outputs[0].uses()[0].node  # type: ignore[union-attr]
        assert before is None or before.op_type not in MOVES
        moved += behind.op_type in MOVES and not str(node.name).endswith("/packed")
    assert moved == ATTENTIONS


@pytest.mark.parametrize(("cores", "apart"), [(None, 0), (1, 1), (2, 0)])
def test_large_attention_is_one_head_a_core_at_a_time(
    int8_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, cores: int | None, apart: int
) -> None:
    """Of two heads, in the one attention whose rows are known: before the first merge."""
    found = int8_bundle.manifest.quantization
    assert found is not None
    exponentials = []
    for large in (1 << 20, 0):
        monkeypatch.setattr("algm_deploy.lowering.openvino._LARGE", large)
        model = load_portable(int8_bundle.file(ONNX))
        counts = rewrite(model, single=True, bf16=False, attention_int8=found.attention, cores=cores)
        assert counts["heads_apart"] == (0 if large else apart)
        exponentials.append(sum(node.op_type == "Exp" for node in model.graph))
    assert exponentials == [ATTENTIONS, ATTENTIONS + apart]


def test_attention_that_is_not_there(portable: ir.Model) -> None:
    steps = [QuantizedAttention(name="encoder.blocks.99.attn", query=1.0, key=1.0, value=1.0)]
    with pytest.raises(BundleError, match=r"encoder\.blocks\.99\.attn"):
        rewrite(portable, single=True, bf16=False, attention_int8=steps)


def test_a_value_is_cast_once(portable: ir.Model) -> None:
    rewrite(portable, single=True, bf16=True, attention_bf16=True)
    casts = [(node.inputs[0], node.attributes["to"].as_int()) for node in portable.graph if node.op_type == "Cast"]
    low = [value for value, to in casts if to == BF16]
    assert len(low) == len(set(low))
    assert all(value is not None and value.dtype == FP32 for value in low), "bf16 is not cast to fp32 and back"


def test_no_weight_is_written_again(tiny_bundle: Bundle, copied: Callable[..., Bundle]) -> None:
    bundle = copied(tiny_bundle)
    write_openvino_onnx(bundle, "model.openvino.onnx")
    found = bundle.files["model.openvino.onnx"]
    assert found.uses == (ONNX_DATA,)
    assert found.size_bytes < bundle.files[ONNX_DATA].size_bytes / 4


def test_a_graph_of_somebody_else_is_refused(tiny_bundle: Bundle, copied: Callable[..., Any]) -> None:
    from algm_deploy.errors import BundleError

    path = copied(tiny_bundle).path / ONNX
    path.write_bytes(b"no graph")
    with pytest.raises(BundleError, match="expected an ONNX file"):
        load_portable(path)
