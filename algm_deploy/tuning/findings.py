"""What a tuning run found: a recipe or none, and the evidence as sentences, tables and plots in plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import PlanError
from algm_deploy.evaluation.datasets import Dataset
from algm_deploy.evaluation.evaluate import merge_names
from algm_deploy.recipe.schema import MergePlan, Recipe
from algm_deploy.tuning.attention import AttentionMass, measure_attention
from algm_deploy.tuning.objective import (
    KNOBS,
    SPEEDUP,
    STABLE,
    THROUGHPUT,
    Evaluate,
    Goal,
    Record,
    Tuned,
    point_facts,
    tune_threshold,
    tuned_recipe,
    worst_slice,
)
from algm_deploy.tuning.positions import EvaluatePlan, earliest_gbm
from algm_deploy.tuning.search import Point, miou_of
from algm_deploy.tuning.similarity import ALL, WINDOWS, Groups, Picture, Similarity, measure_similarity
from algm_deploy.wording import counted, dataset_name, merge_title, shown_merges

DENSE, RECIPE, CHOSEN, NEAREST = "dense", "recipe", "chosen", "nearest"

Reference = tuple[str, Callable[[Dataset], Record]]
"""Name of what a goal's mIoU was taken from, and how to evaluate it on other data."""


class Table(NamedTuple):
    """Rows of text under a header."""

    caption: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Plot(NamedTuple):
    """Series of points (x, y, label) by name."""

    caption: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float, str]]]


class Counts(NamedTuple):
    """How many windows have how many tokens after each merge: counts between `edges`, and means, by merge."""

    caption: str
    edges: Sequence[float]
    windows: Mapping[str, Sequence[int]]
    means: Mapping[str, float]


class Page(NamedTuple):
    """What people read of a finding; JSON-able, so that a report can show it from the manifest."""

    lines: Sequence[str]
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    counts: Sequence[Counts] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Page:
        """The page that `Finding.stored` put into a manifest."""
        parts = record["page"]
        return cls(
            parts["lines"],
            [Table(*table) for table in parts["tables"]],
            [Plot(*plot) for plot in parts["plots"]],
            [Counts(*counts) for counts in parts["counts"]],
        )


@dataclass(frozen=True)
class Finding:
    """The outcome of a tuning run.

    `recipe` is None where there is none to write; `reached` tells whether that is because no candidate reached the
    goal. `record` holds the figures. `thresholds` are the name of the threshold that was searched and up to three of
    its values, of which pictures show most.
    """

    title: str
    page: Page
    record: Mapping[str, Any]
    recipe: Recipe | None = None
    reached: bool = True
    thresholds: tuple[str, tuple[float, ...]] | None = None

    def stored(self) -> dict[str, Any]:
        """What the manifest keeps, JSON-able."""
        pictured = {"name": self.thresholds[0], "values": list(self.thresholds[1])} if self.thresholds else None
        return {**self.record, "pictured": pictured, "page": self.page._asdict()}


# ---------------------------------------------------------------------------------------------------------------- rule


def find_by_rule(
    bundle: Bundle, pictures: Sequence[Picture], layers: Sequence[int], source: str, progress: bool = True
) -> Finding:
    """CLAP's threshold by the published rule; `source` names the pictures. Errors as `measure_similarity`."""
    found = measure_similarity(bundle, pictures, layers, progress)
    pairs = sum(groups[ALL].count for groups in found.layers.values())
    blocks = f"block {layers[0]}" if len(layers) == 1 else f"blocks {layers[0]} to {layers[-1]}"
    line = (
        f"clap_threshold {found.threshold:.4f} = mean + standard deviation of the cosine similarity of {pairs} pairs "
        f"of patches after the attention of {blocks}, dense network in fp32, {source}, "
        f"{counted(found.images, 'images')}"
    )
    tables = [_layer_table(found)]
    plots = [_layer_plot(found)] if len(layers) > 1 else []
    if "global same" in found.layers[layers[0]]:
        tables.append(_class_table(found))
        plots += _class_plots(found)
    recipe = tuned_recipe(bundle.recipe, "tau", round(found.threshold, 4))
    return Finding("Threshold by the rule", Page((line,), tables, plots), found.record(), recipe)


