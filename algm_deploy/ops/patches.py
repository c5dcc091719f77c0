"""Pixels as rows, one a patch: what the patch embedding multiplies, whose convolution is a matrix product then.

    patches(image (B,3,H,W); side, centre, scale) -> (B, N, 3 * side * side)

A pixel becomes (pixel - `centre`) * `scale`, computed in fp32 and rounded once. Patches come row by row of the picture;
a row is [channel][down][across], as a convolution's weights are. H and W are multiples of `side`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import operator

CHANNELS = 3


@operator("image:T", "rows:T")
def patches(image: Tensor, side: int, centre: float, scale: float) -> Tensor:
    """Pixels of each patch one behind the other, centred and scaled."""
    images, channels, height, width = image.shape
    pixels = ((image.float() - centre) * scale).to(image.dtype)
    apart = pixels.view(images, channels, height // side, side, width // side, side).permute(0, 2, 4, 1, 3, 5)
    return apart.reshape(images, -1, channels * side * side).contiguous()


@patches.register_fake
def _(image: Tensor, side: int, centre: float, scale: float) -> Tensor:
    images, channels, height, width = image.shape
    return image.new_empty(images, (height // side) * (width // side), channels * side * side)


@body_of("patches")
def onnx_body(body: Body, attributes: Mapping[str, Any], image: Value) -> list[Value]:
    """SpaceToDepth gives [down][across][channel] for each patch, which is turned."""
    area = attributes["side"] ** 2
    centred = body("Sub", body.fp32(image), body.number(attributes["centre"]))
    pixels = body.like(body("Mul", centred, body.number(attributes["scale"])), image)
    deep = body("SpaceToDepth", pixels, blocksize=attributes["side"])
    turned = body("Transpose", body("Reshape", deep, [0, area, CHANNELS, -1]), perm=[0, 3, 2, 1])
    return [body("Reshape", turned, [0, 0, CHANNELS * area])]


def reference(image: np.ndarray, *, side: int, centre: float, scale: float) -> np.ndarray:
    """NumPy definition."""
    images, channels, height, width = image.shape
    pixels = ((image.astype(np.float64) - centre) * scale).astype(image.dtype)
    apart = pixels.reshape(images, channels, height // side, side, width // side, side).transpose(0, 2, 4, 1, 3, 5)
    return apart.reshape(images, -1, channels * side * side)
