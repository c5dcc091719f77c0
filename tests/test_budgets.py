"""Budgets from the flag to the report: what is exported, verified, timed and told, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from algm_deploy import deployment
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import main
from algm_deploy.deployment import bench, build, export, verify
from algm_deploy.errors import BundleError
from algm_deploy.ops import reference
from algm_deploy.parity.merges.clap import ClapFacts, clap_problems
from algm_deploy.parity.merges.gbm import GbmFacts, gbm_problems
from algm_deploy.predictor import Predictor
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.schema import Recipe
from algm_deploy.report.page import write_report
from algm_deploy.report.pictures import _chosen
from algm_deploy.report.plans import budget_words, plan_name
from algm_deploy.report.records import plan_in_force
from algm_deploy.runners.contract import runner
from algm_deploy.runners.onnxruntime import runner as onnxruntime
from algm_deploy.timing.protocols import Request
from algm_deploy.timing.timers import Effort

BUDGETS = {
    "merging.clap": "budget",
    "merging.clap_budget": 5,
    "merging.gbm": "budget",
    "merging.gbm_budget": 0.3,
    "output": "labels",
}
COUNTED = MergePlan(clap="budget", clap_budget=2, gbm="budget", gbm_budget=1)


@pytest.fixture
def bundle(tiny_export: Callable[..., Bundle], copied: Callable[..., Bundle]) -> Bundle:
    return copied(tiny_export(BUDGETS))


# ------------------------------------------------------------------------------------------------------------- command


def test_the_flag_exports_budgets(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bundle"
    assert main(["export", str(tiny_checkpoint), "-o", str(target), "--labels", "--budget", "5,0.3"]) == 0
    found = Bundle.open(target)
    assert found.recipe.merging.clap_budget == 5
    assert found.recipe.merging.gbm_budget == 0.3
    assert found.signature.defaults == {}
    assert "no source gives CLAP's threshold" not in capsys.readouterr().err


def test_the_function_exports_budgets(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[MergePlan] = []

    def write(content: object, recipe: Recipe, *rest: object) -> object:
        written.append(recipe.merging)
        return SimpleNamespace(manifest=SimpleNamespace(quantization=None))

    monkeypatch.setattr(deployment, "write_bundle", write)
    export(tiny_checkpoint, tmp_path / "bundle", None, {}, budget=(0.5, 7))
    found = written[0]
    assert (found.clap, found.clap_budget, found.gbm, found.gbm_budget) == ("budget", 0.5, "budget", 7)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--budget", "0.4"], "expected WINDOWS,TOKENS as counts or shares"),
        (["--budget", "0.4,many"], "expected a finite number, got 'many'"),
        (["--budget", "1.5,0.2"], "merging.clap_budget as a share above 0 and up to 1.0, or a count from 1, got 1.5"),
        (["--budget", "5,0.3", "--tau", "0.9"], "a merge by a budget reads no threshold"),
        (["--budget", "5,0.3", "--dense"], "--dense or --budget, got both"),
        (["--set", "merging.gbm=budget", "--set", "merging.gbm_budget=0.2"], "a budget for CLAP too"),
    ],
)
def test_what_the_flag_refuses(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    command = ["export", str(tiny_checkpoint), "-o", str(tmp_path / "bundle"), *flags]
    assert _exit_code(command) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


def _exit_code(command: list[str]) -> int | str | None:
    """Of a command whose parser may end it."""
    try:
        return main(command)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tau": 0.9}, "merges a fixed budget of windows and tokens, whatever a threshold"),
        ({"gbm": 1.0}, "merges a fixed budget of windows and tokens, whatever a threshold"),
        ({"dense": True}, "those of this bundle have a budget: export with --dense"),
    ],
)
def test_a_run_changes_no_budget(bundle: Bundle, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(BundleError, match=said), Predictor(bundle, "torch", **asked):
        pass


# ------------------------------------------------------------------------------------------------- proof, time, report


def test_a_bundle_is_proven_timed_and_told(bundle: Bundle, blob_images: Callable[[int], np.ndarray]) -> None:
    build(bundle, "onnxruntime-cpu")
    proven = verify(bundle, "onnxruntime-cpu", count=2, progress=False)
    assert proven.passed, [link.measured for link in proven.links]
    assert [link.number for link in proven.links] == [1, 2, 3, 4, 5, 6]
    decisions = proven.links[4].facts
    assert decisions["unexcused"] == [] and decisions["token_count_difference_max"] == 0
    with runner(bundle, "onnxruntime-cpu") as run:
        counts = run.infer({"image": blob_images(3)})["token_counts"]
    left = 64 - 3 * 5
    assert counts.tolist() == [[left, left - int(0.3 * left + 0.5)]] * 3
    request = Request("latency", 1, effort=Effort(warmup=0, rounds=2, most_rounds=2), variants=("merged",))
    (row,) = bench(bundle, "onnxruntime-cpu", protocol=request, progress=False)
    assert row.thresholds == {}
    page = write_report([bundle], bundle.path / "report.html").read_text()
    assert "5 windows, 30 % of the tokens" in page
    assert "not the paper" in page


def test_budgets_beside_the_library_on_the_cpu(
    bundle: Bundle, blob_images: Callable[[int], np.ndarray], ort_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It registers merges that take a threshold; the functions of these take none."""
    build(bundle, "onnxruntime-cpu")
    with runner(bundle, "onnxruntime-cpu") as run:
        plain = run.infer({"image": blob_images(2)})
    for name in ("find_library", "require_library"):
        monkeypatch.setattr(onnxruntime, name, lambda _: ort_library)
    build(bundle, "onnxruntime-cpu")
    with runner(bundle, "onnxruntime-cpu") as run:
        assert run.custom_operators == ("label_map",)
        custom = run.infer({"image": blob_images(2)})
    assert plain.keys() == custom.keys()
    np.testing.assert_array_equal(plain["token_counts"], custom["token_counts"])
    labels = bundle.signature.outputs[0].name
    assert (plain[labels] == custom[labels]).mean() > 0.999