def _layer_table(found: Similarity) -> Table:
    rows = [
        (str(layer), str(all_.count), f"{all_.mean:.4f}", f"{all_.std:.4f}", f"{all_.mean + all_.std:.4f}")
        for layer, all_ in ((layer, groups[ALL]) for layer, groups in found.layers.items())
    ]
    return Table(
        "cosine similarity of all pairs of patches of a window, after attention",
        ("block", "pairs", "mean", "standard deviation", "mean + standard deviation"),
        rows,
    )


def _layer_plot(found: Similarity) -> Plot:
    means = [(float(layer), groups[ALL].mean, "") for layer, groups in found.layers.items()]
    rule = [(float(layer), groups[ALL].mean + groups[ALL].std, "") for layer, groups in found.layers.items()]
    series = {"mean": means, "mean + standard deviation": rule}
    return Plot("similarity of all pairs of patches of a window by block", "block", "cosine similarity", series)


def _class_table(found: Similarity) -> Table:
    scopes = _scopes(found)
    rows = [
        (str(layer), *(f"{_mean(groups, scope, 'same')} / {_mean(groups, scope, 'other')}" for scope in scopes))
        for layer, groups in found.layers.items()
    ]
    return Table(
        "mean similarity of patches of one class / of two classes, within windows of so many patches and in the whole",
        ("block", *scopes),
        rows,
    )


def _class_plots(found: Similarity) -> list[Plot]:
    first, groups = next(iter(found.layers.items()))
    sides = [side for side in WINDOWS if f"{side}x{side} same" in groups]
    by_side = {
        f"{kind} class": [
            (float(side), pairs.mean, "") for side in sides if (pairs := groups[f"{side}x{side} {kind}"]).count
        ]
        for kind in ("same", "other")
    }
    plots = [Plot(f"within windows, after block {first}", "patches a side", "cosine similarity", by_side)]
    if len(found.layers) > 1:
        by_layer = {
            f"{scope}, {kind} class": [
                (float(layer), pairs.mean, "")
                for layer, groups in found.layers.items()
                if (pairs := groups[f"{scope} {kind}"]).count
            ]
            for scope in ("2x2", "global")
            for kind in ("same", "other")
        }
        plots.append(Plot("by block, within windows of 2x2 and in the whole", "block", "cosine similarity", by_layer))
    return [plot._replace(series={name: points for name, points in plot.series.items() if points}) for plot in plots]


def _scopes(found: Similarity) -> list[str]:
    names = next(iter(found.layers.values()))
    windows = [name.removesuffix(" same") for name in names if name.endswith(" same")]
    return sorted(windows, key=lambda scope: (scope == "global", scope))


def _mean(groups: Groups, scope: str, kind: str) -> str:
    pairs = groups[f"{scope} {kind}"]
    return f"{pairs.mean:.3f}" if pairs.count else "-"


# ----------------------------------------------------------------------------------------------------------- attention


def find_attention(bundle: Bundle, plan: MergePlan, dataset: Dataset, progress: bool = True) -> Finding:
    """Where attention goes, class by class, without and with merging.

    Errors as `measure_attention`, and PlanError where no block is behind the last merge.
    """
    blocks = slice(max(plan.layers, default=0), None)
    if blocks.start == bundle.recipe.network.encoder_depth:
        raise PlanError(f"expected a block behind the last merge in {blocks.start}, there is none to look at")
    found = measure_attention(bundle, plan, dataset, progress)
    clap = f"; CLAP threshold {plan.clap_threshold:g}" if plan.clap_layers else ""
    spread = found.classes_dense[blocks].mean(), found.classes_merged[blocks].mean()
    lines = (
        f"behind the last merge attention is spread over {spread[0]:.2f} classes without merging and {spread[1]:.2f} "
        f"with it (the exponential of its entropy, mean of {counted(found.windows, 'windows')} and of blocks "
        f"{blocks.start + 1} to {len(found.dense)}){clap}",
        f"{dataset.title}, {counted(len(dataset.samples), 'images')}, PyTorch in fp32",
    )
    numbers = [float(block) for block in range(1, len(found.dense) + 1)]
    series = {
        name: [(block, float(value), "") for block, value in zip(numbers, values, strict=True)]
        for name, values in (("without merging", found.classes_dense), ("with merging", found.classes_merged))
    }
    plot = Plot("number of classes that attention is spread over, by block", "block", "classes", series)
    page = Page(lines, [_attention_table(found, blocks)], [plot])
    record = {"plan": asdict(plan), **_where_facts(dataset), **found.record()}
    return Finding("Attention by class", page, record)


