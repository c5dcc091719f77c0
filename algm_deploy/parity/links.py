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
from algm_deploy.merging import insert_merging, merge_inputs, merges_in
from algm_deploy.models.deployed import NORMALIZATIONS, Deployed
from algm_deploy.models.loading import DTYPES, load_network
from algm_deploy.models.merges import Elvit, elvit_distances
from algm_deploy.models.scores import MaskScores, Scores, upsample_scores
from algm_deploy.models.vit import Tokens
from algm_deploy.ops import reference
from algm_deploy.ops.clap import window_similarity
from algm_deploy.ops.evit import evit_distances
from algm_deploy.ops.g2tm import neighbour_similarity
from algm_deploy.ops.gbm import WORST, first_source, gbm_similarity, undefined
from algm_deploy.ops.mpm import mpm_similarity
from algm_deploy.ops.tome import SEMANTICS, tome_similarity
from algm_deploy.parity.graph import graph_facts, graph_problems, signature_problems
from algm_deploy.parity.levels import level_problems
from algm_deploy.parity.replay import Replayed, rms
from algm_deploy.recipe.schema import DENSE, MergePlan, Network, Precision

PART = STRETCH_ONNX.partition("*")[0]
FOLD_ERROR = 1e-9  # fp64 leaves 1e-14; a deviation off by its seventh digit would not pass


# --- link 1 -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def network_link(bundle: Bundle, image: NDArray[Any]) -> Link:
    """Without merging the network is the original: bit for bit in the bundle's precision, and with the normalisation
    folded into it to rounding of fp64, for images (1, 3, H, W)."""
    pixels, precision = torch.from_numpy(image), DTYPES[bundle.recipe.precision]
    original = load_network(bundle, precision, quantize=False)
    normalised = _normalised(pixels, bundle.recipe.network).to(precision)
    networks = original, insert_merging(original, DENSE)
    plain, emptied = (_numbers(network(normalised, merge_inputs(0.0, 0.0))) for network in networks)
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
    network = bundle.recipe.network
    model = load_network(bundle, torch.float64, quantize=False)
    scores = model(_normalised(pixels, network), merge_inputs(0.0, 0.0))
    original = upsample_scores(scores, network.grid, network.image_size).numpy()
    deployed = Deployed(insert_merging(model, DENSE), network, "scores").eval()
    ours = deployed(pixels, merge_inputs(0.0, 0.0))[0].numpy()
    errors = [rms(ours - original) / rms(original)]
    if network.policy:
        original, ours = model.encoder.policy(_normalised(pixels, network)), deployed.model.encoder.policy(pixels)
        errors.append(rms((ours - original).numpy()) / rms(original.numpy()))
    return float(np.max(errors))


def _normalised(pixels: Tensor, network: Network) -> Tensor:
    """Pixels as the network's authors feed them, fp64."""
    mean, deviation = (
        torch.tensor(v, dtype=torch.float64)[:, None, None] for v in NORMALIZATIONS[network.normalization]
    )
    return (pixels.double() / 255 - mean) / deviation


# --- link 2 -----------------------------------------------------------------------------------------------------------


