"""Link 3: the exported graph, and what the manifest tells runners about it, are what the recipe asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx

from algm_deploy.bundle.signature import Signature, Tensor, signature_of
from algm_deploy.errors import BundleError
from algm_deploy.lowering.portable import operator_of
from algm_deploy.merging import merge_budgets, tome_merges
from algm_deploy.ops.schema import DOMAIN
from algm_deploy.recipe.schema import Merge, MergePlan, Network, Recipe


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
    expected_nodes = _encoder_nodes(recipe)
    found = facts["algm_nodes"][: len(expected_nodes)]
    found += [None] * (len(expected_nodes) - len(found))
    for node, wanted_node in zip(found, expected_nodes, strict=True):
        if not _same(node, wanted_node):
            problems.append(f"encoder: expected {wanted_node}, found {node}")
    surplus = [node for node in facts["algm_nodes"][len(expected_nodes) :] if node["operator"] in get_args(Merge)]
    return problems + [f"decoder: expected no merging, found {node}" for node in surplus]


def signature_problems(found: Signature, recipe: Recipe) -> list[str]:
    """Where the manifest tells runners something else than the recipe says; empty where it does not."""
    wanted = signature_of(recipe)
    return [
        f"manifest: expected signature.{item.name} {getattr(wanted, item.name)}, found {getattr(found, item.name)}"
        for item in fields(wanted)
        if getattr(found, item.name) != getattr(wanted, item.name)
    ]


def _expected(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": ["batch" if d < 0 else d for d in tensor.shape]}


def _encoder_nodes(recipe: Recipe) -> list[dict[str, Any]]:
    """The `algm` nodes of the encoder in order: an attention a block, and the merge where the plan has one."""
    network, plan = recipe.network, recipe.merging
    if plan.counts_in and plan.layers:
        if plan.method == "elvit":
            return _elvit_nodes(network, plan)
        if plan.method == "evit":
            return _evit_nodes(network, plan)
        return _tome_nodes(network, plan) if plan.lasting else _blockwise_nodes(network, plan)
    common = {"prefix": network.prefix, "semantics": plan.semantics, "batch": plan.batch}
    budgets = merge_budgets(plan, network.grid, network.prefix)
    clap = {"operator": "clap", "grid": list(network.grid), "window": list(plan.window), "order": plan.order} | common
    clap["rule"] = plan.clap
    attention = _attention_node(network)
    nodes = []
    for layer in range(1, network.encoder_depth + 1):
        nodes.append(attention)
        if layer in plan.clap_layers:
            nodes.append(clap | {"budget": budgets.get(layer, 0)})
        elif layer in plan.gbm_layers:
            gbm = {"operator": "gbm", "rule": plan.gbm, "divisor": float(layer), "budget": budgets.get(layer, 0)}
            nodes.append(gbm | common)
        elif layer in plan.layers:
            nodes.append({"operator": "g2tm", "grid": list(network.grid), "prefix": network.prefix})
    return nodes


def _tome_nodes(network: Network, plan: MergePlan) -> list[dict[str, Any]]:
    """The nodes of an encoder with ToMe, which unmerges what it hands to the decoder."""
    attention = _attention_node(network) | {"operator": "proportional_attention"}
    merges = tome_merges(plan, network.grid[0] * network.grid[1], network.prefix)
    nodes = []
    for layer in range(1, network.encoder_depth + 1):
        nodes.append(attention)
        if layer in merges:
            nodes.append({"operator": "tome", "r": merges[layer], "prefix": network.prefix})
        if layer in (network.stages or (network.encoder_depth,)):
            nodes.append({"operator": "unmerge", "prefix": 0})
    return nodes


def _blockwise_nodes(network: Network, plan: MergePlan) -> list[dict[str, Any]]:
    """The nodes of an encoder with ToMe around attention and MLP."""
    merges, nodes = tome_merges(plan, network.grid[0] * network.grid[1], network.prefix), []
    unmerge = {"operator": "unmerge", "prefix": 0}
    for layer in range(1, network.encoder_depth + 1):
        if layer in merges:
            tome = {"operator": "tome", "r": merges[layer], "prefix": network.prefix}
            nodes += [tome, _attention_node(network), unmerge, tome, unmerge]
        else:
            nodes.append(_attention_node(network))
    return nodes


def _elvit_nodes(network: Network, plan: MergePlan) -> list[dict[str, Any]]:
    """The nodes of an encoder with ELViT, which restores what it hands to the decoder."""
    nodes = []
    for layer in range(1, network.encoder_depth + 1):
        nodes.append(_attention_node(network))
        if layer == plan.elvit_layer:
            nodes.append(
                {
                    "operator": "elvit",
                    "grid": list(network.grid),
                    "centroids": list(plan.elvit_grid),
                    "prefix": network.prefix,
                    "iterations": plan.elvit_iterations,
                    "window": plan.elvit_window,
                    "temperature": plan.elvit_temperature,
                    "neighbours": plan.elvit_neighbours,
                    "semantics": plan.semantics,
                }
            )
        if layer >= plan.elvit_layer and layer in (network.stages or (network.encoder_depth,)):
            nodes.append({"operator": "elvit_restore", "prefix": network.prefix})
    return nodes


def _evit_nodes(network: Network, plan: MergePlan) -> list[dict[str, Any]]:
    """The nodes of an encoder with EViT, which gives the decoder every patch."""
    patches, attention = network.grid[0] * network.grid[1], _attention_node(network)
    counts, nodes = plan.evit_counts(patches), []
    for layer in range(1, network.encoder_depth + 1):
        nodes.append(attention)
        if layer in counts:
            rows, keep = counts[layer]
            nodes.append(attention | {"operator": "cls_attention"})
            evit = {"operator": "evit", "patches": patches, "rows": rows, "keep": keep, "prefix": network.prefix}
            nodes.append(evit)
        if layer in (network.stages or (network.encoder_depth,)):
            nodes.append({"operator": "unmerge", "prefix": 0})
    return nodes


def _attention_node(network: Network) -> dict[str, Any]:
    return {"operator": "attention", "heads": network.heads, "scale": (network.embed_dim / network.heads) ** -0.5}


def _same(node: dict[str, Any] | None, wanted: dict[str, Any]) -> bool:
    """Attributes are equal; ONNX holds numbers as fp32."""
    if node is None or node.keys() != wanted.keys():
        return False
    return all(
        np.float32(node[k]) == np.float32(v) if isinstance(v, float) else node[k] == v for k, v in wanted.items()
    )


def _tensor(value: onnx.ValueInfoProto) -> dict[str, Any]:
    kind = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    return {"name": value.name, "dtype": dtype, "shape": [d.dim_param or d.dim_value for d in kind.shape.dim]}


def _kind(node: onnx.NodeProto) -> str:
    return f"{DOMAIN}.{operator_of(node.op_type)}" if node.domain == DOMAIN else node.op_type


def _plain(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else list(value) if attribute.ints else value
