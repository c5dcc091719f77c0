"""`bench` and `deploy --bench`: what they print and keep, and what they refuse."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnxruntime as ort
import pytest
from msgspec import structs

from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import main
from algm_deploy.report.page import report_page

SHORT = ("--count", "2", "--warmup", "0", "--rounds", "2")


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny bundle, verified on PyTorch."""
    folder = Path(shutil.copytree(tiny_bundle.path, tmp_path_factory.mktemp("bench") / "tiny"))
    assert main(["verify", str(folder), "--runtime", "torch", "--count", "1"]) == 0
    return folder


def test_bench_prints_and_keeps_what_it_timed(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(bundle), "--runtime", "torch", *SHORT]) == 0
    printed = capsys.readouterr().out
    conditions, _, header, _, *lines = printed.splitlines()
    assert conditions.startswith(
        f"runtime torch, bundle {bundle.name}, precision fp32, output scores, protocol latency, "
    )
    assert header.split()[0] == "variant"
    assert [line.split()[0] for line in lines[:3]] == ["dense", "merged", "truncated"]
    assert "2 synthetic scenes" in printed
    assert "not representative" in printed
    opened = Bundle.open(bundle)
    timed = {(one.runtime, one.protocol, one.variant, one.batch) for one in opened.manifest.speeds}
    assert timed == {("torch", "latency", name, 1) for name in ("dense", "merged", "truncated")}
    assert "torch latency merged" not in report_page(opened)  # keys are not for readers
    assert "latency" in report_page(opened)


def test_bench_of_batches(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--runtime", "torch", "--protocol", "mixed", "--batch", "2")
    assert main(["bench", str(bundle), *options, *SHORT]) == 0
    assert "protocol mixed, batch 2, " in capsys.readouterr().out
    timed = {(one.runtime, one.protocol, one.variant, one.batch) for one in Bundle.open(bundle).manifest.speeds}
    assert ("torch", "mixed", "merged", 2) in timed


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--runtime", "onnxruntime-cpu"), 2, "--runtime onnxruntime-cpu` first"),
        (("--runtime", "tensorrt-rtx"), 2, "--runtime tensorrt-rtx`"),
        (("--runtime", "torch", "--batch", "2"), 2, "expected a batch of 1 for latency, got 2"),
        (("--runtime", "torch", "--protocol", "mixed", "--batch", "4", "--count", "3"), 2, "at least 4 different"),
        (("--runtime", "torch", "--rounds", "1"), 2, "2 rounds or more"),
        (("--runtime", "torch", "--images", "nowhere"), 2, "nowhere: expected pictures or a folder"),
    ],
)
def test_bench_refuses(
    bundle: Path, options: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(bundle), *options]) == code
    message = capsys.readouterr().err
    assert message.startswith("algm-deploy bench: ")
    assert message.count("\n") == 1
    assert said in message


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this is the CUDA package")
def test_what_cannot_be_verified_here_is_not_asked_for(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(bundle), "--runtime", "onnxruntime-cuda"]) == 2
    message = capsys.readouterr().err
    assert "pip install onnxruntime-gpu" in message
    assert "verify" not in message


def test_bench_refuses_what_failed(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Bundle.open(shutil.copytree(bundle, tmp_path / "failed"))
    (record,) = copy.manifest.parity
    *links, last = record.links
    copy.record(structs.replace(record, links=(*links, structs.replace(last, passed=False))))
    assert main(["bench", str(copy.path), "--runtime", "torch"]) == 1
    assert "so nothing is timed" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--count", "0"), ("--rounds", "-1"), ("--warmup", "many"), ("--batch", "2.5")])
def test_numbers_that_are_none(bundle: Path, option: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", str(bundle), *option])
    assert stopped.value.code == 2


@pytest.mark.slow
def test_deploy_times_when_asked(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "deployed"
    options = ("--runtime", "torch", "--count", "1", "--max-batch", "1", "--bench")
    assert main(["deploy", str(tiny_checkpoint), "-o", str(target), *options]) == 0
    shown = capsys.readouterr().out
    (merged,) = [one for one in Bundle.open(target).manifest.speeds if one.variant == "merged"]
    assert "p50 ms" in shown and "speed-up" in shown
    assert merged.stable != ("not stable" in shown)  # a busy machine gives no figure
    assert merged.samples is not None
    assert merged.samples >= 100
    assert merged.latency_ms_p99 is not None
    assert merged.latency_ms_p90 is not None
    assert merged.latency_ms_p99 >= merged.latency_ms_p90
