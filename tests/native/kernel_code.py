"""The code that a kernel library holds, and kernels with the code of earlier cards."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from native_build import built

from algm_deploy.native_libraries import find_nvcc


class Card(NamedTuple):
    """Whose code it runs, and the memory that the blocks of a multiprocessor share where the GPU here has more."""

    architecture: int
    shared_bytes: int | None


# In the ids of tests. What cards of compute capability 8.6, 8.9 and 12.0 have is 100 KiB, one of 7.5 has 64.
EARLIER_CARDS = {
    "PTX of 8.0": Card(80, None),
    "PTX of 8.0, as on 8.9": Card(80, 100 << 10),
    "PTX of 7.5, as on 7.5": Card(75, 64 << 10),
}


def library_for(card: str) -> Path:
    """The kernels with the code of an earlier card as PTX alone, so that the driver must translate it for this one."""
    import torch

    architecture, shared_bytes = EARLIER_CARDS[card]
    major, minor = torch.cuda.get_device_capability()
    if architecture > 10 * major + minor:
        pytest.skip(f"a card of compute capability {major}.{minor} runs no code for {architecture / 10}")
    return built("kernels", architecture, shared_bytes=shared_bytes, ptx_only=True)


def find_cuobjdump() -> Path | None:
    """CUDA's lister of code: on the search path, beside nvcc, or as Triton brings it along with PyTorch for CUDA."""
    nvcc, triton = find_nvcc(), find_spec("triton")
    folders = [nvcc.resolve().parent] if nvcc else []
    if triton and triton.origin:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    found = shutil.which("cuobjdump") or next((f / "cuobjdump" for f in folders if (f / "cuobjdump").is_file()), None)
    return Path(found) if found else None


def code_in(library: Path) -> set[str]:
    """What a library holds for GPUs: `sm_80.cubin` is code for compute capability 8.0, `sm_80.ptx` its PTX."""
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("needs cuobjdump of the CUDA toolkit")
    listed = subprocess.run([cuobjdump, "-lelf", "-lptx", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\.(sm_\w+\.(?:cubin|ptx))$", listed, flags=re.MULTILINE))
