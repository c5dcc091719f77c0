"""Links 4 to 6: what a runtime returned, held against PyTorch. Each link is a class that collects comparisons.

A link fails where something was not compared: no output, one of another shape, NaN, or token maps that are none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from algm_deploy.bundle.records import Link
from algm_deploy.bundle.signature import Signature, mask_names
from algm_deploy.parity.decisions import Cells, Ints, mask_problems
from algm_deploy.parity.merges import differing, merge_at, on_grounds, torch_maps
from algm_deploy.parity.replay import Doubles, Error, Replayed, error_of, mask_facts
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.schema import Recipe
from algm_deploy.runners.contract import Array

ERROR_FACTOR = 2.0  # a runtime may err twice as much as PyTorch in the same precision
LARGEST_FACTOR = 4.0  # the largest of a million errors scatters more than their mean
FP32_EPS = 2.0**-23


class Numbers:
    """Link 4: scores or labels equal the truth that has the runtime's own merge decisions forced.

    An image's error is held to PyTorch's on that image or to PyTorch's over all images, whichever is larger. On one
    image PyTorch's is a single draw where few numbers make all scores, as the class probabilities of an image's
    queries do: by luck it is then far smaller than rounding makes it.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._labels, self._precision = recipe.output == "labels", recipe.precision
        self._problems: list[str] = []
        self._pytorch: list[Error] = []
        self._errors: list[Error] = []
        self._maps: dict[Replayed, list[tuple[int, Array]]] = {}  # with the place in `_pytorch`
        self._abs_error = 0.0

    def broken(self, problem: str) -> None:
        """Notes outputs that cannot be compared."""
        self._problems.append(problem)

    def compare(self, image: str, output: Array, replayed: Replayed) -> None:
        """Takes in scores (K, H, W) or labels (H, W) of one image."""
        if not np.isfinite(replayed.error.largest):
            self.broken(f"{image}: PyTorch's own scores are not finite in this precision: export with fp32")
        elif not np.isfinite(output).all():
            self.broken(f"{image}: the scores hold NaN or infinity")
        elif not replayed.scale.largest:
            self.broken(f"{image}: the true scores are all zero, which no error can be measured against")
        else:
            if self._labels:
                self._maps.setdefault(replayed, []).append((len(self._pytorch), output))
            else:
                error = error_of(output - replayed.scores())
                self._errors.append(_share(error, replayed.scale))
                self._abs_error = max(self._abs_error, error.largest)
            self._pytorch.append(_share(replayed.error, replayed.scale))

    def link(self, expected: int) -> Link:
        """The outcome; `expected` images had to be compared."""
        if not len(self._pytorch) == expected > 0:
            self._problems.append(f"{len(self._pytorch)} of {expected} images could be compared")
        within, measured, gate, facts = (self._of_labels if self._labels else self._of_scores)()
        distance = float(np.mean([own.rms for own in self._pytorch])) if self._pytorch else 0.0
        if self._precision == "fp8":
            measured += f"; PyTorch in fp8 is {_percent(distance, 2)} % from fp64"
        facts |= {"pytorch_error_mean": distance, "images_compared": len(self._pytorch), "problems": self._problems}
        return Link(
            number=4,
            name="numbers",
            passed=within and not self._problems,
            measured="; ".join(self._problems[:1]) or measured,
            gate=gate,
            facts=facts,
        )

    def _allowed(self) -> list[Error]:
        """Image by image, what PyTorch errs."""
        if not self._pytorch:
            return []
        usual = np.sqrt(np.mean(np.square(self._pytorch), 0))
        return [Error(*np.maximum(own, usual)) for own in self._pytorch]

    def _of_scores(self) -> tuple[bool, str, str, dict[str, Any]]:
        """Whether all scores are near enough, what was measured, the gate, and facts."""
        ratios = (np.array(self._errors) / (np.array(self._allowed()) + FP32_EPS)).reshape(-1, 2)
        usual, peak = ratios.max(0, initial=0)
        measured = f"error {usual:.2f} x PyTorch's, largest {self._abs_error:.0e}"
        if peak > LARGEST_FACTOR:
            measured += f", {peak:.1f} x PyTorch's"
        return (
            bool(usual <= ERROR_FACTOR and peak <= LARGEST_FACTOR),
            measured,
            f"{ERROR_FACTOR:g} x, largest {LARGEST_FACTOR:g} x PyTorch's",
            {
                "error_ratio_max": float(usual),
                "largest_error_ratio_max": float(peak),
                "abs_error_max": self._abs_error,
            },
        )

    def _of_labels(self) -> tuple[bool, str, str, dict[str, Any]]:
        """The same of label maps."""
        wrong, allowed = 0, self._allowed()
        for replayed, maps in self._maps.items():
            truth = replayed.scores()
            for place, labels in maps:
                noise = (2 * ERROR_FACTOR * allowed[place].largest + FP32_EPS) * replayed.scale.largest
                wrong += unexplained_labels(labels, truth, noise)
        return wrong == 0, f"{wrong} labels beyond noise", "0", {"labels_beyond_noise_max": wrong}


