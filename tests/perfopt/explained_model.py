"""A small model for the tests of `explain` and `verify`; golden texts name its lines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Model(nn.Module):
    """A normalised layer with an activation, a head, and a loss if there are labels."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.head = nn.Linear(128, 10)
        self.broken = broken

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        x = F.gelu(self.up(x), approximate="tanh")
        if self.broken:
            torch._dynamo.graph_break()
        x = self.head(x)
        return x if labels is None else F.cross_entropy(x, labels)


def make() -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and a batch."""
    return Model(), (torch.randn(32, 64), torch.randint(10, (32,)))


def broken() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The same with a graph break, without labels, inputs as keywords."""
    return Model(broken=True), (), {"x": torch.randn(32, 64)}


def huge() -> tuple[nn.Module, tuple[Any, ...]]:
    """A layer of four terabytes."""
    return nn.Linear(1 << 20, 1 << 20), (torch.randn(16, 1 << 20),)


def failing() -> tuple[nn.Module, tuple[Any, ...]]:
    """A factory that raises."""
    raise ValueError("no data\nat all")


def odd() -> tuple[nn.Module, int]:
    """Not what a factory returns."""
    return Model(), 3


def reading() -> tuple[Any, tuple[Any, ...]]:
    """A function that depends on the value of a tensor."""

    def function(x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x

    return function, (torch.ones(3),)


def mismatched() -> tuple[nn.Module, tuple[Any, ...]]:
    """Inputs that do not fit the model."""
    return nn.Linear(3, 4), (torch.randn(5, 6),)


class Learning(nn.Module):
    """A layer that sets a value of its own in its first run, which captures it once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.kind: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "relu"
        return self.layer(x).relu().sum()


def learning() -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and a batch."""
    return Learning(), (torch.randn(32, 64),)


NOT_CALLABLE = 3
