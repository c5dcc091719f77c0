"""Tables: from records to rows of text, and from rows to a terminal or Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from algm_deploy.bundle.records import (
    Engine,
    EngineStretches,
    Evaluation,
    Figures,
    FileEntry,
    MergeTokens,
    Parity,
    Speed,
    tokens_by_merge,
)
from algm_deploy.environment import Environment
from algm_deploy.parity.pairwise import Comparison
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.report.plans import plan_name
from algm_deploy.report.published import NO_REDUCTION, Published
from algm_deploy.report.records import Measured, baseline, may_share_row
from algm_deploy.wording import counted, dataset_title, merge_titles, variant_title

Row = Sequence[str]

UNKNOWN = "-"
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( %)?( \([-+][\d.]+\)| \(-?[\d.]+ to -?[\d.]+\))?|-")

_SHARE = re.compile(r"(?<![\w.-])(-?\d[\d.]*(?:e[-+]?\d+)?) %")

# What a link of the parity chain compares, for readers who see it for the first time.
LINKS = {
    "network": "without merging, the network equals the original",
    "operators": "PyTorch's merging equals its definition in NumPy",
    "graph": "the exported graph is the one the recipe asks for",
    "numbers": "the runtime equals PyTorch when PyTorch uses the runtime's merge decisions",
    "decisions": "the runtime decides as PyTorch does, or rounding noise explains the difference",
    "labels": "label maps equal those of PyTorch deciding for itself, or alike where noise decided",
}

# Columns of a speed table, in order, with digits of numbers; a column appears where a record holds its field.
_FIGURES = (
    ("variant", "variant", None),
    ("protocol", "protocol", None),
    ("batch", "batch", 0),
    ("throughput_img_per_s", "img/s", 1),
    ("latency_ms_p50", "p50 ms", 2),
    ("speedup", "speed-up", 2),
    ("baseline", "against", None),
    ("merge_efficiency", "merge efficiency (middle half of rounds)", 2),
    ("latency_ms_p90", "p90 ms", 2),
    ("latency_ms_p99", "p99 ms", 2),
)
_CONDITIONS = (
    ("gmacs_per_window_mean", "GMACs per window", 2),
    ("device", "device", None),
    ("pictures", "pictures", None),
)

_CONDITION_COLUMNS = ("runtime", "bundle", "precision", "output", "protocol", "batch", "device", "pictures")


class Table(NamedTuple):
    """A header, units included, and rows of the same length."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


# ------------------------------------------------------------------------------------------------------------- records


def parity_table(record: Parity) -> Table:
    """The links of one parity record."""
    rows = [
        (
            str(link.number),
            link.name,
            LINKS.get(link.name, UNKNOWN),
            "passed" if link.passed else "FAILED",
            link.measured,
            clipped(link.gate),
        )
        for link in record.links
    ]
    return Table(("", "link", "what is compared", "result", "measured", "would pass at"), rows)


def quality_table(record: Evaluation) -> Table:
    """One evaluation record: the whole data set, then its slices where there are several."""
    titles = merge_titles([one.merge for one in record.tokens])
    parts: list[tuple[str, Figures]] = [("all", record)]
    parts += record.slices.items() if len(record.slices) > 1 else []
    header = ("slice", "images", "mIoU %", "pixel accuracy %", *(f"tokens after {t}" for t in titles.values()))
    rows = [
        (
            name,
            str(part.images),
            shown(part.miou_percent, 2),
            shown(part.pixel_accuracy_percent, 2),
            *_token_cells(part.tokens, titles),
        )
        for name, part in parts
    ]
    return Table(header, rows)


def runs_table(rows: Sequence[Measured[Evaluation]]) -> Table:
    """Evaluation records beside each other: one row a record."""
    header = ("runtime", "device", "plan", "precision", "output", "data set", "images", "mIoU %", "GMACs per window")
    lines = [
        (
            row.runtime,
            row.record.device,
            plan,
            row.artifact.precision,
            row.artifact.output,
            dataset_title(row.record.dataset, row.record.split),
            str(row.record.images),
            shown(row.record.miou_percent, 2),
            shown(row.record.gmacs_per_window_mean, 2),
        )
        for row, plan in zip(rows, _plan_names(rows), strict=True)
    ]
    return Table(header, lines)