def _share(error: Error, scale: Error) -> Error:
    """An error relative to the size of what errs."""
    return Error(error.rms / scale.rms, error.largest / scale.largest)


def _percent(share: float, digits: int) -> str:
    """For people: a gate that PyTorch's own error widens beyond everything lets everything pass, and no more."""
    rounded = f"{100 * min(max(share, 0.0), 1.0):.{digits}g}"
    return f"{float(rounded):g}"  # two digits of a hundred are 1e+02


class Decided(NamedTuple):
    """One image of a batch.

    Its name, the runtime's token maps (N,) by merge, the replay of its decisions, and the cells (Q, S) that its queries
    chose, by layer.
    """

    image: str
    maps: list[Ints]
    replayed: Replayed
    masks: Sequence[Cells] = ()


class Counts(NamedTuple):
    """One merge, or choice of cells, of one image.

    Whether the runtime's is another than PyTorch's, how many decisions there are, and how many of them the runtime, and
    PyTorch in the bundle's precision, made otherwise than fp64.
    """

    unequal: bool
    decisions: int
    others: int
    own: int


class _Shares(NamedTuple):
    """Of all decisions of a kind.

    How many there are, how many the runtime and PyTorch made otherwise than fp64, how many of them the runtime may, and
    the share that this is.
    """

    decisions: int
    others: int
    own: int
    limit: int
    allowed: float

    @property
    def share(self) -> float:
        return self.others / self.decisions if self.decisions else 1.0

    @property
    def own_share(self) -> float:
        return self.own / self.decisions if self.decisions else 1.0


