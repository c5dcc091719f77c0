"""Precision and threshold together: the fastest that keeps an mIoU wins, and the page says what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from stand_ins import DEMO, evaluation, speed, trial

from algm_deploy.bundle.records import Evaluation, Link, Parity, PrecisionTuning, Speed
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import main
from algm_deploy.errors import RecipeError
from algm_deploy.evaluation.datasets import Dataset
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import Precision
from algm_deploy.report.tuning import precision_plots, tuning_page
from algm_deploy.tuning.precisions import Contender, check_one_network, tune_precision
from algm_deploy.tuning.search import Goal

TAUS = [0.5, 0.6, 0.7, 0.8, 0.9]
COST = {"fp32": (70.0, 1.0), "bf16": (69.9, 1.5), "int8": (69.0, 2.0)}  # mIoU without merging, times as fast
NAME = "a bundle of "


def stand_in(precision: Precision, **changes: Any) -> Any:
    """All that a search asks of a bundle."""

    class StandIn:
        recipe = replace(DEMO, precision=precision, **changes)
        path = Path(NAME + precision)

    return StandIn()


def evaluated(precision: str, tau: float | None, dataset: Dataset) -> Evaluation:
    """A tenth of the threshold costs two points."""
    miou = COST[precision][0] - (0.0 if tau is None else 20 * (0.9 - tau))
    return evaluation(miou, split=dataset.split, by_slice={"day": miou + 1, "night": miou - 1})


def timed(precision: str, plan: MergePlan) -> Speed:
    return speed(100 * COST[precision][1] * (1.5 - plan.clap_threshold))


def tuned(limit: float, whole: bool = False) -> PrecisionTuning:
    first = ("dense fp32", partial(evaluated, "fp32", None))
    contenders = [
        Contender(
            stand_in(precision),
            trial(partial(evaluated, precision), Goal("reference", limit), reference=first),
            partial(timed, precision),
        )
        for precision in ("fp32", "bf16", "int8")
    ]
    return tune_precision(contenders, "onnxruntime-cpu", "clap_threshold", TAUS, whole)


@pytest.mark.parametrize(
    ("limit", "chosen", "tau"), [(69.95, "fp32", 0.9), (69.5, "bf16", 0.9), (67.0, "int8", 0.8), (61.0, "int8", 0.5)]
)
def test_the_fastest_that_keeps_the_limit(limit: float, chosen: str, tau: float) -> None:
    found = tuned(limit)
    assert (found.best.precision, found.best.search.marked.value) == (chosen, tau)
    assert found.best.search.reached
    assert msgspec.convert(msgspec.to_builtins(found), PrecisionTuning) == found


def test_the_page_compares_with_the_first_network() -> None:
    found = tuned(67.0)
    page = tuning_page(found)
    assert page.lines[0] == (
        "int8 at clap_threshold 0.8 is the fastest of fp32, bf16, int8 on onnxruntime-cpu to merge most while mIoU "
        "stays at or above 67.00 %: mIoU 67.00 %, 5.00 GMACs per window, 140.0 img/s, 4.00 times as fast as fp32 "
        "without merging"
    )
    assert "int8 67.00 %, -3.00 points to dense fp32 (70.00 %); the weakest slice: day (-3.00 points)" in page.lines[2]
    here, held = page.tables
    assert here.header == ("precision", "", "clap_threshold", "ms a picture", "all", "day", "night")
    assert [row[:2] for row in here.rows[::2]] == [("fp32", "dense"), ("bf16", "dense"), ("int8", "dense")]
    assert here.rows[0][3:5] == ("28.57", "70.00")
    assert here.rows[5] == ("int8", "chosen", "0.8", "7.14", "67.00 (-3.00)", "68.00 (-3.00)", "66.00 (-3.00)")
    assert held.rows[5][4:] == here.rows[5][4:]
    (plot,) = precision_plots(found)
    assert [one.name for one in plot.series] == ["fp32", "bf16", "int8", "chosen"]
    assert plot.series[-1].points == [(1e3 / 140, pytest.approx(67.0), "int8, 0.8")]
    assert plot.series[0].points[-1][2] == "dense"


def test_a_gain_over_one_dense_network_may_be_a_loss_against_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense with cuDNN's attention is the faster; nobody evaluated it, so its time stands beside no mIoU."""
    plain = timed

    def against_cudnn(precision: str, plan: MergePlan) -> Speed:
        return structs.replace(plain(precision, plan), speedup=0.8, baseline="dense_cudnn")

    monkeypatch.setitem(globals(), "timed", against_cudnn)
    found = tuned(69.95)
    page = tuning_page(found)
    assert page.lines[0].endswith("60.0 img/s, 0.80 times as fast as fp32 without merging (dense, cuDNN attention)")
    here, held = page.tables
    assert [row[1] for row in here.rows[:3]] == ["dense", "chosen", "dense, cuDNN attention"]
    assert here.rows[0][3:5] == ("-", "70.00")
    assert here.rows[2] == ("fp32", "dense, cuDNN attention", "", "13.33", "-", "-", "-")
    assert held.rows[2] == here.rows[2]
    assert "dense" not in {label for series in precision_plots(found)[0].series for _, _, label in series.points}


