"""A kill at any moment, a full disk, no permission, little memory, no package, two at once: survived and explained."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image

from algm_deploy.bundle.records import Evaluation, Link, Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.merging import deployed_network
from algm_deploy.pictures.shipped import scene
from algm_deploy.recipe.reading import recipe

Run = Callable[..., tuple[int, float]]
InNewProcess = Callable[..., list[tuple[int, str]]]
LINK = Link(number=1, name="network", passed=True, measured="equal", gate="equal")
PARITY = Parity(runtime="torch", images=1, batches=(1,), links=(LINK,))

# Reads commands and delays, a line each. A command runs in a child, which starts at once as everything is imported, and
# is killed after the delay where there is one. Answers with its exit code, negative for a signal, and its seconds. All
# exports here take the translation to ONNX that they are given: making one takes most of an export's time, before
# anything is written.
KILLER = """
import json, os, signal, sys, time
import onnx_ir as ir
from algm_deploy.cli import main
from algm_deploy.lowering import writing
from algm_deploy.demo import run as demonstration
from algm_deploy.runners.onnxruntime import runner as onnxruntime
from algm_deploy.runners.torch import runner as torch
from algm_deploy.report import tuning
writing.base_onnx = lambda *network: ir.load(sys.argv[1])
for line in sys.stdin:
    words, delay = json.loads(line)
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        os._exit(main(words))
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([code, time.perf_counter() - started]), flush=True)
"""


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four labelled scenes in CamVid's layout."""
    for index in range(4):
        for kind, array in zip(("images", "annotations"), scene(index), strict=True):
            folder = tmp_path / "camvid" / kind / "test"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(folder / f"a_{index}.png")
    return tmp_path / "camvid"


