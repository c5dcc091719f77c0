"""Builds and finds the native libraries: the kernels and their shells for TensorRT and ONNX Runtime.

Libraries live in a cache folder named after the version and the hash of the sources, so that a changed source or an
upgraded package never loads an old binary. Nothing is compiled by installing the package; `algm-deploy build-native`
calls `build`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from algm_deploy import __version__
from algm_deploy.errors import BuildError
from algm_deploy.package_data import content

_LOG = logging.getLogger("algm_deploy")

REBUILD = "algm-deploy build-native"
# The GPU generations the kernels are compiled for; the newest one is added as PTX for GPUs that come later.
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


@dataclass(frozen=True)
class Header:
    """A header that one library needs, the variable that says where it is, and its publisher's package."""

    file: str
    variable: str
    system: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Library:
    """One library: CMake target, which is also the file's stem, and the foreign header it is compiled against.

    Without `cuda` it is complete on a machine that has no CUDA compiler, with what it offers the CPU.
    """

    target: str
    header: Header | None = None
    cuda: bool = True

    @property
    def file_name(self) -> str:
        """File name of the shared library."""
        return f"lib{self.target}.so"


TENSORRT_HEADER = Header(
    "NvInferRuntime.h",
    "TENSORRT_ROOT",
    ("/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu", "/usr/include", "/usr/local/tensorrt/include"),
    "apt-get install libnvinfer-headers-dev from NVIDIA's repository, or unpack the TensorRT archive from "
    "https://developer.nvidia.com/tensorrt",
)
ONNXRUNTIME_HEADER = Header(
    "onnxruntime_c_api.h",
    "ONNXRUNTIME_ROOT",
    ("/usr/include/onnxruntime", "/usr/local/include/onnxruntime", "/usr/local/include"),
    "unpack the archive of https://github.com/microsoft/onnxruntime/releases",
)
LIBRARIES = {
    "kernels": Library("algm_kernels"),
    "trt_plugin": Library("algm_trt_plugin", TENSORRT_HEADER),
    "ort_custom_op": Library("algm_ort_custom_op", ONNXRUNTIME_HEADER, cuda=False),
    # Built along with trt_plugin; see runtimes/trt_plugin/CMakeLists.txt for what it cures.
    "rtx_alias": Library("algm_rtx_alias"),
}
BUILT = ("kernels", "trt_plugin", "ort_custom_op")
"""What is built where nothing is named: all of them."""
_SOURCE_SUFFIXES = frozenset({".cpp", ".cu", ".cuh", ".h", ".hpp", ".txt"})


def source_hash() -> str:
    """Hash of every native source file and its place in the tree, 12 hexadecimal digits."""
    root = content("runtimes")
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in _SOURCE_SUFFIXES):
        digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def cache_folder() -> Path:
    """Where the libraries of these very sources live: `$XDG_CACHE_HOME/algm-deploy/native/<version>-<hash>`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "algm-deploy" / "native" / f"{__version__}-{source_hash()}"


def find_library(name: str) -> Path | None:
    """The built library `name` (a key of `LIBRARIES`), or None where it has not been built from these sources."""
    path = cache_folder() / LIBRARIES[name].file_name
    return path if path.is_file() else None


def missing_here(name: str, runtime: str, then: str = "") -> bool:
    """Whether the library `name` is missing where a runtime would merge faster with it; says so, once a process.

    Args:
        name: key of `LIBRARIES`.
        runtime: the one that runs, for the line.
        then: what is to be done after building the library, such as "then build the bundle again".
    """
    missing = find_library(name) is None
    if missing:
        _say_missing(name, runtime, then)
    return missing


@cache
def _say_missing(name: str, runtime: str, then: str) -> None:
    cure = ", ".join(filter(None, (f"run `{REBUILD} {name}`", then)))
    _LOG.warning(
        "merging with %s takes several times longer on this device without the native library: %s", runtime, cure
    )


def require_library(name: str) -> Path:
    """The built library `name`; BuildError with the command that builds it where it is absent."""
    path = find_library(name)
    if path is None:
        raise BuildError(
            f"expected the native library {LIBRARIES[name].file_name} in {cache_folder()}, found none: "
            f"run `{REBUILD} {name}` first"
        )
    return path


def find_nvcc() -> Path | None:
    """CUDA's compiler: `$CUDACXX`, `$CUDA_HOME`, the search path, then the usual folder."""
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    if home := os.environ.get("CUDA_HOME"):
        candidates.insert(1, f"{home}/bin/nvcc")
    return next((Path(c) for c in candidates if c and Path(c).is_file()), None)


def find_header(header: Header) -> Path | None:
    """Folder that holds the header: the variable's folder or its `include`, else the system's folders."""
    if root := os.environ.get(header.variable):
        folders = [Path(root), Path(root) / "include", Path(root) / "include" / "x86_64-linux-gnu"]
    else:
        folders = [Path(folder) for folder in header.system]
    return next((folder for folder in folders if (folder / header.file).is_file()), None)


