"""The code in the documentation runs as it stands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from algm_deploy.bundle.store import Bundle

HIDDEN = "import sys; sys.modules['algm_deploy'] = None; exec(open('snippet.py').read())"


def code_of(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


def test_model_runs_without_the_package(root_dir: Path, tiny_bundle: Bundle, tmp_path: Path) -> None:
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copy(tiny_bundle.path / name, tmp_path)
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)).save(tmp_path / "photo.png")
    (tmp_path / "snippet.py").write_text(code_of(root_dir / "docs" / "plain-onnxruntime.md"))
    done = subprocess.run([sys.executable, "-c", HIDDEN], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens after each merge: [" in done.stdout
    labels = np.asarray(Image.open(tmp_path / "labels.png"))
    assert labels.shape == tiny_bundle.recipe.network.image_size
    assert labels.max() < tiny_bundle.recipe.network.classes
