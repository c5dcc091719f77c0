"""The names at the root: there at once, typed, and loaded on first use."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import algm_deploy
from algm_deploy import deployment, predictor

STEPS = {"bench", "build", "evaluate", "export", "verify"}


def test_the_steps_are_those_of_the_deployment() -> None:
    assert set(algm_deploy.__all__) == STEPS | {"load"}
    for name in STEPS:
        assert getattr(algm_deploy, name) is getattr(deployment, name)
    assert algm_deploy.load is predictor.Predictor
    assert set(algm_deploy.__all__) <= set(dir(algm_deploy))
    with pytest.raises(AttributeError, match="module 'algm_deploy' has no attribute 'deploy'"):
        algm_deploy.deploy  # noqa: B018


def test_thresholds_have_the_same_names_everywhere() -> None:
    """`tau`, `gbm` and `dense`, by keyword, wherever one of them makes sense."""
    wanted = {"load": 3, "evaluate": 3, "bench": 3, "export": 2}
    for name, count in wanted.items():
        parameters = inspect.signature(getattr(algm_deploy, name)).parameters
        for threshold in ("tau", "gbm", "dense")[:count]:
            assert parameters[threshold].kind is inspect.Parameter.KEYWORD_ONLY, (name, threshold)


def test_libraries_are_loaded_on_first_use() -> None:
    shown = "print(*{'torch', 'cv2', 'onnxruntime', 'numpy'} & set(sys.modules))"
    assert _told(f"import sys, algm_deploy; {shown}") == set()
    assert {"cv2", "numpy"} <= _told(f"import sys, algm_deploy; algm_deploy.load; {shown}")


def _told(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_module_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "algm_deploy", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, [algm_deploy.__version__])
    wrong = subprocess.run([sys.executable, "-P", "-m", "algm_deploy", "nonsense"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "algm-deploy: argument COMMAND: invalid choice: 'nonsense'" in wrong.stderr
