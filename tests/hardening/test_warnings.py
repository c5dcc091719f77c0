"""What goes on with a loud line: bundles that failed the parity chain, weights that may not be read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from PIL import Image

from algm_deploy.bundle.records import Link, Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import main
from algm_deploy.pictures.shipped import scene

LINK = Link(number=5, name="decisions", passed=False, measured="3 of 4 images", gate="0 unexcused")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a photo, and with one labelled scene in CamVid's layout."""
    for kind, array in zip(("images", "annotations"), scene(0), strict=True):
        folder = tmp_path / "camvid" / kind / "test"
        folder.mkdir(parents=True)
        Image.fromarray(array).save(folder / "a.png")
    Image.fromarray(scene(0)[0][:128, :128]).save(tmp_path / "photo.png")
    return tmp_path


def said(caplog: pytest.LogCaptureFixture, *words: object) -> list[str]:
    """Lines that a command logs, which must succeed."""
    caplog.clear()
    assert main([str(word) for word in words]) == 0
    return [record.getMessage() for record in caplog.records]


def test_a_failed_parity_chain_is_told_once_by_whoever_uses_the_bundle(
    tiny_bundle: Bundle, copied: Callable[..., Bundle], place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = copied(tiny_bundle)
    commands = {
        "predict": (place / "photo.png", "-o", place / "pictures", "--runtime", "torch", "--quiet"),
        "evaluate": ("--data", place / "camvid", "--runtime", "torch"),
        "report": ("--images", place / "photo.png", "-o", place / "report.html", "--runtime", "torch"),
    }
    bundle.record(Parity(runtime="torch", images=4, batches=(1,), links=(LINK,)))
    for command, words in commands.items():
        (line,) = said(caplog, command, bundle.path, *words)
        assert line.startswith(f"WARNING: {bundle.path} FAILED the parity chain on torch (link 5 decisions): trust no")
        assert line.endswith(f"before `algm-deploy verify {bundle.path} --runtime torch` passes")
    assert main(["bench", str(bundle.path), "--runtime", "torch"]) == 1  # which times nothing
    assert "Parity FAILED" in (place / "report.html").read_text()

    bundle.record(Parity(runtime="torch", images=4, batches=(1,), links=()))
    (line,) = said(caplog, "report", bundle.path, "-o", place / "report.html")
    assert "(nothing was compared)" in line
    bundle.record(Parity(runtime="onnxruntime-cpu", images=1, batches=(1,), links=(LINK,)))
    passed = Link(number=5, name="decisions", passed=True, measured="all", gate="0 unexcused")
    bundle.record(Parity(runtime="torch", images=4, batches=(1,), links=(passed,)))
    assert said(caplog, "predict", bundle.path, *commands["predict"]) == []  # another runtime's failure is not its own


def test_weights_that_may_not_be_read_are_needed_by_pytorch_alone(
    tiny_bundle: Bundle,
    copied: Callable[..., Bundle],
    unprivileged: Callable[[], AbstractContextManager[None]],
    place: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle, pictures = copied(tiny_bundle), place / "pictures"
    assert main(["build", str(bundle.path), "--runtime", "onnxruntime-cpu"]) == 0
    (bundle.path / "weights.safetensors").chmod(0)
    predict = ("predict", bundle.path, place / "photo.png", "-o", pictures, "--runtime")
    refused = (
        f"expected to read {bundle.path}/weights.safetensors, got Permission denied: change its permissions or copy"
    )
    with unprivileged():
        (line,) = said(caplog, *predict, "onnxruntime-cpu")
        assert f"pictures go without the similarity of windows: {refused}" in line
        assert {path.name for path in pictures.iterdir()} == {
            f"photo.{kind}.png" for kind in ("labels", "overlay", "tokens")
        }
        capsys.readouterr()
        assert main([*map(str, predict), "torch"]) == 2
    assert refused in capsys.readouterr().err
