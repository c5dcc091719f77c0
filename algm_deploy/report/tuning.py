"""What tuning found, from its records: text for a terminal, and sentences, tables and plots for pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.records import (
    AttentionTuning,
    BlockSimilarity,
    BudgetTuning,
    Candidate,
    ClassSimilarity,
    Point,
    PositionTuning,
    PrecisionSearch,
    PrecisionTuning,
    RuleTuning,
    ThresholdTuning,
    TunedOn,
    Tuning,
    TuningPage,
)
from algm_deploy.bundle.signature import CLAP_THRESHOLD
from algm_deploy.report.gallery import Example
from algm_deploy.report.html import render
from algm_deploy.report.plans import budget_words
from algm_deploy.report.plots import Histogram, Scatter, Series
from algm_deploy.report.tables import UNKNOWN, shown, text_table, with_difference
from algm_deploy.tuning.search import Goal
from algm_deploy.wording import counted, dataset_title, merge_titles, variant_title, without_merging

Search = ThresholdTuning | BudgetTuning | PositionTuning
Marks = Sequence[tuple[float, float, str]]  # x, y, label


class Table(NamedTuple):
    """Rows of text under a header."""

    caption: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Page(NamedTuple):
    """What people read of a record."""

    title: str
    lines: Sequence[str]
    tables: Sequence[Table]
    plots: Sequence[Scatter | Histogram]


def tuning_page(record: Tuning) -> Page:
    """The sentences, tables and plots about a record."""
    if isinstance(record, RuleTuning):
        return _rule_page(record)
    if isinstance(record, AttentionTuning):
        return _attention_page(record)
    if isinstance(record, PrecisionTuning):
        return _precision_page(record)
    return _page_as_written(record) if isinstance(record, TuningPage) else _search_page(record)


def tuning_text(record: Tuning) -> str:
    """Sentences and tables for a terminal."""
    page = tuning_page(record)
    tables = [f"{table.caption}\n{text_table(table.header, table.rows)}" for table in page.tables]
    return "\n\n".join(("\n".join(page.lines), *tables))


def write_tuning(record: Tuning, name: str, target: Path, examples: Sequence[Example] = ()) -> Path:
    """Writes the page about a record of the network called `name`; `examples` show photos at its thresholds."""
    html = render("tuning_page.jinja", name=name, pages=[tuning_page(record)], examples=examples)
    with write_atomically(target) as path:
        path.write_text(html, encoding="utf-8")
    return target


def write_sheet(plots: Sequence[Scatter], columns: int, target: Path) -> Path:
    """Writes plots as one picture, an SVG file."""
    lines = max((len(plot.series) + 1) // 2 for plot in plots)
    svg = render("sheet.jinja", plots=plots, columns=columns, lines=lines)
    with write_atomically(target) as path:
        path.write_text(svg, encoding="utf-8")
    return target


def _page_as_written(found: TuningPage) -> Page:
    plots = [_scatter(*plot) for plot in found.plots]
    counts = [Histogram(*one) for one in found.counts]
    return Page(found.title, found.lines, [Table(*one) for one in found.tables], [*plots, *counts])


# ---------------------------------------------------------------------------------------------------------------- rule


def _rule_page(found: RuleTuning) -> Page:
    first, *more = found.blocks
    where = _blocks(first.block, found.blocks[-1].block)
    source = dataset_title(found.dataset, found.split) if found.dataset and found.split else "photos without labels"
    line = (
        f"clap_threshold {found.clap_threshold:.4f} = mean + standard deviation of the cosine similarity of "
        f"{sum(one.every.pairs for one in found.blocks)} pairs of patches after the attention of {where}, network "
        f"without merging in fp32, {source}, {counted(found.images, 'images')}"
    )
    figures = {one.block: (one.every.mean, one.every.std, one.every.mean + one.every.std) for one in found.blocks}
    tables = [
        Table(
            "cosine similarity of all pairs of patches of a window, after attention",
            ("block", "pairs", "mean", "standard deviation", "mean + standard deviation"),
            [(str(b.block), str(b.every.pairs), *(shown(x, 4) for x in figures[b.block])) for b in found.blocks],
        )
    ]
    plots = []
    if more:
        series = {"mean": 0, "mean + standard deviation": 2}
        marks = {name: [(block, of[index], "") for block, of in figures.items()] for name, index in series.items()}
        caption = "similarity of all pairs of patches of a window by block"
        plots.append(_scatter(caption, "block", "cosine similarity", marks))
    if first.by_class:
        tables.append(_class_table(found.blocks))
        plots += _class_plots(found.blocks)
    return Page(found.title, [line], tables, plots)


def _class_table(blocks: Sequence[BlockSimilarity]) -> Table:
    rows = [
        (str(block.block), *(" / ".join(shown(_mean_of(one, kind), 3) for kind in _KINDS) for one in block.by_class))
        for block in blocks
    ]
    caption = (
        "mean similarity of patches of one class / of two classes, within windows of so many patches and in the whole"
    )
    return Table(caption, ("block", *(_scope(one.side) for one in blocks[0].by_class)), rows)


def _class_plots(blocks: Sequence[BlockSimilarity]) -> Iterator[Scatter]:
    first = blocks[0]
    by_side = {
        f"{kind} class": [(one.side, mean, "") for one in first.by_class if one.side and (mean := _mean_of(one, kind))]
        for kind in _KINDS
    }
    yield _scatter(f"within windows, after block {first.block}", "patches a side", "cosine similarity", by_side)
    pairs = [(block.block, one) for block in blocks for one in block.by_class]
    by_block = {
        f"{_scope(side)}, {kind} class": [
            (block, mean, "") for block, one in pairs if one.side == side and (mean := _mean_of(one, kind))
        ]
        for side in (2, None)
        for kind in _KINDS
    }
    if len(blocks) > 1:
        yield _scatter("by block, within windows of 2x2 and in the whole", "block", "cosine similarity", by_block)


_KINDS: tuple[Literal["same", "other"], ...] = ("same", "other")


def _mean_of(found: ClassSimilarity, kind: Literal["same", "other"]) -> float | None:
    pairs = found.same if kind == "same" else found.other
    return pairs.mean if pairs else None


def _scope(side: int | None) -> str:
    return "global" if side is None else f"{side}x{side}"


# ----------------------------------------------------------------------------------------------------------- attention


def _attention_page(found: AttentionTuning) -> Page:
    after = slice(found.last_merge, None)
    shares = found.attention_dense_percent_by_block, found.attention_merged_percent_by_block
    spread = {
        "without merging": found.classes_attended_dense_by_block,
        "with merging": found.classes_attended_merged_by_block,
    }
    (without, with_), tau = (_mean(one[after]) for one in spread.values()), found.thresholds.get(CLAP_THRESHOLD)
    lines = (
        f"after the last merge attention is spread over {without:.2f} classes without merging and {with_:.2f} with it "
        f"(the exponential of its entropy, mean of {counted(found.windows, 'windows')} and of "
        f"{_blocks(found.last_merge + 1, len(shares[0]))})"
        + ("" if tau is None else f"; CLAP threshold {float(tau):g}"),
        f"{dataset_title(found.dataset, found.split)}, {counted(found.images, 'images')}, PyTorch in fp32",
    )
    dense, merged = ([_mean(one) for one in zip(*blocks[after], strict=True)] for blocks in shares)
    rows = sorted(
        zip(found.class_names, found.patches_percent, found.tokens_percent, dense, merged, strict=True),
        key=lambda row: -row[3],
    )
    table = Table(
        "shares of the classes; attention in the blocks after the last merge",
        ("class", "patches %", "tokens left %", "attention % dense", "attention % merged", "change"),
        [
            (name, *(shown(one, 2) for one in percent), f"{percent[3] / percent[2] - 1:+.0%}" if percent[2] else "-")
            for name, *percent in rows
            if percent[0]
        ],
    )
    marks = {name: [(block, value, "") for block, value in enumerate(one, 1)] for name, one in spread.items()}
    caption = "number of classes that attention is spread over, by block"
    return Page(found.title, lines, [table], [_scatter(caption, "block", "classes", marks)])


def _blocks(first: int, last: int) -> str:
    return f"block {first}" if first == last else f"blocks {first} to {last}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# -------------------------------------------------------------------------------------------------------------- search


def _search_page(found: Search) -> Page:
    tuned, held = found.tuned_on, found.held_out
    tables = [_point_table(found, tuned), _held_out_table(found)]
    if held.candidates:
        tables.insert(1, _point_table(found, held, "held out, "))
    lines = (_verdict(found), _dense("tuned on", tuned), _held_out_line(found), *_doubts(tuned.candidates))
    if isinstance(found, BudgetTuning):
        lines = (*lines, _rules_line(found))
        tables += _rule_tables(found)
    return Page(found.title, lines, tables, [*_search_plots(found)])


def _verdict(found: Search) -> str:
    marked, aim, names = found.marked, _aim(found), _names(found)
    if not found.reached:
        return f"no {names.knob} qualifies to {aim}; nearest: {marked.value:g} with {_figures(marked)}"
    setting = "GBM in block" if isinstance(found, PositionTuning) else names.knob
    if isinstance(found, BudgetTuning):
        setting = f"budget of {budget_words(found.plan)}, as much as {found.knob}"
        names = names._replace(marked=f"{names.marked} merges on average,")
    exceptions = _exceptions(found) if found.aim == "reference" else ""
    return f"{setting} {names.marked} to {aim}: {_figures(marked)}{exceptions}"


def _aim(found: Search) -> str:
    return {
        "reference": f"merge most while mIoU stays at or above {shown(found.limit, 2)} %",
        "best": "reach the best mIoU",
        "gmacs": f"merge least at no more than {shown(found.limit)} GMACs per window",
        "throughput": f"merge least at no less than {shown(found.limit)} img/s",
    }[found.aim]


def _rules_line(found: BudgetTuning) -> str:
    """What the budget gains over the threshold of equal cost, on both parts of the photos."""
    value = found.marked.value
    here, there = (
        _change(budget, next(one for one in thresholds if one.value == value))
        for budget, thresholds in (
            (found.marked, found.thresholds),
            (found.held_out.marked, found.thresholds_held_out),
        )
    )
    return (
        f"to {found.knob} {value:g} itself, which is the paper's rule and costs as much on average: {here:+.2f} points "
        f"where it was tuned, {there:+.2f} held out"
    )


def _rule_tables(found: BudgetTuning) -> Iterator[Table]:
    """Both rules beside each other at equal mean cost, as a whole and by slice."""
    held = found.held_out
    for what, part, budgets, thresholds in (
        ("", found.tuned_on, found.tuned_on.candidates, found.thresholds),
        ("held out, ", held, held.candidates or (held.marked,), found.thresholds_held_out),
    ):
        names, timed = ("all", *_slices(part)), any(one.throughput_img_per_s for one in thresholds)
        rows = [
            (
                f"{by_threshold.value:g}",
                *(with_difference(_miou(budget, name), _miou(by_threshold, name), False) for name in names),
                *(shown(one.gmacs_per_window_mean, 2) for one in (budget, by_threshold)),
                *((shown(_ms(one), 2) for one in (budget, by_threshold)) if timed else ()),
            )
            for budget, by_threshold in zip(budgets, thresholds, strict=True)
        ]
        times = ("ms a picture", "ms by threshold") if timed else ()
        caption = (
            f"{_photos(part)}: {what}mIoU % of budgets and the difference to the threshold of equal cost in points"
        )
        yield Table(caption, (_names(found).knob, *names, "GMACs", "GMACs by threshold", *times), rows)


def _exceptions(found: Search) -> str:
    """Measured candidates on the wrong side of the chosen one, where accuracy does not simply rise."""
    goal, candidates = Goal(found.aim, found.limit), found.tuned_on.candidates
    alone = [f"{one.value:g}" for one in candidates if one.value < found.marked.value and goal.meets(one)]
    missing = [f"{one.value:g}" for one in candidates if one.value > found.marked.value and not goal.meets(one)]
    below = f"; {', '.join(alone)} would qualify alone, but a larger value between does not" if alone else ""
    above = f"; {', '.join(missing)} would not qualify, although larger" if missing else ""
    return below + above


def _held_out_line(found: Search) -> str:
    """How the choice holds on the photos it was not made on, beside where it was."""
    held, marked = found.held_out, found.held_out.marked
    name, change = worst_slice(held.dense, marked)
    there, here = _change(marked, held.dense), _change(found.marked, found.tuned_on.dense)
    return (
        f"{_dense('held out', held)}, {_state(found)} {marked.miou_percent:.2f} % ({there:+.2f} points, {here:+.2f} "
        f"where it was tuned); the weakest slice: {name} ({change:+.2f} points)"
    )


def worst_slice(dense: Point, merged: Point) -> tuple[str, float]:
    """The slice that loses most by merging, and its mIoU difference in points (negative: a loss)."""
    changes = {name: _change(merged, dense, name) for name in merged.miou_percent_by_slice}
    known = {name: change for name, change in changes.items() if change is not None}
    return min((known or {"all": _change(merged, dense) or 0.0}).items(), key=lambda one: one[1])


def _miou(point: Point, part: str = "all") -> float | None:
    return point.miou_percent if part == "all" else point.miou_percent_by_slice.get(part)


def _ms(point: Point) -> float | None:
    """Milliseconds of the network for a picture, where it was timed."""
    return 1e3 / point.throughput_img_per_s if point.throughput_img_per_s else None


def _change(point: Point, dense: Point, part: str = "all") -> float | None:
    """mIoU in points to that without merging, where both have labelled pixels."""
    value, base = _miou(point, part), _miou(dense, part)
    return None if value is None or base is None else value - base


def _doubts(candidates: Sequence[Candidate]) -> list[str]:
    """What is wrong with times: not steady, or without the dense network beside them that others are told against."""
    shaky = [f"{one.value:g}" for one in candidates if not one.stable]
    lone = [f"{one.value:g}" for one in candidates if one.throughput_img_per_s and not one.speedup]
    against = next((variant_title(one.baseline) for one in candidates if one.speedup and one.stable), None)
    told = [f"times were not steady at {', '.join(shaky)}: tune on a device that does nothing else"] if shaky else []
    if lone and against:
        told.append(f"no gain is told at {', '.join(lone)}: {against}, which others are told against, failed there")
    return told


def _figures(point: Point) -> str:
    gmacs, speed = point.gmacs_per_window_mean, point.throughput_img_per_s
    cost = "" if gmacs is None else f", {gmacs:.2f} GMACs per window"
    return f"mIoU {point.miou_percent:.2f} %{cost}" + ("" if speed is None else f", {speed:.1f} img/s")


def _point_table(found: Search, part: TunedOn, what: str = "") -> Table:
    """A row for each candidate: mIoU as a whole and in each of several slices, its cost, and which one is marked."""
    titles, slices = _token_titles(found), _slices(part)
    timed = any(one.throughput_img_per_s for one in part.candidates)

    def row(name: str, mark: str, point: Point) -> tuple[str, ...]:
        tokens = {index: one.mean for index, one in enumerate(point.tokens)}
        against = variant_title(point.baseline) if point.speedup else UNKNOWN
        speed = (shown(point.throughput_img_per_s, 1), shown(point.speedup, 2), against)
        return (
            name,
            mark,
            shown(point.miou_percent, 2),
            f"{_change(point, part.dense):+.2f}",
            *(shown(_miou(point, name), 2) for name in slices),
            shown(point.gmacs_per_window_mean, 2),
            *(shown(tokens.get(index), 0) for index in titles),
            *(speed if timed else ()),
        )

    marks = {found.marked.value: _state(found)}
    rows = [row(f"{one.value:g}", marks.get(one.value, ""), one) for one in part.candidates]
    tokens = (f"tokens after {title}" for title in titles.values())
    speed = ("img/s", "times as fast", "against") if timed else ()
    return Table(
        f"{_photos(part)}: {what}every measured candidate, with tokens and multiply-adds in 10^9 of a window",
        (_names(found).knob, "", "mIoU %", "to dense", *slices, "GMACs", *tokens, *speed),
        [*rows, row("dense", "", part.dense)],
    )


def _token_titles(found: Search) -> dict[int, str]:
    """The merges that tables show, by their place in a point's tokens."""
    names = [one.merge for one in found.marked.tokens]
    if isinstance(found, PositionTuning):
        names[-1:] = ["gbm_here"]  # which stands in another block in each row
    titles = merge_titles(names)
    return {index: titles[name] for index, name in enumerate(names) if name in titles}


