"""What the wheel carries, and that the documented commands are the ones that CI runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from algm_deploy.errors import AlgmDeployError
from algm_deploy.package_data import content


@pytest.fixture(scope="module")
def wheel(root_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=root_dir, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def tracked(root: Path, folder: str) -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.splitlines() if (root / name).exists()}


def test_one_top_level_name(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {re.sub(r"-.*\.", ".", top) for top in tops} == {"algm_deploy", "algm_deploy.dist-info"}


def test_wheel_carries_code_recipes_and_native_sources(wheel: zipfile.ZipFile, root_dir: Path) -> None:
    names = {name for name in wheel.namelist() if not name.startswith("algm_deploy-")}
    carried = {name.replace("algm_deploy/_content/", "") for name in names}
    folders = tracked(root_dir, "algm_deploy") | tracked(root_dir, "export") | tracked(root_dir, "runtimes")
    assert carried == folders | {"benchmarks/published.toml"}
    assert "algm_deploy/py.typed" in names
    assert any(name.startswith("algm_deploy/_content/export/recipes/") for name in names)


def test_wheel_carries_the_drawn_scenes_but_not_their_painter(wheel: zipfile.ZipFile, root_dir: Path) -> None:
    names = wheel.namelist()
    for kind in ("images", "labels"):
        assert sum(name.startswith(f"algm_deploy/demo/assets/{kind}/") for name in names) == 24
    painter = {file.name for file in (root_dir / "benchmarks" / "demo" / "painter").glob("*.py")} - {"__init__.py"}
    assert painter == {"scenes.py", "things.py", "canvas.py"}
    assert {Path(name).name for name in names} & painter == set()
    assert [name for name in names if "painter" in name] == []


# Modules whose distribution has another name, and those that only some extras install.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "google": "protobuf",
    "yaml": "pyyaml",
}
# Triton Inference Server brings triton_python_backend_utils.
# Triton comes with PyTorch's CUDA packages; the fused steps run in PyTorch's operators without it.
OPTIONAL = {"onnxruntime", "openvino", "tensorrt", "tensorrt_rtx", "triton", "triton_python_backend_utils"} | {
    "prometheus_client",
    "pyarrow",
    "ray",
    "starlette",
    "uvicorn",
}


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"algm_deploy"}


def test_every_import_is_a_declared_dependency(root_dir: Path) -> None:
    project = tomllib.loads((root_dir / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[>=<]", line)[0] for line in project["dependencies"]}
    used = {name for file in (root_dir / "algm_deploy").rglob("*.py") for name in imported(file)} - OPTIONAL
    assert {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in used} <= declared


def test_ci_pins_every_declared_dependency(root_dir: Path) -> None:
    project = tomllib.loads((root_dir / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    runtimes = [*extras["onnxruntime-cpu"], *extras["openvino"]]
    named = [*project["dependencies"], *extras["dev"], *extras["serve"], *runtimes]
    lines = [line for line in named if line != "algm-deploy[serve]"]  # that extra, from the one for development
    declared = {re.split(r"[>=<]", line)[0].lower() for line in lines}
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (root_dir / "constraints-ci.txt").read_text(), re.MULTILINE))
    assert declared <= set(pinned)


def test_wheel_has_licence_and_command(wheel: zipfile.ZipFile) -> None:
    (licence,) = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    assert b"Apache License" in wheel.read(licence)
    (scripts,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert b"algm-deploy = algm_deploy.cli:main" in wheel.read(scripts)


def test_no_content_folder_is_named_like_a_package(root_dir: Path) -> None:
    taken = {"tensorrt", "onnxruntime", "openvino", "onnx", "torch", "numpy", "cv2", "triton"}
    names = {path.stem for folder in ("export", "runtimes") for path in (root_dir / folder).rglob("*")}
    assert names & taken == set()


def test_content_is_found_and_missing_content_is_explained() -> None:
    assert (content("export/recipes")).is_dir()
    assert (content("runtimes") / "README.md").is_file()
    with pytest.raises(AlgmDeployError, match="expected the folder export/nothing"):
        content("export/nothing")


def commands_under(readme: str, heading: str) -> list[str]:
    section = readme.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)[0].strip().splitlines()


def test_ci_runs_the_readme_test_commands(root_dir: Path) -> None:
    documented = commands_under((root_dir / "README.md").read_text(), "Tests")
    ci = (root_dir / ".ci" / "run").read_text().splitlines()
    assert documented[-1].endswith("&& pytest")
    assert [line for line in documented if line not in ci] == []
