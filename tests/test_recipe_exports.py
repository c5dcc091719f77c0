"""Every recipe of the package: what its network takes and gives at full size, and a tiny one of its kind exported.

A recipe is found by being there, and its snapshot in tests/data/recipes by its name. To write snapshots, and then to
read the difference before committing it:

    ALGM_UPDATE_SNAPSHOTS=1 pytest tests/test_recipe_exports.py -k NAME
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from toys import deployed_toy, shrunk

from algm_deploy.bundle.signature import Tensor, signature_of
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.parity.graph import graph_facts, graph_problems
from algm_deploy.recipe.reading import recipe, recipe_names
from algm_deploy.recipe.schema import Recipe

SNAPSHOTS = Path(__file__).parent / "data" / "recipes"
UPDATE = "ALGM_UPDATE_SNAPSHOTS"
Export = Callable[[Recipe], ir.Model]


def told(tensors: tuple[Tensor, ...]) -> dict[str, str]:
    """Names, dtypes and axes in words."""
    return {t.name: f"{t.dtype}[{','.join('batch' if d < 0 else str(d) for d in t.shape)}]" for t in tensors}


def summary(full: Recipe, facts: dict[str, Any]) -> dict[str, Any]:
    signature, plan = signature_of(full), full.merging
    return {
        "inputs": told(signature.inputs),
        "outputs": told(signature.outputs),
        "merges": list(signature.merges),
        "thresholds": {name: float(np.float32(value)) for name, value in signature.defaults.items()},
        "plan": f"{plan.semantics}, {plan.batch}, {plan.order}, window {plan.window[0]}x{plan.window[1]}",
        "tiny_opset": facts["opset"],
        "tiny_operators": facts["operators"],
        "tiny_algm_nodes": [" ".join(f"{k}={v}" for k, v in sorted(node.items())) for node in facts["algm_nodes"]],
    }


def written(found: dict[str, Any]) -> str:
    """JSON, one fact a line."""
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def one_of_each() -> list[str]:
    """A recipe of each that shrink to the same network: their exports are one graph, which runs once."""
    found: dict[Any, str] = {}
    for name in recipe_names():
        small = shrunk(recipe(name))
        found.setdefault((small.network, small.merging, small.output, signature_of(small).image.dtype), name)
    return list(found.values())


def on_record(name: str) -> dict[str, Any]:
    path = SNAPSHOTS / f"{name}.json"
    if not path.is_file():
        pytest.fail(
            f"the recipe {name} has no snapshot: write it with `{UPDATE}=1 pytest tests/test_recipe_exports.py -k "
            f"{name}`, read {path.relative_to(Path(__file__).parents[1])} and commit it"
        )
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture
def exported(translated: Callable[..., ir.Model]) -> Export:
    """The base graph of a small recipe's network; recipes that shrink to the same one share it."""

    def export(small: Recipe) -> ir.Model:
        network = deployed_toy(small.network, small.merging, small.output)
        return translated(network, small.merging, signature_of(small).image.dtype)

    return export


@pytest.fixture
def facts_of(exported: Export, tmp_path: Path) -> Callable[[Recipe], dict[str, Any]]:
    """Facts of the graph of a small recipe."""

    def facts(small: Recipe) -> dict[str, Any]:
        ir.save(exported(small), tmp_path / "tiny.onnx")
        return graph_facts(tmp_path / "tiny.onnx")

    return facts


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_has_a_snapshot_and_a_tiny_export(name: str, facts_of: Callable[[Recipe], dict[str, Any]]) -> None:
    full = recipe(name)
    small = shrunk(full)
    facts = facts_of(small)
    assert graph_problems(facts, small) == []
    found = json.loads(json.dumps(summary(full, facts)))
    if UPDATE in os.environ:
        (SNAPSHOTS / f"{name}.json").write_text(written(found))
    assert found == on_record(name), f"if the change is meant: {UPDATE}=1, see the top of this file"


@pytest.mark.parametrize("name", one_of_each())
def test_tiny_export_runs(name: str, exported: Export) -> None:
    small = shrunk(recipe(name))
    signature = signature_of(small)
    model = exported(small)
    add_function_bodies(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    image = np.random.default_rng(0).integers(0, 256, (2, *signature.image.shape[1:]))
    feeds = {"image": image.astype(signature.image.dtype)}
    feeds |= {key: np.asarray(value, np.float32) for key, value in signature.defaults.items()}
    outputs = session.run(None, feeds)
    assert [value.name for value in session.get_outputs()] == [tensor.name for tensor in signature.outputs]
    for tensor, value in zip(signature.outputs, outputs, strict=True):
        assert (value.dtype, value.shape) == (np.dtype(tensor.dtype), (2, *tensor.shape[1:]))
        assert np.isfinite(value).all()


def test_every_snapshot_has_a_recipe() -> None:
    assert {path.stem for path in SNAPSHOTS.glob("*.json")} <= set(recipe_names())


def test_a_missing_snapshot_says_how_to_make_one() -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"ALGM_UPDATE_SNAPSHOTS=1 pytest tests/test_recipe_exports.py -k no"
    ):
        on_record("no_such_recipe")


def test_a_graph_with_another_merge_is_noticed(facts_of: Callable[[Recipe], dict[str, Any]]) -> None:
    name = "segmenter_vit_s16_ade20k"
    full = recipe(name)
    for changed in (replace(full.merging, semantics="paper"), replace(full.merging, order="raster", gbm_layers=(7,))):
        other = replace(full, merging=changed)
        assert summary(other, facts_of(shrunk(other))) != on_record(name)
