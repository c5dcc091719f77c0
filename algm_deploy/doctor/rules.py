"""What follows from the facts: which steps each runtime can do here, and what to change where it cannot.

What a runtime needs is told by its row of the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from algm_deploy.doctor.probes import Library, Machine, examine, numbers
from algm_deploy.native_libraries import LIBRARIES, WHEEL, absence
from algm_deploy.runners.registry import RUNTIMES, Runtime, row_of

Step = Literal["build", "execute"]

# A CUDA release runs from this driver on (NVIDIA's CUDA release notes, table "minor version compatibility").
DRIVERS = {"11": 450, "12": 525, "13": 580}
# Releases that compute plain ViTs wrongly, and the issue that says so.
WRONG: dict[tuple[str, tuple[int, ...]], int] = {("tensorrt", (10, 3)): 4723, ("tensorrt", (10, 4)): 4742}
TORCH = row_of("torch")


class Problem(NamedTuple):
    """What is wrong, and the one thing to install or change."""

    found: str
    cure: str


@dataclass(frozen=True)
class Finding:
    """One line of the judgement.

    `topic` is a runtime, or something about the machine; `step` is what the runtime would do, None where the finding is
    about no runtime. `cure` says what to change, empty where nothing has to be.
    """

    topic: str
    step: Step | None
    ok: bool
    found: str
    cure: str = ""


Check = Callable[[Machine, Runtime], Problem | None]


def diagnose(machine: Machine | None = None) -> list[Finding]:
    """Judges this machine, or the facts of another: facts first, then what is wrong, then each runtime's two steps."""
    machine = machine or examine()
    findings = [Finding(topic, None, True, found) for topic, found in _facts(machine)]
    findings += [Finding(topic, None, False, *problem) for topic, problem in _general_problems(machine)]
    steps: tuple[Step, ...] = ("build", "execute")
    return findings + [_judged(machine, row, step) for row in RUNTIMES.values() for step in steps]


def _judged(machine: Machine, row: Runtime, step: Step) -> Finding:
    """The first problem counts."""
    for check, about in _checks(row, step):
        if problem := check(machine, about):
            return Finding(row.name, step, False, *problem)
    return Finding(row.name, step, True, _success(machine, row, step))


def _checks(row: Runtime, step: Step) -> Iterator[tuple[Check, Runtime]]:
    """What a step of a runtime needs, in the order of mending: hardware, then packages, then libraries."""
    on_gpu = row.needs_gpu if step == "execute" else row.builds_on_gpu
    packages = tuple(dict.fromkeys((row, TORCH)))  # PyTorch keeps the memory that runtimes work in
    if on_gpu:
        yield from ((check, row) for check in (_gpu, _capability))
    yield from ((check, about) for about in packages for check in (_imports, _recent))
    if on_gpu:
        yield from ((check, row) for check in (_cuda_provider, _driver))
        yield from ((check, TORCH) for check in (_driver, _torch_sees_gpu, _torch_has_kernels))
    yield _libraries, row
    if on_gpu:
        yield _cuda_session, row


def _facts(machine: Machine) -> Iterable[tuple[str, str]]:
    yield "python", f"{machine.python} on {machine.platform}"
    yield "cpu", f"{machine.cpu}, {machine.cpu_count} cores"
    yield "driver", machine.driver or "no NVIDIA driver"
    for index, gpu in enumerate(machine.gpus):
        memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
        yield f"gpu {index}", f"{gpu.name}, compute capability {gpu.compute_capability}, {memory}"
    for name, module in machine.modules.items():
        listed = ", ".join(f"{package} {number}" for package, number in sorted(module.packages.items()))
        yield f"module {name}", listed or "not installed"
    for name, library in machine.libraries.items():
        needs = f", needs {', '.join(lack.split(' (')[0] for lack in library.lacks)}" if library.lacks else ""
        later = ", compiled when it is first used" if _compiled_on_use(machine, library) else ""
        yield f"library {name}", library.path or f"not built{needs}{later}"


