"""Fifty random graphs of pointwise operations, reductions and views, in mixed dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.perfopt.comparing import compare

UNARY: list[Callable[[Tensor], Tensor]] = [
    F.gelu,
    F.silu,
    torch.tanh,
    torch.sigmoid,
    torch.sin,
    torch.abs,
    torch.relu,
    lambda x: torch.exp(-x.abs()),
    lambda x: torch.log1p(x.abs()),
    lambda x: torch.rsqrt(x * x + 0.5),
    lambda x: x.clamp(-0.7, 0.9),
    lambda x: x.softmax(-1),
    lambda x: x.log_softmax(-1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x / (x.abs().amax(0, keepdim=True) + 1),
    lambda x: x.sum(1, keepdim=True) * 0.1 + x,
    lambda x: x.flip(0),
    lambda x: x.t().contiguous().t(),
    lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    lambda x: x.reshape(-1).view(x.shape),
    lambda x: torch.where(x > 0.1, x, x * 0.2),
    lambda x: x.to(torch.bfloat16).to(x.dtype),
    lambda x: x.double().mul(2).to(x.dtype),
    lambda x: (x * 4).int() + x,
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.sub,
    torch.mul,
    lambda a, b: a / (b.abs() + 1),
    torch.maximum,
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: a + b[:1],
    lambda a, b: a * b[:, :1],
    lambda a, b: a.lerp(b, 0.3),
]
Step = tuple[bool, int, int, int]


def build(steps: list[Step], outputs: int) -> Callable[..., Any]:
    """A function that applies the steps to its two inputs and to one another's results."""

    def function(a: Tensor, b: Tensor) -> Any:
        values = [a, b]
        for binary, which, first, second in steps:
            x, y = values[first % len(values)], values[second % len(values)]
            if binary:
                values.append(BINARY[which % len(BINARY)](x, y))
            else:
                values.append(UNARY[which % len(UNARY)](x))
        ends = values[-outputs:]
        return [*ends, ends[0].sum(), ends[-1].mean(0)]

    return function


number = st.integers(0, 1000)


@settings(max_examples=50)
@given(
    steps=st.lists(st.tuples(st.booleans(), number, number, number), min_size=2, max_size=9),
    outputs=st.integers(1, 3),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 20)),
    seed=number,
)
def test_random_graph(steps: list[Step], outputs: int, shape: tuple[int, int], seed: int) -> None:
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(2))
    compare(build(steps, outputs), [a, b], scale=4.0)
