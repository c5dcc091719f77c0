"""What SECURITY.md promises: no connection, nothing executed from files, nothing written elsewhere, pinned packages."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from PIL import Image

from algm_deploy.pictures.shipped import scene

# Runs commands under an audit hook that refuses connections and notes programs that are started, objects that are
# unpickled, and files that are opened for writing, removed or renamed.
WATCHED = """
import json, os, sys
events = []
def watch(event, args):
    if event.startswith("socket.") and event != "socket.gethostname":
        events.append([event, repr(args)])
        raise OSError(f"no network: {event}")
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class"):
        events.append([event, repr(args)[:300]])
    if event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        events.append(["write", os.path.abspath(args[0])])
    if event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate"):
        place = args[2 if event in ("os.rename", "os.mkdir") else 1] if event != "os.truncate" else -1
        folder = os.readlink(f"/proc/self/fd/{place}") if place >= 0 else ""  # the folder that a name is of
        events.append(["write", os.path.abspath(os.path.join(folder, str(args[0])))])
sys.addaudithook(watch)
from algm_deploy.cli import main
codes = []
for words in json.load(sys.stdin):
    events.append(["command", words[0]])
    codes.append(main(words))
print("\\n" + json.dumps([codes, events]))
"""
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "input", "breakpoint"}


@pytest.fixture(scope="module")
def watched(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[list[str]]]:
    """Folder, exit codes and events of a whole deployment whose home and temporary folder are elsewhere."""
    folder = tmp_path_factory.mktemp("deployed")
    home = tmp_path_factory.mktemp("home")
    for kind, array in zip(("images", "annotations"), scene(0), strict=True):
        (folder / "camvid" / kind / "test").mkdir(parents=True)
        Image.fromarray(array).save(folder / "camvid" / kind / "test" / "a_0.png")
    photo, data = str(folder / "camvid" / "images" / "test" / "a_0.png"), str(folder / "camvid")
    bundle = str(folder / "bundle")
    words = [
        ["deploy", str(tiny_checkpoint), "-o", bundle, "--data", data, "--count", "1", "--max-batch", "2"],
        ["predict", bundle, photo, "-o", str(folder / "pictures"), "--runtime", "torch"],
        ["tune", "rule", bundle, "--images", photo, "-o", str(folder / "tuned.toml")],
        ["report", bundle, "--images", photo, "-o", str(folder / "report.html")],
        ["list"],
        ["doctor"],
    ]
    (home / "tmp").mkdir()
    unset = ("XDG_CACHE_HOME", "ORT_DISABLE_TELEMETRY")
    ours = {name: value for name, value in os.environ.items() if name not in unset}
    surroundings = {**ours, "HOME": str(home), "TMPDIR": str(home / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED],
        input=json.dumps(words), capture_output=True, text=True, check=False, env=surroundings,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    codes, events = json.loads(done.stdout.splitlines()[-1])
    assert [path.name for path in home.iterdir()] == ["tmp"]
    temporary = str(home / "tmp")
    return folder, codes, [[kind, path] for kind, path in events if kind != "write" or not path.startswith(temporary)]


def test_a_whole_deployment_opens_no_connection(watched: tuple[Path, list[int], list[list[str]]]) -> None:
    _, codes, events = watched
    assert codes == [0] * 6
    assert [event for event in events if event[0].startswith("socket.")] == []


def test_it_starts_no_program_and_unpickles_no_object(watched: tuple[Path, list[int], list[list[str]]]) -> None:
    """`doctor` alone imports runtimes in processes of its own, and asks NVIDIA's tool."""
    _, _, events = watched
    before_doctor = events[: events.index(["command", "doctor"])]
    own = ("uname", ["uname", "-p"])  # Python's own platform module asks for the kind of processor
    others = [e for e in before_doctor if e[0] not in ("command", "write") and not e[1].startswith(str(own)[:-1])]
    assert others == []
    started = [event[1] for event in events if event[0] == "subprocess.Popen"]
    known = ("doctor.probes import tell", "nvidia-smi", "'uname', '-p'")
    assert [words for words in started if not any(part in words for part in known)] == []
    assert any("doctor.probes import tell" in words for words in started)


def test_it_writes_into_the_named_folders_only(watched: tuple[Path, list[int], list[list[str]]]) -> None:
    folder, _, events = watched
    written = {path for kind, path in events if kind == "write"}
    outside = {path for path in written if not path.startswith((str(folder), os.devnull))}
    # PyTorch makes an empty folder for a compiler of its own, which nothing here uses.
    assert [path for path in outside if not Path(path).name.startswith("torchinductor_")] == []
    assert any(path.endswith("manifest.json") or "/.manifest." in path for path in written)


