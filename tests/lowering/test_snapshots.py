"""Exported graphs as they are on record: inputs, outputs, axes, opset, operators, and the `algm` nodes in full.

A change must be deliberate. To write the records anew, and then to read the difference before committing it:

    ALGM_UPDATE_SNAPSHOTS=1 pytest tests/lowering/test_snapshots.py
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import onnx_ir as ir

FOLDER = Path(__file__).parent / "snapshots"
UPDATE = "ALGM_UPDATE_SNAPSHOTS"


def summary(model: ir.Model) -> dict[str, Any]:
    """What a graph is, as JSON."""
    graph = model.graph
    axes = {str(axis) for node in graph for value in node.outputs for axis in value.shape if not isinstance(axis, int)}
    return {
        "ir_version": model.ir_version,
        "opsets": dict(model.opset_imports),
        "inputs": {value.name: f"{value.dtype.name}{value.shape}" for value in graph.inputs},
        "outputs": {value.name: f"{value.dtype.name}{value.shape}" for value in graph.outputs},
        "axes": sorted(axes),
        "operators": dict(sorted(Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in graph).items())),
        "algm": [merge_node(node) for node in graph if node.domain == "algm"],
    }


def merge_node(node: ir.Node) -> dict[str, Any]:
    attributes = {key: attribute.value for key, attribute in sorted(node.attributes.items())}
    return {
        "name": node.name,
        "inputs": [None if value is None else f"{value.dtype.name}{value.shape}" for value in node.inputs],
        "outputs": [f"{value.dtype.name}{value.shape}" for value in node.outputs],
        "attributes": {key: list(v) if isinstance(v, tuple | list) else v for key, v in attributes.items()},
    }


def test_graph_is_the_one_on_record(exported: Callable[[str], Any], configuration: str) -> None:
    found = json.loads(json.dumps(summary(exported(configuration).base)))
    path = FOLDER / f"{configuration}.json"
    if UPDATE in os.environ:
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(path.read_text())


def test_every_record_has_a_configuration(configurations: Collection[str]) -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(configurations)


def test_a_changed_graph_is_noticed(exported: Callable[[str], Any]) -> None:
    model = exported("published").base.clone()
    before = summary(model)
    node = next(node for node in model.graph if node.op_type == "clap")
    node.attributes["semantics"] = ir.AttrString("semantics", "paper")
    changed = summary(model)
    assert changed != before
    assert changed["algm"][1]["attributes"]["semantics"] == "paper"
    model.graph.inputs[0].dtype = ir.DataType.FLOAT
    assert summary(model)["inputs"] != before["inputs"]
