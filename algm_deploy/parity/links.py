"""Links 1 to 3 of the parity chain, which hold whatever runtime is verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algm_deploy.bundle.files import ONNX
from algm_deploy.bundle.records import Link
from algm_deploy.bundle.store import Bundle
from algm_deploy.lowering.tensorrt_stretches import STRETCH_ONNX
from algm_deploy.merging import insert_merging, merge_inputs
from algm_deploy.models.deployed import NORMALIZATIONS, Deployed
from algm_deploy.models.loading import DTYPES, load_network
from algm_deploy.models.scores import MaskScores, Scores, upsample_scores
from algm_deploy.parity.graph import graph_facts, graph_problems, signature_problems
from algm_deploy.parity.levels import level_problems
from algm_deploy.parity.merges import MERGES
from algm_deploy.parity.replay import Replayed, rms
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.schema import Precision

PART = STRETCH_ONNX.partition("*")[0]
FOLD_ERROR = 1e-9  # fp64 leaves 1e-14; a deviation off by its seventh digit would not pass


# --- link 1 -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def network_link(bundle: Bundle, image: NDArray[Any], device: str = "cpu") -> Link:
    """Without merging the network is the original: bit for bit in the bundle's precision, and with the normalisation
    folded into it to rounding of fp64, for images (1, 3, H, W), computed on `device`."""
    pixels, precision = torch.from_numpy(image).to(device), DTYPES[bundle.recipe.precision]
    original = load_network(bundle, precision, quantize=False)
    normalised = _normalised(pixels, bundle.recipe.network).to(precision)
    networks = original.to(device), insert_merging(original, DENSE).to(device)
    inputs = merge_inputs(0.0, 0.0, device=device)
    plain, emptied = (_numbers(network(normalised, inputs)) for network in networks)
    equal = all(map(torch.equal, plain, emptied))
    error = _fold_error(bundle, pixels)
    return Link(
        number=1,
        name="network",
        passed=equal and error <= FOLD_ERROR,
        measured=f"{'equal bit for bit' if equal else 'differs'} without merging, normalisation folded to {error:.0e}",
        gate=f"bit for bit, {FOLD_ERROR:.0e}",
        facts={"equal_without_merging": equal, "fold_relative_rms_error_fp64": error},
    )


def _numbers(output: Scores) -> tuple[Tensor, ...]:
    """All that a network's pictures are made of."""
    return (output.masks, output.classes) if isinstance(output, MaskScores) else (output.scores,)


def _fold_error(bundle: Bundle, pixels: Tensor) -> float:
    """Relative RMS error in fp64 of the deployed network without merging, against the original on normalised pixels;
    or of the scores of its policy network, if that is larger."""
    network, inputs = bundle.recipe.network, merge_inputs(0.0, 0.0, device=pixels.device)
    model = load_network(bundle, torch.float64, quantize=False)
    deployed = Deployed(insert_merging(model, DENSE), network, "scores").eval().to(pixels.device)
    scores = model.to(pixels.device)(_normalised(pixels, network), inputs)
    original = upsample_scores(scores, network.grid, network.image_size).cpu().numpy()
    ours = deployed(pixels, inputs)[0].cpu().numpy()
    errors = [rms(ours - original) / rms(original)]
    if network.policy:
        original, ours = model.encoder.policy(_normalised(pixels, network)), deployed.model.encoder.policy(pixels)
        errors.append(rms((ours - original).cpu().numpy()) / rms(original.cpu().numpy()))
    return float(np.max(errors))


def _normalised(pixels: Tensor, network: Network) -> Tensor:
    """Pixels as the network's authors feed them, fp64."""
    mean, deviation = (
        torch.tensor(v, dtype=torch.float64, device=pixels.device)[:, None, None]
        for v in NORMALIZATIONS[network.normalization]
    )
    return (pixels.double() / 255 - mean) / deviation


# --- link 2 -----------------------------------------------------------------------------------------------------------


def operators_link(plan: MergePlan, network: Network, replays: Sequence[Replayed]) -> Link:
    """PyTorch's merges equal their NumPy definitions on this network's own tokens: similarities within the rounding of
    an fp32 sum, decisions exactly, given equal similarities."""
    results = [
        MERGES[plan.merge_in(layer)].compared(plan, layer, network, tokens)
        for replayed in replays
        for layer, tokens in zip(plan.layers, replayed.baseline, strict=True)
    ]
    bound = network.embed_dim * 2.0**-24  # a sum of embed_dim products of unit vectors
    worst = float(np.max([error for error, _ in results], initial=0))
    wrong = sum(not equal for _, equal in results)
    measured = f"similarity {worst:.1e}, {wrong} of {len(results)} decisions differ"
    return Link(
        number=2,
        name="operators",
        passed=worst <= bound and wrong == 0 and bool(results or not plan.layers),
        measured=measured if results or plan.layers else "nothing merges",
        gate=f"{bound:.1e}, 0",
        facts={
            "similarity_error": worst if np.isfinite(worst) else None,
            "similarity_error_allowed": bound,
            "decisions": len(results),
            "decisions_differ": wrong,
        },
    )


# --- link 3 -----------------------------------------------------------------------------------------------------------


def graph_link(bundle: Bundle, executed: str, precision: Precision | None = None, attention: bool = False) -> Link:
    """The exported graph and the manifest's signature are what the recipe asks for; what is quantised there, and in
    the graph that is `executed` in `precision`, by default the recipe's, or that an engine was made from, is what the
    manifest and the weights give; `attention`: that graph computes attention's products in int8."""
    facts = graph_facts(bundle.file(ONNX))
    problems = signature_problems(bundle.signature, bundle.recipe) + graph_problems(facts, bundle.recipe)
    ran = _graph_of(bundle, executed)
    graphs = dict.fromkeys([ONNX, ran])
    problems += level_problems(bundle, graphs, precision or bundle.recipe.precision, [ran] if attention else [])
    return Link(
        number=3,
        name="graph",
        passed=not problems,
        measured=problems[0]
        if problems
        else f"{len(facts['algm_nodes'])} algm nodes, opset {facts['opset']['ai.onnx']}",
        gate="as the recipe",
        facts={"problems": problems},
    )


def _graph_of(bundle: Bundle, executed: str) -> str:
    """The graph that is executed, or the whole one that an engine, or the first engine of its parts, was made from; of
    weights alone the exported one."""
    name = executed
    while not name.endswith(".onnx") or name.startswith(PART):
        sources = [source for source in bundle.files[name].made_from if source.endswith(".onnx")]
        if not sources:
            return ONNX
        name = sources[0]
    return name
