"""What `benchmarks/full_size.py` runs for a command line, and what its record keeps. The commands are stand-ins."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from algm_deploy.bundle.records import Link, Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import RuntimeUnavailableError
from algm_deploy.recipe.families import architectures
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.reading import recipe
from algm_deploy.runners.contract import runner_type

TAKEN = {"exit_code": 0, "seconds": 1.0, "cpu_seconds": 1.0, "peak_memory_gib": 1.0}
DEIT, SETR, PRUNED = "deit_vit_b16_ade20k", "setr_naive_vit_b16_cityscapes", "segvit_prune_vit_b16_ade20k"


@pytest.fixture
def full_size(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as it is left by whoever sets it
    return script("full_size.py")


@pytest.fixture
def run(full_size: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs the script on these words with a stand-in for its commands; returns the rows of its record."""
    monkeypatch.setattr(full_size, "checkpoint_apart", lambda _, target: (target, 7))

    def rows(step: Callable[[list[str]], dict[str, Any]], *words: str) -> dict[str, Any]:
        monkeypatch.setattr(full_size, "step", lambda command: (step(command), f"{command[0]} said this"))
        monkeypatch.setattr(sys, "argv", ["full_size.py", *words, "-o", str(tmp_path / "record.json")])
        full_size.main()
        found: dict[str, Any] = json.loads((tmp_path / "record.json").read_text())
        assert found["schema_version"] == 2
        return found["rows"]  # type: ignore[no-any-return]

    return rows


def after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_without_recipes_there_is_one_of_each_family(full_size: ModuleType) -> None:
    options = full_size.arguments([])
    families = {recipe(name).network.architecture.name for name in options.recipes}
    assert families == {row.name for row in architectures()} - {"dinov2/linear_ms"}  # which has no recipe
    assert len(options.recipes) == len(families)
    assert "demo" not in options.recipes
    assert options.clap_threshold == "0.6"


@pytest.mark.parametrize(
    ("words", "recipes", "precisions"),
    [
        ([f"{DEIT}=0.6", SETR], [f"{DEIT}=0.6", SETR], ["fp32"]),
        (["--runtime", "torch", "--precision", "fp16", DEIT, "--dense"], [DEIT], ["fp16"]),
        ([DEIT, "--precision", "fp32", "bf16", f"{SETR}=0.7"], [DEIT, f"{SETR}=0.7"], ["fp32", "bf16"]),
    ],
)
def test_recipes_and_precisions_are_told_apart(
    full_size: ModuleType, words: list[str], recipes: list[str], precisions: list[str]
) -> None:
    options = full_size.arguments(words)
    assert (options.recipes, options.precision) == (recipes, precisions)
    assert options.clap_threshold is None


@pytest.mark.parametrize("words", [["--precision", "fp8"], ["--precision", DEIT], [DEIT, "--jobs", "0"], ["deit"]])
def test_what_is_neither_is_refused(full_size: ModuleType, words: list[str]) -> None:
    with pytest.raises(SystemExit):
        full_size.arguments(words)


def test_rows_run_at_a_time_each_in_its_own_folder(run: Callable[..., dict[str, Any]]) -> None:
    both = threading.Barrier(2)
    folders: list[str] = []

    def step(command: list[str]) -> dict[str, Any]:
        if command[0] == "export":
            folders.append(after(command, "-o"))
            both.wait(timeout=30)  # breaks where one row waits for the other
        return TAKEN

    rows = run(step, DEIT, SETR, "--jobs", "2", "--runtime", "onnxruntime-cuda", "--precision", "bf16")
    assert set(rows) == {f"{name} bf16 onnxruntime-cuda" for name in (DEIT, SETR)}
    assert len(set(folders)) == 2
    assert all(list(row["steps"]) == ["export", "build", "verify"] for row in rows.values())
    assert run(step, DEIT, SETR, "--jobs", "2") | rows == run(step, DEIT, SETR, "--jobs", "2")  # others stay


