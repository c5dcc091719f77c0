"""Link 3: the exported graph is the one the recipe asks for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx

from algm_deploy.errors import BundleError
from algm_deploy.lowering.portable import operator_of
from algm_deploy.ops.schema import DOMAIN
from algm_deploy.recipes import Recipe
from algm_deploy.signature import Tensor, signature_of


def graph_facts(path: Path) -> dict[str, Any]:
    """Inputs, outputs, opset, operator counts and `algm` nodes of an ONNX file; its weights are not read.

    Raises:
        BundleError: not an ONNX file.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise BundleError(f"{path}: expected an ONNX file: {str(error).splitlines()[0]}") from error
    except Exception as error:  # protobuf's own error class is private
        raise BundleError(f"{path}: expected an ONNX file, it cannot be decoded") from error
    return {
        "opset": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "inputs": [_tensor(value) for value in model.graph.input],
        "outputs": [_tensor(value) for value in model.graph.output],
        "operators": dict(sorted(Counter(_kind(node) for node in model.graph.node).items())),
        "algm_nodes": [
            {"operator": operator_of(node.op_type), **{a.name: _plain(a) for a in node.attribute}}
            for node in model.graph.node
            if node.domain == DOMAIN
        ],
    }


def graph_problems(facts: dict[str, Any], recipe: Recipe) -> list[str]:
    """Where a graph is not what the recipe asks for; empty when it is."""
    signature = signature_of(recipe)
    problems = []
    for kind, expected in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        wanted = [_expected(tensor) for tensor in expected]
        if facts[kind] != wanted:
            problems.append(f"{kind}: expected {wanted}, found {facts[kind]}")
    if facts["opset"].get("ai.onnx") != 18:
        problems.append(f"opset: expected 18, found {facts['opset'].get('ai.onnx')}")
    merges = [node for node in facts["algm_nodes"] if node["operator"] in ("clap", "gbm")]
    if merges != (wanted_nodes := _expected_merges(recipe)):
        problems.append(f"merges: expected {wanted_nodes}, found {merges}")
    return problems


def _expected(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": ["batch" if d < 0 else d for d in tensor.shape]}


def _expected_merges(recipe: Recipe) -> list[dict[str, Any]]:
    plan = recipe.merging
    common = {"prefix": recipe.network.prefix, "semantics": plan.semantics, "batch": plan.batch}
    clap = {"operator": "clap", "grid": list(recipe.network.grid), "window": list(plan.window), "order": plan.order}
    return [
        clap | common
        if layer in plan.clap_layers
        else {"operator": "gbm", "mode": plan.gbm_mode, "divisor": float(layer)} | common
        for layer in plan.layers
    ]


def _tensor(value: onnx.ValueInfoProto) -> dict[str, Any]:
    kind = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    return {"name": value.name, "dtype": dtype, "shape": [d.dim_param or d.dim_value for d in kind.shape.dim]}


def _kind(node: onnx.NodeProto) -> str:
    return f"{DOMAIN}.{operator_of(node.op_type)}" if node.domain == DOMAIN else node.op_type


def _plain(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else list(value) if attribute.ints else value
