"""Auxiliary heads, which stand after some blocks and say of tokens what class they are (DToP, ICCV 2023).

What the last head that saw a patch said of it stays on a canvas. Tokens whose class is sure leave (`ops/dtop.py`); the
decoder fills in what it says of those that stayed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from algm_deploy.models.multiply_adds import NORM
from algm_deploy.models.scores import on_canvas
from algm_deploy.models.vit import Tokens
from algm_deploy.ops._rows import wide


class Auxiliary(nn.Module):
    """A head after a block. A network has one in `Block.auxiliary`."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def judge(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Of the rows behind the prefix (B, R, K), at least fp32: what goes on the canvas, and how sure each class is,
        from 0 to 1."""
        raise NotImplementedError

    def forward(self, tokens: Tokens) -> Tokens:
        scores, confidence = self.judge(tokens)
        return tokens._replace(keys=confidence, canvas=on_canvas(scores, tokens.map, self.prefix, tokens.canvas))


class LinearHead(Auxiliary):
    """A norm and one linear layer a token; probabilities say how sure a class is."""

    def __init__(self, prefix: int, dim: int, classes: int) -> None:
        super().__init__(prefix)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def judge(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        scores = wide(self.scores(tokens.values[:, self.prefix :]))
        return scores, torch.softmax(scores, 2)

    def scores(self, rows: Tensor) -> Tensor:
        """Rows (B, R, D) behind the prefix to scores of the classes (B, R, K)."""
        scores: Tensor = self.head(self.norm(rows))
        return scores

    @staticmethod
    def multiply_adds(tokens: int, dim: int, classes: int) -> int:
        """Of so many patch tokens."""
        return NORM * tokens * dim + tokens * dim * classes
