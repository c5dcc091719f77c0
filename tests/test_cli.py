"""Every command: what it prints, what it leaves behind, and its exit code. Errors are one sentence."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from algm_deploy import __version__
from algm_deploy.bundle.records import Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import arguments as kinds
from algm_deploy.cli import main
from algm_deploy.cli.arguments import given_settings
from algm_deploy.cli.making import _engine_options
from algm_deploy.cli.parser import parser
from algm_deploy.errors import BuildError, NotExecutedError
from algm_deploy.pictures.shipped import scene
from algm_deploy.pictures.video import Video, video_writer
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import flatten, recipe, resolve
from algm_deploy.runners import contract
from algm_deploy.runners.registry import RUNTIMES

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; returns its exit code, what it printed, and its errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stopped:  # argparse, on usage errors
            code = int(stopped.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    """A copy of the tiny bundle whose manifest may change."""
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A drawn scene as a file."""
    path = tmp_path / "street.png"
    Image.fromarray(scene(5)[0][:160]).save(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three labelled scenes in CamVid's layout."""
    for kind in ("images", "annotations"):
        (tmp_path / "camvid" / kind / "test").mkdir(parents=True)
    for index in range(3):
        pixels, labels = scene(index)
        name = f"{'ab'[index % 2]}_{index}.png"
        Image.fromarray(pixels).save(tmp_path / "camvid" / "images" / "test" / name)
        Image.fromarray(labels).save(tmp_path / "camvid" / "annotations" / "test" / name)
    return tmp_path / "camvid"


def edit(bundle: Path, change: Callable[[dict], object]) -> None:
    """Changes the manifest as an editor does."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


# --- commands --------------------------------------------------------------------------------------------------------


def test_list(run: Run) -> None:
    code, out, err = run("list")
    assert (code, err) == (0, "")
    assert "segmenter_vit_s16_camvid" in out
    assert "0.9319" in out


def test_verify(run: Run, bundle: Path) -> None:
    code, out, _ = run("verify", bundle, "--count", 2)
    assert code == 0
    for name in ("network", "operators", "graph", "numbers", "decisions", "labels"):
        assert name in out
    assert "(give --images for your own); batches of 1, 2, 3, 8; passed" in out
    record = Bundle.open(bundle).found(Parity, "onnxruntime-cpu")
    assert record.passed
    assert set(record.seconds) == {"opening", "runtime", "fp64", *(link.name for link in record.links)}
    longest = max(record.seconds, key=lambda part: record.seconds[part])
    assert out.splitlines()[-1].startswith(f"seconds: {longest} {record.seconds[longest]:.1f}")


def test_verify_fails_with_the_reason(run: Run, bundle: Path, photo: Path) -> None:
    edit(bundle, lambda manifest: manifest["signature"]["defaults"].update(clap_threshold=0.1))
    code, out, err = run("verify", bundle, "--runtime", "torch", "--images", photo)
    assert (code, err) == (1, "")
    assert "1 photo; batches of 1; FAILED" in out
    assert "CLAP: merged a window" in out
    assert not Bundle.open(bundle).found(Parity, "torch").passed


def test_predict(run: Run, bundle: Path, photo: Path, tmp_path: Path) -> None:
    code, out, _ = run("predict", bundle, photo, "-o", tmp_path / "pictures")
    assert code == 0
    written = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert written == ["street.labels.png", "street.overlay.png", "street.tokens.png"]
    assert all(name in out for name in written)
    assert np.asarray(Image.open(tmp_path / "pictures" / "street.labels.png")).shape == (160, 256)


def test_evaluate_with_and_without_merging(run: Run, bundle: Path, data: Path) -> None:
    code, out, _ = run("evaluate", bundle, "--data", data, "--runtime", "torch")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["all", "a", "b"]
    assert "64" not in out.splitlines()[2].split()
    code, out, _ = run("evaluate", bundle, "--data", data, "--runtime", "torch", "--dense", "--limit", 2)
    assert code == 0
    assert out.splitlines()[2].split()[-2:] == ["64", "64"]


def test_photos_that_cannot_be_evaluated_are_no_success(run: Run, bundle: Path, data: Path) -> None:
    (data / "images" / "test" / "b_1.png").write_bytes(b"no picture")
    code, out, said = run("evaluate", bundle, "--data", data, "--runtime", "torch")
    assert code == 2
    assert "b_1.png" in said and "all" in out
    assert "1 of 3 images could not be evaluated" in said


def test_a_photo_without_a_label_is_named_and_no_failure(run: Run, bundle: Path, data: Path) -> None:
    labels = data / "annotations" / "test" / "b_1.png"
    Image.fromarray(np.full_like(np.asarray(Image.open(labels)), 255)).save(labels)
    for _ in range(2):  # measured, and read from the state file
        code, out, said = run("evaluate", bundle, "--data", data, "--runtime", "torch")
        assert (code, out.splitlines()[2].split()[1]) == (0, "3")
        assert "note: no labelled pixel, so in the figures of tokens alone: b_1\n" in said


def test_a_report_draws_the_photos_that_can_be_read(run: Run, bundle: Path, photo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    shutil.copy(photo, folder / "street.png")
    (folder / "cut.png").write_bytes(photo.read_bytes()[:2000])
    page = tmp_path / "report.html"
    code, out, said = run("report", bundle, "-o", page, "--images", folder, "--runtime", "torch")
    assert (code, out) == (2, f"{page}\n")
    assert "1 of 2 files could not be drawn:\n  " in said and "cut.png: the picture cannot be decoded" in said
    assert "street.png" in page.read_text()


def test_tau_changes_the_token_count(run: Run, bundle: Path, data: Path) -> None:
    tokens = []
    for tau in (-1, 0.5, 1.5):
        code, out, _ = run("evaluate", bundle, "--data", data, "--limit", 1, "--tau", tau)
        assert code == 0
        tokens.append(float(out.splitlines()[2].split()[-2]))
    assert tokens[0] == 16
    assert tokens[0] < tokens[1] < tokens[2] == 64


def test_deploy_from_checkpoint_to_miou(run: Run, tiny_checkpoint: Path, data: Path, tmp_path: Path) -> None:
    target = tmp_path / "deployed"
    options = ("--tau", 0.8, "--max-batch", 2, "--count", 2, "--data", data, "--image-size", "128x128")
    code, out, said = run("deploy", tiny_checkpoint, "-o", target, *options)
    assert code == 0, out
    assert "note: merging.clap_threshold: command line says 0.8, variant.yml says 0.9; command line wins" in said
    assert "note: ran on onnxruntime-cpu, the best that can execute here" in said
    assert "batches of 1, 2; passed" in out
    assert "mIoU %" in out
    assert f"deployed: {target}" in out
    assert f"next: algm-deploy predict {target} PHOTO" in out
    deployed = Bundle.open(target)
    assert deployed.recipe.merging.clap_threshold == 0.8
    assert [one.runtime for one in deployed.manifest.parity] == ["onnxruntime-cpu"]
    assert [one.images for one in deployed.manifest.evaluations] == [3]
    deployed.verify()


def test_a_photo_that_cannot_be_evaluated_stops_no_deployment(
    run: Run, tiny_checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be done is done, and the exit code says that something is missing."""
    timed: list[object] = []
    monkeypatch.setattr("algm_deploy.cli.proving.timed", lambda *arguments: timed.append(arguments))
    (data / "images" / "test" / "b_1.png").write_bytes(b"no picture")
    target = tmp_path / "deployed"
    options = ("--max-batch", 1, "--count", 1, "--data", data, "--bench", "--runtime", "torch")
    code, out, said = run("deploy", tiny_checkpoint, "-o", target, *options)
    assert code == 2
    assert "1 of 3 images could not be evaluated" in said
    assert len(timed) == 1
    assert f"deployed: {target}" in out


def test_deploy_refuses_what_is_not_installed_before_the_export(
    run: Run, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    code, out, err = run("deploy", tiny_checkpoint, "-o", tmp_path / "bundle", "--runtime", "tensorrt-rtx")
    assert (code, out) == (2, "")
    assert "pip install 'algm-deploy[tensorrt-rtx]'" in err
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("options", "message", "exported"),
    [
        (("--images", "nowhere"), "nowhere: expected pictures", False),
        (("--level", 3), "has no build option level", False),
        (("--opt-batch", 3), "has no build option batches", False),
        (("--data", "nowhere"), "expected camvid test in nowhere", True),  # the recipe names the data set
    ],
)
def test_deploy_refuses_wrong_flags_before_the_work(
    run: Run, tiny_checkpoint: Path, tmp_path: Path, options: tuple[object, ...], message: str, exported: bool
) -> None:
    target = tmp_path / "bundle"
    code, out, err = run("deploy", tiny_checkpoint, "-o", target, *options)
    assert (code, target.exists()) == (2, exported)
    assert message in err
    assert "link" not in out
    assert not exported or "model.onnxruntime-cpu.onnx" not in Bundle.open(target).files


def test_the_next_command_can_be_pasted(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    code, out, _ = run("export", tiny_checkpoint, "-o", tmp_path / "für später")
    assert code == 0
    assert f"next: algm-deploy verify '{tmp_path}/für später'" in out


def test_export_for_whole_frames(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    code, out, said = run("export", tiny_checkpoint, "-o", tmp_path / "wide", "--image-size", "64x96", "--labels")
    assert code == 0
    assert "network.image_size: command line says (64, 96), variant.yml says (128, 128)" in said
    assert f"next: algm-deploy verify {tmp_path / 'wide'}" in out
    assert Bundle.open(tmp_path / "wide").recipe.network.image_size == (64, 96)


def test_version(run: Run) -> None:
    assert run("--version")[:2] == (0, f"{__version__}\n")


def test_console_entry(root_dir: Path) -> None:
    """The command in a process of its own: as installed, or where it is only importable, as its entry point says."""
    installed = Path(sys.executable).with_name("algm-deploy")
    importable = [sys.executable, "-c", "import sys; from algm_deploy.cli import main; sys.exit(main())"]
    entry = [installed] if installed.is_file() else importable

    def process(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*entry, *arguments], capture_output=True, text=True, check=False, cwd=root_dir)

    done = process("list")
    assert done.returncode == 0, done.stderr
    assert "segmenter_vit_s16_ade20k" in done.stdout
    done = process("verify", "nowhere")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_the_package_is_a_command(root_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "algm_deploy", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")


# --- exit codes and errors -------------------------------------------------------------------------------------------


def sentence(outcome: tuple[int, str, str], command: str, *parts: str, code: int = 2) -> None:
    """The command failed with one line on stderr that says what was expected."""
    assert outcome[0] == code, outcome
    said = [line for line in outcome[2].splitlines() if not line.startswith("note: ")]
    assert len(said) == 1, said
    assert said[0].startswith(f"algm-deploy {command}: ")
    for part in parts:
        assert part in said[0]


@pytest.mark.parametrize("command", ["verify", "evaluate", "predict"])
def test_bundle_that_is_not_there(run: Run, command: str, tmp_path: Path, photo: Path) -> None:
    rest = {"verify": (), "evaluate": ("--data", tmp_path), "predict": (photo,)}[command]
    sentence(run(command, tmp_path / "nowhere", *rest), command, "expected a bundle", "found nothing")


def test_folder_that_is_no_bundle(run: Run, tmp_path: Path) -> None:
    sentence(run("verify", tmp_path), "verify", "expected a bundle with manifest.json")


def test_bundle_that_was_changed(run: Run, bundle: Path) -> None:
    data = bytearray((bundle / "model.onnx.data").read_bytes())
    data[100] ^= 1
    (bundle / "model.onnx.data").write_bytes(bytes(data))
    sentence(run("verify", bundle), "verify", "expected the content that the manifest lists")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recipe", "segmenter_vit_s16_camvit"), "did you mean segmenter_vit_s16_camvid?"),
        (("--recipe", "nowhere.toml"), "expected a recipe in TOML"),
        (("--set", "merging.order"), "expected --set KEY=VALUE"),
        (("--set", "merging.ordre=raster"), "did you mean merging.order?"),
        (("--set", "merging.order=zigzag"), "expected published or raster as merging.order, got 'zigzag'"),
        (("--set", "merging.gbm_layers=[9]"), "expected merging layers up to 4"),
        (("--set", "network.depth=9"), "missing encoder.blocks.4"),
        (("--tau", "7"), "expected merging.clap_threshold between -2 and 2"),
        (("--image-size", "100x128"), "in multiples of the patch size 16"),
        (("--recipe", "segmenter_vit_s16_ade20k"), "expected"),
    ],
)
def test_export_of_bad_settings(
    run: Run, tiny_checkpoint: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    sentence(run("export", tiny_checkpoint, "-o", tmp_path / "bundle", *options), "export", message)
    assert list(tmp_path.glob("[!.]*")) == list(tmp_path.glob(".*partial*")) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "bundle", "--runtime", "abacus"),
        ("verify", "bundle", "--count", "0"),
        ("verify", "bundle", "--count", "1000000"),
        ("verify", "bundle", "--count", "9" * 5000),
        ("bench", "bundle", "--count", "1e9"),
        ("tune", "threshold", "bundle", "--data", "data", "--aim", "gmacs", "--target", "nan"),
        ("tune", "threshold", "bundle", "--data", "data", "--drop", "inf"),
        ("build", "bundle", "--repeat", "0"),
        ("export", "c", "-o", "b", "--image-size", "512"),
        ("export", "c", "-o", "b", "--image-size", "512x-1"),
        ("export", "c", "-o", "b", "--max-batch", "many"),
        ("export", "c"),
        ("export", "c", "-o", "b", "--scores", "--labels"),
        ("predict", "bundle", "photo", "--tau", "nan"),
        ("verify", "bundle", "--run", "torch"),  # half a flag's name
        ("verify", "bundle", "-q", "-v"),
        ("build-native", "--architectures", "80,new"),
        ("fly",),
        (),
    ],
)
def test_usage(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("algm-deploy")
    assert err.count("\n") == 1
    assert "--help` tells more" in err


def arguments_of(command: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a command, and of the commands below it."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from arguments_of(below)
        elif action.nargs != 0:
            yield action


@pytest.mark.parametrize(
    ("kind", "least", "most"), [(kinds.count, 0, 999_999_999), (kinds.positive, 1, 999_999_999), (kinds.port, 0, 65535)]
)
def test_whole_numbers_say_what_they_may_be(kind: Callable[[str], int], least: int, most: int) -> None:
    assert [kind(str(number)) for number in (least, 7, most)] == [least, 7, most]
    assert kind("007") == 7
    for text in (str(least - 1), "-3", "1.5", "", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"a whole number of at least {least}, got"):
            kind(text)
    with pytest.raises(argparse.ArgumentTypeError, match=f"a whole number up to {most}, got"):
        kind(str(most + 1))


def test_an_empty_text_is_no_argument() -> None:
    """The value of a variable that is not set: a path would be the current folder, a name the default."""
    found = list(arguments_of(parser()))
    assert {action.dest for action in found if action.type is kinds.path} > {
        "bundle",
        "images",
        "output",
        "data",
        "beside",
    }
    for action in found:
        if action.choices is None:
            assert action.type is not None, f"{action.dest} takes any text"
            with pytest.raises((argparse.ArgumentTypeError, ValueError)):
                action.type("")  # type: ignore[operator]
        else:
            assert "" not in action.choices


@pytest.mark.parametrize(
    "words",
    [
        ("export", "", "-o", "b"),
        ("export", "c", "-o", ""),
        ("export", "c", "-o", "b", "--recipe", ""),
        ("predict", "bundle", ""),
        ("evaluate", "bundle", "--data", "data", "--dataset", ""),
        ("compare", "bundle", "--runtimes", "torch,"),
        ("tune", "threshold", "bundle", "--data", "data", "--held-out", ""),
    ],
)
def test_an_empty_text_is_told(run: Run, words: tuple[str, ...]) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "expected a name, got an empty text: is a variable unset?" in err


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("report", ("--dataset", "camvid"), "expected --data with --dataset"),
        ("deploy", ("--limit", "3"), "expected --data with --limit"),
        ("deploy", ("--tau", "0.9", "--set", "merging.clap_threshold=0.8"), "expected merging.clap_threshold once"),
        ("export", ("--labels", "--set", "output=scores"), "expected output once"),
        ("export", ("--dense", "--set", "merging.gbm_layers=[5]"), "expected merging.gbm_layers once"),
    ],
)
def test_no_flag_is_dropped(
    run: Run, bundle: Path, tiny_checkpoint: Path, tmp_path: Path, command: str, flags: tuple[str, ...], said: str
) -> None:
    rest = (bundle,) if command == "report" else (tiny_checkpoint, "-o", tmp_path / "b")
    sentence(run(command, *rest, *flags), command, said)


