"""Pipelines: their text, the runner, its limit and what it does about failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx

from perfopt.cost_model.decision import Verdict
from perfopt.cost_model.roofline import CostModel
from perfopt.passes.base import Gate, Level, PassResult
from perfopt.passes.cse import Cse
from perfopt.passes.fuse import Fuse
from perfopt.passes.pipeline import (
    DEFAULT,
    Pipeline,
    PipelineError,
    parse_pipeline,
    run_pipeline,
)
from perfopt.passes.verify import VerifyError
from tests.passes.graphs import assert_same, gpt_step, prices, trace


@dataclass(frozen=True)
class Breaks:
    """Raises, or returns a graph that computes something else in another shape."""

    raises: bool = True
    name: ClassVar[str] = "breaks"
    level: ClassVar[Level] = Level.GRAPH

    def run(self, graph: fx.GraphModule, cost: CostModel, gate: Gate | None = None) -> PassResult:
        assert gate is not None and gate.take()
        output = graph.graph.output_node()
        output.args = (next(iter(graph.graph.nodes)),)
        if self.raises:
            raise RuntimeError("broken")
        return PassResult(graph, (), True)


@pytest.mark.parametrize(
    "text",
    [
        "pre() | joint(canonicalize,cse,dce) | graph(fuse)",
        "pre() | joint() | graph(fuse{max_nodes=8})",
        "pre() | joint(dce) | graph(fuse{max_nodes=8,singles=False},fuse)",
        DEFAULT,
    ],
)
def test_text_parses_back(text: str) -> None:
    pipeline = parse_pipeline(text)
    assert str(pipeline) == text
    assert parse_pipeline(str(pipeline)) == pipeline


def test_levels_may_be_left_out_and_spaced() -> None:
    assert parse_pipeline("graph( fuse { max_nodes = 3 } )") == Pipeline(graph=(Fuse(max_nodes=3),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph(fuze)", r"unknown pass 'fuze'; did you mean 'fuse'\? Allowed: canonicalize, cse"),
        ("join(cse)", r"unknown level 'join'; did you mean 'joint'\?"),
        ("graph(fuse{max_node=3})", r"unknown option of fuse 'max_node'; did you mean 'max_nodes'"),
        ("graph(fuse{max_nodes=three})", "fuse: max_nodes=three is not of type int"),
        ("graph(fuse{max_nodes=1.5})", "max_nodes=1.5 is not of type int"),
        ("graph(fuse{singles=1})", "singles=1 is not of type bool"),
        ("graph(fuse", r"expected ',' or '\)', found the end at 10"),
        ("graph(fuse) joint()", r"expected '\|', found 'joint' at 12"),
        ("graph(fuse) | graph()", "level 'graph' is given twice"),
        ("graph(cse)", "pass 'cse' works on joint, not graph"),
        ("", "unknown level ''"),
        ("graph[fuse]", r"expected '\(', found '\['"),
    ],
)
def test_errors_name_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        parse_pipeline(text)


def test_the_runner_refuses_the_wrong_level() -> None:
    gm = trace(torch.sin, torch.ones(3))
    with pytest.raises(PipelineError, match="'cse' works on joint, not graph"):
        run_pipeline(gm, [Cse()], prices(), level=Level.GRAPH)


def test_the_default_pipeline_keeps_a_training_step_and_the_ledger() -> None:
    gm, args = gpt_step()
    before = [node.name for node in gm.graph.nodes]
    pipeline = parse_pipeline(DEFAULT)
    result = run_pipeline(gm, [*pipeline.joint, *pipeline.graph], prices(), strict=True)
    assert [node.name for node in gm.graph.nodes] == before
    assert_same(gm, result.graph, args)
    names = ["canonicalize", "cse", "dce", "remat", "gemm", "fuse"]
    assert [step.text for step in result.history] == names
    saved = prices().graph(gm).seconds - prices().graph(result.graph).seconds
    assert saved > 0
    assert sum(d.seconds_saved for d in result.decisions) == pytest.approx(saved, rel=1e-9)


def test_a_symbolic_training_step() -> None:
    gm, args = gpt_step(symbolic=True)
    pipeline = parse_pipeline(DEFAULT)
    result = run_pipeline(gm, [*pipeline.joint, *pipeline.graph], prices(), strict=True)
    assert_same(gm, result.graph, args)
    saved = prices().graph(gm).seconds - prices().graph(result.graph).seconds
    assert sum(d.seconds_saved for d in result.decisions) == pytest.approx(saved, rel=1e-9)


def test_running_twice_gives_the_same_text() -> None:
    gm, _ = gpt_step()
    pipeline = parse_pipeline(DEFAULT)
    passes = [*pipeline.joint, *pipeline.graph]
    one, two = (run_pipeline(gm, passes, prices(), strict=True) for _ in range(2))
    assert one.decisions == two.decisions
    assert one.graph.code == two.graph.code


@pytest.mark.parametrize("limit", [0, 1, 5, 9, 12, 16])
def test_the_limit_counts_applied_decisions(limit: int) -> None:
    gm, args = gpt_step()
    pipeline = parse_pipeline(DEFAULT)
    passes = [*pipeline.joint, *pipeline.graph]
    result = run_pipeline(gm, passes, prices(), limit=limit, strict=True)
    applied = [d for d in result.decisions if d.verdict is Verdict.APPLIED]
    assert len(applied) == limit
    assert_same(gm, result.graph, args)


def test_nothing_to_do_changes_nothing() -> None:
    gm = trace(torch.add, torch.ones(3), torch.ones(3))
    result = run_pipeline(gm, parse_pipeline(DEFAULT).joint, prices())
    assert result.graph is gm and not result.decisions
    assert [step.changed for step in result.history] == [False] * 4


@pytest.mark.parametrize("raises", [True, False])
def test_a_failing_pass_is_left_out(raises: bool) -> None:
    gm = trace(lambda x: x.sin().cos().sum(0), torch.ones(3, 4))
    result = run_pipeline(gm, [Breaks(raises), Fuse()], prices())
    failed, fused = result.decisions
    assert failed.verdict is Verdict.FAILED
    assert failed.text().startswith("RuntimeError: broken" if raises else "VerifyError: results")
    assert fused.verdict is Verdict.APPLIED
    assert_same(gm, result.graph, [torch.randn(3, 4)])
    with pytest.raises((RuntimeError, VerifyError)):
        run_pipeline(gm, [Breaks(raises)], prices(), strict=True)
