"""What a GPU's server builds, built here: every merge method and every kind of network, with the library present.

Building for CUDA needs no GPU, and with the library a bundle gets more than without it, so a machine without one would
not notice what fails there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_recipe_exports import one_of_each
from toys import CONSTANT_COUNTS, SURE, TAU, deployed_toy, shrunk, toy

from algm_deploy.bundle.records import OptimizedGraph
from algm_deploy.bundle.store import Bundle, BundleWriter
from algm_deploy.errors import BuildError
from algm_deploy.lowering.writing import write_network
from algm_deploy.models.loading import DTYPES
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import METHODS, MergePlan
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import Precision, Protocol, Recipe
from algm_deploy.runners.onnxruntime import runner as runner_module
from algm_deploy.runners.onnxruntime.runner import OnnxRuntimeCudaRunner

PROTOCOL = Protocol("camvid", 64, 64, 64)
SEGMENTER, PLAN = toy("segmenter", "mask_transformer")
BUDGETS = replace(PLAN, clap="budget", clap_budget=2, gbm="budget", gbm_budget=0.3)
# By method: how a toy merges by it, and in how many segments its graph comes.
METHOD_PLANS: dict[str, tuple[MergePlan, int]] = {
    "algm": (PLAN, 3),
    **{name: (CONSTANT_COUNTS[name], 0) for name in ("tome", "tome_blockwise")},
    "elvit": (replace(CONSTANT_COUNTS["elvit"], elvit_grid=(2, 3)), 0),
    "evit": (replace(CONSTANT_COUNTS["evit"], evit_layers=(1, 2)), 0),
    "g2tm": (MergePlan((), (), method="g2tm", g2tm_layer=2, clap_threshold=TAU), 0),
    "mpm": (MergePlan((), (), method="mpm", mpm_layers=(1, 2)), 0),
    "cts": (MergePlan((), (), method="cts", cts_shared=2), 0),
    "dtop": (MergePlan((), (), method="dtop", dtop_layers=(1, 2), clap_threshold=SURE), 0),
}
OTHERS = {
    "budgets": (BUDGETS, 1),
    "coupled": (replace(PLAN, batch="batch_min"), 0),
    "coupled budgets": (replace(BUDGETS, batch="batch_min"), 1),
    "dense": (MergePlan((), ()), 1),
}
PLANS = METHOD_PLANS | OTHERS


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Recipe], Bundle]:
    """A toy's bundle, built for CUDA as where the library is."""
    monkeypatch.setattr(runner_module, "usable_library", lambda _: Path("library.so"))
    monkeypatch.setattr(runner_module, "check_cuda", lambda: None)
    monkeypatch.setattr(runner_module.ort, "__version__", "1.31.0")

    def build(small: Recipe) -> Bundle:
        deployed = deployed_toy(small.network, small.merging, small.output, DTYPES[small.precision])
        with BundleWriter(tmp_path / "bundle", small) as writer:
            write_network(writer, deployed.model, deployed, {})
        bundle = Bundle.open(tmp_path / "bundle")
        OnnxRuntimeCudaRunner.build(bundle)
        return Bundle.open(bundle.path)

    return build


def network_of(method: str) -> Network:
    """A toy with what a method asks for beside tokens."""
    return replace(SEGMENTER, policy=method == "cts", auxiliary=(1, 2) if method == "dtop" else ())


def test_every_method_has_a_plan_here() -> None:
    assert set(METHOD_PLANS) == set(METHODS) and all(plan.method == name for name, (plan, _) in METHOD_PLANS.items())
    assert all(plan.layers for plan, _ in METHOD_PLANS.values())


@pytest.mark.parametrize("name", PLANS)
def test_every_method_is_built(built: Callable[[Recipe], Bundle], name: str) -> None:
    """In segments where all merges are the library's; otherwise the runner launches operator by operator."""
    plan, segments = PLANS[name]
    network = network_of(plan.method)
    facts = Recipe("toy", network, plan, PROTOCOL, precision="fp16", output="labels", max_batch=2)
    bundle = built(facts)
    record = bundle.found(OptimizedGraph, "onnxruntime-cuda")
    assert record is not None and record.segments == segments
    cuda = OnnxRuntimeCudaRunner(bundle)
    assert (cuda.segments, cuda.graph_images) == (segments, 2 if segments else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_each())
def test_every_kind_of_recipe_is_built(built: Callable[[Recipe], Bundle], name: str) -> None:
    """In fp32, as other tests translate it."""
    small = replace(shrunk(recipe(name)), precision="fp32")
    record = built(small).found(OptimizedGraph, "onnxruntime-cuda")
    assert record is not None
    assert record.segments == (len(small.merging.layers) + 1 if small.merging.method == "algm" else 0)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_without_the_library_a_bundle_asks_for_none(
    built: Callable[[Recipe], Bundle], monkeypatch: pytest.MonkeyPatch, precision: Precision
) -> None:
    """Whatever ONNX Runtime's own operators are counted as."""

    def missing(name: str) -> Path:
        raise BuildError(name)

    monkeypatch.setattr(runner_module, "usable_library", lambda _: None)
    monkeypatch.setattr(runner_module, "require_library", missing)
    bundle = built(Recipe("toy", SEGMENTER, PLAN, PROTOCOL, precision=precision, output="labels"))
    cuda = OnnxRuntimeCudaRunner(bundle)
    assert cuda._built is not None and cuda._built.rewrites["skip_layer_norm"] > 0
    assert cuda.custom_operators == ()
    cuda._session_options()


def test_without_segments_the_whole_is_opened(
    built: Callable[[Recipe], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And records of speed say that nothing was replayed."""
    plan, _ = PLANS["mpm"]
    bundle = built(Recipe("toy", SEGMENTER, plan, PROTOCOL, precision="fp16", output="labels"))
    opened: list[Path] = []

    def session(path: Path, *_: Any) -> Any:
        opened.append(path)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(runner_module, "alone", lambda _: nullcontext())
    monkeypatch.setattr(runner_module, "CudaSession", session)
    monkeypatch.setattr(OnnxRuntimeCudaRunner, "_session_options", lambda self: None)
    cuda = OnnxRuntimeCudaRunner(bundle)
    cuda._open()
    assert opened == [bundle.file("model.onnxruntime-cuda.onnx")]
    assert cuda.execution == {"launched": "operator by operator"}
    cuda._close()
    assert cuda.execution == {}