def _held_out_table(found: Search) -> Table:
    held, names = found.held_out, _names(found)
    points = {
        "dense": held.dense,
        **({f"reference ({found.reference})": held.reference} if held.reference else {}),
        f"recipe ({names.recipe})": held.recipe,
        f"{_state(found)} ({names.marked})": held.marked,
    }
    images = {"all": held.images, **{name: held.images_by_slice[name] for name in _slices(held)}}
    rows = [
        (
            part,
            str(count),
            *(with_difference(_miou(one, part), _miou(held.dense, part), one is held.dense) for one in points.values()),
        )
        for part, count in images.items()
    ]
    caption = f"{dataset_title(held.dataset, held.split)}, held out: mIoU % and the difference to dense in points"
    return Table(caption, ("slice", "images", *points), rows)


# ----------------------------------------------------------------------------------------------------------- precisions


def _precision_page(found: PrecisionTuning) -> Page:
    best, first = found.best.search, found.searches[0].search
    held = best.held_out
    lines = (
        _precision_verdict(found),
        f"{_dense('tuned on', first.tuned_on)} in {found.searches[0].precision}",
        f"{_photos(held)}, held out: {found.best.precision} {held.marked.miou_percent:.2f} %, "
        f"{_to_reference(found.best)}",
        *(
            f"{one.precision}: no {_names(one.search).knob} qualifies; nearest: {one.search.marked.value:g} with "
            f"{_figures(one.search.marked)}"
            for one in found.searches
            if not one.search.reached and one is not found.best
        ),
        *(f"{one.precision}: {line}" for one in found.searches for line in _doubts(one.search.tuned_on.candidates)),
    )
    return Page(found.title, lines, _precision_tables(found), precision_plots(found))