def _general_problems(machine: Machine) -> Iterable[tuple[str, Problem]]:
    if machine.requirements:
        listed = " ".join(f"'{requirement}'" for requirement in machine.requirements)
        yield (
            "requirements",
            Problem(f"missing or too old: {', '.join(machine.requirements)}", f"pip install -U {listed}"),
        )
    if machine.wheel_refused:
        yield "native libraries", Problem(machine.wheel_refused, WHEEL)
    if problem := _two_onnxruntimes(machine):
        yield "onnxruntime", problem
    torch = machine.modules["torch"]
    if machine.gpus and torch.facts and not torch.facts["cuda"]:
        yield (
            "torch",
            Problem(
                f"torch {torch.facts['version']} is a CPU build, so the runtime torch leaves the GPU idle",
                "install a CUDA build of torch (https://pytorch.org/get-started)",
            ),
        )
    if machine.gpus and torch.facts.get("cuda") and (problem := _missing(machine, "kernels")):
        yield "torch", _slower(problem, "kernels", gpu=True)
    if machine.modules["onnxruntime"].packages and (problem := _missing(machine, "ort_custom_op")):
        yield "onnxruntime", _slower(problem, "ort_custom_op", gpu=bool(machine.gpus))


def _slower(problem: Problem, library: str, gpu: bool) -> Problem:
    """What does without a library says what that costs."""
    return Problem(f"{problem.found}: {LIBRARIES[library].instead[0 if gpu else 1]}", problem.cure)


def _two_onnxruntimes(machine: Machine) -> Problem | None:
    """Several packages that install the same module: the files of the one installed last are what runs."""
    module = machine.modules["onnxruntime"]
    if len(module.packages) < 2:
        return None
    names = sorted(module.packages)
    runs = f"{module.facts['package']} is in place" if module.facts else "the module is broken"
    extra = "onnxruntime-cuda" if machine.gpus else "onnxruntime-cpu"
    return Problem(
        f"{' and '.join(names)} overwrite each other: {runs}",
        f"pip uninstall -y {' '.join(names)} && pip install {row_of(extra).install}",
    )


def _imports(machine: Machine, row: Runtime) -> Problem | None:
    found = machine.modules[row.module]
    if not found.packages:
        return Problem(f"the module {row.module} is not installed", f"pip install {row.install}")
    if found.error is None:
        return None
    names = " ".join(sorted(found.packages))
    mixed = f"pip uninstall -y {names} && pip install {row.install}"
    cure = mixed if len(found.packages) > 1 else f"pip install --force-reinstall {names}"
    return Problem(f"importing {row.module} fails: {found.error}", cure)


def _recent(machine: Machine, row: Runtime) -> Problem | None:
    module, oldest = machine.modules[row.module], ".".join(map(str, row.oldest))
    found = module.facts["version"]
    known = {other.package for other in RUNTIMES.values() if other.module == row.module} & set(module.packages)
    cure = f"pip install -U '{min(known, default=row.package)}>={oldest}'"
    if issue := WRONG.get((row.module, numbers(found)[:2])):
        link = f"https://github.com/NVIDIA/TensorRT/issues/{issue}"
        return Problem(f"{row.name} {found} computes plain ViTs wrongly ({link})", cure)
    return None if numbers(found)[:2] >= row.oldest else Problem(f"{row.name} {found} is older than {oldest}", cure)


def _gpu(machine: Machine, row: Runtime) -> Problem | None:
    if machine.driver is None:
        if machine.nvidia_card:
            return Problem("an NVIDIA GPU is present, its driver is not loaded", "install NVIDIA's driver 580 or newer")
        return Problem("no NVIDIA GPU and no driver", "use a machine with an NVIDIA GPU")
    if not machine.gpus:
        return Problem(
            "the driver is loaded and shows no GPU", "give the GPU to this container (docker run --gpus all)"
        )
    return None


def _capability(machine: Machine, row: Runtime) -> Problem | None:
    first = machine.gpus[0]
    if not row.capabilities or first.compute_capability in row.capabilities:
        return None
    return Problem(
        f"{row.name} refuses {first.name} (compute capability {first.compute_capability}; it takes "
        f"{', '.join(row.capabilities)})",
        f"use the runtime tensorrt on this GPU: pip install {row_of('tensorrt').install}",
    )


