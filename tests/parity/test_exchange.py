"""Inputs and outputs in Polygraphy's files, held to the installed tool."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError
from algm_deploy.parity.exchange import load_inputs, load_outputs, save_inputs, save_outputs
from algm_deploy.runners.contract import runner

FEEDS = [{"image": np.arange(12, dtype=np.uint8).reshape(1, 3, 2, 2), "clap_threshold": np.float32(0.5)}]


def polygraphy(*arguments: object) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("polygraphy")
    assert tool is not None, "the package depends on it"
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    (found,) = load_inputs(save_inputs(FEEDS, tmp_path / "inputs.json"))
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in FEEDS[0].items()}
    assert found["image"].dtype == np.uint8
    name, (outputs,) = load_outputs(save_outputs(FEEDS, "tiny on torch", tmp_path / "outputs.json"))
    assert name == "tiny on torch"
    assert np.array_equal(outputs["image"], FEEDS[0]["image"])


def test_the_tool_reads_our_files_and_agrees(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """Polygraphy runs the portable graph on our inputs and compares it with our outputs, in its own words."""
    rng = np.random.default_rng(3)
    image = rng.integers(0, 256, (1, 3, 128, 128), dtype=np.uint8)
    with runner(tiny_bundle, "onnxruntime-cpu") as run:
        feeds = [{"image": image, **{n: np.float32(v) for n, v in run.signature.defaults.items()}}]
        names = [tensor.name for tensor in run.signature.outputs]
        outputs = [run.infer(one, names) for one in feeds]
    inputs, kept = tmp_path / "inputs.json", tmp_path / "outputs.json"
    save_inputs(feeds, inputs)
    save_outputs(outputs, "tiny", kept)
    listed = polygraphy("inspect", "data", inputs)
    assert listed.returncode == 0, listed.stderr
    assert "image [dtype=uint8, shape=(1, 3, 128, 128)]" in listed.stdout
    model = tiny_bundle.file("model.onnx")
    again = polygraphy("run", model, "--onnxrt", "--load-inputs", inputs, "--load-outputs", kept, "--atol", 1e-4)
    assert again.returncode == 0, again.stdout + again.stderr
    wrong = [{**outputs[0], "scores": outputs[0]["scores"] + 1}]
    save_outputs(wrong, "tiny", kept)
    refused = polygraphy("run", model, "--onnxrt", "--load-inputs", inputs, "--load-outputs", kept, "--atol", 1e-4)
    assert refused.returncode != 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a file of Polygraphy, got"),
        ("{}", "expected"),
        ("[]", "expected"),
        (json.dumps([{"image": "text"}]), "expected numbers as image"),
        ("[" * 100_000, "expected a file of Polygraphy, got"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(BundleError, match=message) as caught:
        load_inputs(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(BundleError, match="expected"):
        load_outputs(path)


def test_absent_files_are_named(tmp_path: Path) -> None:
    for load in (load_inputs, load_outputs):
        with pytest.raises(BundleError, match=r"absent.json: expected a file of Polygraphy, found none"):
            load(tmp_path / "absent.json")
