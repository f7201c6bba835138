"""Canonicalize: what goes, what must stay, and that nothing changes by a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from perfopt.passes.base import PassResult, copy_graph
from perfopt.passes.canonicalize import Canonicalize
from perfopt.passes.verify import verify_change
from tests.passes.graphs import assert_same, prices, targets, trace

aten = torch.ops.aten
SPECIAL = torch.tensor([0.0, -0.0, 1.5, -2.5, float("nan"), float("inf"), -float("inf"), 1e-45])
X = SPECIAL.repeat(4).reshape(4, 8)
B = X.bfloat16()


def canonical(fn: Callable[..., Any], *args: Any) -> tuple[list[str], PassResult]:
    gm = trace(fn, *args)
    result = Canonicalize().run(copy_graph(gm), prices())
    verify_change(gm, result.graph)
    assert_same(gm, result.graph, args)
    return targets(result.graph), result


GONE: dict[str, Callable[[], tuple[Callable[..., Any], torch.Tensor, list[str]]]] = {
    "times one": lambda: (lambda x: aten.mul.Tensor(x, 1).sin(), X, ["sin"]),
    "over one": lambda: (lambda x: aten.div.Tensor(x, 1.0).sin(), X, ["sin"]),
    "minus zero": lambda: (lambda x: aten.sub.Tensor(x, 0).sin(), X, ["sin"]),
    "integer plus zero": lambda: (lambda x: aten.add.Tensor(x, 0) * 3, X.isnan().long(),
                                  ["mul.Tensor"]),
    "identity view": lambda: (lambda x: x.view(4, 8).sin(), X, ["sin"]),
    "there and back": lambda: (lambda x: x.view(32).view(4, 8).sin(), X, ["view", "sin"]),
    "identity order": lambda: (lambda x: x.permute(0, 1).sin(), X, ["sin"]),
    "transposed twice": lambda: (lambda x: x.t().t().sin(), X, ["t", "sin"]),
    "expanded to itself": lambda: (lambda x: x.expand(4, 8).sin(), X, ["sin"]),
    "whole slice": lambda: (lambda x: aten.slice.Tensor(x, 0, 0, 99).sin(), X, ["sin"]),
    "copy": lambda: (lambda x: x.clone().sin(), X, ["sin"]),
    "same type": lambda: (lambda x: aten._to_copy.default(x, dtype=torch.float32).sin(), X,
                          ["sin"]),
    "wide and back": lambda: (lambda x: x.float().bfloat16().sin(), B, ["_to_copy", "sin"]),
    "copy of a copy returned": lambda: (lambda x: x.sin().clone(), X, ["sin"]),
}  # fmt: skip


@pytest.mark.parametrize("case", GONE)
def test_gone(case: str) -> None:
    fn, x, left = GONE[case]()
    found, result = canonical(fn, x)
    assert found == left
    assert len(result.decisions) == 1


STAYS: dict[str, Callable[..., Any]] = {
    "plus zero turns -0.0 into 0.0": lambda x: aten.add.Tensor(x, 0).sin(),
    "minus -0.0 does too": lambda x: aten.sub.Tensor(x, -0.0).sin(),
    "a copy of an input is returned": lambda x: x.clone(),
    "the product with one is returned": lambda x: aten.mul.Tensor(x, 1),
    "a copy and its source are returned": lambda x: ((y := x.sin()), y.clone()),
    "a view of a copy of an input is returned": lambda x: x.clone().view(32),
    "a view is returned": lambda x: (x.view(4, 8), x.sin()),
    "a copy in another layout": lambda x: x.t().contiguous().sin(),
    "narrow and back": lambda x: x.bfloat16().float().sin(),
    "promoted": lambda x: aten.mul.Tensor(x.isnan(), 1).neg(),
    "a square transposed": lambda x: x[:, :4].t().sin(),
    "a copy of what is overwritten": lambda x: (y := x.clone(), x.copy_(x.sin()), y.cos())[2],
}


@pytest.mark.parametrize("case", STAYS)
def test_stays(case: str) -> None:
    gm = trace(STAYS[case], X.clone())
    assert canonical(STAYS[case], X.clone())[0] == targets(gm)


def test_a_constant_does_not_wait_for_the_tensor_it_is_shaped_like() -> None:
    found, result = canonical(lambda x: torch.full_like(x.sin(), 2.0) * x, X)
    assert found == ["sin", "full", "mul.Tensor"]
    assert result.decisions[0].text().endswith("(only the shape of its operand counts)")


def test_one_spelling_of_a_range() -> None:
    ranges = [lambda x: torch.arange(8) * x, lambda x: torch.arange(0, 8) * x]
    assert [canonical(fn, X)[0] for fn in ranges] == [["arange.start_step", "mul.Tensor"]] * 2


def test_symbolic_shapes_compare_without_guards() -> None:
    gm = trace(lambda x: x.view(x.shape).sin() * 1, X, symbolic=True)
    result = Canonicalize().run(copy_graph(gm), prices())
    assert "view" not in targets(result.graph)
    assert_same(gm, result.graph, [X])