def _attention_table(found: AttentionMass, blocks: slice) -> Table:
    dense, merged = found.dense[blocks].mean(0), found.merged[blocks].mean(0)
    rows = [
        (
            name,
            *(f"{100 * part[index]:.2f}" for part in (found.patches, found.tokens, dense, merged)),
            f"{merged[index] / dense[index] - 1:+.0%}" if dense[index] else "-",
        )
        for name, index in sorted(zip(found.class_names, range(len(dense)), strict=True), key=lambda c: -dense[c[1]])
        if found.patches[index]
    ]
    header = ("class", "patches %", "tokens left %", "attention % dense", "attention % merged", "change")
    return Table("shares of the classes; attention in the blocks behind the last merge", header, rows)


def _where_facts(dataset: Dataset) -> dict[str, Any]:
    return {"dataset": dataset.name, "split": dataset.split, "images": len(dataset.samples)}


# ----------------------------------------------------------------------------------------------------------- threshold


def find_threshold(
    recipe: Recipe,
    knob: str,
    goal: Goal,
    candidates: Sequence[float],
    evaluate: Evaluate,
    tuning: Dataset,
    held_out: Dataset,
    reference: Reference | None = None,
    whole: bool = False,
) -> Finding:
    """A threshold chosen on `tuning`, reported on `held_out`.

    `reference` is what the goal was taken from, where that is neither the dense network nor a number. `whole` measures
    every candidate, on both parts, instead of as many as it takes to choose. Errors as `tune_threshold`.
    """
    name, plan = KNOBS[knob], recipe.merging
    tuned = tune_threshold(plan, knob, goal, candidates, evaluate, tuning, whole)
    shown = tuned.chosen or tuned.nearest
    current = plan.clap_threshold if knob == "tau" else plan.gbm_threshold
    held = {
        DENSE: _dense(evaluate(held_out, None)),
        **_referred(reference, held_out),
        f"{RECIPE} ({current:g})": evaluate(held_out, {name: current}),
        f"{_state(tuned)} ({shown.value:g})": evaluate(held_out, {name: shown.value}),
    }
    points = [Point(p.value, evaluate(held_out, {name: p.value})) for p in tuned.points] if whole else []
    chosen = tuned_recipe(recipe, knob, shown.value) if tuned.chosen else None
    title = f"{'CLAP' if knob == 'tau' else 'GBM'} threshold, aim: {goal.aim}"
    outcome = _Outcome(name, tuned, _dense(evaluate(tuning, None)), held, points, plan)
    return _finding(title, outcome, chosen, (name, _three(tuned)))


def find_positions(
    evaluate_plan: EvaluatePlan,
    recipe: Recipe,
    count: int,
    goal: Goal,
    tuning: Dataset,
    held_out: Dataset,
    reference: Reference | None = None,
) -> Finding:
    """The earliest block for GBM, then the earliest one for a second, ...: `count` in all. Errors as `earliest_gbm`."""
    layers: tuple[int, ...] = ()
    while True:
        tuned = earliest_gbm(evaluate_plan, recipe.merging, recipe.network.encoder_depth, goal, tuning, layers)
        layers = (*layers, int((tuned.chosen or tuned.nearest).value))
        if tuned.chosen is None or len(layers) == count:
            break
    plan = replace(recipe.merging, gbm_layers=layers)
    dense = replace(plan, clap_layers=(), gbm_layers=())
    held = {
        DENSE: evaluate_plan(dense, held_out),
        **_referred(reference, held_out),
        f"{RECIPE} ({_layers(recipe.merging.gbm_layers)})": evaluate_plan(recipe.merging, held_out),
        f"{_state(tuned)} ({_layers(layers)})": evaluate_plan(plan, held_out),
    }
    chosen = replace(recipe, merging=plan) if tuned.chosen else None
    name = f"GBM block behind {_layers(layers[:-1])}" if layers[:-1] else "GBM block"
    outcome = _Outcome(name, tuned, evaluate_plan(dense, tuning), held, [], plan)
    return _finding(f"GBM in block {_layers(layers)}", outcome, chosen)


