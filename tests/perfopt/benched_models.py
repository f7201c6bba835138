"""Models that are awkward to measure: with state, with random numbers, in one dtype alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[Any, tuple[Any, ...]]


class Writing(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2 * self.scale


class Counting(nn.Module):
    """Counts its calls in a buffer, which the result shows."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count


def normalised() -> Made:
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    return nn.Sequential(*layers), (torch.randn(32, 8),)


def writing() -> Made:
    return Writing(), (torch.randn(64),)


def counting() -> Made:
    return Counting(), (torch.randn(64),)


def expanded() -> Made:
    return nn.Linear(8, 4), (torch.randn(1, 8).expand(16, 8),)


def dropping() -> Made:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5)), (torch.randn(32, 8),)


def drawing() -> Made:
    return lambda x: x + torch.randn(x.shape, dtype=x.dtype), (torch.randn(64),)


def single() -> Made:
    def function(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("not in float64")
        return x + 1

    return function, (torch.randn(64),)


def writing_nothing() -> Made:
    return lambda x: x.sin(), (torch.randn(64),)
