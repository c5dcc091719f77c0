"""Deploys plain-ViT segmenters with adaptive token merging (ALGM, CVPR 2024).

    with algm_deploy.load("bundle", runtime="onnxruntime-cpu") as network:
        labels = network.predict("photo.jpg")

Importing this package loads no tensor library and no runtime.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# From 1.32 on ONNX Runtime keeps an identity of the machine and a telemetry store in the home folder as soon as it is
# imported. Nothing of this package reports anything, so that is off unless somebody has chosen.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from pathlib import Path

    from algm_deploy.predictor import Predictor

__version__ = "0.1.0"

__all__ = ["load"]


def load(
    bundle: str | Path,
    runtime: str = "torch",
    tau: float | None = None,
    gbm_threshold: float | None = None,
    merge: bool = True,
) -> Predictor:
    """Opens a bundle on a runtime; see `algm_deploy.predictor.Predictor`."""
    from algm_deploy.predictor import Predictor

    return Predictor(bundle, runtime, tau, gbm_threshold, merge)
