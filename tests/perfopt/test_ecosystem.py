"""Other parts of torch that meet a compiled function: optimizers, functorch, layouts, nesting."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import perfopt
from tests.perfopt.comparing import compare, compiled


@pytest.mark.parametrize("foreach", [True, False])
def test_a_compiled_optimizer_step(foreach: bool) -> None:
    ours = [nn.Parameter(torch.randn(5, 5)) for _ in range(3)]
    eager = copy.deepcopy(ours)
    first, second = (torch.optim.AdamW(p, lr=1e-2, foreach=foreach) for p in (ours, eager))
    step = perfopt.compile(first.step)
    for number in range(3):
        for p in (*ours, *eager):
            p.grad = torch.full_like(p, number + 0.5)
        step()
        second.step()
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)


def test_functorch_inside_and_outside() -> None:
    def inside(x: Tensor) -> Any:
        rows = torch.vmap(lambda row: F.gelu(row).softmax(-1))(x)
        return rows, torch.func.grad(lambda y: F.gelu(y).sum())(x)

    with torch.no_grad():
        compare(inside, [torch.randn(3, 5)])
    row = perfopt.compile(lambda y: F.gelu(y) * 2)
    x = torch.randn(3, 5)
    torch.testing.assert_close(torch.vmap(row)(x), F.gelu(x) * 2)


def test_convolutions_and_batch_norm_in_channels_last() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4),
        nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    other = copy.deepcopy(model)
    ours = perfopt.compile(model, fullgraph=True)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for _ in range(2):
        a, b = ours(x), other(x)
        a.pow(2).sum().backward()
        b.pow(2).sum().backward()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-4, rtol=1e-4)
    for p, q in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(p, q)
    with torch.no_grad():
        model.eval(), other.eval()
        torch.testing.assert_close(ours(x), other(x), atol=1e-5, rtol=1e-4)
        assert ours(x).stride() == other(x).stride()


def test_a_custom_operator_that_writes_to_its_argument() -> None:
    @torch.library.custom_op("perfopt_tests::add_one", mutates_args=("x",))
    def add_one(x: Tensor) -> None:
        x.add_(1)

    def function(x: Tensor) -> Tensor:
        y = x * 2
        add_one(y)
        add_one(x)
        return y.exp() + x

    a, b = torch.zeros(4), torch.zeros(4)
    torch.testing.assert_close(compiled(function)(a), function(b))
    assert torch.equal(a, b)


def test_recurrent_modules() -> None:
    model = nn.LSTM(4, 8, batch_first=True)
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(perfopt.compile(model)(x), model(x))


def test_nested_jagged_tensors() -> None:
    x = torch.nested.nested_tensor(
        [torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged
    )  # fmt: skip
    ours, eager = perfopt.compile(lambda x: (x * 2 + 1).sin())(x), (x * 2 + 1).sin()
    torch.testing.assert_close(ours.values(), eager.values())