def test_thresholds_are_the_rows_own_before_those_of_all(run: Callable[..., dict[str, Any]]) -> None:
    rows = run(lambda _: TAKEN, f"{DEIT}=0.7", SETR, PRUNED, "--clap-threshold", "0.5")
    assert rows[f"{DEIT} fp32"]["settings"] == ["merging.clap_threshold=0.7"]
    assert rows[f"{SETR} fp32"]["settings"] == ["merging.clap_threshold=0.5"]
    assert rows[f"{PRUNED} fp32"]["settings"] == "recipe's"  # DToP has no such threshold


def test_a_row_keeps_links_and_where_the_time_went(run: Callable[..., dict[str, Any]], tiny_bundle: Bundle) -> None:
    link = Link(number=1, name="network", passed=True, measured="equal", gate="bit for bit")

    def step(command: list[str]) -> dict[str, Any]:
        if command[0] == "export":
            shutil.copytree(tiny_bundle.path, after(command, "-o"))
        elif command[0] == "verify":
            seconds = {"network": 3.0, "fp64": 40.0}
            record = Parity(runtime="onnxruntime-cpu", images=2, batches=(1,), links=(link,), seconds=seconds)
            Bundle.open(Path(command[1])).record(record)
        return TAKEN

    row = run(step, DEIT, "--runtime", "onnxruntime-cpu")[f"{DEIT} fp32 onnxruntime-cpu"]
    assert row["links"] == {"network": {"passed": True, "measured": "equal", "gate": "bit for bit"}}
    assert row["verify_seconds"] == {"network": 3.0, "fp64": 40.0}
    assert (row["scenes"], row["parameters"]) == (2, 7)


def test_a_step_that_fails_ends_its_recipe_alone(run: Callable[..., dict[str, Any]]) -> None:
    def step(command: list[str]) -> dict[str, Any]:
        return TAKEN | {"exit_code": int(command[0] == "export" and after(command, "--recipe") == DEIT)}

    rows = run(step, DEIT, SETR)
    assert [list(row["steps"]) for row in rows.values()] == [["export"], ["export", "verify", "build"]]


WANTS_MEMORY = "algm-deploy verify: expected enough memory for a batch of 1 on onnxruntime-cuda, got 'too much'"


@pytest.mark.parametrize(
    "failure",
    [
        {"exit_code": 2, "error": WANTS_MEMORY},
        {"exit_code": 2, "error": "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"},
        {"exit_code": -9},
    ],
    ids=["as this package says it", "as a library says it", "ended by a signal"],
)
def test_a_row_that_lacked_memory_is_made_again_alone(
    run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], failure: dict[str, Any]
) -> None:
    """Its neighbour may take as long as it wants: it has ended before."""
    at_work, beside, asked = set[str](), [], Counter[str]()
    lock, other_is_there, it_failed = threading.Lock(), threading.Event(), threading.Event()

    def step(command: list[str]) -> dict[str, Any]:
        folder = after(command, "-o") if command[0] == "export" else command[1]
        with lock:
            if command[0] == "export":
                at_work.add(folder)
                asked[after(command, "--recipe")] += 1
            if command[0] == "export" and after(command, "--recipe") == DEIT:
                hungry.add(folder)
        if folder not in hungry:
            other_is_there.set()
            assert it_failed.wait(timeout=30)
            at_work.discard(folder)
            return TAKEN
        assert other_is_there.wait(timeout=30)
        if command[0] == "export":
            return TAKEN
        beside.append(len(at_work) - 1)
        at_work.discard(folder)
        it_failed.set()
        return TAKEN | (failure if beside[-1] else {})

    hungry = set[str]()
    rows = run(step, DEIT, SETR, "--jobs", "2", "--runtime", "torch")
    row, other = (rows[f"{name} fp32 torch"] for name in (DEIT, SETR))
    assert beside == [1, 0]
    assert asked == {DEIT: 2, SETR: 1}
    assert row["steps"] == {"export": TAKEN, "verify": TAKEN}
    assert row["beside_others"] == {"rows_at_a_time": 2, "steps": {"export": TAKEN, "verify": TAKEN | failure}}
    assert (row["rows_at_a_time"], other["rows_at_a_time"]) == (1, 2)
    assert "beside_others" not in other
    told = capsys.readouterr().out
    assert "FAILED: verify" in told
    assert "once more at the end, alone" in told
    assert f"{DEIT} fp32 torch: passed, 2 s" in told