@dataclass(frozen=True)
class _Outcome:
    """What was measured: on the tuning data `tuned` and `dense`, on others `held` by name and maybe every candidate."""

    knob: str
    tuned: Tuned
    dense: Record
    held: Mapping[str, Record]
    held_points: Sequence[Point]
    plan: MergePlan

    @property
    def held_dense(self) -> Record:
        return self.held[DENSE]


def _finding(
    title: str, outcome: _Outcome, recipe: Recipe | None, thresholds: tuple[str, tuple[float, ...]] | None = None
) -> Finding:
    knob, tuned, dense, held = outcome.knob, outcome.tuned, outcome.dense, outcome.held
    lines = (_verdict(knob, tuned), _where("tuned on", dense), _held_out_line(outcome), *_unsteady(tuned))
    tables = [_point_table(outcome, tuned.points, dense), _held_out_table(held)]
    record = {
        **tuned.record(),
        "tuned_on": _facts(dense),
        "held_out": {name: {**_facts(one), "slices": _slices(one)} for name, one in held.items()},
    }
    if outcome.held_points:
        tables.insert(1, _point_table(outcome, outcome.held_points, outcome.held_dense, "held out, "))
        record["held_out_points"] = [{"value": p.value, **point_facts(p.record)} for p in outcome.held_points]
    marked = (tuned.chosen or tuned.nearest).record
    page = Page(lines, tables, [*_plots(outcome), *_slice_plots(outcome)], [_counts(marked)])
    return Finding(title, page, record, recipe, tuned.chosen is not None, thresholds)


def _referred(reference: Reference | None, dataset: Dataset) -> dict[str, Record]:
    return {f"reference ({reference[0]})": reference[1](dataset)} if reference else {}


