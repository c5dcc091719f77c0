"""Imports point one way, and importing the package costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "algm_deploy"

# Top to bottom: a module imports its own row and the rows below it. `algm_deploy/__init__.py` stands above all rows.
TIERS = (
    {"cli", "__main__"},
    {"proof"},
    {"demo", "serving"},
    {"deployment"},
    {"fleet"},
    {"report", "doctor"},
    {"tuning", "timing"},
    {"parity", "evaluation"},
    {"predictor"},
    {"pictures", "runners"},
    {"lowering"},
    {"quantization"},
    {"merging"},
    {"models"},
    {"ops"},
    {"bundle"},
    {"recipe"},
    {"environment", "garbage", "native_libraries", "package_data", "wording"},
    {"errors"},
)
RANK = {name: rank for rank, names in enumerate(TIERS) for name in names}
# Reading these would open connections or run what a file says; SECURITY.md promises neither.
UNTRUSTED = {"socket", "ssl", "http", "urllib", "ftplib", "requests", "pickle", "marshal", "shelve", "dill", "joblib"}
HEAVY = ("torch", "onnxruntime", "openvino", "onnx", "onnxscript", "tensorrt", "tensorrt_rtx", "cv2", "matplotlib")


def modules_of(package: Path) -> dict[str, Path]:
    """Dotted name -> file of every module of a package."""
    names = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


def imports_of(source: str, known: set[str]) -> set[str]:
    """Modules of the package that a source imports anywhere, inside functions and for types included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if [alias.name for alias in node.names] == ["__version__"]:
                continue  # a constant, not a piece of the package above
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= submodules or {node.module}
    return found & known


def graph_of(package: Path) -> dict[str, set[str]]:
    modules = modules_of(package)
    return {name: imports_of(file.read_text(), set(modules)) - {name} for name, file in modules.items()}


def rank_of(module: str) -> int:
    parts = module.split(".")
    return -1 if len(parts) == 1 else RANK[parts[1]]


def upward_imports(graph: dict[str, set[str]]) -> list[str]:
    return [f"{a} imports {b}" for a, targets in graph.items() for b in sorted(targets) if rank_of(b) < rank_of(a)]


def test_every_module_has_a_place() -> None:
    names = {name.split(".")[1] for name in modules_of(PACKAGE) if "." in name}
    assert names <= set(RANK), f"give these modules a row in TIERS: {sorted(names - set(RANK))}"


def test_imports_point_down() -> None:
    assert upward_imports(graph_of(PACKAGE)) == []


def test_no_import_cycles() -> None:
    TopologicalSorter(graph_of(PACKAGE)).prepare()


def test_the_import_checks_can_fail(tmp_path: Path) -> None:
    package = tmp_path / "algm_deploy"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ops" / "__init__.py").touch()
    (package / "errors.py").write_text("def f():\n    from algm_deploy import recipe\n")
    (package / "recipe.py").write_text("from algm_deploy.errors import f\nfrom algm_deploy.ops import clap\n")
    graph = graph_of(package)
    assert upward_imports(graph) == [
        "algm_deploy.errors imports algm_deploy.recipe",
        "algm_deploy.recipe imports algm_deploy.ops",
    ]
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


def test_importing_loads_no_tensor_library() -> None:
    # The tables of `list` among them, which comes at once.
    lean = [name for name in modules_of(PACKAGE) if "." not in name or rank_of(name) >= RANK["bundle"]]
    code = f"import sys, algm_deploy.report.tables, {', '.join(lean)}; print(*set({HEAVY}) & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.split() == []


def test_nothing_connects_or_unpickles() -> None:
    names = {
        name.partition(".")[0]
        for file in modules_of(PACKAGE).values()
        for node in ast.walk(ast.parse(file.read_text()))
        for name in imported_names(node)
    }
    assert names & UNTRUSTED == set()
    assert {"json", "torch"} <= names


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
