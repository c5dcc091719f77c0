"""Tables: columns for what records hold, whatever merges, and cells that people can read."""

from __future__ import annotations

from typing import Any

import pytest

from algm_deploy.bundle.records import Evaluation, Link, MergeTokens, Parity, Speed, TokenHistograms
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.schema import Protocol
from algm_deploy.report.records import Artifact, Measured
from algm_deploy.report.tables import (
    Table,
    clipped,
    condensed,
    cost_table,
    markdown_table,
    parity_table,
    quality_table,
    speed_table,
    text_table,
)

CLAP_GBM = MergePlan(clap_layers=(1,), gbm_layers=(5,))
TWO_GBM = MergePlan(clap_layers=(1,), gbm_layers=(5, 9))
TOME = MergePlan(clap_layers=(), gbm_layers=(), method="tome", tome_r=(7,) * 6)


def tokens(**means: float) -> tuple[MergeTokens, ...]:
    return tuple(MergeTokens(merge=merge, mean=mean) for merge, mean in means.items())


def speed(plan: MergePlan = CLAP_GBM, **figures: Any) -> Measured[Speed]:
    known = {"runtime": "torch", "variant": "merged", "protocol": "latency", "batch": 1, "stable": True, **figures}
    return Measured("bundle", Artifact("ab" * 32, plan, "fp32", "scores"), Speed(**known))


def evaluation(plan: MergePlan, miou: float, merged: tuple[MergeTokens, ...]) -> Measured[Evaluation]:
    record = Evaluation(
        runtime="torch",
        dataset="camvid",
        split="test",
        protocol=Protocol("camvid", 512, 512, 480),
        images=7,
        miou_percent=miou,
        pixel_accuracy_percent=80.0,
        token_histograms=TokenHistograms(token_edges=(0.0, 1024.0), windows_by_merge={}),
        tokens=merged,
    )
    return Measured("bundle", Artifact("ab" * 32, plan, "fp32", "scores"), record)


# What tables call the merges of a network, and how many of them have a column.
MERGES = [
    (CLAP_GBM, tokens(clap_1=694.2, gbm_5=539.1), {"CLAP": "694", "GBM": "539"}),
    (TWO_GBM, tokens(clap_1=694.2, gbm_5=539.1, gbm_9=401.0), {"CLAP": "694", "GBM 5": "539", "GBM 9": "401"}),
    (TOME, tokens(**{f"tome_{i}": 1024.0 - 7 * i for i in range(1, 7)}), {"ToMe 1": "1017", "ToMe 6": "982"}),
]


@pytest.mark.parametrize(("plan", "merged", "expected"), MERGES, ids=["clap+gbm", "two gbm", "tome"])
def test_every_table_has_columns_for_what_merges(
    plan: MergePlan, merged: tuple[MergeTokens, ...], expected: dict[str, str]
) -> None:
    columns = {f"tokens after {title}": mean for title, mean in expected.items()}
    dense = evaluation(DENSE, 70.0, ())
    tables = (
        speed_table([speed(plan, tokens=merged), speed(DENSE, variant="dense")]),
        cost_table([evaluation(plan, 66.0, merged), dense]),
        quality_table(evaluation(plan, 66.0, merged).record),
    )
    for table in tables:
        cells = dict(zip(table.header, table.rows[0], strict=True))
        assert {title: cell for title, cell in cells.items() if title.startswith("tokens after")} == columns
    without = [dict(zip(table.header, table.rows[-1], strict=True)) for table in tables[:2]]
    for title in columns:
        assert [cells[title] for cells in without] == ["-", "1024"]  # the dense network keeps its patches


def test_records_of_different_plans_share_a_speed_table() -> None:
    rows = [speed(plan, tokens=merged) for plan, merged, _ in MERGES]
    table = speed_table(rows)
    after = [title.removeprefix("tokens after ") for title in table.header if title.startswith("tokens after ")]
    assert after == ["CLAP", "GBM 5", "GBM 9", "ToMe 1", "ToMe 6"]
    first = dict(zip(table.header, table.rows[0], strict=True))
    assert (first["tokens after CLAP"], first["tokens after GBM 9"], first["tokens after ToMe 1"]) == ("694", "-", "-")


def test_a_speed_table_has_the_columns_that_records_hold() -> None:
    table = speed_table([speed(latency_ms_p50=1.234), speed(protocol="mixed", throughput_img_per_s=10.0)])
    assert table.header == (
        "runtime", "bundle", "precision", "output", "variant", "protocol", "batch", "img/s", "p50 ms", "device",
    )  # fmt: skip
    assert table.rows[0][4:] == ("merged", "latency", "1", "-", "1.23", "not recorded")
    assert table.rows[1][4:] == ("merged", "mixed", "1", "10.0", "-", "not recorded")


def test_conditions_that_all_rows_share_stand_in_one_line() -> None:
    rows = [speed(latency_ms_p50=1.5, device="CPU"), speed(variant="dense", latency_ms_p50=2.5, device="CPU")]
    table, shared = condensed(speed_table(rows))
    assert table.header == ("variant", "p50 ms")
    assert "device CPU" in shared
    assert "protocol latency" in shared


@pytest.mark.parametrize(
    ("gate", "told"),
    [
        ("-56 % (PyTorch in fp16: 21.9 %)", "0 % (PyTorch in fp16: 21.9 %)"),
        ("0 unexcused, 1.2e+02 % of decisions", "0 unexcused, 100 % of decisions"),
        ("0 unexcused, 0.5 % of decisions", "0 unexcused, 0.5 % of decisions"),
        ("99.44 %", "99.44 %"),
        ("100 %", "100 %"),
        ("bit for bit, 1e-06", "bit for bit, 1e-06"),
        ("2 x, largest 4 x PyTorch's", "2 x, largest 4 x PyTorch's"),
        ("-0.4 %", "0 %"),
    ],
)
def test_shares_lie_between_nothing_and_all(gate: str, told: str) -> None:
    assert clipped(gate) == told
    link = Link(number=6, name="labels", passed=False, measured="12.000 % of pixels equal", gate=gate)
    (row,) = parity_table(Parity(runtime="torch", images=1, batches=(1,), links=(link,))).rows
    assert row[-3:] == ("FAILED", "12.000 % of pixels equal", told)


# ------------------------------------------------------------------------------------------------------------- forms


def test_text_columns_are_as_wide_as_their_widest_cell() -> None:
    assert text_table(("a", "long"), [("12345", "1")]) == "a      long\n-----  ----\n12345  1"


def test_markdown_aligns_numbers_and_keeps_bars_out_of_cells() -> None:
    table = Table(("name", "mIoU %"), [("a|b", "12.50 (-1.25)"), ("c", "-")])
    assert markdown_table(*table) == "| name | mIoU % |\n| --- | ---: |\n| a\\|b | 12.50 (-1.25) |\n| c | - |"