def _three(tuned: Tuned) -> tuple[float, ...]:
    """The value that merges most, the one that is marked, and the one that merges least, or one between."""
    values = [point.value for point in tuned.points]
    found = {values[0], (tuned.chosen or tuned.nearest).value, values[-1]}
    return tuple(sorted(found if len(found) > 2 else found | {values[len(values) // 2]}))


def _verdict(knob: str, tuned: Tuned) -> str:
    if tuned.chosen is None:
        return f"no {knob} qualifies to {tuned.goal}; nearest: {tuned.nearest.value:g} with {_figures(tuned.nearest)}"
    line = f"{knob} {tuned.chosen.value:g} to {tuned.goal}: {_figures(tuned.chosen)}"
    return line + (_exceptions(tuned, tuned.chosen) if tuned.goal.aim == "reference" else "")


def _exceptions(tuned: Tuned, chosen: Point) -> str:
    """Measured candidates on the wrong side of the chosen one, where accuracy does not simply rise."""
    alone = [f"{p.value:g}" for p in tuned.points if p.value < chosen.value and tuned.goal.meets(p)]
    missing = [f"{p.value:g}" for p in tuned.points if p.value > chosen.value and not tuned.goal.meets(p)]
    below = f"; {', '.join(alone)} would qualify alone, but a larger value between does not" if alone else ""
    above = f"; {', '.join(missing)} would not qualify, although larger" if missing else ""
    return below + above


def _where(verb: str, record: Record) -> str:
    return f"{_part(verb, record)}: dense {miou_of(record):.2f} %"


def _held_out_line(outcome: _Outcome) -> str:
    """How the choice holds on the data it was not made on, beside where it was."""
    dense, *_, chosen = outcome.held.values()
    name, change = worst_slice(dense, chosen)
    marked = outcome.tuned.chosen or outcome.tuned.nearest
    there, here = miou_of(chosen) - miou_of(dense), marked.miou_percent - miou_of(outcome.dense)
    return (
        f"{_where('held out', dense)}, {_state(outcome.tuned)} {miou_of(chosen):.2f} % ({there:+.2f} points, "
        f"{here:+.2f} where it was tuned); the weakest slice: {name} ({change:+.2f} points)"
    )


def _unsteady(tuned: Tuned) -> list[str]:
    shaky = [f"{point.value:g}" for point in tuned.points if not point.record.get(STABLE, True)]
    return [f"times were not steady at {', '.join(shaky)}: tune on a device that does nothing else"] if shaky else []


def _figures(point: Point) -> str:
    gmacs = "" if point.gmacs is None else f", {point.gmacs:.2f} GMACs per window"
    speed = f", {point.record[THROUGHPUT]:.1f} img/s" if THROUGHPUT in point.record else ""
    return f"mIoU {point.miou_percent:.2f} %{gmacs}{speed}"


def _state(tuned: Tuned) -> str:
    return CHOSEN if tuned.chosen else NEAREST


def _layers(layers: Sequence[int]) -> str:
    return " and ".join(map(str, layers)) or "none"


def _point_table(outcome: _Outcome, points: Sequence[Point], dense: Record, what: str = "") -> Table:
    """A row for each point: mIoU as a whole and in each of several slices, its cost, and which one is marked."""
    tuned, names = outcome.tuned, shown_merges(merge_names(outcome.plan))
    tokens = {f"tokens after {merge_title(name)}": f"tokens_after_{name}_mean" for name in names}
    columns = {"GMACs": ("gmacs_per_window_mean", 2), **{name: (key, 0) for name, key in tokens.items()}}
    if any(THROUGHPUT in point.record for point in points):
        columns |= {"img/s": (THROUGHPUT, 1), "times as fast": (SPEEDUP, 2)}
    slices = [name for name in dense["slices"] if len(dense["slices"]) > 1]
    marked = (tuned.chosen or tuned.nearest).value
    named = [(f"{p.value:g}", p.record, _state(tuned) if p.value == marked else "") for p in points]
    without_tokens = {key: value for key, value in dense.items() if key not in tokens.values()}
    rows = [
        (
            name,
            mark,
            f"{miou_of(record):.2f}",
            f"{miou_of(record) - miou_of(dense):+.2f}",
            *(_shown(record["slices"][part]["miou_percent"], 2) for part in slices),
            *(_shown(record.get(key), digits) for key, digits in columns.values()),
        )
        for name, record, mark in (*named, (DENSE, without_tokens, ""))
    ]
    caption = (
        f"{dataset_name(dense)}, {counted(dense['images'], 'images')}: {what}every measured candidate, with tokens "
        "and multiply-adds in 10^9 of a window"
    )
    return Table(caption, (outcome.knob, "", "mIoU %", "to dense", *slices, *columns), rows)


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _held_out_table(held: Mapping[str, Record]) -> Table:
    dense = next(iter(held.values()))
    parts: dict[str, Callable[[Record], Record]] = {"all": lambda record: record}
    if len(dense["slices"]) > 1:
        parts |= {name: lambda record, name=name: record["slices"][name] for name in dense["slices"]}
    rows = [
        (
            name,
            str(part(dense)["images"]),
            *(
                _with_change(part(one)["miou_percent"], part(dense)["miou_percent"], one is dense)
                for one in held.values()
            ),
        )
        for name, part in parts.items()
    ]
    caption = f"{dataset_name(dense)}, held out: mIoU % and the difference to dense in points"
    return Table(caption, ("slice", "images", *held), rows)


def _with_change(value: float | None, base: float | None, is_base: bool) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if is_base or base is None else f"{value:.2f} ({value - base:+.2f})"


def _plots(outcome: _Outcome) -> Iterator[Plot]:
    """Accuracy against what it costs and against the knob, on the tuning data and, where measured, on the others."""
    knob, tuned = outcome.knob, outcome.tuned
    marked = tuned.chosen or tuned.nearest
    here, there = _part("tuned on", outcome.dense), _part("held out", outcome.held_dense)
    if outcome.dense["gmacs_per_window_mean"] is not None and marked.gmacs is not None:
        held = [_cost_point(one) for one in (*(p.record for p in outcome.held_points), outcome.held_dense)]
        series = {
            here: [*_labelled(tuned.points, marked), _cost_point(outcome.dense, DENSE)],
            there: held if outcome.held_points else [],
            _state(tuned): [_cost_point(marked.record, f"{marked.value:g}")],
        }
        yield _plot("accuracy against arithmetic", "GMACs per window", series)
    series = {
        here: [(p.value, p.miou_percent, "") for p in tuned.points],
        there: [(p.value, p.miou_percent, "") for p in outcome.held_points],
        _state(tuned): [(marked.value, marked.miou_percent, f"{marked.value:g}")],
    }
    yield _plot(f"accuracy by {knob}", knob, series)
    timed = [p for p in tuned.points if THROUGHPUT in p.record]
    if timed:
        points = [(float(p.record[THROUGHPUT]), p.miou_percent, f"{p.value:g}" if p is marked else "") for p in timed]
        yield _plot("accuracy against throughput", "img/s", {here: points})


def _cost_point(record: Record, label: str = "") -> tuple[float, float, str]:
    return record["gmacs_per_window_mean"], miou_of(record), label


def _part(verb: str, record: Record) -> str:
    return f"{verb} {dataset_name(record)}, {counted(record['images'], 'images')}"


def _plot(caption: str, x_label: str, series: Mapping[str, Sequence[tuple[float, float, str]]]) -> Plot:
    return Plot(caption, x_label, "mIoU %", {name: points for name, points in series.items() if points})


def _slice_plots(outcome: _Outcome) -> Iterator[Plot]:
    """What each slice of the data that was not tuned on loses, by the knob."""
    dense = outcome.held_dense
    if not outcome.held_points or len(dense["slices"]) < 2:
        return
    lost = {
        part: [
            (p.value, p.record["slices"][part]["miou_percent"] - figures["miou_percent"], "")
            for p in outcome.held_points
            if p.record["slices"][part]["miou_percent"] is not None
        ]
        for part, figures in dense["slices"].items()
        if figures["miou_percent"] is not None
    }
    whole = {"all": [(p.value, p.miou_percent - miou_of(dense), "") for p in outcome.held_points]}
    caption = f"what merging costs by slice, held out: {dataset_name(dense)}, {counted(dense['images'], 'images')}"
    yield Plot(caption, outcome.knob, "mIoU, points to dense", whole | lost)


def _counts(record: Record) -> Counts:
    windows = record["token_histograms"]["windows_by_merge"]
    names = shown_merges([*windows])
    means = {name: record[f"tokens_after_{name}_mean"] for name in names}
    caption = "tokens of the windows it was tuned on, at the point that is marked"
    return Counts(caption, record["token_histograms"]["token_edges"], {name: windows[name] for name in names}, means)


def _labelled(points: Sequence[Point], marked: Point) -> list[tuple[float, float, str]]:
    """Points by multiply-adds; those too near to the marked one or to each other have no label."""
    known = [(point.gmacs, point) for point in points if point.gmacs is not None]
    room = (max(gmacs for gmacs, _ in known) - min(gmacs for gmacs, _ in known)) / 7
    taken, placed = [gmacs for gmacs, point in known if point is marked], []
    for gmacs, point in known:
        free = all(abs(gmacs - other) > room for other in taken)
        taken += [gmacs] * free
        placed.append((gmacs, point.miou_percent, f"{point.value:g}" if free else ""))
    return placed


def _dense(record: Record) -> Record:
    """The record of a run in which nothing could merge, at the arithmetic of a network that does not look for it."""
    return {**record, "gmacs_per_window_mean": record["gmacs_per_window_dense"]}


def _facts(record: Record) -> dict[str, Any]:
    keys = ("dataset", "split", "images", "miou_percent", "gmacs_per_window_mean")
    return {key: record[key] for key in keys}


def _slices(record: Record) -> dict[str, float | None]:
    return {name: part["miou_percent"] for name, part in record["slices"].items()}
