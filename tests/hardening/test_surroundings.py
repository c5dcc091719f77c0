"""Names, standard streams and links that no one thinks of, over every command: no traceback, and the work is done."""

from __future__ import annotations

import argparse
import ast
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import stream_child
from PIL import Image
from stream_child import AWKWARD, LATIN, STREAMS

from algm_deploy import cli
from algm_deploy.bundle.records import Link, Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import making
from algm_deploy.cli.parser import parser
from algm_deploy.pictures.shipped import scene
from algm_deploy.pictures.video import video_writer
from algm_deploy.timing import protocols


def commands(below: argparse.ArgumentParser) -> Iterator[str]:
    """Every command by its words, searches of tune as well."""
    deeper = [action for action in below._actions if isinstance(action, argparse._SubParsersAction)]
    if not deeper:
        yield below.prog.removeprefix("algm-deploy ")
    for action in deeper:
        for one in action.choices.values():
            yield from commands(one)


COMMANDS = tuple(commands(parser()))
NAMES = {  # what every command needs; nothing of it is read here
    "demo": [], "list": [], "doctor": [], "build-native": [],
    "export": ["c", "-o", "b"], "deploy": ["c", "-o", "b"], "evaluate": ["b", "--data", "d"], "predict": ["b", "p"],
    "prove": ["b"], "serve-repository": ["b", "-o", "r"], "tune precision": ["b", "c", "--data", "d"],
    **{key: ["b", "--data", "d"] for key in ("tune threshold", "tune budget", "tune positions", "tune attention")},
}  # fmt: skip

# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_child() -> Iterator[Callable[..., int]]:
    """`in_child(streams, words)`: exit code of `algm-deploy WORDS` on such streams, as `stream_child` gives it."""
    words = [sys.executable, stream_child.__file__]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def call(streams: str, words: list[str], prepared: bool = True) -> int:
            process.stdin.write(json.dumps([streams, words, prepared]) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield call
        process.stdin.close()


@pytest.mark.parametrize("streams", STREAMS)
def test_no_stream_ends_a_command(in_child: Callable[..., int], streams: str) -> None:
    _, done, failed = STREAMS[streams]
    for command in COMMANDS:
        words = [*command.split(), *NAMES.get(command, ["b"])]
        assert in_child(streams, words) == done, command
        assert in_child(streams, [*words, "-v"]) == failed, command
    assert in_child(streams, ["predict", "b", "p", "--no-such-flag-ü"]) == 2
    assert in_child(streams, ["predict", "--help"]) == done


@pytest.mark.parametrize("streams", ["ASCII, strict", "stdout closed"])
def test_a_traceback_would_be_seen(in_child: Callable[..., int], streams: str) -> None:
    assert in_child(streams, ["list"], prepared=False) == 99


def test_only_one_module_writes_to_the_streams(root_dir: Path) -> None:
    """So that what holds for a stand-in of a command holds for every command."""
    package = root_dir / "algm_deploy"
    writing = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            named = isinstance(node, ast.Name) and node.id == "print"
            streams = isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr", "__stdout__")
            if named or (streams and isinstance(node.value, ast.Name) and node.value.id == "sys"):
                writing.add(file.relative_to(package).as_posix())
    # The command line flushes; the others answer the process that started them, or write into a file.
    assert writing == {
        "cli/saying.py",
        "cli/__init__.py",
        "doctor/probes.py",
        "runners/tensorrt/builder.py",
        "runners/tensorrt/polygraphy.py",
    }


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(
    tiny_bundle: Bundle, int8_bundle: Bundle, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder in which everything has an awkward name, and photos have two; the bundles are links."""
    folder = tmp_path_factory.mktemp("place")
    (folder / AWKWARD).mkdir()
    link = Link(number=1, name="network", passed=True, measured="", gate="")
    for name, made in ((B, tiny_bundle), (INT8, int8_bundle)):
        shutil.copytree(made.path, folder / made.path.name)
        bundle = Bundle.open(folder / made.path.name)
        for runtime in ("torch", "onnxruntime-cpu"):
            bundle.record(Parity(runtime=runtime, images=1, batches=(1,), links=(link,)))
        (folder / AWKWARD / name).symlink_to(bundle.path)
    shutil.copytree(tiny_checkpoint, folder / AWKWARD / "-checkpoint ü")
    for index, name in enumerate((LATIN, AWKWARD[:190], f"{LATIN} b", AWKWARD[:189])):
        for kind, array in zip(("images", "annotations"), scene(index), strict=True):
            at = folder / AWKWARD / f"-data {LATIN}" / kind / "test" / f"{name}.png"
            at.parent.mkdir(parents=True, exist_ok=True)
            with at.open("wb") as file:
                Image.fromarray(array).save(file, "png")
    with video_writer(folder / "v.mp4", 5) as write:
        for _ in range(2):
            write(np.full((64, 64, 3), 90, np.uint8))
    for name in (f"{LATIN} film", "-film ü"):
        shutil.copy(folder / "v.mp4", folder / AWKWARD / f"{name}.mp4")
    return folder / AWKWARD


def run(words: list[str]) -> tuple[int, str]:
    """Exit code of a command on strict ASCII streams, and all it said."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "ascii", "strict", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return code, b"".join(one.buffer.getvalue() for one in (out, err)).decode("ascii")  # type: ignore[attr-defined]


ONE = ["--runtime", "torch"]
B, INT8, C, P = "bundle ü", "int8 ü", "-checkpoint ü", f"-data {LATIN}/images/test/{LATIN}.png"
DATA = [f"--data=-data {LATIN}", "-q"]
WORDS: dict[str, list[str]] = {
    "export": [f"--output=-new {AWKWARD[8:180]}", "--", C],
    "deploy": ["-o", "deployed ü", *ONE, "--count", "1", "--limit", "2", "--max-batch", "1", *DATA, "--", C],
    "build": [B, "--runtime", "onnxruntime-cpu"],
    "verify": [B, *ONE, f"--images={P}", "--count", "1", "--json"],
    "evaluate": [B, *ONE, *DATA, "--slice", "(.*)", "--json"],
    "bench": [B, *ONE, f"--images={P}", "--rounds", "2", "--warmup", "0"],
    "compare": [B, f"--images={P}", "--runtimes", "torch", "--count", "1", f"--output=-compared {LATIN}"],
    "predict": [*ONE, f"--output=-predicted {LATIN}", "--", B, P],
    "report": [B, f"--output=-report {LATIN}.html", f"--images={P}", *ONE, *DATA, "--count", "2"],
    "tune rule": [B, f"--output=-rule {LATIN}.toml", *DATA],
    "tune threshold": [B, *ONE, *DATA, "--values", "0.9", "--slice", "^.{5}", f"--output=-tau {LATIN}.toml"],
    "serve-repository": [B, *ONE, "--name", "network", "--output=-models ü"],  # a bundle's own path is in UTF-8
    "tune precision": [
        B,
        INT8,
        *ONE,
        *DATA,
        "--values",
        "0.9",
        "--slice",
        "^.{5}",
        f"--output=-8 {LATIN}.toml",
    ],
    "tune budget": [B, *DATA, "--slice", "^.{5}", f"--output=-budget {LATIN}.toml"],
    "tune positions": [B, *DATA, "--slice", "^.{5}", f"--output=-gbm {LATIN}.toml"],
    "tune attention": [B, *DATA, "--limit", "1", f"--output=-attention {LATIN}.html"],
}
WITHOUT_NAMES = {"list", "doctor", "build-native"}
IN_THE_WAY: dict[str, list[str]] = {"demo": ONE, "prove": [B, "--runtime", "tensorrt-rtx"]}
"""Commands of many steps, which other tests run, and what they are told beside the folder to write."""
UNTIL_STOPPED = {"serve"}  # tests/serving tries it


def test_every_command_is_tried() -> None:
    assert {*WORDS, *WITHOUT_NAMES, *IN_THE_WAY, *UNTIL_STOPPED} == set(COMMANDS)


@pytest.mark.parametrize("command", WORDS)
def test_files_may_be_called_anything(place: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other networks are exported from names of ours; one export is enough to see that it takes awkward ones.
    monkeypatch.setattr(protocols, "_bundles", lambda bundle, *_: {"merged": bundle})
    if command == "deploy":
        monkeypatch.setattr(making, "_exported", lambda _: Bundle.open(B))
    with chdir(place):
        code, said = run([*command.split(), *WORDS[command]])
    assert code == 0 or (command.startswith("tune") and code == 1), said  # a search may reach nothing on a few scenes
    assert not list(place.rglob(".*.partial"))


def test_films_may_not(place: Path) -> None:
    """OpenCV ends the process at a name that is no UTF-8."""
    with chdir(place):
        assert run(["predict", *ONE, "--output=-films ü", "--", B, "-film ü.mp4"])[0] == 0
        code, said = run(["predict", *ONE, "--output=-films ü", "--", B, f"{LATIN} film.mp4"])
        assert (code, "expected a path in UTF-8" in said) == (2, True)
        code, said = run(["predict", *ONE, f"--output=-films {LATIN}", "--", B, "-film ü.mp4"])
        assert (code, "expected a path in UTF-8" in said) == (2, True)


def test_records_of_such_names_are_read_again(place: Path) -> None:
    """The bundle's manifest and state, which hold them by now."""
    code, said = run(["evaluate", str(place / B), *ONE, f"--data={place}/-data {LATIN}", "--slice", "(.*)", "-q"])
    assert code == 0, said
    assert (place / B).is_symlink()


@pytest.mark.parametrize("command", IN_THE_WAY)
def test_a_command_of_many_steps_names_what_is_in_its_way(place: Path, command: str) -> None:
    with chdir(place):
        Path(f"-taken {LATIN}").touch()
        code, said = run([command, *IN_THE_WAY[command], f"--output=-taken {LATIN}", "-q"])
    assert code == 2, said
    assert len(said.splitlines()[-1]) > 20


@pytest.mark.parametrize("command", ["export", "verify", "predict"])
def test_a_bundle_or_checkpoint_that_libraries_cannot_open_is_refused(place: Path, command: str) -> None:
    words = {
        "export": [str(place / C), "-o", str(place / LATIN)],
        "verify": [str(place / f"{LATIN}-bundle"), *ONE],
        "predict": [str(place / f"{LATIN}-bundle"), str(place / P), *ONE],
    }
    (place / f"{LATIN}-bundle").exists() or (place / f"{LATIN}-bundle").symlink_to(place / B)
    code, said = run([command, *words[command]])
    assert code == 2
    assert "expected a path in UTF-8" in said
    assert "rename it" in said
