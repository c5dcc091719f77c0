"""What rounding does to a network in int8: values that lie between two levels fall to the one or to the other.

Two implementations of one quantised network differ by their fp32 rounding, which is tiny, until it tips a value from
one level to the next: then by a whole level, and from there on in everything. Whether that happens on a given picture
is luck, so PyTorch in fp32 is a poor measure of how far a runtime may be off. The measure is PyTorch with a jitter in
front of every level, as large as fp32 rounding gets: it tips as many values as rounding can.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from algm_deploy.bundle.store import Bundle
from algm_deploy.merging import deployed_network
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.quantized import QuantizedLinear
from algm_deploy.models.vit import Model

# In levels. Tokens of a ViT in fp32 carry about 2^-20 of their range of 2^8 levels (measured against fp64); two
# implementations may each err twice as much.
JITTER = 2.0 ** (8 - 20 + 2)


def jittered(model: Model) -> Model:
    """The network, in place, with a jitter before every quantised product; one without such products stays as it is."""
    for seed, module in enumerate(m for m in model.modules() if isinstance(m, QuantizedLinear)):
        module.register_forward_pre_hook(_jitter(seed))
    return model


def jittered_network(bundle: Bundle, dtype: torch.dtype) -> Deployed:
    """The network that a bundle in int8 deploys, with jitter."""
    network = deployed_network(bundle, dtype)
    jittered(network.model)
    return network


def _jitter(seed: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
    def shake(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        assert isinstance(module, QuantizedLinear)
        (x,) = inputs
        generator = torch.Generator().manual_seed(seed)  # the same for each run, so that results are
        noise = torch.rand(x.shape, generator=generator, dtype=x.dtype) * 2 - 1
        return (x + noise * (JITTER * module.scale),)

    return shake