def _precision_verdict(found: PrecisionTuning) -> str:
    one = found.best
    setting = f"{one.precision} at {_names(one.search).knob} {one.search.marked.value:g}"
    if not one.search.reached:
        return f"no precision qualifies to {_aim(one.search)}; nearest: {setting} with {_figures(one.search.marked)}"
    first, ms = found.searches[0], _ms(one.search.marked)
    base = _baseline_ms(first.search)
    dense = f"{first.precision} {without_merging(first.search.marked.baseline)}"
    times = f", {base / ms:.2f} times as fast as {dense}" if base and ms else ""
    return (
        f"{setting} is the fastest of {', '.join(o.precision for o in found.searches)} on {found.runtime} to "
        f"{_aim(one.search)}: {_figures(one.search.marked)}{times}"
    )


def _to_reference(one: PrecisionSearch) -> str:
    """How the choice of a precision holds against the reference, on photos it was not made on."""
    held = one.search.held_out
    assert held.reference is not None  # its record says so
    name, change = worst_slice(held.reference, held.marked)
    difference = _change(held.marked, held.reference)
    return (
        f"{difference:+.2f} points to {one.search.reference} ({held.reference.miou_percent:.2f} %); the weakest slice: "
        f"{name} ({change:+.2f} points)"
    )


