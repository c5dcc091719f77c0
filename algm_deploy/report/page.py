"""One self-contained HTML page about a bundle: what was deployed, what it computes, what merging costs, how fast it is.

`Report` gathers what the page shows, `templates/report.jinja` writes it. Every figure comes from the records in the
manifests; what was not run says so, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.records import DENSE_VARIANTS, Evaluation, Parity, Speed, Step
from algm_deploy.bundle.signature import threshold_defaults
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError
from algm_deploy.report import tables
from algm_deploy.report.gallery import Gallery
from algm_deploy.report.html import render
from algm_deploy.report.plans import budget_words, plan_name, told_merges
from algm_deploy.report.plots import Histogram, Scatter, Series
from algm_deploy.report.published import Published, published_beside, read_published
from algm_deploy.report.records import (
    Measured,
    baseline,
    comparable,
    joined,
    measured,
    plan_in_force,
)
from algm_deploy.report.tuning import tuning_page
from algm_deploy.runners.registry import RUNTIMES
from algm_deploy.wording import counted, dataset_title, merge_titles, variant_title


class _StepRow(NamedTuple):
    kind: type[Parity] | type[Evaluation] | type[Speed]
    title: str
    command: str


STEPS: Mapping[Step, _StepRow] = {
    "parity": _StepRow(Parity, "parity", "verify {} --runtime {}"),
    "evaluation": _StepRow(Evaluation, "mIoU", "evaluate {} --runtime {} --data FOLDER"),
    "speed": _StepRow(Speed, "speed", "bench {} --runtime {}"),
}


def write_report(bundles: Sequence[Bundle], target: Path, gallery: Gallery | None = None) -> Path:
    """Writes the page of the first bundle; the others stand beside it where their records can be compared.

    What is in `variants` inside the first bundle is added by itself.

    Raises:
        BundleError: a bundle is incomplete, or the page cannot be written.
    """
    variants = [bundles[0].path / "variants" / name for name in (*DENSE_VARIANTS, "truncated")]
    beside = [*bundles[1:], *(Bundle.open(path) for path in variants if path.is_dir())]
    page = report_page(bundles[0], beside, gallery, read_published())
    for bundle in (bundles[0], *beside):
        bundle.warn_of_failed_parity(record.runtime for record in bundle.manifest.parity)
    if not target.parent.is_dir():
        raise BundleError(f"expected a folder for the report, got {target.parent}: create it first")
    with write_atomically(target) as path:
        path.write_text(page, encoding="utf-8")
    return target


def report_page(
    bundle: Bundle, beside: Sequence[Bundle] = (), gallery: Gallery | None = None, published: Sequence[Published] = ()
) -> str:
    """The page as one HTML text."""
    report = Report(bundle, beside, published_beside(bundle.recipe, published))
    found = [tuning_page(one) for one in bundle.manifest.tunings]
    shared = {"tables": tables, "counted": counted, "told_merges": told_merges, "budget_words": budget_words}
    shared["thresholds"] = threshold_defaults(bundle.recipe.merging)
    return render("report.jinja", report=report, gallery=gallery, tuning_pages=found, **shared)


class Report:
    """What a page shows of a bundle. Records of the bundles `beside` it are compared with its own; `published` rows
    are of the same network, input and data set.
    """

    def __init__(self, bundle: Bundle, beside: Sequence[Bundle], published: Sequence[Published]) -> None:
        self.bundle, self.bundles, self.published = bundle, (bundle, *beside), published
        self.plan = plan_in_force(bundle.recipe.merging, {})
        self.parity = [row for one in self.bundles for row in measured(one, Parity)]
        self.evaluations = [row for one in self.bundles for row in measured(one, Evaluation)]
        self.speeds = [row for one in self.bundles for row in measured(one, Speed)]
        self.joined = joined(self.evaluations, self.speeds)
        self.costs = _differing(self.evaluations)
        # The recipe's own plan before other thresholds, and more images before fewer.
        self.own = sorted(
            measured(bundle, Evaluation), key=lambda row: (row.artifact.plan != self.plan, -row.record.images)
        )

    @property
    def patches(self) -> int:
        """Patches of a window: its tokens before anything merges."""
        rows, columns = self.bundle.recipe.network.grid
        return rows * columns

    def pictures(self, row: Measured[Evaluation]) -> str:
        """What an evaluation was measured on."""
        return f"{dataset_title(row.record.dataset, row.record.split)}, {counted(row.record.images, 'images')}"

    def plan_name(self, row: Measured[Any]) -> str:
        """Short name of the plan that a record was measured with."""
        return plan_name(row.artifact.plan, self.plan)

    def about(self, row: Measured[Evaluation]) -> str:
        """What an evaluation was of."""
        return f"{self.pictures(row)}, {row.runtime}, {self.plan_name(row)}"

    def group_title(self, group: Sequence[Measured[Evaluation]]) -> str:
        """What the evaluations of a comparable group have in common."""
        bundles = " and ".join(dict.fromkeys(row.bundle for row in group))
        return f"{bundles}: {self.pictures(group[0])}, {group[0].runtime}, {group[0].artifact.precision}"

    # -------------------------------------------------------------------------------------------- what was run, or not

    @cached_property
    def runtimes(self) -> list[str]:
        """All runtimes, and those that only the manifest knows."""
        manifest = self.bundle.manifest
        groups = (manifest.engines, manifest.parity, manifest.evaluations, manifest.speeds, manifest.not_run)
        return list(dict.fromkeys((*RUNTIMES, *(one.runtime for group in groups for one in group))))

    @property
    def executed(self) -> tables.Table:
        """What was executed where: a row for each runtime."""
        rows = [
            (name, _artifact(self.bundle, name), *(self._outcome(step, name) for step in STEPS))
            for name in self.runtimes
        ]
        return tables.Table(("runtime", "artifact", *(step.title for step in STEPS.values())), rows)

    def _outcome(self, step: Step, runtime: str) -> str:
        found = self.bundle.found(STEPS[step].kind, runtime)
        if found is None:
            return "not run"
        if isinstance(found, Parity):
            return "passed" if found.passed else "FAILED"
        if isinstance(found, Evaluation):
            main = next(row for row in self.own if row.runtime == runtime)
            where = f"{self.plan_name(main)}, {counted(main.record.images, 'images')}"
            return f"{tables.shown(main.record.miou_percent, 2)} % ({where})"
        return ", ".join(dict.fromkeys(one.protocol for one in self.bundle.manifest.speeds if one.runtime == runtime))

    @property
    def not_run(self) -> list[str]:
        """What has no record on a runtime, and why; backticks surround a command."""
        return [
            f"{one.title} on {runtime}: {self._noted(step, runtime) or self._command('no record yet', step, runtime)}"
            for runtime in self.runtimes
            for step, one in STEPS.items()
            if self.bundle.found(one.kind, runtime) is None
        ]

    def why_not(self, step: Step) -> str:
        """Why a step was run on no runtime; backticks surround a command."""
        noted = [f"{runtime}: {reason}" for runtime in self.runtimes if (reason := self._noted(step, runtime))]
        return "; ".join(noted) or self._command("the bundle holds no record of it yet", step, "onnxruntime-cpu")

    def _noted(self, step: Step, runtime: str) -> str:
        noted = self.bundle.manifest.not_run
        return next((one.reason for one in noted if (one.step, one.runtime) == (step, runtime)), "")

    def _command(self, state: str, step: Step, runtime: str) -> str:
        return f"{state}, `algm-deploy {STEPS[step].command.format(self.bundle.path.name, runtime)}` makes one"

    # -------------------------------------------------------------------------------------------------------- accuracy

    @property
    def miou_without_merging(self) -> float | None:
        """mIoU of the dense network on the same pictures and runtime as the first evaluation, where it was measured."""
        (group,) = (group for group in comparable(self.evaluations) if self.own[0] in group)
        dense = baseline(group)
        return None if dense is None or dense is self.own[0] else dense.record.miou_percent

    @property
    def spreads(self) -> Iterator[str]:
        """How far runtimes differ in mIoU at the same thresholds on the same pictures, in sentences."""
        groups: dict[tuple[Any, ...], list[Measured[Evaluation]]] = {}
        for row in self.own:
            one = row.record
            groups.setdefault((row.artifact, one.dataset, one.split, one.images, one.labelled_pixels), []).append(row)
        gate = self.bundle.recipe.gates.miou_drop_points
        for rows in groups.values():
            values = [row.record.miou_percent for row in rows if row.record.miou_percent is not None]
            if len(values) == len(rows) > 1:
                spread, names = max(values) - min(values), " and ".join(row.runtime for row in rows)
                verdict = "within" if spread <= gate else "beyond"
                yield f"{names} differ by {spread:.3f} points, {verdict} the {gate:g} that the recipe allows."

    # ----------------------------------------------------------------------------------------------------------- speed

    @property
    def latencies(self) -> list[Scatter]:
        """Latency against tokens, where a run tells pictures apart."""
        series = []
        for row in self.speeds:
            one, where = row.record, f"{row.runtime}, {row.bundle}"
            if one.stable and one.by_picture and one.by_picture.tokens_by_merge:
                tokens = [*one.by_picture.tokens_by_merge.values()][-1]
                points = [(x, y, "") for x, y in zip(tokens, one.by_picture.latency_ms_p50, strict=True)]
                series.append(Series(f"merged, {where}", points))
            elif one.stable and one.variant in DENSE_VARIANTS and one.latency_ms_p50 is not None:
                title = variant_title(one.variant)
                series.append(Series(f"{title}, {where}", [(self.patches, one.latency_ms_p50, title)], hollow=True))
        caption = "latency against tokens: each point is a picture, at its median; dense for all of them"
        drawn = not all(one.hollow for one in series)
        return [Scatter(caption, "tokens after the last merge", "p50 ms", series)] if drawn else []

    @property
    def runs(self) -> dict[str, list[Measured[Speed]]]:
        """Speed records by the run that timed them, where they hold its conditions."""
        runs: dict[str, list[Measured[Speed]]] = {}
        for row in self.speeds:
            if row.record.rounds is not None:
                title = f"{row.bundle}, {row.runtime}, {row.record.protocol}, batch {row.record.batch}"
                runs.setdefault(title, []).append(row)
        return runs

    # ----------------------------------------------------------------------------------------------- tokens, trade-off

    @property
    def tokens(self) -> list[Histogram]:
        """Tokens of windows: a drawing for each plan that merges, on each data set."""
        drawn: dict[tuple[Any, ...], Histogram] = {}
        for row in self.own:
            if row.artifact.plan.layers:
                found = row.record.token_histograms
                titles = merge_titles([*found.windows_by_merge])
                counts = {title: found.windows_by_merge[merge] for merge, title in titles.items()}
                caption = f"{self.about(row)}: {counted(row.record.windows, 'windows')}"
                histogram = Histogram(caption, found.token_edges, counts, tables.titled_tokens(row.record.tokens))
                drawn.setdefault((row.artifact.plan, row.record.dataset), histogram)
        return list(drawn.values())

    @cached_property
    def trade_offs(self) -> list[Scatter]:
        """Accuracy against arithmetic, and against throughput."""
        scatters = []
        known = [row for row in self.evaluations if row.record.miou_percent is not None]
        if groups := _differing([row for row in known if row.record.gmacs_per_window_mean is not None]):
            caption = "accuracy against arithmetic (multiply-adds in 10⁹); each point is a threshold"
            series = [Series(self.group_title(group), _cost_points(group)) for group in groups]
            scatters.append(Scatter(caption, "GMACs per window", "mIoU %", [*series, *self._published(groups)]))
        pairs = joined(known, [row for row in self.speeds if row.record.throughput_img_per_s and row.record.stable])
        if len({accuracy.artifact.plan for accuracy, _ in pairs}) > 1:
            scatters.append(Scatter("accuracy against throughput", "img/s", "mIoU %", _throughputs(pairs)))
        return scatters

    def _published(self, groups: Sequence[Sequence[Measured[Evaluation]]]) -> list[Series]:
        """Published points, where the measured ones are of the same data set."""
        points = [
            (row.gmacs, row.miou_percent, tables.published_name(row))
            for row in self.published
            if row.implemented and row.gmacs and row.miou_percent
        ]
        same = all(group[0].record.dataset == self.bundle.recipe.protocol.dataset for group in groups)
        return [Series("published", points, hollow=True)] if points and same else []


def _differing(rows: Sequence[Measured[Evaluation]]) -> list[list[Measured[Evaluation]]]:
    return [group for group in comparable(rows) if len({row.artifact.plan for row in group}) > 1]


def _cost_points(group: Sequence[Measured[Evaluation]]) -> list[tuple[float, float, str]]:
    plan = tables.merged_plan(group)
    return [
        (row.record.gmacs_per_window_mean or 0, row.record.miou_percent or 0, plan_name(row.artifact.plan, plan))
        for row in group
    ]


def _throughputs(pairs: Sequence[tuple[Measured[Evaluation], Measured[Speed]]]) -> list[Series]:
    plan = tables.merged_plan([accuracy for accuracy, _ in pairs])
    kinds: dict[str, list[tuple[float, float, str]]] = {}
    for accuracy, speed in pairs:
        name = f"{speed.runtime}, {speed.record.protocol}, {speed.record.device}"
        label = plan_name(accuracy.artifact.plan, plan)
        point = (speed.record.throughput_img_per_s or 0, accuracy.record.miou_percent or 0, label)
        kinds.setdefault(name, []).append(point)
    return [Series(name, points) for name, points in kinds.items()]


def _artifact(bundle: Bundle, runtime: str) -> str:
    """The file a runtime executes, as far as this bundle has one."""
    row = RUNTIMES.get(runtime)
    return (row and row.executable(bundle.files)) or "not built"