def _driver(machine: Machine, row: Runtime) -> Problem | None:
    cuda = machine.modules[row.module].cuda
    oldest = DRIVERS.get(cuda or "")
    if machine.driver is None or oldest is None or numbers(machine.driver)[0] >= oldest:
        return None
    return Problem(
        f"{row.module} is built for CUDA {cuda}, which driver {machine.driver} cannot run",
        f"update NVIDIA's driver to {oldest} or newer",
    )


def _torch_has_kernels(machine: Machine, row: Runtime) -> Problem | None:
    facts, first = machine.modules[row.module].facts, machine.gpus[0]
    oldest = min((int(name.split("_")[1].rstrip("af")) for name in facts["architectures"]), default=0)
    if round(float(first.compute_capability) * 10) >= oldest:
        return None
    return Problem(
        f"torch {facts['version']} has no kernels for {first.name} (compute capability {first.compute_capability})",
        "install a build of torch for an older CUDA release (https://pytorch.org/get-started/previous-versions)",
    )


def _torch_sees_gpu(machine: Machine, row: Runtime) -> Problem | None:
    """PyTorch keeps the device memory of every GPU runtime."""
    facts = machine.modules[row.module].facts
    if facts["devices"]:
        return None
    if not facts["cuda"]:
        return Problem(
            f"torch {facts['version']} is a CPU build and cannot hold device memory",
            "install a CUDA build of torch (https://pytorch.org/get-started)",
        )
    if machine.visible_devices is not None:
        return Problem(f"CUDA_VISIBLE_DEVICES={machine.visible_devices!r} hides the GPU", "unset CUDA_VISIBLE_DEVICES")
    return Problem("torch finds no GPU that nvidia-smi lists", "restart the machine or reload NVIDIA's driver")


def _cuda_provider(machine: Machine, row: Runtime) -> Problem | None:
    """A package for CPUs brings the same module."""
    module = machine.modules[row.module]
    if not row.module_is_shared or "CUDAExecutionProvider" in module.facts["providers"]:
        return None
    return Problem(
        f"the package {module.facts['package']} {module.facts['version']} has no CUDA provider",
        f"pip uninstall -y {' '.join(sorted(module.packages))} && pip install {row.install}",
    )


def _cuda_session(machine: Machine, row: Runtime) -> Problem | None:
    """ONNX Runtime alone tells: it looks for its CUDA libraries when a session opens."""
    module = machine.modules[row.module]
    if module.facts.get("cuda_session", True):
        return None
    cuda = f"CUDA {module.cuda}" if module.cuda else "CUDA"
    return Problem(
        f"onnxruntime {module.facts['version']} cannot load the {cuda} or cuDNN libraries of its CUDA provider",
        "pip install 'onnxruntime-gpu[cuda,cudnn]'",
    )


def _libraries(machine: Machine, row: Runtime) -> Problem | None:
    return next(filter(None, (_missing(machine, name) for name in row.libraries)), None)


def _missing(machine: Machine, name: str) -> Problem | None:
    """A native library that is neither here nor compiled when it is first used."""
    library = machine.libraries[name]
    if library.path is not None or _compiled_on_use(machine, library):
        return None
    return Problem(*absence(name, library.lacks))


def _compiled_on_use(machine: Machine, library: Library) -> bool:
    return machine.compiles and bool(machine.gpus) and library.path is None and not library.lacks


def _success(machine: Machine, row: Runtime, step: Step) -> str:
    number = str(machine.modules[row.module].facts["version"])
    if step == "build":
        return number if row.builds else f"{number}; nothing to build"
    if len(row.devices) == 1:
        lacks_bf16 = machine.modules[row.module].facts.get("bf16") is False
        return f"{number}; this CPU has no bf16, bundles in bf16 are computed in fp32" if lacks_bf16 else number
    return f"{number} on {(machine.modules[TORCH.module].facts['devices'] or ['the CPU'])[0]}"
