"""The parity chain: six links from the original network to a runtime's label maps, each of which can fail.

1 network    the network with an empty merge plan equals the original
2 operators  PyTorch's merges equal their NumPy definitions on this network's own tokens
3 graph      the exported graph is the one the recipe asks for
4 numbers    the runtime equals PyTorch with the runtime's own merge decisions forced
5 decisions  the runtime's merge decisions equal PyTorch's, or noise explains the difference
6 labels     the runtime's label maps equal those of PyTorch deciding freely
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from algm_deploy.bundle import Bundle
from algm_deploy.errors import BundleError
from algm_deploy.lowering.bundling import load_network
from algm_deploy.merging import insert_merging, merge_inputs
from algm_deploy.models.deployed import NORMALIZATIONS, Deployed
from algm_deploy.models.families import DTYPES
from algm_deploy.models.scores import upsample_scores
from algm_deploy.ops import reference
from algm_deploy.ops.clap import clap_decisions, clap_rows, window_similarity
from algm_deploy.ops.gbm import gbm_decisions, gbm_rows, gbm_similarity, gbm_threshold
from algm_deploy.parity.decisions import Ints, clap_problems, gbm_problems, map_problem
from algm_deploy.parity.graph import graph_facts, graph_problems
from algm_deploy.parity.replay import Replayed, ReplayNetwork, clap_facts, gbm_facts, torch_maps
from algm_deploy.recipes import DENSE
from algm_deploy.runners.contract import Array, Runner, runner
from algm_deploy.signature import CLAP_THRESHOLD, GBM_THRESHOLD

SCHEMA_VERSION = 1
ERROR_FACTOR = 2.0  # a runtime may err twice as much as PyTorch in the same precision
FP32_EPS = 2.0**-23
OPERATOR_IMAGES = 2  # the NumPy definitions are loops


@dataclass(frozen=True)
class Link:
    """One link. `measured` and `gate` are for people; `facts` hold the numbers, units in their names."""

    number: int
    name: str
    passed: bool
    measured: str
    gate: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParityReport:
    """The chain for one runtime on one set of images."""

    runtime: str
    images: int
    batches: tuple[int, ...]
    links: tuple[Link, ...]

    @property
    def passed(self) -> bool:
        """Whether every link holds."""
        return all(link.passed for link in self.links)

    def record(self) -> dict[str, Any]:
        """JSON-able form."""
        return {"schema_version": SCHEMA_VERSION, "passed": self.passed, **asdict(self)}


def verify(bundle: Bundle, runtime: str, images: Array, progress: bool = True) -> ParityReport:
    """Runs the chain for one runtime.

    Args:
        bundle: the bundle under test.
        runtime: its name.
        images: (n, 3, H, W) RGB 0..255 in the dtype of the bundle's image input, all different, n >= 1.
        progress: show a bar.

    Raises:
        BundleError: no image, or images that do not fit the bundle.
    """
    if len(images) == 0:
        raise BundleError("parity needs at least one image, got none")
    with runner(bundle, runtime) as run, runner(bundle, "torch") as torch_run:
        chain = _Chain(bundle, run, torch_run, images)
        steps = chain.steps()
        bar = tqdm(total=chain.work, desc=f"verify {runtime}", unit="image", disable=None if progress else True)
        with bar:
            for _ in steps:
                bar.update()
        links = (chain.network(), chain.operators(), chain.graph(), *chain.measured())
    return ParityReport(runtime, len(images), tuple(chain.sizes), links)


@dataclass
class _Seen:
    """What the runs have shown so far; lists hold one entry an image and run."""

    error_ratio: list[float] = field(default_factory=list)
    max_error: list[float] = field(default_factory=list)
    wrong_labels: int = 0
    problems: list[str] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    stages_equal: list[bool] = field(default_factory=list)
    unexcused: list[str] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    count_difference: list[int] = field(default_factory=list)


class _Chain:
    """One verification. The torch networks are loaded once; replays with the same maps are done once."""

    def __init__(self, bundle: Bundle, run: Runner, torch_run: Runner, images: Array) -> None:
        self.bundle, self.recipe = bundle, bundle.recipe
        self.run, self.torch_run, self.images = run, torch_run, images
        self.plan, self.grid = self.recipe.merging, list(self.recipe.network.grid)
        self.truth = ReplayNetwork(bundle, torch.float64)
        self.baseline = ReplayNetwork(bundle, DTYPES[self.recipe.precision])
        self.prefix = self.truth.prefix
        self.sizes = sorted(
            {b for b in (1, 2, 3, self.recipe.max_batch) if b <= min(len(images), self.recipe.max_batch)}
        )
        self.seen = _Seen()
        self._replays: dict[tuple[int, bytes], tuple[Replayed, Replayed]] = {}

    @property
    def work(self) -> int:
        """Images over all batches."""
        return sum(len(batch) for batch in self._batches())

    def steps(self) -> Iterator[int]:
        """Runs every image alone, then batches of different images; yields after each image."""
        for batch in self._batches():
            outputs = self.run.infer({"image": self.images[batch]}, [t.name for t in self.run.signature.outputs])
            maps = self._maps(outputs, len(batch))
            if len(batch) == 1:
                self._compare_labels(batch[0], outputs)
            self._compare_decisions(batch, maps)
            for position, index in enumerate(batch):
                self._compare_numbers(index, maps[position], outputs, position)
                yield index

    def _batches(self) -> list[list[int]]:
        singles = [[i] for i in range(len(self.images))]
        return singles + [list(range(size)) for size in self.sizes if size > 1]

    def _maps(self, outputs: dict[str, Array], count: int) -> list[list[Ints]]:
        """Token maps by image, then merge."""
        names = [f"token_map_{name}" for name in self.run.signature.merges]
        return [[outputs[name][i] for name in names] for i in range(count)]

    def _replay(self, index: int, maps: list[Ints]) -> tuple[Replayed, Replayed]:
        key = (index, b"".join(m.tobytes() for m in maps))
        if key not in self._replays:
            image = self.images[index]
            self._replays[key] = self.truth(image, maps), self.baseline(image, maps)
        return self._replays[key]

    # --- link 4 ------------------------------------------------------------------------------------------------------

    def _compare_numbers(self, index: int, maps: list[Ints], outputs: dict[str, Array], position: int) -> None:
        if problem := map_problem(maps, self.prefix):
            self.seen.problems.append(f"image {index}: {problem}")
            return
        truth, baseline = self._replay(index, maps)
        allowed = _rms(baseline.scores - truth.scores) + FP32_EPS * _rms(truth.scores)
        if self.recipe.output == "labels":
            noise = 2 * ERROR_FACTOR * float(np.max(np.abs(baseline.scores - truth.scores)))
            self.seen.wrong_labels += _unexplained_labels(outputs["labels"][position], truth.scores, noise)
            return
        scores = outputs["scores"][position].astype(np.float64)
        if not np.isfinite(scores).all():
            self.seen.problems.append(f"image {index}: the scores hold NaN or infinity")
            return
        self.seen.error_ratio.append(_rms(scores - truth.scores) / allowed)
        self.seen.max_error.append(np.abs(scores - truth.scores).max().item())

    # --- link 5 ------------------------------------------------------------------------------------------------------

    def _compare_decisions(self, batch: list[int], maps: list[list[Ints]]) -> None:
        """Images that decide together are compared together; behind a mismatch the runtime's decision is replayed."""
        if any(map_problem(m, self.prefix) for m in maps):
            return
        groups = [[p] for p in range(len(batch))] if self.plan.batch == "per_image" else [list(range(len(batch)))]
        for group in groups:
            replays = [self._replay(batch[p], maps[p]) for p in group]
            equal = np.ones(len(group), dtype=bool)
            for stage, layer in enumerate(self.plan.layers):
                stage_maps = [maps[p] for p in group]
                equal_here = self._compare_stage(stage, layer, replays, stage_maps, [batch[p] for p in group])
                self.seen.stages_equal.extend(equal_here)
                equal &= equal_here
            self.seen.equal.extend(bool(e) for e in equal)

    def _compare_stage(
        self,
        stage: int,
        layer: int,
        replays: list[tuple[Replayed, Replayed]],
        maps: list[list[Ints]],
        indices: list[int],
    ) -> NDArray[np.bool_]:
        truth = [replay[0].entering[stage] for replay in replays]
        baseline = [replay[1].entering[stage] for replay in replays]
        thresholds = (
            self.run.signature.defaults.get(CLAP_THRESHOLD, 0.0),
            self.run.signature.defaults.get(GBM_THRESHOLD, 0.0),
        )
        expected = torch_maps(baseline, self.plan, layer, thresholds, self.grid, self.prefix)
        equal = np.array([np.array_equal(e, m[stage]) for e, m in zip(expected, maps, strict=True)])
        if equal.all():
            return equal
        if layer in self.plan.clap_layers:
            problems = [
                clap_problems(
                    clap_facts(t, b, self.plan, thresholds[0], (self.grid, self.prefix)),
                    m[stage],
                    self.plan,
                    self.recipe.network.grid,
                    self.prefix,
                )
                for t, b, m in zip(truth, baseline, maps, strict=True)
            ]
        else:
            facts = gbm_facts(truth, baseline, self.plan, layer, thresholds[1], self.prefix)
            problems = [
                gbm_problems(f, t.map[0].numpy(), m[stage], self.plan, self.prefix)
                for f, t, m in zip(facts, truth, maps, strict=True)
            ]
        for index, same, found in zip(indices, equal, problems, strict=True):
            self.seen.unexcused.extend(f"image {index}: {problem}" for problem in found if not same)
        return equal

    # --- link 6 ------------------------------------------------------------------------------------------------------

    def _compare_labels(self, index: int, outputs: dict[str, Array]) -> None:
        free = self.torch_run.infer({"image": self.images[index : index + 1]})
        labels = [o["labels"] if "labels" in o else o["scores"].argmax(1) for o in (outputs, free)]
        self.seen.agreement.append(float((labels[0] == labels[1]).mean()))
        counts = np.abs(outputs["token_counts"] - free["token_counts"])
        self.seen.count_difference.append(int(counts.max(initial=0)))

    # --- the links ---------------------------------------------------------------------------------------------------

    def network(self) -> Link:
        """Link 1, in the bundle's precision against fp64."""
        image = torch.from_numpy(self.images[:1])
        dtype = DTYPES[self.recipe.precision]
        model = load_network(self.bundle, dtype)
        dense = Deployed(insert_merging(model, DENSE), self.recipe.network, "scores").eval()
        with torch.inference_mode():
            ours = dense(image, merge_inputs(0.0, 0.0))[0][0].double().numpy()
            original, truth = (self._original(image, kind) for kind in (dtype, torch.float64))
        allowed = ERROR_FACTOR * _rms(original - truth) + FP32_EPS * _rms(truth)
        error = _rms(ours - truth)
        return Link(
            1,
            "network",
            bool(error <= allowed),
            f"error {error:.1e}",
            f"{allowed:.1e} (twice the original's in {self.recipe.precision})",
            {"rms_error": error, "rms_error_allowed": allowed},
        )

    def _original(self, image: torch.Tensor, dtype: torch.dtype) -> NDArray[np.float64]:
        """The network as its authors run it: normalised pixels, no merging, scores at full size."""
        network = self.recipe.network
        mean, deviation = (
            torch.tensor(v, dtype=torch.float64)[:, None, None] for v in NORMALIZATIONS[network.normalization]
        )
        pixels = ((image.double() / 255 - mean) / deviation).to(dtype)
        result = load_network(self.bundle, dtype)(pixels)
        return upsample_scores(result, network.grid, network.image_size)[0].double().numpy()

    def operators(self) -> Link:
        """Link 2 on tokens of the first images: similarities within rounding, decisions exact on equal similarities."""
        worst, wrong, compared = 0.0, 0, 0
        replays = list(self._replays.values())[:OPERATOR_IMAGES]
        for _, baseline in replays:
            for layer, tokens in zip(self.plan.layers, baseline.entering, strict=True):
                error, equal = self._operator(layer, tokens)
                worst, wrong, compared = max(worst, error), wrong + (not equal), compared + 1
        bound = self.recipe.network.embed_dim * 2.0**-24  # of an fp32 sum of embed_dim products of unit vectors
        passed = worst <= bound and wrong == 0 and (compared > 0 or not self.plan.layers)
        return Link(
            2,
            "operators",
            passed,
            f"similarity {worst:.1e}, {wrong} of {compared} decisions differ" if compared else "nothing merges",
            f"{bound:.1e}, 0",
            {"similarity_error": worst, "similarity_error_allowed": bound, "decisions": compared, "differ": wrong},
        )

    def _operator(self, layer: int, tokens: Any) -> tuple[float, bool]:
        plan, values = self.plan, tokens.values.float().numpy()
        clap, gbm = (torch.tensor(self.run.signature.defaults.get(n, 0.0)) for n in (CLAP_THRESHOLD, GBM_THRESHOLD))
        if layer in plan.clap_layers:
            similarity = window_similarity(tokens.values, self.grid, list(plan.window), self.prefix)
            place = clap_decisions(similarity, clap, plan.semantics, plan.batch, plan.order)
            row = clap_rows(place, self.grid, list(plan.window), self.prefix)[0]
            grid = self.recipe.network.grid
            exact = reference.window_similarity(values, grid, plan.window, self.prefix)
            merged = reference.clap_decisions(similarity.numpy(), float(clap), plan.semantics, plan.batch, plan.order)
            expected = reference.clap_rows(merged, grid, plan.window, self.prefix)[0]
            return float(np.abs(similarity.numpy() - exact).max()), np.array_equal(row.numpy(), expected)
        best, match = gbm_similarity(tokens.values, tokens.length, self.prefix, plan.semantics)
        limit = gbm_threshold(best, gbm, plan.gbm_mode, float(layer), plan.batch)
        joins = gbm_decisions(best, limit, plan.semantics, plan.batch)
        rows = gbm_rows(joins, match, tokens.length, values.shape[1], self.prefix, plan.semantics)[0].numpy()
        length = tokens.length.numpy()
        exact_best, _ = reference.gbm_similarity(values, length, self.prefix, plan.semantics)
        sources = [torch.isfinite(b) for b in best]
        given = [b[s].numpy() for b, s in zip(best, sources, strict=True)]
        first = self.prefix if plan.semantics == "paper" else 0
        targets = [(first + 1 + 2 * m[s]).numpy() for m, s in zip(match, sources, strict=True)]
        merged_rows = reference.gbm_decisions(
            given, float(gbm), plan.gbm_mode, float(layer), plan.semantics, plan.batch
        )
        expected = reference.gbm_rows(merged_rows, targets, values.shape[1], length, self.prefix, plan.semantics)[0]
        error = max(float(np.abs(g - e).max(initial=0)) for g, e in zip(given, exact_best, strict=True))
        return error, np.array_equal(rows, expected)

    def graph(self) -> Link:
        """Link 3."""
        facts = graph_facts(self.bundle.file("model.onnx"))
        problems = graph_problems(facts, self.recipe)
        nodes = len(facts["algm_nodes"])
        return Link(
            3,
            "graph",
            not problems,
            problems[0] if problems else f"{nodes} algm nodes, opset 18",
            "as the recipe",
            {"problems": problems},
        )

    def measured(self) -> Iterable[Link]:
        """Links 4 to 6 from the runs."""
        yield self._numbers_link()
        if self.plan.layers:
            yield self._decisions_link()
        yield self._labels_link()

    def _numbers_link(self) -> Link:
        seen = self.seen
        if self.recipe.output == "labels":
            passed = not seen.problems and seen.wrong_labels == 0
            measured = f"{seen.wrong_labels} labels beyond noise"
            return Link(
                4,
                "numbers",
                passed,
                "; ".join(seen.problems[:1]) or measured,
                "0",
                {"labels_beyond_noise": seen.wrong_labels, "problems": seen.problems},
            )
        worst = max(seen.error_ratio, default=np.inf)
        passed = not seen.problems and worst <= ERROR_FACTOR
        measured = f"error {worst:.2f} x PyTorch's, largest {max(seen.max_error, default=np.inf):.1e}"
        return Link(
            4,
            "numbers",
            passed,
            "; ".join(seen.problems[:1]) or measured,
            f"{ERROR_FACTOR:.0f} x",
            {"error_ratio_max": worst, "abs_error_max": max(seen.max_error, default=None), "problems": seen.problems},
        )

    def _decisions_link(self) -> Link:
        seen, gate = self.seen, self.recipe.gates.excused_windows
        different = 1 - float(np.mean(seen.equal)) if seen.equal else 1.0
        passed = bool(seen.equal) and not seen.unexcused and different <= gate
        measured = (
            f"{sum(seen.equal)} of {len(seen.equal)} images equal, {len(seen.equal) - sum(seen.equal)} excused by noise"
        )
        return Link(
            5,
            "decisions",
            passed,
            seen.unexcused[0] if seen.unexcused else measured,
            f"0 unexcused, excused share {gate:g}",
            {
                "images": len(seen.equal),
                "images_equal": sum(seen.equal),
                "merges_equal_share": float(np.mean(seen.stages_equal)) if seen.stages_equal else None,
                "excused_share": different,
                "unexcused": seen.unexcused,
                "token_count_difference_max": max(seen.count_difference, default=None),
            },
        )

    def _labels_link(self) -> Link:
        agreement, gate = self.seen.agreement, self.recipe.gates.label_agreement
        mean = float(np.mean(agreement)) if agreement else 0.0
        return Link(
            6,
            "labels",
            mean >= gate,
            f"{100 * mean:.3f} % of pixels equal, worst image {100 * min(agreement, default=0.0):.2f} %",
            f"{100 * gate:g} %",
            {"label_agreement_mean": mean, "label_agreement_min": min(agreement, default=None)},
        )


def _rms(x: NDArray[np.floating[Any]]) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def _unexplained_labels(labels: Array, scores: NDArray[np.float64], noise: float) -> int:
    """Pixels whose label scores clearly less than the best class of the truth (K, H, W)."""
    if labels.max(initial=0) >= len(scores):
        return int(labels.size)
    chosen = np.take_along_axis(scores, labels[None].astype(np.int64), axis=0)[0]
    return int((scores.max(0) - chosen > noise).sum())
