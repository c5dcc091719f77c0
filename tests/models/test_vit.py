"""The encoder: what enters the first block, what the slots see, and structural copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.vit import Block, KeepTokens, Tokens, VisionTransformer, share_parameters
from algm_deploy.recipe.network import Network


@pytest.fixture
def encoder() -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(Network("segmenter", 16, 2, 2, 5, (8, 12), patch_size=4))
    nn.init.normal_(model.pos_embed)
    nn.init.normal_(model.cls_token)
    return model.eval().requires_grad_(False)


def test_sequence_is_cls_then_patches_in_raster_order(encoder: VisionTransformer) -> None:
    image = torch.zeros(2, 3, 8, 12)
    image[1, :, 4:, 8:] = 1  # the last patch
    tokens = encoder.embed(image)
    assert tokens.values.shape == (2, 7, 16)
    assert torch.equal(tokens.values[:, 0], (encoder.cls_token + encoder.pos_embed[:, :1])[0].expand(2, -1))
    assert (tokens.values[0] != tokens.values[1]).any(-1).tolist() == [False] * 6 + [True]
    assert tokens.size.tolist() == [[1.0] * 7] * 2
    assert tokens.map.tolist() == [[1, 2, 3, 4, 5, 6]] * 2
    assert tokens.length.tolist() == [7, 7]
    assert tokens.key_length is None


def test_block_is_pre_norm_attention_and_mlp() -> None:
    """Written out with PyTorch's own attention."""
    torch.manual_seed(0)
    block, x = Block(16, 4).eval(), torch.randn(2, 5, 16)
    packed = F.linear(block.norm1(x), block.attn.qkv.weight, block.attn.qkv.bias)
    query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in packed.chunk(3, -1))
    mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    y = x + block.attn.proj(mixed)
    y = y + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(y))))
    tokens = Tokens(x, torch.ones(2, 5), torch.arange(5).expand(2, -1), torch.tensor([5, 5]), padded=False)
    torch.testing.assert_close(block(tokens).values, y, rtol=0, atol=1e-6)


def test_the_slot_lies_between_attention_and_mlp(encoder: VisionTransformer) -> None:
    seen: list[Tensor] = []

    class Halve(nn.Module):
        def forward(self, tokens: Tokens, inputs: Any) -> Tokens:
            seen.append(tokens.values)
            return tokens._replace(values=tokens.values[:, :3], size=tokens.size[:, :3])

    encoder.blocks[0].merge = Halve()
    (tokens,), stages = encoder(torch.rand(1, 3, 8, 12))
    assert seen[0].shape == (1, 7, 16)
    assert tokens.values.shape == (1, 3, 16)
    assert [stage.size.shape[1] for stage in stages] == [3]  # only blocks that merge


def test_keys_behind_the_length_are_masked_once_images_differ() -> None:
    torch.manual_seed(0)
    block, x = Block(16, 4).eval(), torch.randn(2, 5, 16)
    length = torch.tensor([5, 3])
    rest = torch.ones(2, 5), torch.zeros(2, 4, dtype=torch.int64), length
    padded = block(Tokens(x, *rest, padded=True)).values
    changed = x.clone()
    changed[1, 3:] = 9
    assert torch.equal(block(Tokens(changed, *rest, padded=True)).values[1, :3], padded[1, :3])
    assert not torch.allclose(block(Tokens(changed, *rest, padded=False)).values[1, :3], padded[1, :3])


def test_copies_share_tensors_and_not_structure(encoder: VisionTransformer) -> None:
    copy = share_parameters(encoder)
    assert all(a is b for a, b in zip(copy.parameters(), encoder.parameters(), strict=True))
    copy.blocks[0].merge = nn.Identity()
    assert isinstance(encoder.blocks[0].merge, KeepTokens)