def operators_link(plan: MergePlan, network: Network, replays: Sequence[Replayed]) -> Link:
    """PyTorch's merges equal their NumPy definitions on this network's own tokens: similarities within the rounding of
    an fp32 sum, decisions exactly, given equal similarities."""
    results = [
        _compared(plan, layer, network, tokens)
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


def _compared(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    """Largest difference of similarities, and whether the token maps are equal on PyTorch's similarities."""
    compared = {
        "clap": _clap,
        "gbm": _gbm,
        "tome": _tome,
        "elvit": _elvit,
        "evit": _evit,
        "g2tm": _g2tm,
        "mpm": _mpm,
        "cts": _cts,
    }
    return compared[plan.merge_in(layer)](plan, layer, network, tokens)


def _clap(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    grid, window, prefix = network.grid, plan.window, network.prefix
    tau = torch.tensor(plan.clap_threshold)
    rule = plan.semantics, plan.batch, plan.order, plan.clap, merges_in(plan, layer, network)
    attributes = (list(grid), list(window), prefix, *rule)
    ours = torch.ops.algm.clap(tokens.values, tokens.size, tau, *attributes)[2].numpy()
    similarity = window_similarity(tokens.values, list(grid), list(window), prefix).numpy()
    exact = reference.window_similarity(tokens.values.float().numpy(), grid, window, prefix)
    merged = reference.clap_decisions(similarity, float(tau), *rule)
    expected = reference.clap_rows(merged, grid, window, prefix)[0][:, prefix:]
    return float(np.abs(similarity - exact).max()), np.array_equal(ours, expected)


def _gbm(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    prefix, semantics = network.prefix, plan.semantics
    scale = torch.tensor(plan.gbm_threshold)
    rule = plan.gbm, float(layer), semantics, plan.batch, merges_in(plan, layer, network)
    ours = torch.ops.algm.gbm(*tokens[:4], scale, prefix, *rule)[2].numpy()
    values, length = tokens.values.float().numpy(), tokens.length.numpy()
    nothing = undefined(plan.gbm)
    best, match = gbm_similarity(tokens.values, tokens.length, prefix, semantics, nothing)
    given, targets = _of_sources(best, match, length, values.shape[1], prefix, semantics)
    exact, _ = reference.gbm_similarity(values, length, prefix, semantics, nothing)
    merged = reference.gbm_decisions(given, float(scale), *rule)
    row, _ = reference.gbm_rows(merged, targets, values.shape[1], length, prefix, semantics)
    expected = np.take_along_axis(row, tokens.map.numpy(), 1)
    return _largest_difference(given, exact), np.array_equal(ours, expected)


def _tome(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    assert tokens.keys is not None
    prefix, rows, r = network.prefix, tokens.values.shape[1], merges_in(plan, layer, network)
    ours = torch.ops.algm.tome(*tokens[:3], tokens.keys, r, prefix)[2].numpy()
    best, match = tome_similarity(tokens.keys, prefix)
    length = tokens.length.numpy()
    given, targets = _of_sources(best, match, length, rows, prefix, SEMANTICS)
    exact, _ = reference.gbm_similarity(tokens.keys.float().numpy(), length, prefix, SEMANTICS, WORST)
    merged = reference.most_similar(given, r)
    row, _ = reference.gbm_rows(merged, targets, rows, length, prefix, SEMANTICS)
    row = reference.tome_order(given, merged, row, prefix)
    return _largest_difference(given, exact), np.array_equal(ours, np.take_along_axis(row, tokens.map.numpy(), 1))


def _elvit(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    """Centroids and distances, relative to the longest patch and its square."""
    prefix, count = network.prefix, plan.elvit_neighbours
    values = tokens.values.float()
    rules = plan.elvit_iterations, plan.elvit_window, plan.elvit_temperature
    distance, found = (part.numpy() for part in elvit_distances(values, plan, network.grid, prefix))
    patches = values[:, prefix:].numpy()
    ours = torch.ops.algm.elvit(values, *Elvit(plan, network.grid, prefix).attributes)[1].numpy()
    exact = reference.squared_distances(patches, found)
    again = reference.elvit_centroids(patches, network.grid, plan.elvit_grid, *rules)
    length = float(np.linalg.norm(patches, axis=2).max())
    errors = np.abs(distance - exact).max() / length**2, np.abs(found - again).max() / length
    return max(map(float, errors)), np.array_equal(ours, prefix + reference.nearest(distance, count)[..., -1])


def _evit(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    """Distances, relative to the square of the longest row; attention is compared where a runtime is."""
    assert tokens.keys is not None
    prefix, values, attention = network.prefix, tokens.values.float(), tokens.keys[..., 0].float()
    patches = tokens.map.shape[1]
    rows, keep = plan.evit_counts(patches)[layer]
    record = torch.ops.algm.evit(values, tokens.map, attention, patches, rows, keep, prefix)[2].numpy()
    x, weights = values[:, prefix:], attention[:, prefix:]
    order, distance = (part.numpy() for part in evit_distances(x, weights, keep))
    kept, left = order[:, :keep], order[:, keep:]
    stays = reference.evit_sources(x.numpy(), weights.numpy(), keep) == np.arange(rows)
    expected = np.tile(np.arange(rows), (len(stays), 1))
    near = np.take_along_axis(kept, reference.nearest(distance, 1)[..., 0], 1)
    np.put_along_axis(expected, left, near, 1)
    taken = (np.take_along_axis(x.numpy(), index[:, :, None], 1) for index in (left, kept))
    error = np.abs(distance - reference.squared_distances(*taken)).max() / np.square(x.numpy()).sum(2).max()
    equal = np.array_equal(np.sort(kept, 1), np.stack([np.flatnonzero(one) for one in stays]))
    return float(error), equal and np.array_equal(record[:, :rows] - prefix, expected)


def _g2tm(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    grid, prefix, tau = list(network.grid), network.prefix, torch.tensor(plan.clap_threshold)
    ours = torch.ops.algm.g2tm(tokens.values, tokens.size, tau, grid, prefix)[2].numpy()
    similarity = neighbour_similarity(tokens.values, grid, prefix).numpy()
    exact = reference.neighbour_similarity(tokens.values.float().numpy(), grid, prefix)
    expected = reference.g2tm_rows(similarity > tau.numpy(), grid, prefix)[:, prefix:]
    return float(np.abs(similarity - exact).max()), np.array_equal(ours, expected)


def _mpm(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    prefix, length = network.prefix, tokens.length.numpy()
    ours = torch.ops.algm.mpm(*tokens[:4], prefix)[2].numpy()
    given = mpm_similarity(tokens.values, tokens.length, prefix).numpy()
    exact = reference.mpm_similarity(tokens.values.float().numpy(), length, prefix)
    row = reference.mpm_rows(reference.mpm_pairs(given, length, prefix), length, prefix)
    error = _largest_difference([*given], [*exact])
    return error, np.array_equal(ours, np.take_along_axis(row, tokens.map.numpy(), 1))


def _cts(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    """Tokens, which are copies; scores are compared where a runtime is."""
    assert tokens.keys is not None
    values, score = tokens.values.float(), tokens.keys[..., 0].float()
    grid, prefix, shared = network.grid, network.prefix, plan.cts_shared
    ours = [part.numpy() for part in torch.ops.algm.cts(values, score, list(grid), prefix, shared)]
    exact = reference.cts(values.numpy(), score.numpy(), grid=grid, prefix=prefix, shared=shared)
    return float(np.abs(ours[0] - exact[0]).max()), all(map(np.array_equal, ours[1:], exact[1:]))


def _of_sources(
    best: Tensor, match: Tensor, length: NDArray[Any], rows: int, prefix: int, semantics: str
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Of each image's A rows: the best similarity, -inf where it has none, and the row that has it."""
    first = first_source(semantics, prefix)
    split = (reference.gbm_split(rows, int(valid), prefix, semantics)[0] for valid in length)
    sources = [(source - first) // 2 for source in split]
    given = [row.numpy()[source] for row, source in zip(best, sources, strict=True)]
    return given, [first + 1 + 2 * row.numpy()[source] for row, source in zip(match, sources, strict=True)]


def _largest_difference(given: list[NDArray[Any]], exact: list[NDArray[Any]]) -> float:
    """Of similarities; equal infinities do not differ."""
    pairs = zip(given, exact, strict=True)
    return max(float(np.abs(np.subtract(g, e, out=np.zeros_like(g), where=g != e)).max(initial=0)) for g, e in pairs)


# --- link 3 -----------------------------------------------------------------------------------------------------------


def graph_link(bundle: Bundle, executed: str, precision: Precision | None = None) -> Link:
    """The exported graph and the manifest's signature are what the recipe asks for; what is quantised there, and in
    the graph that is `executed` in `precision`, by default the recipe's, or that an engine was made from, is what the
    manifest and the weights give."""
    facts = graph_facts(bundle.file(ONNX))
    problems = signature_problems(bundle.signature, bundle.recipe) + graph_problems(facts, bundle.recipe)
    graphs = dict.fromkeys([ONNX, _graph_of(bundle, executed)])
    problems += level_problems(bundle, graphs, precision or bundle.recipe.precision)
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