def cost_table(group: Sequence[Measured[Evaluation]]) -> Table:
    """Comparable evaluations, one row a plan: what merging saves and what it costs against the one without merging."""
    reference = baseline(group)
    base = reference.record.miou_percent if reference else None
    titles = merge_titles(max(([one.merge for one in row.record.tokens] for row in group), key=len))
    rows = [
        (
            plan,
            row.bundle,
            with_difference(row.record.miou_percent, base, row is reference),
            shown(row.record.gmacs_per_window_mean, 2),
            *_token_cells(row.record.tokens, titles, row.record.token_histograms.patches),
        )
        for row, plan in zip(group, _plan_names(group), strict=True)
    ]
    tokens = (f"tokens after {title}" for title in titles.values())
    return Table(("plan", "bundle", "mIoU %", "GMACs per window", *tokens), rows)


def slice_table(group: Sequence[Measured[Evaluation]]) -> Table:
    """Comparable evaluations by slice: one column a plan, differences to the one without merging in brackets."""
    slices = {name: part.images for row in group for name, part in row.record.slices.items()}
    values = [{name: part.miou_percent for name, part in row.record.slices.items()} for row in group]
    names = (f"mIoU %, {name}" for name in _plan_names(group))
    rows = [(name, str(slices[name]), *_against_dense(group, values, name)) for name in sorted(slices)]
    return Table(("slice", "images", *names), rows)


def class_table(group: Sequence[Measured[Evaluation]]) -> Table:
    """IoU in percent by class: one column a plan, differences to the one without merging in brackets."""
    values = [row.record.iou_percent_by_class for row in group]
    rows = [(name, *_against_dense(group, values, name)) for name in values[0]]
    return Table(("class", *(f"IoU %, {name}" for name in _plan_names(group))), rows)


def _against_dense(
    group: Sequence[Measured[Evaluation]], values: Sequence[Mapping[str, float | None]], name: str
) -> list[str]:
    """One part's value in each evaluation, with its difference to the one without merging."""
    reference = baseline(group)
    base = next((found.get(name) for row, found in zip(group, values, strict=True) if row is reference), None)
    return [with_difference(found.get(name), base, row is reference) for row, found in zip(group, values, strict=True)]


def _plan_names(group: Sequence[Measured[Evaluation]]) -> list[str]:
    return [plan_name(row.artifact.plan, merged_plan(group)) for row in group]


def speed_table(rows: Sequence[Measured[Speed]]) -> Table:
    """Speed records, one row each; a run that was not stable shows that instead of numbers."""
    figures, conditions = (
        [one for one in columns if any(_has(row.record, one[0]) for row in rows)] for columns in (_FIGURES, _CONDITIONS)
    )
    merges = dict.fromkeys(one.merge for row in rows for one in row.record.tokens)
    titles = merge_titles([*merges])
    header = (
        *("runtime", "bundle", "precision", "output", *(title for _, title, _ in figures)),
        *(f"tokens after {title}" for title in titles.values()),
        *(title for _, title, _ in conditions),
    )
    lines = []
    for row in rows:
        cells = [_speed_cell(row.record, name, digits) for name, _, digits in figures]
        cells += _token_cells(row.record.tokens, titles)
        cells += [_speed_cell(row.record, name, digits) for name, _, digits in conditions]
        lines.append((row.runtime, row.bundle, row.artifact.precision, row.artifact.output, *cells))
    return Table(header, lines)


def _has(record: Speed, name: str) -> bool:
    """Whether a record has something to tell in a column, such as which dense network gains are against, of two."""
    if name == "baseline":
        return "dense_cudnn" in (record.variant, record.baseline)
    return getattr(record, name) is not None


def condensed(table: Table) -> tuple[Table, str]:
    """A speed table without the conditions that all of its rows share, and these in one line."""
    shared = {
        title: table.rows[0][i]
        for i, title in enumerate(table.header)
        if title in _CONDITION_COLUMNS and len({row[i] for row in table.rows}) == 1
    }
    kept = [i for i, title in enumerate(table.header) if title not in shared]
    narrow = Table(tuple(table.header[i] for i in kept), [tuple(row[i] for i in kept) for row in table.rows])
    return narrow, ", ".join(f"{title} {value}" for title, value in shared.items())