def killed() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        apart.submit(signal.raise_signal, signal.SIGKILL).result()


def refused() -> None:
    """As PyTorch says it."""
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: 4 GB")


@pytest.mark.parametrize(("end", "code", "told"), [(killed, -9, " (ended by SIGKILL)"), (refused, 1, "")])
@pytest.mark.parametrize(("jobs", "passes"), [("2", True), ("1", False)])
def test_a_row_whose_weights_were_too_much_leaves_the_rest(
    run: Callable[..., dict[str, Any]],
    full_size: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    jobs: str,
    passes: bool,
    end: Callable[[], None],
    code: int,
    told: str,
) -> None:
    """Where memory runs out what makes them is killed, or refused it; beside others it is tried again."""
    asked: list[Path] = []

    def lacking_first(network: Network, target: Path) -> tuple[Path, int]:
        if network == recipe(DEIT).network and not asked:
            asked.append(target)
            end()
        return target, 7

    monkeypatch.setattr(full_size, "checkpoint_apart", lacking_first)
    rows = run(lambda _: TAKEN, DEIT, SETR, "--jobs", jobs, "--export-only")
    row, other = (rows[f"{name} fp32"] for name in (DEIT, SETR))
    assert (other["parameters"], other["steps"]) == (7, {"export": TAKEN})
    failed = (row["beside_others"] if passes else row)["steps"]
    assert list(failed) == ["checkpoint"]
    assert failed["checkpoint"]["exit_code"] == code
    assert row["parameters"] == (7 if passes else None)
    if passes:
        assert row["steps"] == {"export": TAKEN}
    assert f"FAILED: checkpoint{told}, " in capsys.readouterr().out


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_weights_that_fail_for_another_reason_end_the_script(
    run: Callable[..., dict[str, Any]], full_size: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def wrong(*_: object) -> tuple[Path, int]:
        raise kind("no such layer")

    monkeypatch.setattr(full_size, "checkpoint_apart", wrong)
    with pytest.raises(kind, match="no such layer"):
        run(lambda _: TAKEN, DEIT, "--export-only")


@pytest.mark.parametrize(
    ("jobs", "failure"),
    [
        ("2", {"exit_code": 1, "error": "algm-deploy verify: the parity chain failed"}),
        ("2", {"exit_code": 2, "error": "algm-deploy build: expected a GPU"}),
        ("1", {"exit_code": 2, "error": WANTS_MEMORY}),
    ],
    ids=["failed", "refused", "was alone"],
)
def test_no_other_row_is_made_again(run: Callable[..., dict[str, Any]], jobs: str, failure: dict[str, Any]) -> None:
    calls: list[str] = []

    def step(command: list[str]) -> dict[str, Any]:
        calls.append(command[0])
        return TAKEN | (failure if command[0] == "verify" else {})

    rows = run(step, DEIT, "--jobs", jobs, "--runtime", "torch")
    assert calls == ["export", "verify"]
    assert rows[f"{DEIT} fp32 torch"]["steps"]["verify"] == TAKEN | failure


def test_what_still_fails_alone_stands_as_it_is(run: Callable[..., dict[str, Any]]) -> None:
    failed = TAKEN | {"exit_code": 2, "error": WANTS_MEMORY}
    rows = run(lambda command: failed if command[0] == "verify" else TAKEN, DEIT, "--jobs", "4", "--runtime", "torch")
    row = rows[f"{DEIT} fp32 torch"]
    assert row["steps"] == row["beside_others"]["steps"] == {"export": TAKEN, "verify": failed}


def test_the_words_of_this_package_are_known_as_a_want_of_memory(full_size: ModuleType, tiny_bundle: Bundle) -> None:
    """They are cut where a library's own sentence is too long."""

    class Short(runner_type("torch")):  # type: ignore[misc]
        def _infer(self, *_: object) -> dict[str, Any]:
            raise RuntimeError(f"CUDA out of memory{400 * '.'}")

    with Short(tiny_bundle) as opened, pytest.raises(RuntimeUnavailableError) as caught:
        opened.infer({"image": np.zeros((1, 3, *tiny_bundle.recipe.network.image_size), np.uint8)})
    assert full_size.OUR_OWN.search(str(caught.value))


def test_a_command_is_shown_in_one_piece_under_its_row(
    run: Callable[..., dict[str, Any]], full_size: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(lambda _: TAKEN, DEIT, "--runtime", "torch")
    assert f"{DEIT} fp32 torch: export\n  export said this\n" in capsys.readouterr().out
    output = f"0.1 MB  {tmp_path}/bundle/model.onnx\nnext: algm-deploy verify {tmp_path}/bundle\n"
    assert full_size.readable(output, tmp_path) == "  0.1 MB  bundle/model.onnx"


def test_a_step_tells_how_it_ended(full_size: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, output = full_size.step(["verify", "no/such/bundle"])
    assert taken["exit_code"] == 2
    assert full_size.reason(2, output) == {"error": output.splitlines()[-1]}
    assert output.splitlines()[-1].startswith("algm-deploy verify: ")
    monkeypatch.setattr(full_size, "MAIN", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    taken, output = full_size.step(["verify"])
    assert (taken["exit_code"], output) == (-11, "")
    assert full_size.outcome({"steps": {"verify": taken}}).startswith("FAILED: verify (ended by SIGSEGV), ")


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["done", "killed"])
def test_a_step_ends_with_its_command_and_leaves_nothing_behind(
    full_size: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str
) -> None:
    """The command leaves a process that prints to the same place for a minute."""
    left = tmp_path / "left"
    monkeypatch.setattr(
        full_size,
        "MAIN",
        "import os, signal, subprocess, sys; print('said')\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(left)!r}, 'w').write(str(left.pid)); {ending}",
    )
    taken, output = full_size.step(["build"])
    assert (taken["exit_code"], output) == (-9 if ending else 0, "said\n")
    assert taken["seconds"] < 30
    # What takes it over, on this machine or in this container, may not have noted yet that it has ended.
    stat = Path("/proc") / left.read_text() / "stat"
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("it still runs")


def test_what_interrupts_a_run_ends_its_commands(
    full_size: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C reaches the script alone."""
    monkeypatch.setattr(full_size, "checkpoint_apart", lambda _, target: (target, 7))
    monkeypatch.setattr(full_size, "MAIN", "import time; time.sleep(60)")

    def interrupted(_: object) -> Any:
        while not full_size._GROUPS:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(full_size, "as_completed", interrupted)
    monkeypatch.setattr(sys, "argv", ["full_size.py", DEIT, SETR, "-o", str(tmp_path / "record.json")])
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        full_size.main()
    assert time.monotonic() - start < 30
    assert not full_size._GROUPS


@pytest.mark.parametrize(
    ("code", "lines", "said"),
    [
        (
            2,
            ["algm-deploy verify: expected a bundle", "  seconds: network 1.0"],
            "algm-deploy verify: expected a bundle",
        ),
        (1, ["Traceback (most recent call last):", "  File", "RuntimeError: no"], "RuntimeError: no"),
        (1, ["2 synthetic scenes; FAILED", "seconds: network 1.0"], None),
        (-11, ["algm-deploy build: a warning"], None),
        (0, ["algm-deploy build: a warning"], None),
    ],
    ids=["our own", "a fault", "a gate", "a signal", "none"],
)
def test_only_a_line_that_says_why_is_a_reason(full_size: ModuleType, code: int, lines: list[str], said: str) -> None:
    assert full_size.reason(code, "\n".join(lines)) == ({"error": said} if said else {})


def test_random_weights_are_made_in_a_process_of_their_own(full_size: ModuleType, tmp_path: Path) -> None:
    path, parameters = full_size.checkpoint_apart(recipe("demo").network, tmp_path / "checkpoint")
    assert path.is_file()
    assert parameters > 1e6
