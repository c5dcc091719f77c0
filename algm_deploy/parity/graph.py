"""Link 3: the exported graph, and what the manifest tells runners about it, are what the recipe asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.bundle.signature import Signature, Tensor, signature_of
from algm_deploy.errors import BundleError
from algm_deploy.lowering.portable import operator_of
from algm_deploy.models.vit_adapter import LAST_EXTRACTORS
from algm_deploy.parity.merges import MERGES
from algm_deploy.parity.merges.common import UNMERGE
from algm_deploy.recipe.network import Network, feature_grids
from algm_deploy.recipe.plan import Merge, MergePlan
from algm_deploy.recipe.schema import Recipe


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
    expected_nodes = [("encoder", node) for node in _encoder_nodes(recipe)]
    expected_nodes += [("decoder", node) for node in _pixel_nodes(recipe.network)]
    found = facts["algm_nodes"][: len(expected_nodes)]
    found += [None] * (len(expected_nodes) - len(found))
    for node, (where, wanted_node) in zip(found, expected_nodes, strict=True):
        if not _same(node, wanted_node):
            problems.append(f"{where}: expected {wanted_node}, found {node}")
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
    """The `algm` nodes of the encoder in order: those of every block, and of what it hands on."""
    network, plan = recipe.network, recipe.merging
    outlet = _outlet_node(network, plan)
    if network.architecture.adapter:
        return _adapter_nodes(network, plan, outlet)
    nodes = []
    for layer in range(1, network.encoder_depth + 1):
        nodes += _block_nodes(network, plan, layer)
        handed_on = layer in (network.stages or (network.encoder_depth,))
        # What is made of several tokens is restored behind the merge alone.
        if outlet and handed_on and (outlet is UNMERGE or layer >= plan.layers[0]):
            nodes.append(outlet)
    return nodes


def _adapter_nodes(network: Network, plan: MergePlan, outlet: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The nodes of a ViT-Adapter's encoder: around every group of blocks patches and features look at each other."""
    unmerge = outlet or UNMERGE
    patches, features = [network.grid], feature_grids(network.grid)
    injector, extractor = (
        {"operator": "deformable_attention", "shapes": [side for grid in grids for side in grid]}
        for grids in (features, patches)
    )
    nodes: list[dict[str, Any]] = []
    merged = False
    for start, end in network.groups:
        nodes.append(injector)
        merged = merged and plan.between_groups == "remerge"
        if merged:
            nodes.append({"operator": "remerge", "prefix": network.prefix})
        for layer in range(start, end + 1):
            nodes += _block_nodes(network, plan, layer)
            merged = merged or (plan.row.lasting and layer in plan.layers)
        nodes += [unmerge] * merged + [extractor] * (LAST_EXTRACTORS if end == network.depth else 1)
    return nodes


def _pixel_nodes(network: Network) -> list[dict[str, Any]]:
    """Of a decoder whose queries look at all features, the nodes by which those look at each other first."""
    shapes = [side for grid in feature_grids(network.grid)[::-1] for side in grid]
    return [{"operator": "deformable_attention", "shapes": shapes}] * network.pixel_layers


def _outlet_node(network: Network, plan: MergePlan) -> dict[str, Any] | None:
    """What hands every patch to the decoder, where the decoder does not unmerge itself."""
    if not plan.layers or not plan.row.restores:
        return None
    return MERGES[plan.row.merge].outlet(network)


def _block_nodes(network: Network, plan: MergePlan, layer: int) -> list[dict[str, Any]]:
    """The nodes of a block: its attention, and the merge where the plan has one."""
    attention, row = _attention_node(network), plan.row
    if row.compares == "keys" and plan.layers:
        attention["operator"] = "proportional_attention"
    if layer not in plan.layers:
        return [attention]
    merge = MERGES[plan.merge_in(layer)].node(plan, layer, network)
    if not row.lasting:
        return [merge, attention, UNMERGE, merge, UNMERGE]
    told = [attention | {"operator": "cls_attention"}] if row.compares == "cls" else []
    told += _head_nodes(network) if row.compares == "auxiliary" else []
    return [merge, attention] if "start" in row.parts else [attention, *told, merge]


def _head_nodes(network: Network) -> list[dict[str, Any]]:
    """The nodes of an auxiliary head: attention of its queries, if it has some, and what it says of every patch."""
    dim, heads = network.decoder_dim, network.mask_heads
    attention = {"operator": "attention", "heads": heads, "scale": (dim / heads) ** -0.5}
    layers = network.decoder_depth if network.architecture.own_heads else 0
    return [attention] * layers + [{"operator": "unmerge", "prefix": network.prefix}]


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