def _precision_tables(found: PrecisionTuning) -> list[Table]:
    """Two rows for each precision, with its threshold and cost, and mIoU with the difference to the first's dense.

    One row more tells the time of a dense network with cuDNN's attention, where that is the faster: none was evaluated.
    """
    knob, tables = _names(found.best.search).knob, []
    for held_out in (False, True):
        parts = [one.search.held_out if held_out else one.search.tuned_on for one in found.searches]
        names = ("all", *_slices(parts[0]))
        base = parts[0].dense
        rows = []
        for one, part in zip(found.searches, parts, strict=True):
            marked = one.search.held_out.marked if held_out else one.search.marked
            for variant, point, ms in (
                ("dense", part.dense, _dense_ms(one.search)),
                (_state(one.search), marked, _ms(one.search.marked)),
            ):
                value = "" if variant == "dense" else f"{one.search.marked.value:g}"
                differences = (with_difference(_miou(point, n), _miou(base, n), point is base) for n in names)
                rows.append((one.precision, variant, value, shown(ms, 2), *differences))
            if (variant := one.search.marked.baseline) != "dense":
                ms = _baseline_ms(one.search)
                rows.append((one.precision, variant_title(variant), "", shown(ms, 2), *[UNKNOWN] * len(names)))
        what, first = "held out, " if held_out else "", found.searches[0].precision
        tables.append(
            Table(
                f"{_photos(parts[0])}: {what}mIoU % and the difference to dense {first} in points",
                ("precision", "", knob, "ms a picture", *names),
                rows,
            )
        )
    return tables