_TIMED = {
    "latency": "a time goes from a window in the host's memory to its label map there",
    "mixed": "a time is the network's alone, from pictures to its output, both on its device",
    "duplicate": "a time is the network's alone, from pictures to its output, both on its device",
}


def speed_notes(rows: Sequence[Measured[Speed]]) -> list[str]:
    """What a reader of speed records of one run must know beside the figures, one line each."""
    first, named = rows[0].record, [(variant_title(row.record.variant), row) for row in rows]
    pictures = counted(first.pictures_timed or 0, first.pictures or "pictures")
    notes = [f"{pictures}, {first.rounds} rounds, clock: {first.clock}; {_TIMED[first.protocol]}"]
    if not first.representative:
        notes.append("not representative: how much merges depends on the picture, give --images with photos of yours")
    if not first.stable:
        drifts = ", ".join(f"{name} {shown(row.record.drift_percent, 1)} %" for name, row in named)
        notes.append(f"not stable: the halves of the run differ ({drifts}): close what else runs here, then repeat")
    elif first.stages:
        notes += [
            f"p50 of {name} {shown(row.record.latency_ms_p50, 1)} ms, of it {_stages(row.record.stages)}"
            for name, row in named
        ]
    if first.stable and (baseline := _baselines(rows)):
        notes.append(f"speed-up and merge efficiency are against the faster dense network: {baseline}")
    if first.reading:
        notes.append(f"before that, in no time above, for a photo: {_stages(first.reading)}")
    return notes + [f"{name} ran {told}" for name, row in named if (told := _executed(row.record))]


def _baselines(rows: Sequence[Measured[Speed]]) -> str:
    """Which dense network speed-ups are told against, where a runtime has two; of runs that differ both."""
    two = any(_has(row.record, "baseline") for row in rows)
    found = dict.fromkeys(variant_title(row.record.baseline) for row in rows if row.record.speedup is not None)
    return " or ".join(found) if two else ""


def _executed(record: Speed) -> str:
    """How a network really ran: what its runner tells, and where its nodes were executed."""
    told = [f"{name.replace('_', ' ')} {value}" for name, value in record.execution.items()]
    told += [f"{count} nodes on {provider}" for provider, count in record.nodes_by_provider.items()]
    if copies := record.host_device_copies:
        told.append(f"{copies} copies between host and device")
    return ", ".join(told)


def _stages(stages: Mapping[str, float]) -> str:
    """Parts of a latency in milliseconds: `network_ms_p50` becomes `network 12.3 ms`."""
    return ", ".join(f"{name.removesuffix('_ms_p50').replace('_', ' ')} {ms:.1f} ms" for name, ms in stages.items())


def joined_table(pairs: Sequence[tuple[Measured[Evaluation], Measured[Speed]]]) -> Table:
    """Accuracy and speed of the same weights, plan and precision in one row, which names both outputs.

    Raises:
        ValueError: a pair that may not share a row.
    """
    header = (
        "plan", "precision", "mIoU %", "accuracy from", "img/s", "p50 ms", "batch", "protocol", "speed from", "device",
    )  # fmt: skip
    rows = []
    for accuracy, speed in pairs:
        if not may_share_row(accuracy.artifact, speed.artifact):
            raise ValueError("accuracy and speed of different weights, plans or precisions do not share a row")
        rows.append(
            (
                plan_name(accuracy.artifact.plan, pairs[0][0].artifact.plan),
                accuracy.artifact.precision,
                shown(accuracy.record.miou_percent, 2),
                f"{accuracy.runtime}, {accuracy.artifact.output}",
                _speed_cell(speed.record, "throughput_img_per_s", 1),
                _speed_cell(speed.record, "latency_ms_p50", 2),
                _speed_cell(speed.record, "batch", 0),
                speed.record.protocol,
                f"{speed.runtime}, {speed.artifact.output}",
                speed.record.device,
            )
        )
    return Table(header, rows)


