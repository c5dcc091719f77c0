"""The parity chain: six links from the original network to a runtime's label maps, each of which can fail.

1 network    the network with an empty merge plan equals the original
2 operators  PyTorch's merges equal their NumPy definitions on this network's own tokens
3 graph      the exported graph and the manifest are what the recipe asks for
4 numbers    the runtime equals PyTorch with the runtime's own decisions forced
5 decisions  the runtime's merge decisions equal PyTorch's, or noise explains the difference; likewise where queries
             choose by their masks what they attend to
6 labels     the runtime's label maps equal those of PyTorch deciding freely

A runtime is run on every image alone, on batches of different images, and on one image with thresholds at which nothing
and everything merges, so one that ignores its threshold inputs, or has built them in, breaks links 4 and 5.

The record has the seconds of each link by its name. What links share has names of its own: `opening` of the runtime and
of PyTorch's networks, runs of the `runtime`, and PyTorch's in `fp64` with the runtime's decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from algm_deploy.bundle.records import Link, Parity, Reference
from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD, mask_names, signature_of, threshold_defaults
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, ExecutionError, RuntimeUnavailableError
from algm_deploy.merging import deployed_network
from algm_deploy.models.quantized import computes_levels
from algm_deploy.ops.native_kernels import in_use
from algm_deploy.parity.comparison import Decided, Decisions, Labels, Numbers, output_problem
from algm_deploy.parity.jitter import jittered_network
from algm_deploy.parity.links import graph_link, network_link, operators_link
from algm_deploy.parity.replay import Replayed, Replays
from algm_deploy.parity.stopwatch import Stopwatch
from algm_deploy.predictor import WARM_UP_S
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.schema import Precision
from algm_deploy.runners.contract import Array, Runner, runner
from algm_deploy.runners.torch.runner import Made, TorchRunner

OPERATOR_IMAGES = 2  # the NumPy definitions are loops
NOTHING_MERGES = {CLAP_THRESHOLD: np.inf, GBM_THRESHOLD: np.inf}
EVERYTHING_MERGES = {CLAP_THRESHOLD: -2.0, GBM_THRESHOLD: -1000.0}


@dataclass(frozen=True)
class Trial:
    """One call of the runtime: images by index, and thresholds; without any it takes those of the bundle."""

    images: tuple[int, ...]
    thresholds: Mapping[str, float] = field(default_factory=dict)

    def plan(self, plan: MergePlan) -> MergePlan:
        """The recipe's plan with the trial's thresholds."""
        clap = self.thresholds.get(CLAP_THRESHOLD, plan.clap_threshold)
        return replace(plan, clap_threshold=clap, gbm_threshold=self.thresholds.get(GBM_THRESHOLD, plan.gbm_threshold))


def trials_of(images: int, max_batch: int, plan: MergePlan) -> list[Trial]:
    """The calls that verify a runtime: images alone, batches (of as many different images as there are), extremes."""
    singles = [Trial((index,)) for index in range(images)]
    # A batch of one image repeated could not tell which image is which.
    sizes = sorted({2, 3, max_batch} - {1}) if images > 1 else []
    batches = [Trial(tuple(i % images for i in range(size))) for size in sizes if size <= max_batch]
    names = threshold_defaults(plan)
    extremes = [Trial((0,), {n: extreme[n] for n in names}) for extreme in (NOTHING_MERGES, EVERYTHING_MERGES)]
    return singles + batches + (extremes if names else [])


def verify(bundle: Bundle, runtime: str, images: Array, progress: bool = True, reference: Reference = "cpu") -> Parity:
    """Runs the chain for one runtime.

    Args:
        bundle: the bundle under test.
        runtime: its name.
        images: (n, 3, H, W) RGB 0..255 in the dtype of the bundle's image input, all different, n >= 1.
        progress: show a bar.
        reference: what PyTorch computes on, by its own operators.

    Raises:
        BundleError: no image, two equal images, or images that do not fit the bundle.
        RuntimeUnavailableError: a GPU as the reference where PyTorch sees none; or for the torch runtime, or where that
            has run on the GPU in this process: PyTorch's operators are this project's kernels there, which would be on
            both sides.
    """
    if len(images) == 0:
        raise BundleError("parity needs at least one image, got none")
    if len({image.tobytes() for image in images}) < len(images):
        raise BundleError("parity needs different images to tell them apart, got two equal ones: leave one out")
    _check_reference(reference, runtime)
    trials = trials_of(len(images), bundle.recipe.max_batch, bundle.recipe.merging)
    watch = Stopwatch()
    with ExitStack() as stack:
        with watch.part("opening"):
            run = stack.enter_context(runner(bundle, runtime))
            run.check_image(images[:1])
            for size in {len(trial.images) for trial in trials}:
                run.warm_up(size, WARM_UP_S)  # what is proven runs as servers run it
            stack.enter_context(_without_tf32(reference))
        with watch.part("network"):
            network = network_link(bundle, images[:1], reference)  # before other copies of the weights are held
        with watch.part("opening"):
            chain = _Chain(bundle, run, _pytorch(bundle, run, reference, stack), images, reference, watch)
        work = sum(len(trial.images) for trial in trials)
        with tqdm(total=work, desc=f"verify {runtime}", unit="image", disable=None if progress else True) as bar:
            for trial in trials:
                for _ in chain.run(trial):
                    bar.update()
        links = [network, *chain.links(trials)]
    batches = sorted({len(trial.images) for trial in trials})
    return Parity(
        runtime=runtime,
        images=len(images),
        batches=tuple(batches),
        links=tuple(links),
        reference=reference,
        seconds=watch.seconds,
    )


class _PyTorch(NamedTuple):
    """PyTorch deciding freely: in the runtime's precision, and what is held to be right; that of a network with levels
    is quantised as well, so the network in fp32 is `unquantized`, for information."""

    own: Runner
    exact: Runner
    unquantized: Runner | None = None


def _check_reference(device: Reference, runtime: str) -> None:
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise RuntimeUnavailableError("expected a GPU to compute the reference on, PyTorch sees none: use the CPU")
    if runtime == TorchRunner.runtime or in_use():
        raise RuntimeUnavailableError(
            f"expected a reference that shares no kernel with what is proven, got {device}, where PyTorch has this "
            "project's kernels once the torch runtime has run: use the CPU as reference, or a process of its own"
        )


@contextmanager
def _without_tf32(device: Reference) -> Iterator[None]:
    """Within it products and convolutions of a reference on a GPU are in fp32 where they are said to be.

    For one on the CPU nothing changes: the torch runtime on a GPU is proven as it runs.
    """
    if device == "cpu":
        yield
        return
    libraries: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [library.allow_tf32 for library in libraries]
    try:
        for library in libraries:
            library.allow_tf32 = False
        yield
    finally:
        for library, allowed in zip(libraries, before, strict=True):
            library.allow_tf32 = allowed


def _pytorch(bundle: Bundle, run: Runner, device: Reference, stack: ExitStack) -> _PyTorch:
    """Opened runners, which `stack` closes."""
    precision, inside = run.precision, run.attention_in_levels

    as_stored: Made = partial(deployed_network, quantize=False)

    def opened(of: Precision, network: Made = as_stored) -> Runner:
        return stack.enter_context(TorchRunner(bundle, of, device, network))

    if computes_levels(bundle, precision):
        exact = opened(precision, lambda of, _: deployed_network(of, torch.float64, attention=inside))
        return _PyTorch(opened(precision, partial(jittered_network, attention=inside)), exact, opened("fp32"))
    own = opened(precision)
    return _PyTorch(own, own if precision == "fp32" else opened("fp32"))


class _Chain:
    """One verification."""

    def __init__(
        self, bundle: Bundle, run: Runner, pytorch: _PyTorch, images: Array, reference: Reference, watch: Stopwatch
    ) -> None:
        self._bundle, self._recipe = bundle, replace(bundle.recipe, precision=run.precision)
        self._run, self._images, self._pytorch, self._watch = run, images, pytorch, watch
        self._signature = signature_of(self._recipe)
        self._replays = Replays(bundle, images, run.precision, reference, run.attention_in_levels, watch)
        self._first: list[Replayed] = []
        self._numbers, self._decisions = Numbers(self._recipe), Decisions(self._recipe)
        self._labels = Labels(self._recipe)

    def run(self, trial: Trial) -> Iterator[int]:
        """Runs one trial and compares its outputs; yields after each image."""
        signature, network = self._signature, self._recipe.network
        names = [f"image {index}" for index in trial.images]
        feeds = {"image": self._images[list(trial.images)]}
        feeds |= {name: np.asarray(value, np.float32) for name, value in trial.thresholds.items()}
        outputs, problem = self._outputs(feeds)
        if problem := problem or output_problem(outputs, signature, len(names), network, self._recipe.merging):
            self._numbers.broken(f"batch of {len(names)}: {problem}")
            return
        batch = []
        for position, index in enumerate(trial.images):
            maps = [outputs[f"token_map_{name}"][position] for name in signature.merges]
            masks = [outputs[name][position] for name in mask_names(network)]
            with self._watch.part("numbers"):
                batch.append(Decided(names[position], maps, self._replays(index, maps, masks), masks))
                self._numbers.compare(names[position], outputs[self._recipe.output][position], batch[-1].replayed)
            yield index
        with self._watch.part("decisions"):
            self._decisions.compare(batch, trial.plan(self._recipe.merging), counted=not trial.thresholds)
        if len(batch) == 1 and not trial.thresholds:
            self._first += [batch[0].replayed] if len(self._first) < OPERATOR_IMAGES else []
            with self._watch.part("labels"):
                self._compare_labels(feeds, outputs, batch[0].replayed)

    def _compare_labels(self, feeds: dict[str, Array], outputs: dict[str, Array], replayed: Replayed) -> None:
        """Compares the label map of one image with those of PyTorch deciding freely; `outputs` are the runtime's."""
        every = [tensor.name for tensor in self._signature.outputs]
        free = self._pytorch.own.infer(feeds, every)
        exact = free if self._pytorch.exact is self._pytorch.own else self._pytorch.exact.infer(feeds, every)
        right = exact if self._pytorch.unquantized is not None else free
        maps = (f"token_map_{name}" for name in self._signature.merges)
        decisions = [*maps, *mask_names(self._recipe.network)]
        alike = all(np.array_equal(right[name][0], outputs[name][0]) for name in decisions)
        with self._watch.part("runtime"):
            ours = self._run.infer(feeds)
        self._labels.compare(ours, free, exact, None if alike else replayed)
        if self._pytorch.unquantized is not None:
            self._labels.note_distance(ours, self._pytorch.unquantized.infer(feeds))

    def _outputs(self, feeds: dict[str, Array]) -> tuple[dict[str, Array], str | None]:
        """All outputs of the runtime, or why there are none."""
        try:
            with self._watch.part("runtime"):
                return self._run.infer(feeds, [tensor.name for tensor in self._signature.outputs]), None
        except ExecutionError as error:  # a runtime that fails is not verified
            return {}, f"the runtime failed: {error}"

    def links(self, trials: list[Trial]) -> list[Link]:
        """Links 2 to 6, when the trials have run."""
        plan, network, run = self._recipe.merging, self._recipe.network, self._run
        runs = sum(len(trial.images) for trial in trials)
        with self._watch.part("operators"):
            operators = operators_link(plan, network, self._first)
        with self._watch.part("graph"):
            graph = graph_link(self._bundle, run.executable, run.precision, run.attention_in_levels)
        decisions = (
            [self._decisions.link(runs, self._labels.count_difference)] if plan.layers or network.mask_grids else []
        )
        return [operators, graph, self._numbers.link(runs), *decisions, self._labels.link(len(self._images))]
