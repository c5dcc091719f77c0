"""Small exported networks, each exported once a session."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor
from toys import deployed_toy, toy

from algm_deploy.bundle.signature import mask_names, output_names, threshold_defaults
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.merging import insert_merging, merge_inputs
from algm_deploy.models.deployed import Deployed
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.schema import Output

PLAN = MergePlan(clap_layers=(1,), gbm_layers=(3,), clap_threshold=0.7)


@dataclass(frozen=True)
class Configuration:
    """What an export depends on beside the weights."""

    plan: MergePlan = PLAN
    output: Output = "scores"
    decoder: str = "mask_transformer"
    half: bool = False
    image: str = "uint8"


CONFIGURATIONS = {
    "published": Configuration(),
    "labels": Configuration(output="labels"),
    "dense": Configuration(DENSE, "labels", "linear"),
    "clap_only_raster": Configuration(replace(PLAN, gbm_layers=(), order="raster", window=(3, 2)), "labels", "linear"),
    "paper_gbm_only": Configuration(
        MergePlan((), (2,), semantics="paper", gbm="fixed", gbm_threshold=0.8), decoder="linear"
    ),
    "several_gbm": Configuration(replace(PLAN, gbm_layers=(2, 4)), decoder="linear"),
    "batch_min": Configuration(replace(PLAN, batch="batch_min"), image="float32"),
    "half": Configuration(half=True),
    "budgets": Configuration(
        replace(PLAN, gbm_layers=(2, 4), clap="budget", clap_budget=3, gbm="budget", gbm_budget=0.2), "labels"
    ),
}


@pytest.fixture(scope="session")
def configurations() -> Collection[str]:
    """Names of all configurations that are exported here."""
    return CONFIGURATIONS.keys()


class Exported:
    """A network in PyTorch, its base graph, and the portable graph in ONNX Runtime."""

    def __init__(self, deployed: Deployed, configuration: Configuration, base: ir.Model) -> None:
        self.deployed, self.configuration, self.plan, self.base = deployed, configuration, configuration.plan, base
        self.portable = self.base.clone()
        self.bodies = add_function_bodies(self.portable)
        self.content = ir.to_proto(self.portable).SerializeToString()
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = ort.InferenceSession(self.content, options, providers=["CPUExecutionProvider"])

    def run_onnx(self, images: np.ndarray, **thresholds: float) -> dict[str, np.ndarray]:
        values = threshold_defaults(self.plan) | thresholds
        feeds = {name: np.asarray(value, np.float32) for name, value in values.items()}
        names = output_names(self.plan, self.configuration.output)
        images = images.astype(self.configuration.image)
        return dict(zip(names, self.session.run(list(names), {"image": images, **feeds}), strict=True))

    def run_torch(self, images: np.ndarray) -> dict[str, Tensor]:
        with torch.no_grad():
            inputs = merge_inputs(self.plan.clap_threshold, self.plan.gbm_threshold)
            tail, counts, maps = self.deployed(torch.from_numpy(images.astype(self.configuration.image)), inputs)
        names = (*output_names(self.plan, self.configuration.output), *mask_names(self.deployed.network))
        return dict(zip(names, (tail, counts, *maps), strict=True))


@pytest.fixture(scope="session")
def exported(golden_segmenter: Callable[[str], Any], translated: Callable[..., ir.Model]) -> Callable[[str], Exported]:
    """An exported configuration by name."""
    made: dict[str, Exported] = {}

    def make(name: str) -> Exported:
        if name not in made:
            configuration = CONFIGURATIONS[name]
            model = golden_segmenter(configuration.decoder)
            network = model.network
            model = model.half() if configuration.half else model
            merged = Deployed(insert_merging(model, configuration.plan), network, configuration.output).eval()
            base = translated(merged, configuration.plan, configuration.image)
            made[name] = Exported(merged, configuration, base)
        return made[name]

    return make


@pytest.fixture(scope="session")
def exported_toy(translated: Callable[..., ir.Model]) -> Callable[[str, str], Exported]:
    """The toy of a family and decoder, exported."""

    def make(family: str, decoder: str, output: Output = "scores", half: bool = False) -> Exported:
        network, plan = toy(family, decoder)
        deployed = deployed_toy(network, plan, output, torch.float16 if half else torch.float32)
        return Exported(deployed, Configuration(plan, output, half=half), translated(deployed, plan))

    return make


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the argument `configuration` runs on all of them."""
    if "configuration" in metafunc.fixturenames:
        metafunc.parametrize("configuration", CONFIGURATIONS)