def published_table(rows: Sequence[Published]) -> Table:
    """Published rows of one source, with their units converted to those of measured ones."""
    header = ("method", "run by this project", "mIoU %", "GMACs", "img/s", "speed measured on")
    return Table(
        header,
        [
            (
                published_name(row),
                "yes" if row.implemented else "no",
                shown(row.miou_percent),
                shown(row.gmacs),
                shown(row.throughput_img_per_s),
                row.throughput_conditions or UNKNOWN,
            )
            for row in rows
        ],
    )


def published_name(row: Published) -> str:
    """Method and setting of a published row."""
    return ", ".join(filter(None, ("dense" if row.method == NO_REDUCTION else row.method, row.setting)))


def environment_table(facts: Environment) -> Table:
    """Versions and devices as a bundle's manifest holds them."""
    rows = [("Python", facts.python), ("platform", facts.platform)]
    rows.append(("CPU", f"{facts.cpu}, {facts.cpu_count} cores"))
    rows.append(("NVIDIA driver", facts.driver or "none"))
    for device in facts.devices:
        memory = f"{device.memory_bytes / 2**30:.0f} GiB"
        rows.append(("GPU", f"{device.name}, compute capability {device.compute_capability}, {memory}"))
    rows += list(facts.packages.items())
    return Table(("", "version or device"), rows)


def engine_table(engines: Sequence[Engine], stretches: Sequence[EngineStretches] = ()) -> Table:
    """Engines as a bundle's manifest describes them: what they were built with and for, and what came of it."""
    made_for = ("precision", "batches", "built for compute capability", "plugins", "rows it is tuned for")
    header = ("runtime", "version", "network", *made_for, "attention", "MB", "build s")
    found = [("whole", one) for one in engines]
    for several in stretches:
        count = len(several.engines)
        found += [(f"part {place} of {count}", one) for place, one in enumerate(several.engines, 1)]
    rows = [
        (
            one.runtime,
            one.version,
            network,
            one.precision,
            ", ".join(map(str, one.batches)),
            ", ".join(one.compute_capabilities),
            ", ".join(sorted({plugin.plugin for plugin in one.parsed_network.plugins})) or "none",
            tuned_rows(one),
            fused_attention(one),
            f"{one.engine_bytes / 1e6:.1f}",
            shown(one.build_seconds, 0),
        )
        for network, one in found
    ]
    return Table(header, rows)


def tuned_rows(engine: Engine) -> str:
    """How many rows the builder was told to expect after each merge, and what they were measured on."""
    titles = merge_titles([*engine.usual_rows])
    rows = ", ".join(f"{engine.usual_rows[name]} after {title}" for name, title in titles.items())
    return f"{rows} (measured on {engine.usual_rows_of})" if rows else "every picture has as many"


def fused_attention(engine: Engine) -> str:
    """Whether attention became one kernel a layer."""
    layers = sum(engine.parsed_network.layers.get("ATTENTION_INPUT", {}).values())
    in_parts = engine.attention_in_parts
    if in_parts is None:
        return "the builder did not tell its layers"
    if not in_parts:
        return f"one kernel in each of {counted(layers, 'layers')}"
    return f"several kernels in {in_parts} of {counted(layers, 'layers')}: slower, and a value for every pair of tokens"


def file_table(files: Mapping[str, FileEntry]) -> Table:
    """Files of a bundle in order of their names."""
    rows = [(name, f"{one.size_bytes / 1e6:.2f}", f"{one.sha256[:12]}…") for name, one in sorted(files.items())]
    return Table(("file", "MB", "SHA-256"), rows)


def comparison_table(found: Comparison) -> Table:
    """Two executables window by window: tokens of both, patches grouped otherwise after each merge, labels, scores."""
    merges = list(dict.fromkeys(name for one in found.windows for counts in one.tokens for name in counts))
    titles = merge_titles(merges)
    header = ("window", *(f"tokens after {title}" for title in titles.values()))
    header += (*(f"grouped otherwise by {title}" for title in titles.values()), "labels equal %", "scores differ by")
    rows = []
    for number, one in enumerate(found.windows):
        tokens = [" / ".join(shown(counts.get(merge)) for counts in one.tokens) for merge in titles]
        grouped = [shown(one.patches_grouped_otherwise.get(merge)) for merge in titles]
        scores = UNKNOWN if one.scores_difference_max is None else f"{one.scores_difference_max:.1e}"
        rows.append((str(number), *tokens, *grouped, shown(one.labels_equal_percent, 3), scores))
    return Table(header, rows)


