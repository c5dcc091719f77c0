import json
import subprocess
import sys
from pathlib import Path

import pytest

from algm_deploy.models.checkpoints.reading import read_checkpoint
from algm_deploy.models.checkpoints.weights import state_dict_for
from algm_deploy.recipe.reading import recipe


@pytest.mark.slow
def test_the_training_script_runs_end_to_end_at_toy_size(root_dir: Path, tmp_path: Path) -> None:
    script = root_dir / "benchmarks" / "demo" / "train.py"
    subprocess.run([sys.executable, script, "--toy", "--cpu", "--workers", "1", "--out", tmp_path], check=True)
    record = json.loads((tmp_path / "record.json").read_text())
    assert list(record["trainings"]) == list(record["evaluations"]) == ["a", "b", "c", "d"]
    assert record["ships"] in "bcd"
    for name, parts in record["evaluations"].items():
        merged = parts["report"]["merged"]["all"]
        assert merged["tokens"]["after_gbm"]["mean"] < merged["tokens"]["after_clap"]["mean"] <= 1024
        state_dict_for(recipe("demo").network, read_checkpoint(tmp_path / f"{name}.pth"))