def missing_for(name: str, cuda: bool = True) -> list[str]:
    """What the build of library `name` lacks on this machine, each with the way to get it; empty when complete.

    Without `cuda`: for its part that runs on the CPU.
    """
    header = LIBRARIES[name].header
    lacks = []
    if cuda and LIBRARIES[name].cuda and find_nvcc() is None:
        lacks.append("CUDA's compiler nvcc (apt-get install cuda-toolkit from NVIDIA's repository, or set CUDA_HOME)")
    lacks += [
        f"{tool} (apt-get install {tool}, or pip install {tool})"
        for tool in ("cmake", "ninja")
        if shutil.which(tool) is None
    ]
    if header and find_header(header) is None:
        lacks.append(f"the header {header.file} ({header.source}; then set {header.variable} to the folder)")
    return lacks


def supported_architectures(nvcc: Path) -> tuple[int, ...]:
    """The compute capabilities of `ARCHITECTURES` that this nvcc can compile for."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout  # noqa: S603 - the user's own compiler
    known = {int(number) for number in re.findall(r"compute_(\d+)\b", listed)}
    chosen = tuple(arch for arch in ARCHITECTURES if arch in known)
    if not chosen:
        raise BuildError(f"expected an nvcc that compiles for one of {ARCHITECTURES}, {nvcc} lists {sorted(known)}")
    return chosen


def build(
    names: Sequence[str] = BUILT,
    architectures: Sequence[int] | None = None,
    progress: bool = True,
    folder: Path | None = None,
) -> dict[str, Path]:
    """Compiles the named libraries.

    Args:
        names: keys of `LIBRARIES`.
        architectures: compute capabilities such as 89; default all of `ARCHITECTURES` that nvcc knows. The newest one
            is compiled to PTX as well, so that later GPUs can run it. An empty list leaves CUDA out.
        progress: show a progress bar.
        folder: where they go; default the cache, where `find_library` looks.

    Returns:
        Path of each library.

    Raises:
        BuildError: a name is unknown, a tool or header is missing, or the compiler failed.
    """
    cuda = architectures is None or len(architectures) > 0
    _check(names, cuda)
    nvcc = find_nvcc() if cuda else None
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    log.write_text("")
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as work:
        _run(_configure_command(Path(work), names, nvcc, architectures), log, progress=False)
        targets = [LIBRARIES[name].target for name in names]
        _run(["cmake", "--build", work, "--target", *targets], log, progress)
        for library in LIBRARIES.values():
            if (built := Path(work) / library.file_name).is_file():
                built.replace(folder / library.file_name)
    return {name: folder / LIBRARIES[name].file_name for name in names}


def _check(names: Sequence[str], cuda: bool) -> None:
    if unknown := [name for name in names if name not in LIBRARIES]:
        raise BuildError(f"expected native libraries out of {', '.join(LIBRARIES)}, got {', '.join(unknown)}")
    missing = {name: missing_for(name, cuda) for name in names}
    if any(missing.values()):
        lacks = dict.fromkeys(lack for lacks in missing.values() for lack in lacks)
        ready = " ".join(name for name in names if not missing[name])
        rest = f"; `{REBUILD} {ready}` lacks nothing here" if ready else ""
        raise BuildError(f"building {', '.join(names)} needs {'; and '.join(lacks)}{rest}")


def _configure_command(
    work: Path, names: Sequence[str], nvcc: Path | None, architectures: Sequence[int] | None
) -> list[str]:
    headers = {header for name in names if (header := LIBRARIES[name].header)}
    return [
        "cmake", "-G", "Ninja", "-S", str(content("runtimes")), "-B", str(work), "-DCMAKE_BUILD_TYPE=Release",
        *(_cuda_settings(nvcc, architectures) if nvcc else ["-DALGM_CUDA=OFF"]),
        *(f"-D{header.variable.replace('ROOT', 'INCLUDE_DIR')}={find_header(header)}" for header in headers),
    ]  # fmt: skip


def _cuda_settings(nvcc: Path, architectures: Sequence[int] | None) -> list[str]:
    chosen = sorted(architectures or supported_architectures(nvcc))
    real = [f"{arch}-real" for arch in chosen]
    return [
        "-DALGM_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCMAKE_CUDA_ARCHITECTURES={';'.join([*real, f'{chosen[-1]}-virtual'])}",
    ]


def _run(command: Sequence[str], log: Path, progress: bool) -> None:
    """Runs one step of the build; its output goes to `log`, which survives a failure."""
    from tqdm import tqdm  # here, as `doctor` imports this module where packages may be missing

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:  # noqa: S603 - cmake, from the search path
        output = process.stdout or iter(())
        with (
            log.open("a") as file,
            tqdm(desc="compile", unit="file", leave=False, disable=None if progress else True) as bar,
        ):
            for line in output:
                file.write(line)
                if step := re.match(r"\[(\d+)/(\d+)\]", line):
                    bar.total = int(step[2])
                    bar.update(int(step[1]) - bar.n)
    if process.returncode:
        tail = "\n".join(log.read_text().splitlines()[-20:])
        raise BuildError(f"`{' '.join(command)}` failed with code {process.returncode} (log: {log}):\n{tail}")
