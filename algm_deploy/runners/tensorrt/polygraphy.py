"""Polygraphy's commands with our plugins loaded.

    python -m algm_deploy.runners.tensorrt.polygraphy tensorrt-rtx inspect model bundle/model.tensorrt.onnx

Polygraphy's own `--plugins` opens a library and waits for it to register itself, which needs TensorRT linked into it.
Ours serves several releases of TensorRT and links none, so TensorRT's registry has to load it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from algm_deploy.errors import AlgmDeployError
from algm_deploy.runners.tensorrt.library import listening, load_bindings, load_plugins


def main(arguments: Sequence[str]) -> int:
    """Runs a command of Polygraphy; the first argument is the runtime, the others are Polygraphy's."""
    runtime, *command = arguments or [""]
    if runtime == "tensorrt-rtx":
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"
    try:
        trt = load_bindings(runtime)
        with listening(trt):
            load_plugins(trt, runtime)
    except AlgmDeployError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.modules.setdefault("tensorrt", trt)  # parts of Polygraphy ask for this name whatever the runtime
    from polygraphy.tools import main as polygraphy  # reads the environment when it is imported

    sys.argv = ["polygraphy", *command]
    return int(polygraphy() or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
