"""Dead code."""

from __future__ import annotations

import torch

from perfopt.passes.base import copy_graph
from perfopt.passes.dce import Dce
from perfopt.passes.fuse import Fuse
from tests.passes.graphs import assert_same, prices, targets, trace

X = torch.randn(4, 8, dtype=torch.float64)


def test_dead_chains_go_in_one_decision() -> None:
    gm = trace(lambda x: (x.sin().cos().exp(), x + 1)[1], X)
    result = Dce().run(copy_graph(gm), prices())
    assert targets(result.graph) == ["add.Tensor"]
    (decision,) = result.decisions
    assert decision.nodes == ("sin", "cos", "exp")
    assert decision.text() == "3 calls whose results nobody uses are dropped"
    assert_same(gm, result.graph, [X])


def test_random_calls_and_writes_stay() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        x.copy_(x.sin())
        return x + torch.rand(3).sum()

    gm = trace(fn, X.clone())
    assert not Dce().run(copy_graph(gm), prices()).changed


def test_dead_regions_go() -> None:
    gm = Fuse().run(trace(lambda x: (x.sin().cos(), x @ x.t()), X), prices()).graph
    output = gm.graph.output_node()
    output.args = (output.args[0][1:],)
    assert targets(Dce().run(gm, prices()).graph) == ["t", "mm"]