def test_names_of_plans() -> None:
    shares = replace(COUNTED, clap_budget=0.43, gbm_budget=0.225)
    assert budget_words(shares) == "43 % of the windows, 22.5 % of the tokens"
    assert plan_name(COUNTED, COUNTED) == "budget 2 windows, 1 tokens"
    assert plan_name(shares, COUNTED) == "budget 43 % of the windows, 22.5 % of the tokens"
    assert plan_in_force(COUNTED, {}).layers == (1, 5)


def test_windows_that_merge_are_drawn(bundle: Bundle) -> None:
    """As many in every crop, of equals the first."""
    similarity = np.float32([[[0.5, 0.9, 0.9], [0.1, 0.9, 0.2], [0.9, 0.9, 0.9]], [[0.0] * 3] * 3])
    with Predictor(bundle, "torch") as predictor:
        chosen, lowest, told = _chosen(predictor, similarity)
    assert chosen[0].tolist() == [[False, True, True], [False, True, False], [True, True, False]]
    assert np.flatnonzero(chosen[1]).tolist() == [0, 1, 2, 3, 4]
    assert lowest == 0
    assert told == "are the 5 most similar of their crop"


# ----------------------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("merged", "said"),
    [
        ([1, 2], []),
        ([1, 3], []),  # 2 and 3 are nearer than the noise
        ([2, 1], ["CLAP: two windows are in the wrong order, 1.0e-01 apart"]),
        ([1, 0], ["CLAP: left a window 3.0e-01 above one that merged"]),
        ([1], ["CLAP: merged 1 windows instead of 2"]),
        ([1, 2, 3], ["CLAP: merged 3 windows instead of 2"]),
    ],
)
def test_rank_decisions_of_clap(merged: list[int], said: list[str]) -> None:
    """Noise excuses another window at the edge of the budget, never another count."""
    facts = ClapFacts(np.float32([0.5, 0.9, 0.8, 0.7999]), 0.8, 1e-3, least=2)
    row, _ = reference.clap_rows([merged], (4, 4), (2, 2), 1)
    assert clap_problems(facts, row[0, 1:], COUNTED, (4, 4), 1) == said


@pytest.mark.parametrize(
    ("joins", "said"),
    [
        ([True, False, False], []),
        ([False, True, False], []),
        ([False, False, True], ["GBM: left a token 4.0e-01 above one that merged"]),
        ([True, True, False], ["GBM: merged 2 tokens instead of 1"]),
        ([False, False, False], ["GBM: merged 0 tokens instead of 1"]),
    ],
)
def test_rank_decisions_of_gbm(joins: list[bool], said: list[str]) -> None:
    """Rows 2, 4, 6 look among 1, 3, 5."""
    scores = np.full((4, 3), -np.inf, np.float32)
    scores[1:] = [[0.9, 0.1, 0.1], [0.1, 0.8999, 0.1], [0.1, 0.1, 0.5]]
    facts = GbmFacts(scores, np.array([False, True, True, True]), 0.9, 1e-3, 0.0, least=1)
    match = [np.array([1, 3, 5])]
    row, _ = reference.gbm_rows([np.array(joins)], match, 7, np.array([7]), 1, "code")
    before = np.arange(1, 7)
    assert gbm_problems(facts, before, row[0][before], COUNTED, 1) == said