def precision_plots(found: PrecisionTuning) -> list[Scatter]:
    """Accuracy over measured time, a curve for each precision: tuned on, and held out where all was measured there."""
    plots = []
    for held_out in (False, True):
        series: dict[str, Marks] = {}
        for one in found.searches:
            part = one.search.held_out if held_out else one.search.tuned_on
            dense = _dense_ms(one.search)
            ms_of = {point.value: _ms(point) for point in one.search.tuned_on.candidates}
            points = [(ms, p.miou_percent, "") for p in part.candidates if (ms := ms_of.get(p.value))]
            series[one.precision] = [
                *points,
                *([(dense, part.dense.miou_percent, "dense")] if dense and points else []),
            ]
        best = found.best.search
        marked = best.held_out.marked if held_out else best.marked
        if ms := _ms(best.marked):
            label = f"{found.best.precision}, {best.marked.value:g}"
            series[_state(best)] = [(ms, marked.miou_percent, label)]
        what = f"held out {_photos(best.held_out)}" if held_out else f"tuned on {_photos(best.tuned_on)}"
        if any(series[one.precision] for one in found.searches):
            plots.append(_scatter(what, f"ms a picture on {found.runtime}", "mIoU %", series))
    return plots


def _baseline_ms(found: ThresholdTuning) -> float | None:
    """Milliseconds of the network without merging that gains are told against, timed in turns with the marked one."""
    ms = _ms(found.marked)
    return ms * found.marked.speedup if ms and found.marked.speedup else None


