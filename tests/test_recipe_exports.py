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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from algm_deploy.bundle.signature import Tensor, signature_of
from algm_deploy.lowering.export import base_onnx
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.merging import insert_merging
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import network_class
from algm_deploy.parity.graph import graph_facts, graph_problems
from algm_deploy.recipe.reading import recipe, recipe_names
from algm_deploy.recipe.schema import MergePlan, Network, Recipe

SNAPSHOTS = Path(__file__).parent / "data" / "recipes"
UPDATE = "ALGM_UPDATE_SNAPSHOTS"


def shrunk(full: Recipe) -> Recipe:
    """A recipe of the same kind whose network is exported in a second or two.

    Only the blocks in which something happens are left, in their order: merges, blocks whose tokens a decoder reads,
    and the last one. Width, grid, classes and decoder are small.
    """
    network, plan = full.network, full.merging
    merges = plan.layers if plan.method == "algm" else plan.layers[:2]
    kept = sorted({*merges, *network.stages, network.encoder_depth})
    place = {layer: index for index, layer in enumerate(kept, 1)}
    decoder_depth = min(network.decoder_depth, 1)
    extra = decoder_depth if network.encoder_depth < network.depth else 0
    small = replace(
        network,
        embed_dim=64,  # a head of the mask decoder is that wide
        heads=2,
        depth=len(kept) + extra,
        classes=5,
        image_size=(8 * network.patch_size, 8 * network.patch_size),
        stages=tuple(place[layer] for layer in network.stages),
        decoder_depth=decoder_depth,
        decoder_dim=16,
        extra_tokens=min(network.extra_tokens, 2),
        queries=min(network.queries, 6),
    )
    layers = {
        "clap_layers": tuple(place[layer] for layer in plan.clap_layers),
        "gbm_layers": tuple(place[layer] for layer in plan.gbm_layers),
        "tome_r": tuple(4 if layer in merges else 0 for layer in kept) if plan.method == "tome" else (),
    }
    # Names, colours and published figures are those of the full network.
    return replace(full, network=small, merging=replace(plan, **layers), class_names=(), palette=(), published={})


@cache
def exported(network: Network, plan: MergePlan, image: str, output: Any) -> ir.Model:
    """The base graph of a network with random weights; recipes that shrink to the same one share it."""
    torch.manual_seed(0)
    model = network_class(network)(network).eval().requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return base_onnx(Deployed(insert_merging(model, plan), network, output).eval(), plan, image)


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
def facts_of(tmp_path: Path) -> Callable[[Recipe], dict[str, Any]]:
    """Facts of the graph of a small recipe."""

    def export(small: Recipe) -> dict[str, Any]:
        image = signature_of(small).image.dtype
        ir.save(exported(small.network, small.merging, image, small.output), tmp_path / "tiny.onnx")
        return graph_facts(tmp_path / "tiny.onnx")

    return export


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


@pytest.mark.parametrize("name", recipe_names())
def test_tiny_export_runs(name: str) -> None:
    small = shrunk(recipe(name))
    signature = signature_of(small)
    model = exported(small.network, small.merging, signature.image.dtype, small.output).clone()
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