def test_checkpoint_that_is_none(run: Run, tmp_path: Path) -> None:
    sentence(run("export", tmp_path / "nowhere", "-o", tmp_path / "b"), "export", "expected a checkpoint")
    (tmp_path / "checkpoint.pth").write_bytes(b"no checkpoint")
    sentence(run("export", tmp_path, "-o", tmp_path / "b"), "export", "checkpoint.pth: expected a checkpoint")
    assert not (tmp_path / "b").exists()


def test_folder_with_files_of_the_user_is_not_replaced(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    for command in ("export", "deploy"):
        outcome = run(command, tiny_checkpoint, "-o", tmp_path / "thesis")
        sentence(outcome, command, "expected a bundle or a free name", "choose another name")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.txt"]


def test_photo_that_is_no_photo(run: Run, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("not a picture")
    for command, arguments in (("predict", ()), ("verify", ("--images",))):
        sentence(run(command, bundle, *arguments, tmp_path / "text.jpg"), command, "text.jpg: expected a picture")
    sentence(run("predict", bundle, tmp_path / "nowhere.jpg"), "predict", "found nothing of this name")
    (tmp_path / "empty").mkdir()
    sentence(run("verify", bundle, "--images", tmp_path / "empty"), "verify", "expected pictures", "found none")


def test_large_photo_for_a_bundle_with_labels(run: Run, labels_bundle: Bundle, photo: Path, tmp_path: Path) -> None:
    outcome = run("predict", labels_bundle.path, photo, "-o", tmp_path / "pictures")
    sentence(outcome, "predict", "street.png", "one window of 128x128 pixels", "export the bundle with --scores")
    assert list(tmp_path.glob("pictures/*")) == []


def test_data_set_in_another_layout(run: Run, bundle: Path, data: Path, tmp_path: Path) -> None:
    sentence(run("evaluate", bundle, "--data", tmp_path / "nowhere"), "evaluate", "expected camvid test in")
    sentence(run("evaluate", bundle, "--data", data, "--split", "dev"), "evaluate", "has the splits test, val, train")
    sentence(run("evaluate", bundle, "--data", data, "--dataset", "camvit"), "evaluate", "did you mean camvid?")
    both = run("evaluate", bundle, "--data", data, "--dense", "--tau", "0.9")
    sentence(both, "evaluate", "expected dense, which merges nothing, or a threshold")
    (data / "annotations" / "test" / "a_0.png").unlink()
    sentence(run("evaluate", bundle, "--data", data), "evaluate", "1 of 3 labels missing")


def test_two_equal_photos(run: Run, bundle: Path, photo: Path) -> None:
    # Two windows fit a photo, and photos take turns: the first and the third are cut alike.
    images = [word for _ in range(3) for word in ("--images", photo)]
    outcome = run("verify", bundle, *images, "--runtime", "torch")
    sentence(outcome, "verify", "got two equal ones")


def test_merging_option_of_a_bundle_that_reads_none(run: Run, bundle: Path, photo: Path) -> None:
    edit(bundle, lambda manifest: manifest["signature"].update(defaults={"gbm_threshold": 1.0}))
    sentence(run("predict", bundle, photo, "--tau", 0.5), "predict", "reads no clap_threshold")


def test_a_data_set_without_a_usable_picture(run: Run, bundle: Path, data: Path) -> None:
    for path in (data / "images" / "test").iterdir():
        path.write_text("not a picture")
    sentence(run("evaluate", bundle, "--data", data), "evaluate", "none of 3 can be evaluated")


def test_executable_that_cannot_run_here(run: Run, bundle: Path, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(contract.runner_type("torch")):  # type: ignore[misc]
        def _open(self) -> None:
            raise NotExecutedError("the engine is built and not executed: no such device here")

    monkeypatch.setattr(contract, "runner_type", lambda name: Elsewhere)
    for command, rest in (("predict", (photo,)), ("verify", ())):
        sentence(run(command, bundle, *rest), command, "built and not executed", code=3)


def test_interruption(run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("algm_deploy.deployment.verify", interrupted)
    sentence(run("verify", bundle), "verify", "interrupted", code=130)


def test_runtimes_to_choose_from_are_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    for runtime in RUNTIMES:
        assert parser().parse_args(["build", "BUNDLE", "--runtime", runtime]).runtime == runtime
    with pytest.raises(SystemExit):
        parser().parse_args(["build", "BUNDLE", "--runtime", "tensorflow"])
    said = capsys.readouterr().err
    assert all(runtime in said for runtime in RUNTIMES)


def test_flags_of_an_engine(tiny_bundle: Bundle) -> None:
    def said(*flags: str, runtime: str = "tensorrt-rtx") -> dict[str, object]:
        options = parser().parse_args(["build", "BUNDLE", "--runtime", runtime, *flags])
        return _engine_options(tiny_bundle, runtime, options)

    assert said() == {}
    assert said("--engine-precision", "fp16") == {"precision": "fp16"}
    largest = tiny_bundle.recipe.max_batch
    assert said("--level", "0", "--opt-batch", "2") == {"level": 0, "batches": (1, 2, largest)}
    assert said(runtime="onnxruntime-cpu") == {}
    for flags in (("--level", "0"), ("--engine-precision", "fp16"), ("--timing-cache", "x"), ("--opt-batch", "2")):
        with pytest.raises(BuildError, match=r"torch has no build option .*: leave it out, or build for tensorrt"):
            said(*flags, runtime="torch")


# --- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "BUNDLE", "--images", "a.jpg", "--count", "2"),
        ("verify", "--images", "a.jpg", "BUNDLE", "--count", "2"),
        ("verify", "--count", "2", "--images", "a.jpg", "BUNDLE"),
    ],
)
def test_flags_and_names_stand_in_any_order(words: tuple[str, ...]) -> None:
    options = parser().parse_args(words)
    assert (options.bundle, options.images, options.count) == (Path("BUNDLE"), [Path("a.jpg")], 2)


def test_names_may_stand_on_both_sides_of_a_flag() -> None:
    options = parser().parse_args(["report", "B", "-o", "r.html", "B2"])
    assert (options.bundle, options.beside, options.output) == (Path("B"), [Path("B2")], Path("r.html"))
    options = parser().parse_args(["build-native", "--architectures", "80,90", "kernels"])
    assert (options.libraries, options.architectures) == (["kernels"], (80, 90))
    options = parser().parse_args(["predict", "B", "--tau", "0.5", "one.jpg", "two.jpg"])
    assert (options.images, options.tau) == ([Path("one.jpg"), Path("two.jpg")], 0.5)


@pytest.mark.parametrize("command", ["evaluate", "bench", "predict", "compare"])
def test_thresholds_have_the_same_flags(command: str) -> None:
    """Wherever a network runs on pictures of the user's choice."""
    rest = {"predict": ["photo"], "evaluate": ["--data", "data"]}.get(command, [])
    options = parser().parse_args([command, "BUNDLE", *rest, "--tau", "0.5", "--gbm", "inf"])
    assert (options.tau, options.gbm, options.dense) == (0.5, float("inf"), False)
    assert parser().parse_args([command, "BUNDLE", *rest, "--dense"]).dense


def test_a_dense_bundle_says_so(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    code, _, said = run("export", tiny_checkpoint, "-o", tmp_path / "dense", "--dense")
    assert code == 0
    assert "--dense: the bundle merges nothing, its network is the original one" in said
    assert Bundle.open(tmp_path / "dense").recipe.merging.layers == ()
    both = run("export", tiny_checkpoint, "-o", tmp_path / "b", "--dense", "--tau", "0.5")
    sentence(both, "export", "expected --dense without --tau and --gbm")
    quiet = run("export", tiny_checkpoint, "-o", tmp_path / "dense", "--dense", "--quiet")
    assert (quiet[0], quiet[2]) == (0, "")


@pytest.mark.parametrize(
    "plan",
    [
        MergePlan((), (), method="evit", evit_layers=(2,), evit_keep=0.6),
        MergePlan((), (), method="elvit", elvit_layer=2, elvit_grid=(2, 3), elvit_neighbours=3),
        MergePlan((), (), method="cts", cts_shared=2),
    ],
    ids=["evit", "elvit", "cts"],
)
def test_dense_leaves_nothing_of_another_method(plan: MergePlan) -> None:
    """Settings that the method alone reads included: without it they would be refused."""
    dense = given_settings(parser().parse_args(["export", "checkpoint.pth", "-o", "bundle", "--dense"]))
    given = {key: value for key, value in flatten(recipe("demo")).items() if not key.startswith("merging.")}
    found, _ = resolve([("recipe", given | flatten(plan, "merging.")), ("flags", dense)])
    assert found.merging == DENSE


def test_json_is_the_record_and_nothing_else(run: Run, bundle: Path, data: Path) -> None:
    code, out, _ = run("verify", bundle, "--runtime", "torch", "--count", 1, "--json")
    assert code == 0
    assert [link["number"] for link in json.loads(out)["links"]] == [1, 2, 3, 4, 5, 6]
    _, out, _ = run("evaluate", bundle, "--data", data, "--runtime", "torch", "--dense", "--json")
    assert json.loads(out)["tokens"][0]["mean"] == 64
    _, out, _ = run("bench", bundle, "--runtime", "torch", "--count", 1, "--rounds", 2, "--dense", "--json")
    assert [one["variant"] for one in json.loads(out)] == ["dense"]
    assert [one.variant for one in Bundle.open(bundle).manifest.speeds] == ["dense"]
    code, out, _ = run("doctor", "--json")
    assert "topic" in json.loads(out)[0]


# --- compare and videos ----------------------------------------------------------------------------------------------


def test_compare_finds_nothing_between_runtimes_and_what_another_threshold_changes(
    run: Run, bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    code, out, _ = run("compare", bundle, "--count", 2, "-o", tmp_path / "kept")
    assert code == 0
    assert "all merge decisions are the same" in out
    assert f"first: {bundle.name} on torch; second: {bundle.name} on onnxruntime-cpu" in out
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["first.json", "inputs.json", "second.json"]
    run("export", tiny_checkpoint, "-o", tmp_path / "other", "--tau", "0.5")
    code, out, _ = run("compare", bundle, tmp_path / "other", "--runtimes", "torch", "--count", 2, "--json")
    assert code == 1
    assert all(one["patches_grouped_otherwise"]["clap_1"] for one in json.loads(out)["windows"])
    code, out, _ = run("compare", bundle, tmp_path / "other", "--runtimes", "torch", "--count", 2)
    assert "2 windows decide otherwise, first window 0 in CLAP" in out


def test_compare_puts_bundles_in_one_table(run: Run, bundle: Path, tmp_path: Path) -> None:
    words = ("compare", bundle, bundle, "--table", "--runtimes", "torch", "--count", 1)
    code, out, _ = run(*words)
    assert (code, out.count("100.000"), "held to the first bundle's" in out) == (0, 4, True)
    assert [row["merging"] for row in json.loads(run(*words, "--json")[1])] == ["dense", "dense", "merged", "merged"]
    sentence(run("compare", bundle, "--table"), "compare", "expected other bundles with --table, got one bundle")
    for flags in (("--tau", "0"), ("--dense",), ("-o", tmp_path / "kept"), ("--runtimes", "torch,openvino")):
        flag = flags[0].replace("-o", "--output")
        sentence(
            run("compare", bundle, bundle, bundle, *flags), "compare", f"expected no {flag} for a table of bundles"
        )


def test_compare_reads_what_it_kept(run: Run, bundle: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert run("compare", bundle, "--runtimes", "torch", "--count", 1, "-o", kept)[0] == 0
    files = ("--load-inputs", kept / "inputs.json", "--load-outputs", kept / "first.json")
    code, out, _ = run("compare", bundle, "--runtimes", "onnxruntime-cpu", *files)
    assert code == 0
    assert f"second: {bundle.name} on torch" in out
    outcome = run("compare", bundle, "--load-outputs", kept / "first.json")
    sentence(outcome, "compare", "expected the inputs that the outputs were made from")


def test_compare_refuses_other_windows(run: Run, bundle: Path, wide_bundle: Bundle) -> None:
    sentence(run("compare", bundle, wide_bundle.path), "compare", "expected two bundles that take the same windows")


@pytest.mark.parametrize("frames", ["overlay", "labels"])
def test_predict_on_a_folder_with_a_video(run: Run, bundle: Path, photo: Path, tmp_path: Path, frames: str) -> None:
    folder = tmp_path / "holiday"
    folder.mkdir()
    shutil.copy(photo, folder / "street.png")
    (folder / "broken.jpg").write_bytes(b"no picture")
    with video_writer(folder / "ride.mp4", 5) as write:
        for index in range(3):
            write(scene(index)[0])
    code, _, said = run("predict", bundle, folder, "-o", tmp_path / "out", "--frames", frames, "--runtime", "torch")
    assert code == 2
    assert "1 of 3 files could not be predicted" in said and "broken.jpg" in said
    assert (tmp_path / "out" / "street.labels.png").is_file()
    if frames == "overlay":
        with Video(tmp_path / "out" / "ride.overlay.mp4") as video:
            assert (sum(1 for _ in video), round(video.rate)) == (3, 5)
    else:
        assert len(list((tmp_path / "out" / "ride.labels").glob("*.png"))) == 3