def _dense_ms(found: ThresholdTuning) -> float | None:
    """The same, where it is the network that was evaluated without merging: no other has an mIoU to stand beside."""
    return _baseline_ms(found) if found.marked.baseline == "dense" else None


def trade_offs(found: Search) -> list[Scatter]:
    """Accuracy over multiply-adds where they are counted and, of budgets, over time where it was taken."""
    tuned, held, marked = found.tuned_on, found.held_out, found.marked
    here, label = f"tuned on {_photos(tuned)}", f"{marked.value:g}"
    plots = []
    if marked.gmacs_per_window_mean is not None:
        others = [*held.candidates, held.dense] if held.candidates else []
        series: dict[str, Marks] = {
            here: [*_by_cost(tuned.candidates, marked), *_at_cost(tuned.dense, "dense")],
            f"held out {_photos(held)}": [mark for one in others for mark in _at_cost(one)],
            _state(found): _at_cost(marked, label),
        }
        if isinstance(found, BudgetTuning):
            series |= {
                "by threshold, tuned on": [mark for one in found.thresholds for mark in _at_cost(one)],
                "by threshold, held out": [mark for one in found.thresholds_held_out for mark in _at_cost(one)],
            }
        plots.append(_scatter("accuracy against arithmetic", "GMACs per window", "mIoU %", series))
    if isinstance(found, BudgetTuning) and marked.throughput_img_per_s:
        plots.append(_by_time(found, here, label))
    return plots


