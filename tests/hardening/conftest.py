"""Small networks with random weights, as bundles; commands in processes that lack something."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from algm_deploy.bundle.store import Bundle, BundleWriter
from algm_deploy.lowering.writing import write_network
from algm_deploy.merging import deployed
from algm_deploy.models.loading import DTYPES, network_module, parameter_shapes
from algm_deploy.models.vit import VitNetwork
from algm_deploy.pictures.preprocessing import preprocessing_fingerprint
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.schema import Protocol, Recipe

Weights = dict[str, torch.Tensor]
PLAN = MergePlan(clap_layers=(1,), gbm_layers=(2,), clap_threshold=0.8)
NETWORK = Network("segmenter", 32, 2, 2, 5, (64, 64), decoder="linear")
# What a machine without the optional packages answers when they are imported, and the commands it is given.
SCRIPT = """
import json, sys
absent, commands, mib = json.load(sys.stdin)
sys.modules.update(dict.fromkeys(absent))
import contextlib, io
from algm_deploy.cli import main
if mib is not None:
    import resource
    import algm_deploy.runners.torch.runner, algm_deploy.report.pictures
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (mib << 20),) * 2)
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(command)
    print(json.dumps([code, errors.getvalue()]))
"""
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE = 24, 1


def random_weights(network: Network) -> Weights:
    """Weights as a fresh network has them: unit variance stays unit variance."""
    torch.manual_seed(0)
    return {
        name: torch.ones(shape)
        if "norm" in name and name.endswith("weight")
        else torch.randn(shape) * (0.0 if name.endswith("bias") else max(shape[-1], 1) ** -0.5)
        for name, shape in parameter_shapes(network).items()
    }


def write(target: Path, recipe: Recipe, weights: Weights) -> Bundle:
    model = network_module(recipe.network, weights, DTYPES[recipe.precision])
    with BundleWriter(target, recipe) as writer:
        write_network(writer, model, deployed(model, recipe), {})
        writer.describe(preprocessing_sha256=preprocessing_fingerprint(recipe.protocol))
    return Bundle.open(target)


@pytest.fixture(scope="session")
def random_network() -> Callable[[Callable[[Weights], object]], tuple[VitNetwork, Network]]:
    """The two-block network itself: `random_network(change)`."""

    def make(change: Callable[[Weights], object]) -> tuple[VitNetwork, Network]:
        weights = random_weights(NETWORK)
        change(weights)
        return network_module(NETWORK, weights, torch.float32), NETWORK

    return make


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """A bundle of a two-block network: `small_bundle(image_size, change=..., output=..., ...)`."""

    def make(
        image_size: tuple[int, int] = (64, 64),
        plan: MergePlan = PLAN,
        change: Callable[[Weights], object] = lambda weights: None,
        network: Network = NETWORK,
        **settings: object,
    ) -> Bundle:
        network = Network(**{**vars(network), "image_size": image_size})
        side = min(image_size)
        recipe = Recipe("small", network, plan, Protocol("camvid", side, side, side), **settings)  # type: ignore[arg-type]
        weights = random_weights(network)
        change(weights)
        return write(tmp_path_factory.mktemp("small") / "bundle", recipe, weights)

    return make


@pytest.fixture
def degenerate() -> Callable[[int, int], dict[str, np.ndarray]]:
    """Pictures (3, H, W) uint8 that no photo looks like, by name."""

    def draw(height: int, width: int) -> dict[str, np.ndarray]:
        constant = np.full((3, height, width), 127, np.uint8)
        half, pixel = constant.copy(), np.zeros_like(constant)
        half[:, :, width // 2 :] = 255
        pixel[:, height // 3, width // 3] = 255
        noise = np.random.default_rng(0).integers(0, 256, constant.shape, dtype=np.uint8)
        return {"constant": constant, "noise": noise, "half": half, "bright_pixel": pixel}

    return draw


@pytest.fixture(scope="session")
def obey_permissions() -> Callable[[], None]:
    """Takes root's power to write where permissions forbid it from a process that begins with it."""

    def obey() -> None:
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE)

    return obey


def commands(
    given: Sequence[Sequence[object]],
    absent: Sequence[str] = (),
    restrict: Callable[[], None] | None = None,
    address_space_mib: int | None = None,
) -> list[tuple[int, str]]:
    """Exit code and errors of commands in one new process.

    It lacks the packages `absent`, begins with `restrict`, and has so much address space beyond what importing takes.
    """
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([list(absent), [[str(word) for word in command] for command in given], address_space_mib]),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=restrict,
        # OpenMP ends a process in which it cannot start a thread. Where files have to stay short, Python would leave
        # bytecode that is cut off, which ends every later process that reads it.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [(code, errors) for code, errors in map(json.loads, done.stdout.splitlines())]


@pytest.fixture(scope="session")
def in_new_process() -> Callable[..., list[tuple[int, str]]]:
    return commands