def test_a_whole_curve_is_drawn_held_out_too() -> None:
    here, held = precision_plots(tuned(67.0, whole=True))
    assert [len(one.points) for one in held.series] == [len(TAUS) + 1] * 3 + [1]
    assert held.caption.startswith("held out")
    assert here.x_label == "ms a picture on onnxruntime-cpu"


def test_without_an_answer_the_most_accurate_is_marked() -> None:
    found = tuned(90.0)
    assert (found.best.precision, found.best.search.reached) == ("fp32", False)
    lines = tuning_page(found).lines
    assert lines[0].startswith("no precision qualifies to merge most while mIoU stays at or above 90.00 %; nearest: fp")
    assert [line.partition(":")[0] for line in lines[3:]] == ["bf16", "int8"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merging": replace(DEMO.merging, clap_threshold=0.1)}, "got another merging in a bundle of int8: export"),
        ({"protocol": replace(DEMO.protocol, stride=64)}, "got another protocol in a bundle of int8"),
        ({"output": "labels"}, "got another output in a bundle of int8"),
        ({"precision": "fp32"}, "expected a bundle for each precision, got two in fp32"),
    ],
)
def test_bundles_differ_in_precision_alone(changes: dict[str, Any], message: str) -> None:
    other = stand_in("int8")
    other.recipe = replace(other.recipe, **changes)
    with pytest.raises(RecipeError, match=message):
        check_one_network([stand_in("fp32"), other])


def test_the_command(
    bundle: Bundle,
    copied: Callable[..., Bundle],
    tiny_export: Callable[..., Bundle],
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    low, output = copied(tiny_export({"precision": "bf16"}), "low"), tmp_path / "both.toml"
    words = ["tune", "precision", str(bundle.path), str(low.path), "--data", str(photos), "--dataset", "folder"]
    words += ["--runtime", "torch", "--drop", "100", "--values", "0.8,1.01", "-o", str(output)]
    assert main(words) == 2
    assert "verify" in capsys.readouterr().err
    link = Link(number=1, name="network", passed=True, measured="", gate="")
    for one in (bundle, low):
        one.record(Parity(runtime="torch", images=1, batches=(1,), links=(link,)))
    assert main(words) == 0
    told = capsys.readouterr()
    assert "at clap_threshold 0.8 is the fastest of fp32, bf16 on torch" in told.out
    assert f"{low.path.name}, " in told.err
    written = recipe(str(output))
    assert (written.merging.clap_threshold, written.precision in ("fp32", "bf16")) == (0.8, True)
    chosen = bundle if written.precision == "fp32" else low
    (record,) = Bundle.open(chosen.path).manifest.tunings
    assert isinstance(record, PrecisionTuning)
    assert output.with_suffix(".svg").read_text().count("tuned on first half") == 1
    assert "ms a picture" in output.with_suffix(".html").read_text()
