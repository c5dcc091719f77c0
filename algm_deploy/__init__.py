"""Deploys plain-ViT segmenters with adaptive token merging (ALGM, CVPR 2024).

    algm_deploy.export("checkpoint", "bundle")
    with algm_deploy.load("bundle") as network:
        labels = network.predict("photo.jpg")

`load` opens a bundle (`algm_deploy.predictor.Predictor`); `export`, `build`, `verify`, `evaluate` and `bench` are the
steps of a deployment (`algm_deploy.deployment`). They are imported on first use: importing this package loads no tensor
library and no runtime.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algm_deploy.deployment import bench, build, evaluate, export, verify
    from algm_deploy.predictor import load

# From 1.32 on ONNX Runtime keeps an identity of the machine and a telemetry store in the home folder as soon as it is
# imported. Nothing of this package reports anything, so that is off unless somebody has chosen.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"

__all__ = ["bench", "build", "evaluate", "export", "load", "verify"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"algm_deploy.{'predictor' if name == 'load' else 'deployment'}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
