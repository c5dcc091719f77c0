"""One table of a network in several precisions, without merging and with it: what each costs and what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from algm_deploy.bundle.records import Evaluation, Speed, VariantName
from algm_deploy.parity.pairwise import Standing
from algm_deploy.report.records import Artifact, Measured, measured, plan_in_force
from algm_deploy.report.tables import Table, shown
from algm_deploy.runners.registry import row_of
from algm_deploy.timing.variants import executed_bytes, faster_dense
from algm_deploy.wording import merge_titles, variant_title

PICTURES = ("dataset", "split", "protocol", "images", "labelled_pixels")
CONDITIONS = ("protocol", "batch", "device", "output")
_NOTE = (
    "labels and groups are held to the first bundle's, dense to dense and merged to merged; mIoU and times are those "
    "that evaluate and bench left in each bundle, as far as they are of the same pictures and conditions as the first's"
)


@dataclass(frozen=True)
class PrecisionRow:
    """What one bundle costs and gains in one form; None where no record tells. `miou_points` and `times_as_fast` are
    against the first bundle without merging, labels and groups against the first in the same form. `baseline` is the
    faster network of the first bundle without merging, which `times_as_fast` is against, and `baseline_ms_a_picture`
    what that takes: it may have another attention than the one whose row tells labels and mIoU."""

    bundle: str
    precision: str
    merging: Literal["dense", "merged"]
    miou_percent: float | None
    miou_points: float | None
    labels_equal_percent: float
    grouped_otherwise_percent: dict[str, float]
    ms_a_picture: float | None
    times_as_fast: float | None
    baseline: VariantName | None
    baseline_ms_a_picture: float | None
    bytes_on_disk: int


def precision_rows(standings: Sequence[Standing]) -> list[PrecisionRow]:
    """A row for each bundle and form."""
    first = standings[0]
    base_accuracy, (baseline, base_speed) = _accuracy(first), _baseline(first)
    rows = []
    for one in standings:
        accuracy, speed = _accuracy(one), _speed(one)
        miou, ms = accuracy.miou_percent if accuracy else None, _ms(speed)
        base = base_accuracy.miou_percent if _same(accuracy, base_accuracy, PICTURES) and base_accuracy else None
        base_ms = _ms(base_speed) if _same(speed, base_speed, CONDITIONS) else None
        compared = bool(ms and base_ms)
        rows.append(
            PrecisionRow(
                bundle=one.bundle.path.name,
                precision=precision_words(one),
                merging="dense" if one.dense else "merged",
                miou_percent=miou,
                miou_points=None if miou is None or base is None else miou - base,
                labels_equal_percent=one.labels_equal_percent,
                grouped_otherwise_percent={} if one.dense else one.grouped_otherwise_percent,
                ms_a_picture=ms,
                times_as_fast=base_ms / ms if ms and base_ms else None,
                baseline=baseline if compared else None,
                baseline_ms_a_picture=base_ms if compared else None,
                bytes_on_disk=executed_bytes(one.bundle, one.runtime),
            )
        )
    return rows


def precision_table(rows: Sequence[PrecisionRow]) -> Table:
    """The rows as text."""
    titles = merge_titles(list(dict.fromkeys(merge for row in rows for merge in row.grouped_otherwise_percent)))
    grouped = (f"grouped otherwise by {title}, %" for title in titles.values())
    known = ("bundle", "precision", "merging", "mIoU %", "labels equal %")
    header = (*known, *grouped, "ms a picture", "times as fast", "MB")
    return Table(
        header,
        [
            (
                row.bundle,
                row.precision,
                row.merging,
                shown(row.miou_percent, 2) + (f" ({row.miou_points:+.2f})" if row.miou_points is not None else ""),
                shown(row.labels_equal_percent, 3),
                *(shown(row.grouped_otherwise_percent.get(merge), 2) for merge in titles),
                shown(row.ms_a_picture, 2),
                shown(row.times_as_fast, 2),
                f"{row.bytes_on_disk / 1e6:.1f}",
            )
            for row in rows
        ],
    )


def precision_notes(rows: Sequence[PrecisionRow]) -> list[str]:
    """What a reader of the table must know beside it, one line each."""
    told = next((row for row in rows if row.baseline), None)
    if told is None or told.baseline is None:
        return [_NOTE]
    ms = shown(told.baseline_ms_a_picture, 2)
    return [_NOTE, f"times as fast are against the first bundle's {variant_title(told.baseline)}: {ms} ms a picture"]


def precision_words(one: Standing) -> str:
    """A bundle's precision, and what the runtime computes it in where that is another or is simulated."""
    precision, row = one.bundle.recipe.precision, row_of(one.runtime)
    computed = row.precision_of(precision)
    if computed != precision:
        return f"{precision}, in {computed}"
    return f"{precision}, simulated" if row.simulates and one.bundle.calibrated else precision


def _accuracy(one: Standing) -> Evaluation | None:
    """The last evaluation of the same form on the runtime."""
    rows: list[Measured[Evaluation]] = measured(one.bundle, Evaluation)
    return next((row.record for row in reversed(rows) if _of(one, row.artifact, row.runtime)), None)


def _baseline(first: Standing) -> tuple[VariantName, Speed | None]:
    """The faster network without merging, as far as both were timed alike, and its times."""
    own, other = _speed(first), _speed(first, cudnn_attention=True)
    if own is None or other is None or not _same(own, other, CONDITIONS):
        return "dense", own
    timed: dict[VariantName, Speed] = {"dense": own, "dense_cudnn": other}
    faster = faster_dense({name: ms for name, record in timed.items() if (ms := _ms(record))}) or "dense"
    return faster, timed[faster]


def _speed(one: Standing, cudnn_attention: bool = False) -> Speed | None:
    """The last steady times of the same form on the runtime."""
    rows: list[Measured[Speed]] = measured(one.bundle, Speed)
    fitting = (row for row in reversed(rows) if _of(one, row.artifact, row.runtime, cudnn_attention))
    return next((row.record for row in fitting if row.record.stable), None)


def _of(one: Standing, artifact: Artifact, runtime: str, cudnn_attention: bool = False) -> bool:
    """Whether a record is one of the form, at the bundle's own thresholds, with that attention, on the runtime."""
    own = plan_in_force(one.bundle.recipe.merging, {})
    plan_fits = not artifact.plan.layers if one.dense else artifact.plan == own
    attends_so = artifact.cudnn_attention == cudnn_attention
    return runtime == one.runtime and plan_fits and attends_so and not artifact.truncated


def _same(one: Evaluation | Speed | None, other: Evaluation | Speed | None, names: Sequence[str]) -> bool:
    """Whether two records are there and were measured alike."""
    return None not in (one, other) and all(getattr(one, name) == getattr(other, name) for name in names)


def _ms(speed: Speed | None) -> float | None:
    """Milliseconds for a picture."""
    if speed is None:
        return None
    return 1e3 / speed.throughput_img_per_s if speed.throughput_img_per_s else speed.latency_ms_p50
