"""Weights that every project makes alike, so that golden values need none of their own."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights that depend on names alone; NumPy keeps the stream of RandomState."""
    made: dict[str, Tensor] = {}
    for key, shape in shapes.items():
        if key.endswith("num_batches_tracked"):
            made[key] = torch.zeros(shape, dtype=torch.int64)
            continue
        if key.endswith("attn_mask_probs"):  # annealed away
            made[key] = torch.zeros(shape)
            continue
        random = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape).astype(np.float32)
        if key.endswith(("pos_embed", "cls_token")):
            value = random / 10
        elif key.endswith(("running_var", "gamma", "gamma1", "gamma2")):
            value = 0.5 + np.abs(random)
        elif len(shape) > 1:
            value = random / np.sqrt(np.prod(shape[1:]))
        else:
            value = key.endswith(".weight") + random / 10
        made[key] = torch.from_numpy(np.asarray(value, dtype=np.float32))
    return made