def snapshot(folder: Path) -> dict[str, str]:
    """Hash of every file; locks are empty files that stay."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


# --- kills -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(
    tiny_bundle: Bundle, translated: Callable[..., ir.Model], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """`run(words, delay)`: exit code and seconds of a command that is killed after a delay in seconds, if any."""
    translation = tmp_path_factory.mktemp("translation") / "base.onnx"
    ir.save(translated(deployed_network(tiny_bundle), tiny_bundle.recipe.merging), translation)
    words = [sys.executable, "-c", KILLER, translation]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def call(words: list[object], delay: float | None = None) -> tuple[int, float]:
            process.stdin.write(json.dumps([[str(word) for word in words], delay]) + "\n")
            process.stdin.flush()
            code, seconds = json.loads(process.stdout.readline())
            return code, seconds

        yield call
        process.stdin.close()


def killed_anywhere(run: Run, words: Callable[[int], list[object]], check: Callable[[int], None], kills: int) -> None:
    """Kills the command of each step at another moment of the time that an undisturbed one takes."""
    code, seconds = run(words(0))
    assert code == 0
    moments = np.random.default_rng(0).permutation((np.arange(kills) + 0.5) / kills)
    deaths = 0
    for step, moment in enumerate(moments, start=1):
        code, took = run(words(step), moment * seconds)
        deaths += code == -signal.SIGKILL
        if code == 0:  # the first one was slower, as it was the first or something else ran
            seconds = 0.5 * took
        check(step)
    assert deaths > 0
    assert run(words(kills + 1))[0] == 0
    check(kills + 1)


@pytest.fixture(scope="session")
def kills(long_form: bool) -> int:
    return 40 if long_form else 3


def test_killed_exports(run: Run, tiny_checkpoint: Path, tmp_path: Path, kills: int) -> None:
    target = tmp_path / "bundle"

    def words(step: int) -> list[object]:
        return ["export", tiny_checkpoint, "-o", target, "--max-batch", step + 1]

    def check(step: int) -> None:
        bundle = Bundle.open(target)
        bundle.verify()
        assert bundle.recipe.max_batch <= step + 1

    killed_anywhere(run, words, check, 2 * kills)
    assert Bundle.open(target).recipe.max_batch == 2 * kills + 2


def test_killed_builds(run: Run, bundle: Path, photo: Path, kills: int) -> None:
    killed_anywhere(run, lambda _: ["build", bundle], lambda _: Bundle.open(bundle).verify(), kills)
    assert run(["predict", bundle, photo, "-o", bundle.parent / "pictures"])[0] == 0


def test_killed_evaluations_go_on_where_they_stopped(run: Run, bundle: Path, data: Path, kills: int) -> None:
    def words(step: int) -> list[object]:
        return ["evaluate", bundle, "--data", data, "--runtime", "torch", "--tau", step / 100]

    def record(step: int) -> Evaluation:
        thresholds = {"clap_threshold": float(np.float32(step / 100)), "gbm_threshold": 1.0}
        found = Bundle.open(bundle).manifest.evaluations
        (record,) = [one for one in found if (one.images, one.thresholds) == (4, thresholds)]
        return record

    def check(step: int) -> None:
        Bundle.open(bundle).verify()
        assert run(words(step))[0] == 0
        resumed = record(step)
        shutil.rmtree(bundle / "reports")
        assert run(words(step))[0] == 0
        assert record(step) == resumed

    killed_anywhere(run, words, check, kills // 2)


def test_killed_tuning(run: Run, bundle: Path, data: Path, kills: int) -> None:
    output = bundle.parent / "tuned.toml"

    def check(_: int) -> None:
        Bundle.open(bundle).verify()
        assert recipe(str(output)).merging.clap_threshold > 0

    killed_anywhere(run, lambda _: ["tune", "rule", bundle, "--data", data, "-o", output], check, kills)


# --- disk and permissions --------------------------------------------------------------------------------------------


def everything(bundle: Path, checkpoint: Path, photo: Path, data: Path, place: Path) -> list[tuple[object, ...]]:
    """Every command that writes, into `bundle` or below `place`."""
    return [
        ("export", checkpoint, "-o", place / "new"),
        ("deploy", checkpoint, "-o", place / "deployed", "--runtime", "torch"),
        ("build", bundle),
        ("verify", bundle, "--count", 1, "--runtime", "torch"),
        ("compare", bundle, "--count", 1, "--runtimes", "torch", "-o", place / "compared"),
        ("evaluate", bundle, "--data", data, "--runtime", "torch"),
        ("bench", bundle, "--count", 1, "--rounds", 2, "--runtime", "torch"),
        ("tune", "rule", bundle, "--images", photo, "-o", place / "tuned.toml"),
        ("predict", bundle, photo, "-o", place / "pictures", "--runtime", "torch"),
        ("report", bundle, "-o", place / "report.html"),
        ("demo", "-o", place / "demo"),
    ]


def assert_explained(outcomes: list[tuple[int, str]], words: list[tuple[object, ...]], reason: str) -> None:
    for (code, errors), command in zip(outcomes, words, strict=True):
        last = [line for line in errors.splitlines() if line.startswith("algm-deploy ")]
        assert code == 2, (command, errors)
        assert "Traceback" not in errors, errors
        assert len(last) == 1, (command, errors)
        assert reason in last[0], (command, errors)


def test_a_full_disk(
    in_new_process: InNewProcess, bundle: Path, tiny_checkpoint: Path, photo: Path, data: Path, tmp_path: Path
) -> None:
    """The limit on the size of a file stands for it: the same error comes from the same calls."""
    verified = Bundle.open(bundle)
    verified.record(PARITY)
    place = tmp_path / "place"
    place.mkdir()
    words = everything(bundle, tiny_checkpoint, photo, data, place)
    before = snapshot(tmp_path)
    outcomes = in_new_process(words, restrict=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200)))
    assert_explained(outcomes, words, "File too large")
    after = snapshot(tmp_path)
    assert {name: after.get(name) for name in before} == before
    # What is new is the state of a measurement that the next run goes on with: an evaluation's, whose torn last line it
    # cuts off, and a tuning's, which is small enough to be whole.
    states = ("bundle/reports/evaluation-", "bundle/reports/similarity-")
    assert [name for name in after if name not in before and not name.startswith(states)] == []


def test_a_read_only_bundle_predicts_and_explains_what_it_cannot(
    in_new_process: InNewProcess,
    obey_permissions: Callable[[], None],
    tiny_bundle: Bundle,
    tiny_checkpoint: Path,
    photo: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    archive = tmp_path / "archive"
    bundle = Path(shutil.copytree(tiny_bundle.path, archive / "bundle"))
    verified = Bundle.open(bundle)
    verified.record(PARITY)
    (bundle / ".lock").unlink()
    for path in (bundle, archive):
        path.chmod(0o555)
    if os.getuid() == 0:  # a folder of another owner's, as far as this machine lets us make one
        os.chown(archive, 4242, 4242)
        archive.chmod(0o755)
    before = snapshot(archive)
    predict = ("predict", bundle, photo, "-o", tmp_path / "pictures", "--runtime", "torch")
    words = everything(bundle, tiny_checkpoint, photo, data, archive)
    outcomes = in_new_process([predict, *words], restrict=obey_permissions)
    assert outcomes[0] == (0, "")
    assert len(list((tmp_path / "pictures").iterdir())) == 3
    assert_explained(outcomes[1:], words, "Permission denied")
    assert snapshot(archive) == before


def test_two_processes_on_one_bundle(in_new_process: InNewProcess, bundle: Path, photo: Path) -> None:
    words = [("build", bundle), ("verify", bundle, "--count", 1), ("build", bundle)]
    with ThreadPoolExecutor(2) as pool:
        outcomes = [code for found in pool.map(in_new_process, [words, words]) for code, _ in found]
    assert outcomes == [0] * 6
    opened = Bundle.open(bundle)
    opened.verify()
    (record,) = opened.manifest.parity
    assert (record.runtime, record.passed) == ("onnxruntime-cpu", True)
    assert opened.manifest.replacing == {}


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_machine_with_little_memory(in_new_process: InNewProcess, bundle: Path, tmp_path: Path) -> None:
    """A picture that decodes to more than there is: the picture is not to blame, and nothing is half-written."""
    Image.new("RGB", (9000, 9000)).save(tmp_path / "large.png")
    words = [("predict", bundle, tmp_path / "large.png", "-o", tmp_path / "pictures", "--runtime", "torch")]
    (outcome,) = in_new_process(words, address_space_mib=200)
    assert_explained([outcome], words, "expected more free memory")
    assert not list(tmp_path.glob("pictures/*"))


# --- packages --------------------------------------------------------------------------------------------------------


def test_missing_packages_are_named_and_stop_nothing_else(
    in_new_process: InNewProcess, bundle: Path, photo: Path, tmp_path: Path
) -> None:
    def predict(runtime: str) -> tuple[object, ...]:
        return "predict", bundle, photo, "-o", tmp_path / "pictures", "--runtime", runtime

    runtimes = ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx")
    absent = ("onnxruntime", "tensorrt", "tensorrt_rtx")
    outcomes = in_new_process([predict("torch"), ("list",), *map(predict, runtimes)], absent)
    assert outcomes[:2] == [(0, ""), (0, "")]
    for runtime, (code, errors) in zip(runtimes, outcomes[2:], strict=True):
        assert code == 2
        assert errors.count("\n") == 1
        if runtime.startswith("onnxruntime"):
            assert f"runtime {runtime} needs the package onnxruntime: `pip install 'algm-deploy[{runtime}]'`" in errors
        else:  # looked for once an engine has been built
            assert f"holds no engine for {runtime}: build one" in errors


def test_a_reader_that_has_enough_is_no_error(root_dir: Path) -> None:
    """`algm-deploy list | head -1`"""
    writer = [sys.executable, "-c", "import sys; from algm_deploy.cli import main; sys.exit(main(['list']))"]
    with subprocess.Popen(writer, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root_dir) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
