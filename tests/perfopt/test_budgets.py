"""Rematerialization: budgets that hold, gradients that stay, and what must not be run again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import perfopt
from perfopt import OptionError
from perfopt.capture import capture
from perfopt.cost_model.device import device_named
from perfopt.cost_model.memory import memory_of
from perfopt.options import Options
from perfopt.passes.remat import Planned
from perfopt.passes.remat_schedule import just_in_time
from perfopt.passes.remat_solve import best

ATEN = "joint(canonicalize,cse,dce,remat)"  # no kernels: every operation is the same one


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down(self.dropout(F.gelu(self.up(self.norm(x)))))
        return x + inner


def model(blocks: int = 4, **given: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**given) for _ in range(blocks)))


def gradients(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    run(x).square().mean().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def measured_peak(step: Callable[[], Any], given: list[Tensor]) -> int:
    """Bytes that the step has alive at most, with what it is given."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [
        (event.start_ns(), event.nbytes())
        for event in found.profiler.kineto_results.events()  # type: ignore[union-attr]
        if event.name() == "[memory]"
    ]
    now = top = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        now += size
        top = max(top, now)
    return top + sum(x.numel() * x.element_size() for x in given)


@contextmanager
def planned() -> Iterator[list[Planned]]:
    """The plans of every joint graph that is parted inside."""
    from perfopt import budgets

    plans: list[Planned] = []
    usual = budgets.split_within

    def split(job: Any, joint: fx.GraphModule, *args: Any, **given: Any) -> Any:
        plans.append(joint.meta[budgets.PLAN])
        return usual(job, joint, *args, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perfopt.compiler.split_within", split)
        yield plans


def frontier_of(module: nn.Module, x: Tensor, budget: float = 1.0) -> Planned:
    with planned() as plans:
        options = Options(memory_budget=budget)
        capture(lambda: (module, (x,), {}), True, [device_named("h100")], options)
    (plan,) = plans
    return plan


def test_more_memory_never_costs_time() -> None:
    plan = frontier_of(model(), torch.randn(1024, 64))
    seconds = [choice.seconds for choice in plan.frontier]
    peaks = [choice.peak for choice in plan.frontier]
    assert len(peaks) > 8
    assert seconds == sorted(seconds) and peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    assert peaks[-1] < 0.5 * peaks[0]
    assert list(plan.frontier) == best(plan.frontier)


def test_the_same_twice() -> None:
    one, two = (frontier_of(model(), torch.randn(1024, 64)) for _ in range(2))
    assert [(c.seconds, c.peak) for c in one.frontier] == [
        (c.seconds, c.peak) for c in two.frontier
    ]


def test_no_choice_of_a_small_graph_beats_the_frontier() -> None:
    """Every subset of what can be kept, tried."""
    from itertools import combinations

    from perfopt.passes.remat_schedule import keepable

    module = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh())
    plan = frontier_of(module, torch.randn(512, 8))
    problem = plan.problem
    values = [node for node in problem.nodes if keepable(node)]
    assert 4 < len(values) <= 16
    every = {
        problem.choice(frozenset(some))
        for count in range(len(values) + 1)
        for some in combinations(values, count)
    }
    for exact in best(list(every)):
        fitting = [choice for choice in plan.frontier if choice.peak <= exact.peak]
        nearest = min((choice.peak for choice in plan.frontier), default=0)
        assert fitting or nearest <= 1.03 * exact.peak
        if fitting:
            assert fitting[0].seconds <= 1.03 * exact.seconds + 1e-8


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_budgets_hold_and_gradients_stay(share: float) -> None:
    module, x = model(), torch.randn(2048, 64)
    plain = perfopt.compile(module, pipeline=ATEN, memory_budget=1.0)
    expected = gradients(plain, module, x)
    whole = frontier_of(module, x).frontier[0].peak
    torch.compiler.reset()
    budget = int(share * whole)
    compiled = perfopt.compile(module, pipeline=ATEN, memory_budget=budget)
    found = gradients(compiled, module, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    module.zero_grad()
    peak = measured_peak(lambda: compiled(x).square().mean().backward(), [x, *module.parameters()])
    assert peak <= budget
    torch.compiler.reset()
    kernels = perfopt.compile(module, memory_budget=budget)
    for a, b in zip(gradients(kernels, module, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    (decision,) = [d for d in perfopt.report(kernels).decisions if d.pass_name == "remat"]
    assert decision.nodes and "operations run again" in decision.text()


def test_an_impossible_budget_names_the_smallest_one() -> None:
    module = model(2)
    compiled = perfopt.compile(module, memory_budget="1MiB")
    with pytest.raises(Exception, match=r"memory_budget is 1 MiB: this graph needs at least"):
        compiled(torch.randn(2048, 64)).sum().backward()


def test_a_fraction_that_cannot_be_met_takes_the_least() -> None:
    module = model(3)
    compiled = perfopt.compile(module, memory_budget=0.01)
    compiled(torch.randn(2048, 64)).sum().backward()
    (decision,) = [d for d in perfopt.report(compiled).decisions if d.pass_name == "remat"]
    assert "cannot be met, this is the least" in decision.text()


@pytest.mark.parametrize("value", ["20 parsecs", "-1", 0.0, 1.5, -3, True, "0"])
def test_what_is_no_budget_is_said(value: Any) -> None:
    with pytest.raises(OptionError, match="memory_budget is"):
        perfopt.compile(nn.Linear(2, 2), memory_budget=value)


def test_budgets_need_the_pass() -> None:
    with pytest.raises(OptionError, match="no pass remat"):
        perfopt.compile(nn.Linear(2, 2), memory_budget="1GiB", pipeline="graph(fuse)")
    with pytest.raises(OptionError, match="mode 'aten'"):
        perfopt.compile(nn.Linear(2, 2), memory_budget="1GiB", mode="aten")
    assert Options(memory_budget="2GB", memory_reserved="500MB").budget() == ("bytes", 2e9)


def test_random_masks_are_the_same_in_the_backward_pass() -> None:
    module, x = model(3, dropout=0.3), torch.randn(1024, 64)
    usual = gradients(perfopt.compile(module, pipeline="joint(dce)"), module, x)
    torch.compiler.reset()
    compiled = perfopt.compile(module, pipeline=ATEN, memory_budget=0.8)
    for a, b in zip(gradients(compiled, module, x), usual, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpoints_of_the_user_are_honoured() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(model(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    torch.manual_seed(0)
    module, x = Checkpointed(), torch.randn(1024, 64)
    expected = gradients(copy.deepcopy(module).forward, module, x)
    expected = gradients(module.forward, module, x)
    plan = frontier_of(module, x)
    assert plan.problem.must_recompute
    assert not any(plan.problem.must_recompute & choice.kept for choice in plan.frontier)
    compiled = perfopt.compile(module, memory_budget=1.0)
    for a, b in zip(gradients(compiled, module, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_what_is_recomputed_stands_before_its_first_use() -> None:
    graph = fx.Graph()
    x, t = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    a = graph.call_function(torch.ops.aten.exp.default, (x,))
    b = graph.call_function(torch.ops.aten.sin.default, (x,))
    first = graph.call_function(torch.ops.aten.mul.Tensor, (t, 2.0))
    second = graph.call_function(torch.ops.aten.mul.Tensor, (first, a))
    third = graph.call_function(torch.ops.aten.mul.Tensor, (second, b))
    graph.output((third,))
    gm = fx.GraphModule(nn.Module(), graph)
    just_in_time(gm)
    names = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    assert names == [first.name, a.name, second.name, b.name, third.name]
    gm.graph.lint()


def test_the_peak_of_parted_graphs_counts_what_lives_on() -> None:
    def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
        from torch.fx.experimental.proxy_tensor import make_fx

        return make_fx(function, tracing_mode="fake")(*inputs)

    x = torch.zeros(1000)
    forward = traced(lambda x: (x.exp().sum(), x.exp()), x).graph
    # Its inputs have the names of what the forward graph gives.
    backward = traced(lambda exp, t: (exp * t,), x, torch.zeros(())).graph
    peak = memory_of(forward, backward, results=1).peak
    # the input, what was kept, the result and its gradient, and the gradient being computed
    assert peak == 4 * (1000 + 1000 + 1 + 1 + 1000)


def test_sizes_that_change() -> None:
    module = model(5)
    compiled = perfopt.compile(module, memory_budget=0.8, dynamic=True)
    for rows in (1024, 1500):
        x = torch.randn(rows, 64)
        expected = gradients(module.forward, module, x)
        for a, b in zip(gradients(compiled, module, x), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