class Decisions:
    """Link 5: decisions equal PyTorch's on the same tokens, or noise explains the difference.

    Images that decide together are compared together. Behind a mismatch the runtime's decision is replayed, so that the
    next merge is compared on equal grounds.

    Noise excuses a decision, not a runtime that leans on it: the share of decisions that are otherwise than in fp64 is
    held to the recipe's gate, or to twice the share of PyTorch itself in the bundle's precision, in each image rounded
    up to whole decisions. It is a share of decisions (a window merges, a token joins another), not of images: an image
    holds hundreds to thousands, so that one image is enough to tell, and a large one does not fail for a single tie.
    Where a merge decides twice, as EViT does, the second decision is compared on the grounds of the first, too.

    The same holds for the cells that queries choose by their masks. Those are counted apart: there are a thousand times
    as many, which would hide the merges.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._network, self._gate = recipe.network, recipe.gates.excused_decisions
        self._images: list[tuple[Counts, ...]] = []  # merge by merge
        self._masks: list[tuple[Counts, ...]] = []  # layer by layer
        self._compared = 0
        self._unexcused: list[str] = []

    def compare(self, batch: Sequence[Decided], plan: MergePlan, counted: bool) -> None:
        """Compares the decisions of a batch. `plan` has the thresholds the runtime ran with; the shares take in what
        is `counted`."""
        for group in [[one] for one in batch] if plan.batch == "per_image" else [list(batch)]:
            counts = self._group(group, plan)
            self._compared += len(group)
            masks = [self._chosen(one) for one in group]
            if counted:
                self._images += zip(*counts, strict=True) if counts else [()] * len(group)
                self._masks += masks

    def _group(self, group: list[Decided], plan: MergePlan) -> list[list[Counts]]:
        """Of images that decide together: what differs, by merge and image, up to a merge that cannot be compared."""
        counts: list[list[Counts]] = []
        replays = [one.replayed for one in group]
        for stage in range(len(plan.layers)):
            if plan.batch == "batch_min" and len({int(one.maps[stage].max()) for one in group}) > 1:
                self._unexcused.append(f"{group[0].image}: images that decide together kept unequal token counts")
                counts.append([Counts(True, 0, 0, 0)] * len(group))
                break
            expected = torch_maps([replay.baseline[stage] for replay in replays], stage, plan, self._network)
            exact = torch_maps([replay.truth[stage] for replay in replays], stage, plan, self._network)
            maps = zip(group, expected, exact, strict=True)
            counts.append([self._counted(one, stage, plan, e, x) for one, e, x in maps])
            if any(count.unequal for count in counts[-1]):
                problems = self._problems(stage, group, plan)
                for one, count, found in zip(group, counts[-1], problems, strict=True):
                    self._unexcused += [f"{one.image}: {problem}" for problem in found if count.unequal]
        return counts

    def _counted(self, one: Decided, stage: int, plan: MergePlan, expected: Ints, exact: Ints) -> Counts:
        ours, place = one.maps[stage], (stage, plan, self._network)
        truth = one.replayed.truth[stage]
        (others, decisions), (own, _) = (
            differing(truth.map[0].numpy(), made, on_grounds(truth, exact, made, *place), *place)
            for made in (ours, expected)
        )
        return Counts(not np.array_equal(ours, expected), decisions, others, own)

    def _chosen(self, one: Decided) -> tuple[Counts, ...]:
        """What differs in the cells that queries chose, layer by layer."""
        counts = []
        for layer, (chosen, facts) in enumerate(zip(one.masks, mask_facts(one.replayed), strict=True), 1):
            ours, exact = chosen > 0, facts.masks >= 0
            unequal = not np.array_equal(ours, facts.own)
            counts.append(Counts(unequal, ours.size, int((ours != exact).sum()), int((facts.own != exact).sum())))
            if unequal:
                self._unexcused += [f"{one.image}: {problem}" for problem in mask_problems(facts, chosen, layer)]
        return tuple(counts)

    def _shares(self, images: Sequence[tuple[Counts, ...]]) -> _Shares:
        decisions, others, own = (sum(count[i] for image in images for count in image) for i in (1, 2, 3))
        allowed = max(self._gate, ERROR_FACTOR * (own / decisions if decisions else 1.0))
        # Whole decisions: of an image with fewer than a hundred, one is more than 1 %.
        limit = sum(math.ceil(allowed * sum(count.decisions for count in image)) for image in images)
        return _Shares(decisions, others, own, limit, allowed)

    def _problems(self, stage: int, group: list[Decided], plan: MergePlan) -> list[list[str]]:
        network, replays, maps = self._network, [one.replayed for one in group], [one.maps[stage] for one in group]
        merge = merge_at(plan, stage)
        facts = merge.facts(replays, stage, plan, network)
        before = [replay.truth[stage].map[0].numpy() for replay in replays]
        return [merge.problems(f, b, m, plan, network) for f, b, m in zip(facts, before, maps, strict=True)]

    def link(self, expected: int, count_difference: int | None) -> Link:
        """The outcome; `expected` images had to be compared. The largest difference of token counts to PyTorch that
        decides freely is for information."""
        runs, merges = len(self._images), [count for image in self._images for count in image]
        equal = sum(
            not any(count.unequal for count in (*image, *masks))
            for image, masks in zip(self._images, self._masks, strict=True)
        )
        of_merges, of_masks = self._shares(self._images), self._shares(self._masks)
        kinds = [(of_merges, "decisions")] if merges or not of_masks.decisions else []
        kinds += [(of_masks, "cells of masks")] if of_masks.decisions else []
        problems = self._unexcused.copy()
        if not self._compared == expected > 0:
            problems.append(f"{self._compared} of {expected} images could be compared")
        excused = f"{equal} of {runs} images equal, {runs - equal} excused by noise"
        against_truth = (
            ", ".join(f"{_percent(found.share, 2)} % of {kind}" for found, kind in kinds) + " not as in fp64"
        )
        return Link(
            number=5,
            name="decisions",
            passed=not problems and all(found.others <= found.limit for found, _ in kinds),
            measured=problems[0] if problems else f"{excused}, {against_truth}",
            gate=", ".join(["0 unexcused", *(f"{_percent(found.allowed, 2)} % of {kind}" for found, kind in kinds)]),
            facts={
                "images": runs,
                "images_equal": equal,
                "merges_equal_share": 1 - float(np.mean([count.unequal for count in merges])) if merges else None,
                **_told(of_merges),
                **({f"mask_{key}": value for key, value in _told(of_masks).items()} if of_masks.decisions else {}),
                "unexcused": problems,
                "token_count_difference_max": count_difference,
            },
        )


def _told(found: _Shares) -> dict[str, float]:
    return {
        "decisions": found.decisions,
        "decisions_otherwise_than_fp64": found.others,
        "decisions_otherwise_than_fp64_allowed": found.limit,
        "share_otherwise_than_fp64": found.share,
        "share_pytorch_decides_otherwise_than_fp64": found.own_share,
    }


class Labels:
    """Link 6: label maps equal those of PyTorch deciding freely, as users call a runtime: without token maps.

    PyTorch runs in fp32, for int8 with the same products quantised. In 16 bits and in int8 a runtime may, beside the
    recipe's gate, differ from it twice as often as PyTorch itself does in the same precision, which takes in what its
    decisions change. In fp32 nothing does, and a single tie may change more pixels than the gate allows; so where a
    runtime decided otherwise, which link 5 has to excuse, its labels are held to those of PyTorch under the same
    decisions, and likewise in int8.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._agreement: list[float] = []
        self._baseline: list[float] = []
        self._free: list[float] = []
        self._otherwise = 0
        self._distances: list[float] = []
        self._count_differences: list[int] = []

    @property
    def count_difference(self) -> int | None:
        """Largest difference of token counts to PyTorch; None where nothing was compared."""
        return max(self._count_differences, default=None)

    def compare(
        self,
        ours: Mapping[str, Array],
        free: Mapping[str, Array],
        exact: Mapping[str, Array],
        replayed: Replayed | None,
    ) -> None:
        """Compares the outputs for one image with those of PyTorch in the bundle's precision and in fp32.

        `replayed`, given where the runtime's decisions are other than PyTorch's, has them forced.
        """
        labels = [o["labels"] if "labels" in o else o["scores"].argmax(1) for o in (ours, free, exact)]
        self._free.append(float((labels[0] == labels[2]).mean()))
        if replayed is not None and self._recipe.precision in ("fp32", "int8"):
            self._otherwise += 1
            self._agreement.append(float((labels[0][0] == replayed.scores().argmax(0)).mean()))
        else:
            self._agreement.append(self._free[-1])
        self._baseline.append(float((labels[1] == labels[2]).mean()))
        difference = np.abs(ours["token_counts"] - free["token_counts"])
        self._count_differences.append(int(difference.max(initial=0)))

    def note_distance(self, ours: Mapping[str, Array], unquantized: Mapping[str, Array]) -> None:
        """For information: how many labels of an int8 bundle are those of the same network in fp32."""
        labels = [o["labels"] if "labels" in o else o["scores"].argmax(1) for o in (ours, unquantized)]
        self._distances.append(float((labels[0] == labels[1]).mean()))

    def link(self, expected: int) -> Link:
        """The outcome; `expected` images had to be compared."""
        complete = len(self._agreement) == expected > 0
        mean, worst = (float(f(self._agreement)) if self._agreement else 0.0 for f in (np.mean, np.min))
        baseline = float(np.mean(self._baseline)) if self._baseline else 1.0
        gate = max(
            self._recipe.gates.label_agreement - ERROR_FACTOR * (1 - baseline), 0.0
        )  # a share, as it is compared
        measured = f"{100 * mean:.3f} % of pixels equal, worst image {100 * worst:.2f} %"
        if self._otherwise:
            measured += f"; {100 * float(np.mean(self._free)):.3f} % deciding freely"
        if self._distances:
            measured += f"; {100 * float(np.mean(self._distances)):.2f} % as in fp32"
        beside = (
            ""
            if self._recipe.precision == "fp32"
            else f" (PyTorch in {self._recipe.precision}: {100 * baseline:.3f} %)"
        )
        return Link(
            number=6,
            name="labels",
            passed=complete and mean >= gate,
            measured=measured if complete else f"{len(self._agreement)} of {expected} images could be compared",
            gate=f"{_percent(gate, 4)} %{beside}",
            facts={
                "label_agreement_mean": mean,
                "label_agreement_min": worst,
                "label_agreement_free_mean": float(np.mean(self._free)) if self._free else 0.0,
                "images_decided_otherwise": self._otherwise,
                "label_agreement_pytorch_mean": baseline,
                "label_agreement_required": gate,
                "images_compared": len(self._agreement),
                **({"label_agreement_fp32_mean": float(np.mean(self._distances))} if self._distances else {}),
            },
        )


