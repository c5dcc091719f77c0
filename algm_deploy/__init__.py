"""Deploys plain-ViT segmenters with adaptive token merging (ALGM, CVPR 2024).

    with algm_deploy.load("bundle", runtime="onnxruntime-cpu") as network:
        labels = network.predict("photo.jpg")

Importing this package loads no tensor library and no runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from algm_deploy.evaluation.predictor import Predictor

__version__ = "0.1.0"

__all__ = ["load"]


def load(
    bundle: str | Path,
    runtime: str = "torch",
    tau: float | None = None,
    gbm_threshold: float | None = None,
    merge: bool = True,
) -> Predictor:
    """Opens a bundle on a runtime; see `algm_deploy.evaluation.predictor.Predictor`."""
    from algm_deploy.evaluation.predictor import Predictor

    return Predictor(bundle, runtime, tau, gbm_threshold, merge)
