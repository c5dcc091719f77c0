"""The contract without a runtime: names, missing packages, and what a failing executable leaves."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import NotExecutedError, RuntimeUnavailableError
from algm_deploy.runners.contract import Runner, runner, runner_type
from algm_deploy.runners.registry import RUNTIMES


class Echo(Runner):
    """Remembers what it was fed."""

    runtime = "onnxruntime-cpu"
    fails = False
    events: list[str]

    def _open(self) -> None:
        if self.fails:
            raise NotExecutedError("no device")

    def _infer(
        self, image: Tensor, thresholds: dict[str, float], outputs: Sequence[str], to: torch.device
    ) -> dict[str, Tensor]:
        self.fed, self.to = (image, thresholds), to
        return {name: torch.zeros(1) for name in outputs}

    def _close(self) -> None:
        self.events = ["closed"]


def test_unknown_runtime(tiny_bundle: Bundle) -> None:
    with pytest.raises(
        RuntimeUnavailableError, match="unknown runtime 'tensorflow': choose from torch, onnxruntime-cpu"
    ):
        runner(tiny_bundle, "tensorflow")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_names_are_the_runners_own(runtime: str) -> None:
    try:
        found = runner_type(runtime)
    except RuntimeUnavailableError as error:
        pytest.skip(str(error))
    assert found.runtime == runtime


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "algm_deploy.runners.onnxruntime.runner", raising=False)
    with pytest.raises(
        RuntimeUnavailableError, match=r"package onnxruntime: `pip install 'algm-deploy\[onnxruntime-cpu\]'"
    ):
        runner_type("onnxruntime-cpu")


def test_feeds_arrive_complete(tiny_bundle: Bundle) -> None:
    """Contiguous, in the signature's dtypes, thresholds filled in."""
    image = np.zeros((128, 128, 3, 2), np.uint8).transpose(3, 2, 0, 1)
    with Echo(tiny_bundle) as run:
        outputs = run.infer({"image": image, "gbm_threshold": 2})
    fed, thresholds = run.fed
    assert list(outputs) == ["scores", "token_counts"]
    assert thresholds == {"clap_threshold": float(np.float32(0.9)), "gbm_threshold": 2.0}
    assert fed.is_contiguous()
    np.testing.assert_array_equal(fed.numpy(), image)
    assert run.to.type == "cpu"


def test_a_runner_that_cannot_open_stays_closed(tiny_bundle: Bundle) -> None:
    run = Echo(tiny_bundle)
    run.fails = True
    with pytest.raises(NotExecutedError), run:
        pass
    with pytest.raises(RuntimeUnavailableError, match="closed"):
        run.infer({"image": np.zeros((1, 3, 128, 128), np.uint8)})


def test_a_runner_frees_what_it_took(tiny_bundle: Bundle) -> None:
    with Echo(tiny_bundle) as run:
        assert not hasattr(run, "events")
    assert run.events == ["closed"]
