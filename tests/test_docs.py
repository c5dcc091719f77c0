"""The code in the documentation runs as it stands."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from algm_deploy.bundle.store import Bundle
from algm_deploy.cli.parser import parser
from algm_deploy.pictures.shipped import scene
from algm_deploy.runners.contract import runner
from algm_deploy.runners.tensorrt import polygraphy

HIDDEN = "import sys; sys.modules['algm_deploy'] = None; exec(open('snippet.py').read())"


def code_of(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


def test_model_runs_without_the_package(root_dir: Path, tiny_bundle: Bundle, tmp_path: Path) -> None:
    for name in ("model.onnx", "model.inlined.onnx", "model.onnx.data", "manifest.json"):
        shutil.copy(tiny_bundle.path / name, tmp_path)
    size = tiny_bundle.recipe.network.image_size
    photo = scene(0)[0][: size[0], : size[1]]
    Image.fromarray(photo).save(tmp_path / "photo.png")
    (tmp_path / "snippet.py").write_text(code_of(root_dir / "docs" / "plain-onnxruntime.md"))
    done = subprocess.run([sys.executable, "-c", HIDDEN], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with runner(tiny_bundle, "onnxruntime-cpu") as run:
        image = {"image": photo.transpose(2, 0, 1)[None]}
        counts, others = (
            run.infer({**image, **thresholds}, ["token_counts"])["token_counts"][0]
            for thresholds in ({}, {"clap_threshold": np.float32(0.8)})
        )
    assert counts.tolist() != others.tolist()  # so that the page shows whether it takes the bundle's own thresholds
    told = done.stdout.splitlines()
    assert told[0] == f"tokens after each merge: {counts}"
    assert told[1] == f"inlined: {counts}"
    assert told[2].startswith(f"reference: {counts} largest difference ")
    assert float(told[2].split()[-1]) < 1e-4
    labels = np.asarray(Image.open(tmp_path / "labels.png"))
    assert labels.shape == size
    assert labels.max() < tiny_bundle.recipe.network.classes


def test_commands_of_the_page_on_tensorrt_are_commands(root_dir: Path) -> None:
    """Those of the command line parse; Polygraphy's are run in test_proof.py and runners/tensorrt/test_build.py."""
    page = (root_dir / "docs" / "tensorrt.md").read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    ours = [shlex.split(line)[1:] for line in lines if line.startswith("algm-deploy ")]
    assert [parser().parse_args(words).command for words in ours] == ["build", "prove", "build"]
    rest = [line for line in lines if not line.startswith("algm-deploy ")]
    assert all(line.startswith(("polygraphy ", f"python -m {polygraphy.__name__} tensorrt-rtx ")) for line in rest)
