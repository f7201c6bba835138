"""Common subexpressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from perfopt.passes.base import copy_graph
from perfopt.passes.cse import Cse
from perfopt.passes.dce import Dce
from perfopt.passes.verify import verify_change
from tests.passes.graphs import assert_same, prices, targets, trace

X = torch.randn(4, 8, dtype=torch.float64)


def shared(fn: Callable[..., Any]) -> list[str]:
    gm = trace(fn, X)
    result = Cse().run(copy_graph(gm), prices())
    verify_change(gm, result.graph)
    assert_same(gm, result.graph, [X])
    saved = prices().graph(gm).seconds - prices().graph(result.graph).seconds
    assert sum(d.seconds_saved for d in result.decisions) == pytest.approx(saved, abs=1e-15)
    return targets(result.graph)


def test_equal_calls_are_shared_transitively() -> None:
    assert shared(lambda x: (x.sin() * 2) * (x.sin() * 2)) == ["sin", "mul.Tensor", "mul.Tensor"]


def test_constants_of_other_types_are_not_equal() -> None:
    assert shared(lambda x: (x * 1).exp() * (x * 1.0).exp()).count("mul.Tensor") == 3
    assert shared(lambda x: (x - 0.0).exp() * (x - -0.0).exp()).count("sub.Tensor") == 2


def test_random_calls_are_never_shared() -> None:
    assert shared(lambda x: torch.rand_like(x) + torch.rand_like(x)).count("rand_like") == 2


def test_two_returned_tensors_stay_two() -> None:
    assert shared(lambda x: (x.sin(), x.sin())) == ["sin", "sin"]
    assert shared(lambda x: (x.sin(), x.sin().view(32))) == ["sin", "sin", "view"]


def test_writes_part_equal_calls() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        x.copy_(a * 2)
        return a + x.sin()

    gm = trace(fn, X.clone())
    assert targets(Cse().run(copy_graph(gm), prices()).graph) == targets(gm)


def test_equal_sizes_are_one_number() -> None:
    gm = trace(lambda x: x.sin().view(x.shape[0] * x.shape[1]) + x.view(-1), X, symbolic=True)
    result = Cse().run(copy_graph(gm), prices()).graph
    result = Dce().run(result, prices()).graph
    assert_same(gm, result, [X])
    assert targets(result).count("mul") == 1
