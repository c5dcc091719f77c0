"""The runtimes, one row each: whatever depends on the runtime is read here, and nothing is told from its name.

    RUNTIMES                       every row by name, in the order in which they are shown
    row_of("tensorrt")             one row; an unknown name raises RuntimeUnavailableError and lists the known ones
    default_runtime(bundle.files)  name of the best runtime that can execute these files here
    TRITON_BACKENDS                Triton's backends that serve a bundle: `python`, and those of the rows

    row.name, row.install          "tensorrt", and what pip installs for it: "'algm-deploy[tensorrt]'"
    row.package, row.module        what pip and Python call what it needs, and row.oldest, its smallest version
    row.files, row.own             what it executes of a bundle: the first of `files` that is there, best its own one
    row.segments                   names of parts of a network that it executes beside its own file, or in place of it,
                                   `*` for a number
    row.executable(bundle.files)   the file that is executed, None where the bundle holds none
    row.executed(bundle.files)     that file, and the parts beside it
    row.builds, row.build_options  whether `build` makes its own file, and what it can be told
    row.check_options(names)       raises BuildError for other options
    row.devices, row.needs_gpu     kinds of device, the preferred first; whether a CUDA device must be among them
    row.builds_on_gpu              whether building asks for the GPU that will execute
    row.capabilities               compute capabilities of the GPUs it takes, empty where any will do
    row.precision_of("fp8")        in what it executes a bundle of that precision
    row.check_precision("int8", calibrated)
                                   raises RuntimeUnavailableError where it executes no bundle of that precision
    row.cudnn_attention            whether it can leave attention in 16 bits to cuDNN, of networks without merging
    row.simulates                  whether it computes what was calibrated in floating point, from the same levels
    row.libraries                  native libraries that it cannot do without
    row.triton                     Triton's backend that executes its file without Python, None where there is none
    row.device_here()              name of the device it executes on when it is opened now, for records

`runners.contract` makes runners of rows: `runner(bundle, name)`, `runner_type(name)`. Nothing is imported here but what
the standard library has, and PyTorch once it is asked for devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from typing import Literal

from algm_deploy.bundle.files import ONNX, ONNX_INLINED, WEIGHTS
from algm_deploy.environment import cuda_devices, device_name, installed_version
from algm_deploy.errors import BuildError, BundleError, RuntimeUnavailableError
from algm_deploy.native_libraries import find_library
from algm_deploy.recipe.schema import Precision

DeviceKind = Literal["cuda", "cpu"]
FP8_SINCE = (8, 9)
"""The oldest compute capability with fp8 units."""


@dataclass(frozen=True)
class Runtime:
    """A runtime; the module's docstring says what the columns mean.

    `runner` is "module:class", imported on use. `rank` orders runtimes that use the same device, the fastest first.
    `extra`: it has one in pyproject.toml, under its own name. `fp8_needs_ranges`: it finds no scales while it runs.
    `module_is_shared`: another package brings a module of the same name that lacks what this runtime needs.
    """

    name: str
    runner: str
    package: str
    module: str
    oldest: tuple[int, int]
    files: tuple[str, ...]
    devices: tuple[DeviceKind, ...]
    rank: int
    extra: bool = True
    module_is_shared: bool = False
    segments: str | None = None
    builds: bool = True
    builds_on_gpu: bool = False
    build_options: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    fp8: bool = False
    fp8_needs_ranges: bool = False
    cudnn_attention: bool = False
    simulates: bool = False
    bf16: bool = True
    int8: bool = True
    libraries: tuple[str, ...] = ()
    triton: str | None = None

    @property
    def install(self) -> str:
        """What to write behind `pip install`, quoted for a shell."""
        return f"'algm-deploy[{self.name}]'" if self.extra else self.package

    @property
    def required(self) -> str:
        """The package and its smallest version, as pip writes it."""
        return f"{self.package}>={'.'.join(map(str, self.oldest))}"

    @property
    def needs_gpu(self) -> bool:
        """Whether it executes on CUDA devices only."""
        return "cpu" not in self.devices

    @property
    def own(self) -> str:
        """Name of its own file in a bundle, the one that building adds."""
        return self.files[0]

    def precision_of(self, precision: Precision) -> Precision:
        """In what it executes a bundle of that precision: without fp8, the 16-bit weights as they are stored; without
        bf16, the rounded weights in fp32."""
        if precision == "bf16" and not self.bf16:
            return "fp32"
        return "fp16" if precision == "fp8" and not self.fp8 else precision

    def executes(self, precision: Precision, calibrated: bool) -> bool:
        """Whether it executes a bundle of that precision by units for it; `calibrated` on photos."""
        if precision == "int8":
            return self.int8
        if precision == "fp8" and (self.simulates if calibrated else self.fp8_needs_ranges):
            return False
        return self.precision_of(precision) == precision

    def check_precision(self, precision: Precision, calibrated: bool) -> None:
        """Refuses a bundle of a precision that this runtime does not execute.

        Args:
            precision: the bundle's, or another one that is asked for.
            calibrated: whether the bundle has ranges of that precision, measured on photos.

        Raises:
            RuntimeUnavailableError: it is int8, and the runtime would compute its products in floating point, slower
                than those of fp32; or it is fp8, and the runtime needs ranges that the bundle does not have.
        """
        if precision == "fp8" and self.fp8_needs_ranges and not calibrated:
            raise RuntimeUnavailableError(
                f"expected a bundle in fp8 with measured ranges for {self.name}, which finds no scales while it runs, "
                "got one without: export it again with --precision fp8 --calibrate PHOTOS, or with --precision fp16"
            )
        if precision == "int8" and not self.int8:
            others = ", ".join(row.name for row in RUNTIMES.values() if row.int8)
            raise RuntimeUnavailableError(
                f"expected a bundle in floating point for {self.name}, which has no products in int8, got one in int8: "
                f"run it with {others}, or export with --precision fp16"
            )

    def check_options(self, names: Iterable[str]) -> None:
        """Refuses options of `build` that this runtime does not have.

        Raises:
            BuildError: there is one; the message names the runtimes that have it.
        """
        for name in names:
            if name not in self.build_options:
                others = " or ".join(row.name for row in RUNTIMES.values() if name in row.build_options)
                advice = f", or build for {others}" if others else ""
                raise BuildError(f"{self.name} has no build option {name}: leave it out{advice}")

    def executable(self, files: Collection[str]) -> str | None:
        """The file of a bundle that is executed, None where it holds none."""
        return next((name for name in self.files if name in files), None)

    def executed(self, files: Collection[str]) -> tuple[str, ...]:
        """All files of a bundle that may be executed, parts of a network included."""
        found = self.executable(files)
        if found is None:
            return ()
        parts = sorted(name for name in files if self._is_part(name) and name != found)
        return (found, *(parts if self.executes_own(files) else ()))

    def executes_own(self, files: Collection[str]) -> bool:
        """Whether what is executed of a bundle was built for this runtime, whole or in parts."""
        found = self.executable(files)
        return found is not None and (found == self.own or self._is_part(found))

    def _is_part(self, name: str) -> bool:
        return self.segments is not None and fnmatch(name, self.segments)

    def installed(self) -> bool:
        """Whether what it needs is there, as far as that can be told without importing it."""
        found = find_spec(self.module) is not None
        return found and (not self.module_is_shared or installed_version(self.package) is not None)

    def device_here(self) -> str:
        """Name of the device that a runner opened now executes on."""
        return device_name("cuda" in self.devices)


_ROWS = (
    Runtime(
        name="torch",
        runner="algm_deploy.runners.torch.runner:TorchRunner",
        package="torch",
        module="torch",
        oldest=(2, 11),
        files=(WEIGHTS,),
        devices=("cuda", "cpu"),
        rank=3,
        extra=False,
        builds=False,
        fp8=True,
        simulates=True,
    ),
    Runtime(
        name="onnxruntime-cpu",
        runner="algm_deploy.runners.onnxruntime.runner:OnnxRuntimeCpuRunner",
        package="onnxruntime",
        module="onnxruntime",
        oldest=(1, 23),
        files=("model.onnxruntime-cpu.onnx", ONNX),
        devices=("cpu",),
        rank=1,
        bf16=False,
        triton="onnxruntime",
    ),
    Runtime(
        name="onnxruntime-cuda",
        runner="algm_deploy.runners.onnxruntime.runner:OnnxRuntimeCudaRunner",
        package="onnxruntime-gpu",
        module="onnxruntime",
        module_is_shared=True,
        oldest=(1, 23),
        files=("model.onnxruntime-cuda.onnx", ONNX),
        segments="model.onnxruntime-cuda.stretch-*.onnx",
        devices=("cuda",),
        rank=4,
        cudnn_attention=True,
        bf16=False,
        int8=False,
        triton="onnxruntime",
    ),
    Runtime(
        name="openvino",
        runner="algm_deploy.runners.openvino.runner:OpenVinoRunner",
        package="openvino",
        module="openvino",
        oldest=(2026, 4),
        files=("model.openvino.onnx", ONNX_INLINED),
        devices=("cpu",),
        rank=2,
    ),
    Runtime(
        name="tensorrt",
        runner="algm_deploy.runners.tensorrt.runner:TensorRTRunner",
        package="tensorrt",
        module="tensorrt",
        oldest=(10, 14),  # from here on the ONNX parser knows `Attention`
        files=("engines/tensorrt.engine", "engines/tensorrt.stretch-0.engine"),
        segments="engines/tensorrt.stretch-*.engine",
        devices=("cuda",),
        rank=1,
        builds_on_gpu=True,  # it times kernels while it builds
        build_options=(
            "precision",
            "batches",
            "level",
            "workspace_mib",
            "timing_cache",
            "version_compatible",
            "hardware_compatible",
            "in_parts",
        ),
        fp8=True,
        fp8_needs_ranges=True,
        libraries=("trt_plugin",),
        triton="tensorrt",
    ),
    Runtime(
        name="tensorrt-rtx",
        runner="algm_deploy.runners.tensorrt.runner:TensorRTRtxRunner",
        package="tensorrt-rtx",
        module="tensorrt_rtx",
        oldest=(1, 7),
        files=("engines/tensorrt-rtx.engine", "engines/tensorrt-rtx.stretch-0.engine"),
        segments="engines/tensorrt-rtx.stretch-*.engine",
        devices=("cuda",),
        rank=2,
        build_options=("precision", "batches", "level", "workspace_mib", "compute_capabilities", "in_parts"),
        capabilities=("7.5", "8.6", "8.9", "12.0", "12.1"),  # it refuses others, data-centre generations among them
        fp8=True,
        fp8_needs_ranges=True,
        libraries=("trt_plugin", "rtx_alias"),
    ),
)
RUNTIMES = {row.name: row for row in _ROWS}
TRITON_BACKENDS = ("python", *dict.fromkeys(row.triton for row in _ROWS if row.triton))


def row_of(runtime: str) -> Runtime:
    """The row of a runtime.

    Raises:
        RuntimeUnavailableError: an unknown name.
    """
    if runtime not in RUNTIMES:
        raise RuntimeUnavailableError(f"unknown runtime {runtime!r}: choose from {', '.join(RUNTIMES)}")
    return RUNTIMES[runtime]


def default_runtime(files: Collection[str] = (WEIGHTS, ONNX), device: str | None = None) -> str:
    """Name of the best runtime that can execute a bundle here: on a GPU where there is one, else on the CPU.

    What is asked is cheap to find: whether the package is installed, whether PyTorch sees a CUDA device that the
    runtime takes, whether the native libraries it needs are built. Stale engines and broken packages show when it is
    opened.

    Args:
        files: those of the bundle; by default what every export writes.
        device: the best that executes on this device, such as `cpu` or `cuda:1`.

    Raises:
        BundleError: no runtime executes any of these files.
        RuntimeUnavailableError: no runtime is installed, or none executes on that device.
    """
    if not any(row.executable(files) for row in RUNTIMES.values()):
        raise BundleError(
            "expected a bundle with a file that a runtime executes, its manifest lists none: export it again"
        )
    kind = (device or "").partition(":")[0]
    gpus = [gpu.compute_capability for gpu in cuda_devices()] if find_spec("torch") else []
    usable = [row for row in RUNTIMES.values() if row.executable(files) and _runs_here(row, gpus[:1])]
    fitting = [row for row in usable if not kind or kind in row.devices]
    if not fitting:
        where = f" that executes on {device}" if usable else ""
        raise RuntimeUnavailableError(f"no runtime{where} is installed here: `algm-deploy doctor` says what to install")
    on_gpu = bool(gpus) and kind != "cpu"
    return min(fitting, key=lambda row: (on_gpu and "cuda" not in row.devices, row.rank)).name


def _runs_here(row: Runtime, gpu: list[str]) -> bool:
    if not row.installed() or not all(map(find_library, row.libraries)):
        return False
    fits = not row.capabilities or set(gpu) <= set(row.capabilities)
    return bool(gpu) and fits if row.needs_gpu else True
