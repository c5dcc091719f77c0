"""The demo from checkpoint to report, on fewer pictures than users get."""

from __future__ import annotations

from pathlib import Path

import pytest

from algm_deploy.demo import run as demonstration
from algm_deploy.demo.run import demonstrate, generated_scenes, labelled_pictures
from algm_deploy.errors import GateError


@pytest.mark.slow
def test_whole_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = labelled_pictures().subset(3)
    monkeypatch.setattr(demonstration, "labelled_pictures", lambda: few)
    lines: list[str] = []
    bundle = demonstrate(tmp_path, "onnxruntime-cpu", 1, lines.append, progress=False)
    assert [line[0] for line in lines if line[:1].isdigit()] == list("123456")
    assert {"torch", "onnxruntime-cpu"} == set(bundle.fact("parity"))
    assert all(record["passed"] for record in bundle.fact("parity").values())
    assert all(record["pictures"] == "synthetic scenes" for record in bundle.section("parity").values())
    compared = [line.strip().partition(":")[0] for line in lines if ": mIoU" in line]
    assert compared == ["3 pictures of the package", "1 scene drawn now"]
    speed = bundle.fact("speed")
    assert {(one["runtime"], one["variant"]) for one in speed.values()} == {
        (runtime, variant) for runtime in ("torch", "onnxruntime-cpu") for variant in ("dense", "merged")
    }
    assert all(one["pictures"] == "synthetic scenes" and not one["representative"] for one in speed.values())
    timed = [line.split()[0] for line in lines if "times as fast" in line or "not stable" in line]
    assert timed == ["torch", "onnxruntime-cpu"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.endswith("</html>\n")
    assert "synthetic scenes" in page
    assert page.count("data:image/") > 10


def test_fewer_scenes_than_an_earlier_run_are_fewer(tmp_path: Path) -> None:
    """And a scene whose picture had not been finished is drawn again."""
    assert len(generated_scenes(tmp_path, 3).samples) == 3
    first = generated_scenes(tmp_path, 2).samples
    assert len(first) == 2
    first[1].image_path.unlink()
    assert [sample.name for sample in generated_scenes(tmp_path, 2).samples] == [sample.name for sample in first]


def test_an_unsteady_machine_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"stable": False, "batch_ms_mean_of_medians": ms, "speedup": 2.0} for ms in (10.0, 5.0)]
    rows = [type("Row", (), {"record": record}) for record in records]
    monkeypatch.setattr(demonstration, "bench_bundle", lambda *_: rows)
    bundle = type("Verified", (), {"section": lambda _, name: {"parity": {"torch": {}}}[name]})()
    lines: list[str] = []
    demonstration._time(bundle, "torch", lines.append, False)
    assert "not stable" in lines[0]
    assert "10.0" not in lines[0]
    for record in records:
        record["stable"] = True
    demonstration._time(bundle, "torch", lines.append, False)
    assert "10.0 ms dense, 5.0 ms merged: 2.00 times as fast" in lines[1]


def test_a_demo_that_fails_parity_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = type("Report", (), {"passed": False, "links": ()})
    monkeypatch.setattr(demonstration, "verify_bundle", lambda *_: failed)
    with pytest.raises(GateError, match="please report this"):
        demonstration._verify(None, "torch", 1, lambda _: None, False)
