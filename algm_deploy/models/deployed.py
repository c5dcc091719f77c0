"""The network as it is deployed: photo pixels in, labels or scores out.

Graph inputs:  image (B, 3, H, W), RGB in 0..255, uint8 or float32; `clap_threshold` and `gbm_threshold`, fp32 scalars.
Graph outputs: `labels` (B, H, W) or `scores` (B, K, H, W) fp32; `token_counts` (B, M) int64, patch tokens of each image
after each of the M merges; `token_map_i` (B, N) int64, row of every patch after merge i; where
queries choose the cells that they attend to, `mask_i` (B, Q, cells) uint8, 1 for the chosen cells of layer i.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.scores import GridScores, labels_of, upsample_scores
from algm_deploy.models.vit import ImageConv, MergeInputs, PatchEmbedding, VitNetwork, padded, share_parameters
from algm_deploy.recipe.network import Network, Size
from algm_deploy.recipe.schema import Output

# (mean, deviation) of the pixels in 0..1, red, green, blue, by the name the official configuration uses.
NORMALIZATIONS = {
    "vit": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "deit": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
# Pixels enter the convolution as (pixel - 128) / 128, exact even in 16 bits. Centred, because a grey picture would
# otherwise be the difference of two large sums; scaled by a power of two that keeps the folded weights in fp16's range.
PIXEL_CENTRE = PIXEL_SCALE = 128


class PixelEmbedding(nn.Module):
    """Patch embedding with the normalisation folded in: pixels 0..255 of any dtype to tokens (B, N, D).

    `image_size` (height, width) matters where pictures are padded: the padding is zero before the normalisation is
    folded in, so patches that hold some of it have a bias of their own.
    """

    def __init__(self, embedding: PatchEmbedding, normalization: str, image_size: Size) -> None:
        super().__init__()
        proj, self.patch_size = embedding.proj, embedding.patch_size
        device = proj.weight.device
        mean, deviation = (torch.tensor(v, dtype=torch.float64, device=device) for v in NORMALIZATIONS[normalization])
        weight = proj.weight.detach().double() / deviation[:, None, None]
        self.stride = proj.stride
        self.weight = nn.Parameter((weight * (PIXEL_SCALE / 255)).to(proj.weight.dtype), requires_grad=False)
        # What a centred pixel of 0 stands for, summed over the picture's part of a patch.
        whole = not any(side % self.patch_size for side in image_size)
        size = proj.kernel_size if whole else image_size
        inside = padded(torch.ones(1, 3, *size, dtype=torch.float64, device=device), self.patch_size)
        grey = weight * (PIXEL_CENTRE / 255 - mean)[:, None, None]
        bias = F.conv2d(inside, grey, None if proj.bias is None else proj.bias.detach().double(), proj.stride)
        bias = bias.flatten(2).mT.to(proj.weight.dtype)
        self.bias = nn.Parameter(bias[0, 0] if whole else bias, requires_grad=False)

    def forward(self, image: Tensor) -> Tensor:
        pixels = (image.to(self.weight.dtype) - PIXEL_CENTRE) * (1 / PIXEL_SCALE)
        if self.bias.ndim == 1:
            return F.conv2d(pixels, self.weight, self.bias, self.stride).flatten(2).transpose(1, 2)
        patches = F.conv2d(padded(pixels, self.patch_size), self.weight, stride=self.stride)
        return patches.flatten(2).transpose(1, 2) + self.bias


class PixelConv(nn.Module):
    """A convolution on the picture with the normalisation folded in: pixels 0..255 of any dtype to maps.

    Around the picture are normalised zeros. So a fourth channel, which is one on the picture and zero around it, weighs
    what a centred pixel of 0 stands for.
    """

    def __init__(self, conv: ImageConv, normalization: str) -> None:
        super().__init__()
        mean, deviation = (
            torch.tensor(v, dtype=torch.float64, device=conv.weight.device)[:, None, None]
            for v in NORMALIZATIONS[normalization]
        )
        weight = conv.weight.detach().double() / deviation
        grey = (weight * (PIXEL_CENTRE / 255 - mean)).sum(1, keepdim=True)
        joined = torch.cat([weight * (PIXEL_SCALE / 255), grey], 1).to(conv.weight.dtype)
        self.weight = nn.Parameter(joined, requires_grad=False)
        self.bias, self.stride, self.padding = conv.bias, conv.stride, conv.padding

    def forward(self, image: Tensor) -> Tensor:
        pixels = (image.to(self.weight.dtype) - PIXEL_CENTRE) * (1 / PIXEL_SCALE)
        joined = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
        return F.conv2d(joined, self.weight, self.bias, self.stride, cast(tuple[int, int], self.padding))


class Deployed(nn.Module):
    """Wraps a network whose merge slots are filled (or empty) with the deployed inputs and outputs.

    The wrapped network is not changed: parameters are shared, only what reads the picture is new.
    """

    def __init__(self, model: VitNetwork, network: Network, output: Output) -> None:
        super().__init__()
        self.network, self.output = network, output
        self.model = share_parameters(model)
        embedding = cast(PatchEmbedding, model.encoder.patch_embed)
        self.model.encoder.patch_embed = PixelEmbedding(embedding, network.normalization, network.image_size)
        for name, module in list(self.model.named_modules()):
            if isinstance(module, ImageConv):
                self.model.set_submodule(name, PixelConv(module, network.normalization))

    def forward(self, image: Tensor, inputs: MergeInputs) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Labels or scores, token counts, and all decisions: token maps, then masks.

        `inputs.maps` and `inputs.masks` are used by replaying slots only.
        """
        result = self.model(image, inputs)
        grid, size = self.network.grid, self.network.image_size
        tail = labels_of(result, grid, size) if self.output == "labels" else upsample_scores(result, grid, size)
        lengths = [stage.length - result.prefix for stage in result.stages]
        counts = torch.stack(lengths, 1) if lengths else image.new_zeros(image.shape[0], 0, dtype=torch.int64)
        chosen = result.chosen if isinstance(result, GridScores) else ()
        return tail, counts, (*(stage.map for stage in result.stages), *chosen)
