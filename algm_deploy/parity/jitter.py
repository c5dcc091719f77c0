"""What rounding does to a network in int8: values that lie between two levels fall to the one or to the other.

Two implementations of one quantised network differ by their fp32 rounding, which is tiny, until it tips a value from
one level to the next: then by a whole level, and from there on in everything. Whether that happens on a given picture
is luck, so PyTorch in fp32 is a poor measure of how far a runtime may be off. The measure is PyTorch with a jitter in
front of every level, four times as large as fp32 rounding was measured to be: it tips as many values as rounding can.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from algm_deploy.bundle.store import Bundle
from algm_deploy.merging import deployed_network
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.quantized import Int8Attention, Int8Linear
from algm_deploy.models.vit import Model

# In levels, to either side. What enters a product is off by 2^-14.7 of a level RMS in fp32, against fp64 under the same
# merges, and in the worst product by 2^-13.9 (Segmenter-S trained on CamVid, two photos; 2^-16.3 and 2^-15.9 in the
# network of the tests). Two implementations may each err twice as much as in the worst one: four times that RMS, drawn
# evenly. The largest of all values is off by 2^-8.5, but how many are tipped goes with what they are off in the mean.
JITTER = 2.0**-11


def jittered(model: Model) -> Model:
    """The network, in place, with a jitter before every product in int8; one without such products stays as it is.

    In fp8 it does: what surrounds its products is in fp16, whose rounding tips as many values in PyTorch as elsewhere.
    """
    for seed, module in enumerate(m for m in model.modules() if isinstance(m, Int8Linear | Int8Attention)):
        if isinstance(module, Int8Attention):
            module.shake = partial(_shaken, seed)
        else:
            module.register_forward_pre_hook(_jitter(seed))
    return model


def jittered_network(bundle: Bundle, dtype: torch.dtype, attention: bool = False) -> Deployed:
    """The network that a bundle with levels deploys, with the jitter of int8; `attention` as for `load_network`."""
    network = deployed_network(bundle, dtype, attention=attention)
    jittered(network.model)
    return network


def _shaken(seed: int, x: Tensor, step: Tensor) -> Tensor:
    """x and as much as rounding may be off, in levels of this step; the same for each run, so that results are."""
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype) * 2 - 1
    return x + noise.to(x.device) * (JITTER * step)


def _jitter(seed: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
    def shake(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        assert isinstance(module, Int8Linear)
        return (_shaken(seed, inputs[0], module.scale),)

    return shake
