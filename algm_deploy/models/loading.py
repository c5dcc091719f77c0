"""From a recipe's network to its module, with weights given or those of a bundle."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from algm_deploy.bundle.files import WEIGHTS, reading_errors
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, ExportError
from algm_deploy.models.quantized import quantized
from algm_deploy.models.vit import VitNetwork
from algm_deploy.recipe.network import Network

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.float32,
    "fp8": torch.float16,
}
"""What the files of a bundle hold, by its precision; whoever executes int8 or fp8 makes it of these weights."""


def network_class(network: Network) -> type[VitNetwork]:
    """The class of a network's architecture, whose module is imported now."""
    found: type[VitNetwork] = resolve_name(network.architecture.network)
    return found


def parameter_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the parameters of a network's module."""
    return {name: tuple(value.shape) for name, value in _without_memory(network).state_dict().items()}


def network_module(network: Network, weights: Mapping[str, Tensor], dtype: torch.dtype) -> VitNetwork:
    """The network with its weights, in evaluation mode and in `dtype`.

    The module is made without memory of its own and takes the tensors as they are, so weights in the right dtype are
    held once.

    Raises:
        ExportError: a weight is beyond the range of `dtype`.
    """
    model = _without_memory(network)
    model.load_state_dict({k: converted(k, v, dtype) for k, v in weights.items()}, assign=True)
    return model.eval().requires_grad_(False)


def save_weights(model: VitNetwork, path: Path) -> None:
    """Writes the parameters of a network, which `load_network` reads from a bundle.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, path)
    except SafetensorError as error:  # a full disk, in an error of its own
        raise OSError(errno.EIO, str(error), str(path)) from error


def load_network(
    bundle: Bundle, dtype: torch.dtype | None = None, quantize: bool = True, attention: bool = False
) -> VitNetwork:
    """The network of a bundle, merge slots empty, in the bundle's precision or in `dtype`.

    Of a calibrated bundle, in int8 or fp8, its products are quantised, in whatever dtype the rest is, unless `quantize`
    is False; with `attention` those of attention too.

    Raises:
        BundleError: the weights cannot be read or are those of another network.
    """
    path = bundle.file(WEIGHTS)
    try:
        with reading_errors(path):
            weights = load_file(path)
    except SafetensorError as error:
        raise BundleError(f"{path}: expected weights as safetensors ({error}): export the bundle again") from error
    expected = parameter_shapes(bundle.recipe.network)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if found != expected:
        name, _ = min(expected.items() ^ found.items())
        raise BundleError(
            f"{path}: expected {name} of shape {expected.get(name)} for the recipe's network, got {found.get(name)}: "
            "export the bundle again"
        )
    model = network_module(bundle.recipe.network, weights, dtype or DTYPES[bundle.recipe.precision])
    calibrated = bundle.manifest.quantization
    if calibrated is None or not quantize:
        return model
    inside = calibrated.attention if attention else ()
    return quantized(model, calibrated.products, bundle.recipe.precision, inside)


def _without_memory(network: Network) -> VitNetwork:
    with torch.device("meta"):
        return network_class(network)(network)


def converted(name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in `dtype`, the same tensor where it is in that already.

    Raises:
        ExportError: it is beyond the range of `dtype`.
    """
    result = weight.to(dtype)
    if result is not weight and not is_finite(result):
        raise ExportError(
            f"expected weights up to {torch.finfo(dtype).max:g} for {str(dtype).removeprefix('torch.')}, {name} holds "
            f"{weight.abs().max().item():g}: export with --precision fp32"
        )
    return result


def is_finite(weight: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    NaN stays through minimum and maximum, which take one pass; `torch.isfinite` takes over 10 times as long.
    """
    return all(bool(extreme.isfinite()) for extreme in weight.aminmax())