def output_problem(
    outputs: Mapping[str, Array], signature: Signature, images: int, network: Network, plan: MergePlan
) -> str | None:
    """Why the outputs for a batch of `images` cannot be compared, or contradict each other; None where they can.

    `signature` names the outputs that were asked for.
    """
    for tensor in signature.outputs:
        found = outputs.get(tensor.name)
        expected = f"{tensor.dtype} {(images, *tensor.shape[1:])}"
        came = "nothing" if found is None else f"{found.dtype} {found.shape}"
        if came != expected:
            return f"expected {tensor.name} {expected}, got {came}"
    for name in mask_names(network):
        if outputs[name].max() > 1:
            return f"expected zeros and ones in {name}, got {outputs[name].max()}"
    maps = [outputs[f"token_map_{name}"] for name in signature.merges]
    return merge_at(plan, 0).maps_problem(maps, outputs["token_counts"], plan, network) if plan.layers else None


def unexplained_labels(labels: Array, scores: Doubles, noise: float) -> int:
    """Pixels whose label scores clearly less than the best class of the truth (K, H, W), or is no class."""
    if labels.size and (labels.min() < 0 or labels.max() >= len(scores)):
        return int(((labels < 0) | (labels >= len(scores))).sum())
    chosen = np.take_along_axis(scores, labels[None].astype(np.int64), axis=0)[0]
    return int((scores.max(0) - chosen > noise).sum())
