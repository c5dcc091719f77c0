"""Finds, and where it must compiles, the native libraries: the kernels and their shells for TensorRT and ONNX Runtime.

    find_library("kernels")        from the wheel algm-deploy-native, else from the cache; None where neither has it
    usable_library("kernels")      the same for work on a GPU: where it is absent and compilers are here, it is compiled
                                   for the GPUs of this machine, once
    require_library("trt_plugin")  the same for what cannot do without: BuildError with the cure
    missing_here("kernels", "torch")  whether a runtime must do without it; logs what that costs and what mends it
    build(...)                     compiles by order: `algm-deploy build-native`

A library is used only where it was made from these very sources: the wheel tells in `made-from.txt`, the folder of the
cache in its name. So a changed source or an upgraded package never loads an old binary.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from algm_deploy import __version__
from algm_deploy.environment import nvidia_smi, user_cache
from algm_deploy.errors import BuildError
from algm_deploy.package_data import content

_LOG = logging.getLogger("algm_deploy")

REBUILD = "algm-deploy build-native"
WHEEL = "pip install 'algm-deploy[native]'"
# The wheel: a package whose folder holds the libraries, and beside them the version and the hash of their sources.
WHEEL_PACKAGE = "algm_deploy_native"
MADE_FROM = "made-from.txt"
COMPILE = "ALGM_COMPILE"
"""Environment variable: 0 keeps the first use on a GPU from compiling."""
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

    Without `cuda` it is complete on a machine that has no CUDA compiler, with what it offers the CPU. `instead` says
    what happens where it is absent, on a GPU and on a CPU; empty where it is not missed, or nothing works without it.
    """

    target: str
    header: Header | None = None
    cuda: bool = True
    instead: tuple[str, str] = ("", "")

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
    "kernels": Library(
        "algm_kernels", instead=("merging, label maps and deformable attention run in PyTorch's operators, slower", "")
    ),
    "trt_plugin": Library("algm_trt_plugin", TENSORRT_HEADER),
    # On a CPU the library serves labels and deformable attention: merging is as fast without it.
    "ort_custom_op": Library(
        "algm_ort_custom_op",
        ONNXRUNTIME_HEADER,
        cuda=False,
        instead=(
            "merging, labels and deformable attention, and in fp16 attention, GELU and norms too, run in ONNX "
            "Runtime's own operators, slower",
            "labels and deformable attention run in ONNX Runtime's own operators, slower",
        ),
    ),
    # Built along with trt_plugin; see runtimes/trt_plugin/CMakeLists.txt for what it cures.
    "rtx_alias": Library("algm_rtx_alias"),
}
BUILT = ("kernels", "trt_plugin", "ort_custom_op")
"""What is built where nothing is named: all of them."""
_SOURCE_SUFFIXES = frozenset({".cmake", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".txt"})
_LOG = logging.getLogger("algm_deploy")
_ONE_COMPILES = threading.Lock()


def source_hash() -> str:
    """Hash of every native source file and its place in the tree, 12 hexadecimal digits.

    `runtimes/sources.cmake` computes the same for the wheel.
    """
    root = content("runtimes")
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.suffix in _SOURCE_SUFFIXES}
    listed = (f"{hashlib.sha256(files[name].read_bytes()).hexdigest()}  {name}\n" for name in sorted(files))
    return hashlib.sha256("".join(listed).encode()).hexdigest()[:12]


def made_from() -> str:
    """What a library must have been made from to be used: `<version>-<hash of the sources>`."""
    return f"{__version__}-{source_hash()}"


def cache_folder() -> Path:
    """Where what is compiled here from these very sources lives: `$XDG_CACHE_HOME/algm-deploy/native/<made_from>`."""
    return user_cache() / "native" / made_from()


def wheel_folder() -> Path | None:
    """Folder of the libraries of the wheel algm-deploy-native, None where it is not installed."""
    spec = find_spec(WHEEL_PACKAGE)
    return Path(spec.origin).parent if spec and spec.origin else None


def wheel_refused() -> str | None:
    """Why an installed wheel is left alone; None where there is none, or where it is the right one."""
    folder = wheel_folder()
    if folder is None:
        return None
    found = folder / MADE_FROM
    told = found.read_text(encoding="utf-8").strip() if found.is_file() else "nothing it tells"
    if told == made_from():
        return None
    return f"expected the installed wheel algm-deploy-native to be made from {made_from()}, it is made from {told}"


def find_library(name: str) -> Path | None:
    """The library `name` (a key of `LIBRARIES`) made from these sources, None where there is none.

    That of the wheel, else what `build` has made, else what was compiled for the GPUs of this machine at first use.
    """
    return next((path for folder in _folders() if (path := folder / LIBRARIES[name].file_name).is_file()), None)


def _folders() -> Iterator[Path]:
    wheel = wheel_folder()
    if wheel and not wheel_refused():
        yield wheel
    yield cache_folder()
    if any(cache_folder().glob("gpu-*")):
        yield _folder_for(machine_architectures())


def _folder_for(architectures: Sequence[int]) -> Path:
    """What is compiled at first use holds code for these GPUs alone, and a home may be shared with other machines."""
    return cache_folder() / f"gpu-{'-'.join(map(str, architectures))}"


def usable_library(name: str) -> Path | None:
    """The library `name` for work on a GPU; None where it is absent and cannot be compiled.

    Compiling it for the GPUs of this machine takes half a minute and happens once, unless the environment says
    `ALGM_COMPILE=0`. A failure is logged, and not tried again by this process.
    """
    return find_library(name) or _compiled(name)


def require_library(name: str) -> Path:
    """The library `name`, on a machine with a GPU compiled if need be; BuildError with the cure where it is absent."""
    path = usable_library(name)
    if path is None:
        found, cure = _absence_here(name)
        raise BuildError(f"expected the native library {LIBRARIES[name].file_name}, but {found}: {cure}")
    return path