def test_the_watch_can_fail(tmp_path: Path) -> None:
    code = WATCHED.replace(
        "from algm_deploy.cli import main",
        "def main(words):\n"
        "    import pickle, pathlib, socket, subprocess\n"
        "    pathlib.Path(words[1]).write_text('x')\n"
        "    pickle.loads(pickle.dumps(pathlib.Path('x')))\n"
        "    subprocess.run(['true'])\n"
        "    try: socket.create_connection(('localhost', 1))\n"
        "    except OSError: return 0\n",
    )
    words = json.dumps([["deploy", str(tmp_path / "x")]])
    done = subprocess.run([sys.executable, "-c", code], input=words, capture_output=True, text=True, check=True)
    kinds = {kind for kind, _ in json.loads(done.stdout.splitlines()[-1])[1]}
    assert {"command", "write", "pickle.find_class", "subprocess.Popen"} < kinds
    assert any(kind.startswith("socket.") for kind in kinds)


# --- the code --------------------------------------------------------------------------------------------------------


def dangers(source: str) -> list[str]:
    """Calls that execute text, hand text to a shell, or read files as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in FORBIDDEN_CALLS or name.startswith(("os.system", "os.popen", "os.exec", "os.spawn", "pickle.")):
            found.append(name)
        if keywords.get("shell", "False") != "False" or keywords.get("allow_pickle", "False") != "False":
            found.append(f"{name} {keywords}")
        if name == "torch.load" and keywords.get("weights_only") != "True":
            found.append(name)
    return found


def test_no_text_is_evaluated_or_handed_to_a_shell(root_dir: Path) -> None:
    files = [*(root_dir / "algm_deploy").rglob("*.py"), *(root_dir / "benchmarks").rglob("*.py")]
    assert len(files) > 80
    assert {str(file): found for file in files if (found := dangers(file.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)", "os.system(text)", "subprocess.run(text, shell=True)", "torch.load(path)",
        "torch.load(path, weights_only=False)", "np.load(path, allow_pickle=True)", "pickle.load(file)",
    ],
)  # fmt: skip
def test_the_check_of_the_code_can_fail(line: str) -> None:
    assert dangers(line)
    assert not dangers("torch.load(path, weights_only=True); re.compile(text); subprocess.run([text], check=True)")


# --- packages --------------------------------------------------------------------------------------------------------


def pins(file: Path) -> dict[str, str]:
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in re.findall(r"^([\w.-]+)==([\w.+!-]+)", file.read_text(), re.MULTILINE)
    }


@pytest.fixture(scope="module")
def pinned(root_dir: Path) -> dict[str, str]:
    return pins(root_dir / "constraints-ci.txt") | pins(root_dir / "requirements-tensorrt-ci.txt")


def test_every_pin_is_exact(root_dir: Path) -> None:
    for name in ("constraints-ci.txt", "requirements-tensorrt-ci.txt"):
        lines = [line.split("\\")[0].strip() for line in (root_dir / name).read_text().splitlines()]
        wanted = [line for line in lines if line and not line.startswith(("#", "--hash"))]
        assert wanted
        assert [line for line in wanted if not re.fullmatch(r"[\w.-]+==\d[\w.+!-]*", line)] == []


def test_what_is_loaded_as_native_code_from_outside_has_a_hash(root_dir: Path) -> None:
    text = (root_dir / "requirements-tensorrt-ci.txt").read_text()
    blocks = re.split(r"\n(?=[\w.-]+==)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", block) for block in blocks if "==" in block)
    headers = (root_dir / ".ci" / "onnxruntime-headers").read_text()
    assert headers.index("sha256sum --check") < headers.index("tar -x")


def test_ci_installs_nothing_without_a_pin(root_dir: Path) -> None:
    installs = re.findall(r"pip install[^&\n]*", (root_dir / ".ci" / "run").read_text())
    assert len(installs) >= 3
    assert all("-c constraints-ci.txt" in line or "--require-hashes" in line for line in installs)


def test_installed_versions_are_the_pinned_ones(pinned: dict[str, str]) -> None:
    """Where CI installed them; a package that no file pins came as somebody's dependency."""
    if "ALGM_PINNED" not in os.environ:
        pytest.skip("not the environment of .ci/run, which sets ALGM_PINNED")
    found = {re.sub(r"[-_.]+", "-", one.name).lower(): one.version.partition("+")[0] for one in distributions()}
    others = {name: version for name, version in found.items() if version != pinned.get(name)}
    own = re.compile(
        "pip|setuptools|algm-deploy(-native)?|(nvidia|cuda|triton).*"
    )  # venv's, ours, and what torch pins itself
    assert [name for name in others if not own.fullmatch(name)] == []


def test_pins_are_read(pinned: dict[str, str]) -> None:
    assert len(pinned) > 50
    assert {"torch", "numpy", "onnx", "polygraphy"} <= set(pinned)
