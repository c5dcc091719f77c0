"""The network families, by the name a recipe uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from algm_deploy.errors import ExportError, RecipeError
from algm_deploy.models import eomt, linear, segvit, setr
from algm_deploy.models.naming import Naming
from algm_deploy.models.segmenter import Segmenter
from algm_deploy.models.vit import VitNetwork
from algm_deploy.recipe.schema import Network

FAMILIES: dict[str, Callable[[Network], VitNetwork]] = {
    "segmenter": Segmenter,
    "setr": setr.Setr,
    "segvit": segvit.Segvit,
    "dinov2": linear.LinearProbe,
    "deit": linear.LinearProbe,
    "eomt": eomt.Eomt,
}
# Families whose checkpoints name parameters otherwise than the modules here.
NAMINGS: dict[str, Callable[[Network], tuple[Naming, ...]]] = {
    "setr": setr.namings,
    "segvit": segvit.namings,
    "dinov2": linear.dinov2_namings,
    "deit": linear.deit_namings,
    "eomt": eomt.namings,
}

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def parameter_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the parameters of a network's module."""
    with torch.device("meta"):
        model = FAMILIES[network.family](network)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def network_module(network: Network, weights: Mapping[str, Tensor], dtype: torch.dtype) -> VitNetwork:
    """The network with its weights, in evaluation mode and in `dtype`.

    The module is made without memory of its own and takes the tensors as they are, so weights in the right dtype are
    held once.

    Raises:
        RecipeError: an unknown family.
        ExportError: a weight is beyond the range of `dtype`.
    """
    if network.family not in FAMILIES:
        raise RecipeError(f"unknown network family {network.family!r}: choose from {', '.join(FAMILIES)}")
    with torch.device("meta"):
        model = FAMILIES[network.family](network)
    model.load_state_dict({k: _converted(k, v, dtype) for k, v in weights.items()}, assign=True)
    return model.eval().requires_grad_(False)


def _converted(name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    converted = weight.to(dtype)
    if dtype != torch.float32 and not converted.isfinite().all():
        raise ExportError(
            f"expected weights up to {torch.finfo(dtype).max:g} for {str(dtype).removeprefix('torch.')}, {name} holds "
            f"{weight.abs().max().item():g}: export with --precision fp32"
        )
    return converted