def slower_without(name: str, gpu: bool) -> str:
    """One line for what does without the library `name`: what that costs on a GPU or a CPU, and the cure."""
    found, cure = _absence_here(name)
    return f"{found}: {LIBRARIES[name].instead[0 if gpu else 1]}; faster with: {cure}"


def missing_here(name: str, runtime: str, then: str = "", gpu: bool = True) -> bool:
    """Whether a runtime must do without the library `name`, which on a GPU is compiled first where that is possible.

    One line of the log says so, once a process, with what that costs and the cure; `then` is what is to be done after
    it, such as "then build the bundle again".
    """
    missing = (usable_library(name) if gpu else find_library(name)) is None
    if missing:
        say_once(", ".join(filter(None, (f"{runtime}: {slower_without(name, gpu)}", then))))
    return missing


@cache
def say_once(line: str) -> None:
    """Logs a warning, once a process."""
    _LOG.warning(line)


class Absence(NamedTuple):
    """Why a library is absent, and the cure."""

    found: str
    cure: str


def absence(name: str, lacks: Sequence[str]) -> Absence:
    """Of the library `name` on a machine that lacks what `missing_for` told."""
    if not lacks:
        return Absence(f"the library {name} is not built", f"{REBUILD} {name}")
    lack, _, ways = lacks[0].partition(" (")
    return Absence(f"the library {name} is not built, which needs {lack}", f"{WHEEL}, or {ways.removesuffix(')')}")


def _absence_here(name: str) -> Absence:
    found, cure = absence(name, missing_for(name))
    refused = wheel_refused()
    return Absence(f"{found} ({refused})", WHEEL) if refused else Absence(found, cure)


@cache
def machine_architectures() -> tuple[int, ...]:
    """Compute capabilities of the GPUs in this machine as nvcc writes them, such as 89, each once and sorted.

    Hidden ones (CUDA_VISIBLE_DEVICES) among them, so that what is compiled serves whichever is visible next time.
    """
    told = {row[0] for row in nvidia_smi("compute_cap")}
    return tuple(sorted(int(text.replace(".", "")) for text in told if re.fullmatch(r"\d+\.\d", text)))


def compiles_at_first_use() -> bool:
    """Whether the environment allows it."""
    return os.environ.get(COMPILE) != "0"


def _compiled(name: str) -> Path | None:
    """The library, compiled now for the GPUs of this machine; None where that is not possible."""
    if not compiles_at_first_use() or missing_for(name) or not (architectures := machine_architectures()):
        return None
    with _ONE_COMPILES:
        return _compiled_once(name, architectures, _folder_for(architectures))


@cache  # a failure too: it is said once, and would cost the next call as long
def _compiled_once(name: str, architectures: tuple[int, ...], folder: Path) -> Path | None:
    path = folder / LIBRARIES[name].file_name
    try:
        with _locked(folder):
            if not path.is_file():  # another process may have made it while this one waited
                _LOG.warning(
                    "compiling native libraries for compute capability %s, once, which takes half a minute; %s=0 in "
                    "the environment leaves it out",
                    " and ".join(f"{number / 10:.1f}" for number in architectures),
                    COMPILE,
                )
                ready = [one for one in BUILT if one == name or not missing_for(one)]  # they share what takes long
                build(ready, architectures, progress=_LOG.isEnabledFor(logging.WARNING), folder=folder)
    except (BuildError, OSError) as error:
        _LOG.warning("expected to compile the library %s, it failed: %s", name, error)
        return None
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
    ptx_only: bool = False,
) -> dict[str, Path]:
    """Compiles the named libraries.

    Args:
        names: keys of `LIBRARIES`.
        architectures: compute capabilities such as 89; default all of `ARCHITECTURES` that nvcc knows. The newest one
            is compiled to PTX as well, so that later GPUs can run it. An empty list leaves CUDA out.
        progress: show a progress bar.
        folder: where they go; default the cache, where `find_library` looks.
        ptx_only: leave out the code for each GPU, so that the driver translates PTX on whichever GPU runs it: the way
            to run an earlier GPU's code on a later one.

    Returns:
        Path of each library.

    Raises:
        BuildError: a name is unknown, a tool or header is missing, or the compiler failed.
    """
    cuda = architectures is None or len(architectures) > 0
    _check(names, cuda)
    nvcc = find_nvcc() if cuda else None
    settings = _cuda_settings(nvcc, architectures, ptx_only) if nvcc else ["-DALGM_CUDA=OFF"]
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    log.write_text("")
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as work:
        _run(_configure_command(Path(work), names, settings), log, progress=False)
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


def _configure_command(work: Path, names: Sequence[str], cuda_settings: Sequence[str]) -> list[str]:
    headers = {header for name in names if (header := LIBRARIES[name].header)}
    return [
        "cmake", "-G", "Ninja", "-S", str(content("runtimes")), "-B", str(work), "-DCMAKE_BUILD_TYPE=Release",
        *cuda_settings,
        *(f"-D{header.variable.replace('ROOT', 'INCLUDE_DIR')}={find_header(header)}" for header in headers),
    ]  # fmt: skip


def _cuda_settings(nvcc: Path, architectures: Sequence[int] | None, ptx_only: bool) -> list[str]:
    chosen = sorted(architectures or supported_architectures(nvcc))
    real = [] if ptx_only else [f"{arch}-real" for arch in chosen]
    virtual = [f"{arch}-virtual" for arch in (chosen if ptx_only else chosen[-1:])]
    return [
        "-DALGM_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCMAKE_CUDA_ARCHITECTURES={';'.join([*real, *virtual])}",
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