def _search_plots(found: Search) -> Iterator[Scatter | Histogram]:
    """Accuracy against what it costs and against the knob, on the tuning photos and, where measured, on the others."""
    knob, tuned, held, marked = _names(found).knob, found.tuned_on, found.held_out, found.marked
    here, there, label = f"tuned on {_photos(tuned)}", f"held out {_photos(held)}", f"{marked.value:g}"
    yield from trade_offs(found)
    series: dict[str, Marks] = {
        here: [(one.value, one.miou_percent, "") for one in tuned.candidates],
        there: [(one.value, one.miou_percent, "") for one in held.candidates],
        _state(found): [(marked.value, marked.miou_percent, label)],
    }
    yield _scatter(f"accuracy by {knob}", knob, "mIoU %", series)
    labels = {marked.value: label}
    timed = [
        (p.throughput_img_per_s, p.miou_percent, labels.get(p.value, ""))
        for p in tuned.candidates
        if p.throughput_img_per_s
    ]
    if timed and not isinstance(found, BudgetTuning):
        yield _scatter("accuracy against throughput", "img/s", "mIoU %", {here: timed})
    if held.candidates and _slices(held):
        series = {
            part: [
                (p.value, change, "") for p in held.candidates if (change := _change(p, held.dense, part)) is not None
            ]
            for part in ("all", *_slices(held))
        }
        caption = f"what merging costs by slice, held out: {_photos(held)}"
        yield _scatter(caption, knob, "mIoU, points to dense", series)
    if marked.tokens:
        titles, windows = merge_titles([one.merge for one in marked.tokens]), found.token_histograms.windows_by_merge
        yield Histogram(
            "tokens of the windows it was tuned on, at the point that is marked",
            found.token_histograms.token_edges,
            {title: windows[name] for name, title in titles.items()},
            {titles[one.merge]: one.mean for one in marked.tokens if one.merge in titles},
        )


def _by_time(found: BudgetTuning, here: str, label: str) -> Scatter:
    """Both rules against measured time, on the photos that were timed."""
    marked, dense = found.marked, found.tuned_on.dense
    series: dict[str, Marks] = {here: _at_ms(found.tuned_on.candidates), _state(found): _at_ms([marked], label)}
    if marked.speedup and (ms := _ms(marked)):
        series[here] = [*series[here], (ms * marked.speedup, dense.miou_percent, "dense")]
    series["by threshold, tuned on"] = _at_ms(found.thresholds)
    return _scatter("accuracy against time in PyTorch", "ms a picture", "mIoU %", series)


def _at_ms(points: Iterable[Point], label: str = "") -> list[tuple[float, float, str]]:
    return [(ms, one.miou_percent, label) for one in points if (ms := _ms(one))]


def _by_cost(candidates: Sequence[Candidate], marked: Candidate) -> Iterator[tuple[float, float, str]]:
    """Points by multiply-adds; those too near to the marked one or to each other have no label."""
    known = [mark for one in candidates for mark in _at_cost(one, f"{one.value:g}")]
    room = (max(known)[0] - min(known)[0]) / 7
    taken = [x for x, _, _ in _at_cost(marked)]
    for x, y, label in known:
        free = all(abs(x - other) > room for other in taken)
        taken += [x] * free
        yield x, y, label if free else ""


def _at_cost(point: Point, label: str = "") -> list[tuple[float, float, str]]:
    gmacs = point.gmacs_per_window_mean
    return [] if gmacs is None else [(gmacs, point.miou_percent, label)]


class _Names(NamedTuple):
    """How people call what is searched, its setting in the bundle's recipe, and the one that is marked."""

    knob: str
    recipe: str
    marked: str


def _names(found: Search) -> _Names:
    if isinstance(found, BudgetTuning):
        value = found.marked.value
        return _Names(f"{found.knob} of equal cost", f"{found.knob} {found.recipe_value:g}", f"{value:g}")
    if isinstance(found, ThresholdTuning):
        return _Names(found.knob, f"{found.recipe_value:g}", f"{found.marked.value:g}")
    recipe, marked = (" and ".join(map(str, one)) or "none" for one in (found.recipe_layers, found.layers))
    after = " and ".join(map(str, found.layers[:-1]))
    return _Names(f"GBM block after {after}" if after else "GBM block", recipe, marked)


def _state(found: Search) -> str:
    return "chosen" if found.reached else "nearest"


def _dense(verb: str, part: TunedOn) -> str:
    return f"{verb} {_photos(part)}: dense {part.dense.miou_percent:.2f} %"


def _photos(part: TunedOn) -> str:
    return f"{dataset_title(part.dataset, part.split)}, {counted(part.images, 'images')}"


def _slices(part: TunedOn) -> list[str]:
    """The slices, where there are several."""
    return [*part.images_by_slice] if len(part.images_by_slice) > 1 else []


def _scatter(caption: str, x_label: str, y_label: str, series: Mapping[str, Marks]) -> Scatter:
    return Scatter(caption, x_label, y_label, [Series(name, points) for name, points in series.items() if points])