def comparison_lines(found: Comparison) -> list[str]:
    """The verdict about two executables in words."""
    lines = [f"first: {found.first}; second: {found.second}"]
    apart = [(number, one.first_merge) for number, one in enumerate(found.windows) if one.first_merge]
    if apart:
        number, merge = apart[0]
        title = merge_titles([merge])[merge]
        lines.append(
            f"{counted(len(apart), 'windows')} decide otherwise, first window {number} in {title}: what comes after "
            "differs for that reason; `verify` tells whether rounding explains it"
        )
    else:
        lines.append("all merge decisions are the same")
    worst = min(one.labels_equal_percent for one in found.windows)
    lines.append(f"labels equal: at least {worst:.3f} % in each window, {found.gate_percent:g} % are asked for")
    return lines


# -------------------------------------------------------------------------------------------------------------- values


def titled_tokens(tokens: Sequence[MergeTokens]) -> dict[str, float]:
    """Mean tokens after each merge that tables show, by its title for people."""
    means = tokens_by_merge(tokens)
    return {title: means[merge] for merge, title in merge_titles([*means]).items()}


def clipped(text: str) -> str:
    """A text in which shares lie between 0 and 100 %: what a lower one would allow, 0 % allows as well."""
    return _SHARE.sub(lambda found: f"{min(max(float(found[1]), 0), 100):g} %", text)


def shown(value: float | None, digits: int | None = None) -> str:
    """A number with so many digits behind the point, or as it is; `-` where there is none."""
    if value is None:
        return UNKNOWN
    return f"{value:g}" if digits is None else f"{value:.{digits}f}"


def with_difference(value: float | None, base: float | None, is_base: bool) -> str:
    """A percentage, and its difference to the base in points."""
    if value is None or base is None or is_base:
        return shown(value, 2)
    return f"{value:.2f} ({value - base:+.2f})"


def merged_plan(group: Sequence[Measured[Evaluation]]) -> MergePlan:
    """The first plan of a group that merges, which names of plans refer to; the dense one where none does."""
    plans = [row.artifact.plan for row in group]
    return next((plan for plan in plans if plan.layers), plans[0])


def _token_cells(tokens: Sequence[MergeTokens], titles: Mapping[str, str], otherwise: float | None = None) -> list[str]:
    """Mean tokens after each of the merges in `titles`; `otherwise` where a record has none of that merge."""
    means = tokens_by_merge(tokens)
    return [shown(means.get(merge, otherwise), 0) for merge in titles]


def _speed_cell(record: Speed, name: str, digits: int | None) -> str:
    value: Any = getattr(record, name)
    if name in ("variant", "baseline"):
        return UNKNOWN if name == "baseline" and record.speedup is None else variant_title(value)
    if not record.stable and isinstance(value, float) and name != "gmacs_per_window_mean":
        return "not stable"
    spread = record.merge_efficiency_by_round if name == "merge_efficiency" else None
    if spread:
        return f"{shown(value, digits)} ({shown(spread.p25, digits)} to {shown(spread.p75, digits)})"
    return str(value) if isinstance(value, str) else shown(value, digits)


# --------------------------------------------------------------------------------------------------------------- forms


def text_table(header: Row, rows: Sequence[Row]) -> str:
    """Columns padded to their widest cell, two spaces apart."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def markdown_table(header: Row, rows: Sequence[Row]) -> str:
    """The same rows as Markdown; columns of numbers are aligned to the right."""
    numeric = numeric_columns(header, rows)
    rule = ["---:" if right else "---" for right in numeric]
    lines = [header, rule, *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def numeric_columns(header: Row, rows: Sequence[Row]) -> list[bool]:
    """For each column whether it holds numbers only, so that it is aligned to the right."""
    return [bool(rows) and all(_NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(header))]
