"""Factories for `perfopt bench`, `explain` and `verify`: a transformer's block and its parts.

perfopt bench examples/block.py:block --train
perfopt bench --suite examples/suite.toml
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 256, 4
Made = tuple[nn.Module, tuple[Tensor, ...]]


class Block(nn.Module):
    """Causal attention and a feed-forward part, each behind a normalisation, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, WIDTH) to the same."""
        batch, length, _ = x.shape
        parts = self.projections(self.first(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


def block() -> Made:
    """The block and a batch of four sequences of 128."""
    return Block(), (torch.randn(4, 128, WIDTH),)


def normalised() -> Made:
    """A normalisation and an activation: one region."""
    return nn.Sequential(nn.LayerNorm(1024), nn.GELU("tanh")), (torch.randn(1024, 1024),)


def images() -> Made:
    """A convolution with a batch norm."""
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU()
    return nn.Sequential(*layers), (torch.randn(8, 3, 64, 64),)
