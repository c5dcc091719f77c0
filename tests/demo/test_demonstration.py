"""The demo from checkpoint to report, on fewer pictures and timed for less long than users get it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from algm_deploy.bundle.records import Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import main
from algm_deploy.demo import run as demonstration
from algm_deploy.demo.run import draw_pictures, labelled_pictures, measured_before, one_of_each_slice
from algm_deploy.errors import GateError
from algm_deploy.timing.timers import Effort

TITLE = ("drawn scenes", "that ship")


@pytest.mark.slow
def test_whole_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    few = labelled_pictures().subset(3)
    monkeypatch.setattr(demonstration, "labelled_pictures", lambda: few)
    short = replace(demonstration.SHORT, effort=Effort(warmup=0, rounds=2, most_rounds=2))
    monkeypatch.setattr(demonstration, "SHORT", short)
    assert main(["demo", "-o", str(tmp_path), "--runtime", "onnxruntime-cpu"]) == 0
    lines, bundle = capsys.readouterr().out.splitlines(), Bundle.open(tmp_path / "bundle")
    assert [line[0] for line in lines if line[:1].isdigit()] == list("123456")
    parity = bundle.manifest.parity
    assert {"torch", "onnxruntime-cpu"} == {record.runtime for record in parity}
    assert all(record.passed for record in parity)
    assert all(record.pictures == "synthetic scenes" for record in parity)
    compared = [line.strip().partition(" that")[0] for line in lines if ": mIoU" in line]
    assert compared == ["3 drawn scenes"]
    assert [line.split()[0] for line in lines if "->" in line] == ["day", "night"]
    assert {(one.dataset, one.split, one.images) for one in bundle.manifest.evaluations} == {(*TITLE, 3)}
    speeds = bundle.manifest.speeds
    assert {(one.runtime, one.variant) for one in speeds} == {
        (runtime, variant) for runtime in ("torch", "onnxruntime-cpu") for variant in ("dense", "merged")
    }
    assert all(one.pictures == "synthetic scenes" and not one.representative for one in speeds)
    timed = [line.split()[0] for line in lines if "times as fast" in line or "not stable" in line]
    assert timed == ["torch", "onnxruntime-cpu"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.endswith("</html>\n")
    assert "synthetic scenes" in page
    assert "drawn scenes that ship, 3 images" in page
    assert page.count("data:image/") > 10


def test_what_was_measured_before_is_what_the_training_recorded(root_dir: Path) -> None:
    record = json.loads((root_dir / "benchmarks" / "demo" / "record.json").read_text())
    dense, merged = (record["evaluations"][record["ships"]]["report"][mode]["all"] for mode in ("dense", "merged"))
    percents = [round(part["miou_percent"], 2) for part in (dense, merged)]
    assert measured_before() == (merged["images"], *percents)
    assert merged["images"] == 1000


def test_the_comparison_quotes_the_model_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few scenes tell little, so the figures of many stand beside them: those of the card, whatever it says."""
    found = (
        SimpleNamespace(images=24, slices={}, miou_percent=miou, gmacs_per_window_mean=gmacs)
        for miou, gmacs in ((75.0, 4.0), (74.0, 3.0))
    )
    monkeypatch.setattr(demonstration, "evaluate", lambda *_, **__: next(found))
    monkeypatch.setattr(demonstration, "measured_before", lambda: (321, 45.678, 43.21))
    lines: list[str] = []
    demonstration._compare(None, "torch", None, lines.append, False)
    assert "75.00 % without merging, 74.00 % with merging, at 75 % of the multiply-adds" in lines[0]
    assert "on 321 others" in lines[-1]
    assert "45.68 % without merging, 43.21 % with" in lines[-1]


def test_the_report_shows_every_hour() -> None:
    shown = one_of_each_slice(labelled_pictures())
    assert [sample.slice for sample in shown.samples] == ["day", "dusk", "night"]
    assert shown.samples[0] == labelled_pictures().samples[0]
    assert (shown.name, shown.split) == TITLE


def test_pictures_are_of_every_hour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Path] = []
    predictor = type("Opened", (), {"__enter__": lambda self: self, "__exit__": lambda *_: None})
    writer = type("Writer", (), {"__init__": lambda *_: None, "write": lambda _, photo: drawn.append(photo) or [photo]})
    monkeypatch.setattr(demonstration, "Predictor", lambda *_: predictor())
    monkeypatch.setattr(demonstration, "PictureWriter", writer)
    assert draw_pictures(None, "torch", tmp_path) == drawn
    assert len(set(drawn)) == demonstration.PICTURES
    assert {photo.parent.name for photo in drawn} == {"day", "dusk", "night"}


@pytest.mark.parametrize("baseline", ["dense", "dense_cudnn"])
def test_an_unsteady_machine_gives_no_figure(monkeypatch: pytest.MonkeyPatch, baseline: str) -> None:
    """The network without merging is the one that the gain is told against."""
    ms = {"dense": 20.0, "dense_cudnn": 20.0, "merged": 5.0, "truncated": 4.0} | {baseline: 10.0}
    records = [
        SimpleNamespace(variant=name, stable=False, batch_ms_mean_of_medians=one, speedup=2.0, baseline=baseline)
        for name, one in ms.items()
    ]
    monkeypatch.setattr(demonstration, "bench", lambda *_, **__: records)
    bundle = SimpleNamespace(found=lambda kind, runtime: {(Parity, "torch"): "passed"}[kind, runtime])
    lines: list[str] = []
    demonstration._time(bundle, "torch", lines.append, False)
    assert "not stable" in lines[0]
    assert "10.0" not in lines[0]
    for record in records:
        record.stable = True
    demonstration._time(bundle, "torch", lines.append, False)
    which = "" if baseline == "dense" else " (dense, cuDNN attention)"
    assert f"10.0 ms without merging{which}, 5.0 ms with: 2.00 times as fast" in lines[1]


def test_a_demo_that_fails_parity_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = type("Report", (), {"passed": False, "links": ()})
    monkeypatch.setattr(demonstration, "verify", lambda *_, **__: failed)
    with pytest.raises(GateError, match="please report this"):
        demonstration._verify(None, "torch", 1, lambda _: None, False)
