"""Fusion: which regions form, what is refused and why, and that nothing changes by a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from perfopt.cost_model.decision import Verdict
from perfopt.passes.base import PassResult, copy_graph
from perfopt.passes.fuse import Fuse
from perfopt.passes.verify import verify_change
from tests.passes.graphs import (
    ROUND,
    assert_same,
    gpt_step,
    members,
    prices,
    softmax,
    targets,
    text,
    trace,
)

X = torch.randn(6, 8, dtype=torch.float64)
W = torch.randn(8, 8, dtype=torch.float64)
ROW = torch.randn(8, dtype=torch.float64)


def fuse(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[fx.GraphModule, PassResult]:
    gm = trace(fn, *args)
    result = Fuse(**options).run(copy_graph(gm), prices())
    verify_change(gm, result.graph)
    assert_same(gm, result.graph, args)
    saved = prices().graph(gm).seconds - prices().graph(result.graph).seconds
    assert sum(d.seconds_saved for d in result.decisions) == pytest.approx(saved, abs=1e-15)
    return result.graph, result


def reasons(result: PassResult) -> list[str]:
    return [d.text() for d in result.decisions if d.verdict is Verdict.REJECTED]


class TestGolden(expecttest.TestCase):
    def test_chain_and_fan(self) -> None:
        gm, _ = fuse(lambda x, y: ((a := x * y).sin(), a.cos() + 1), X, X.clone())
        self.assertExpectedInline(
            text(gm),
            """\
sin, add = region(x_1, y_1: mul.Tensor sin cos add.Tensor)
return sin, add""",
        )

    def test_softmax(self) -> None:
        gm, result = fuse(softmax, X)
        self.assertExpectedInline(
            text(gm),
            """\
div = region(x_1: amax sub.Tensor exp sum.dim_IntList div.Tensor)
return div""",
        )
        self.assertExpectedInline(
            "\n".join(f"{d.verdict.value} {d.text()}" for d in result.decisions),
            """applied 5 operations in one kernel with 1 results""",
        )

    def test_products_part_regions(self) -> None:
        gm, _ = fuse(lambda x, w: F.relu(softmax(x * 2) @ w).sum(-1), X, W)
        self.assertExpectedInline(
            text(gm),
            """\
div = region(x_1: mul.Tensor amax sub.Tensor exp sum.dim_IntList div.Tensor)
mm = mm(div, w_1)
sum_2 = region(mm: relu sum.dim_IntList)
return sum_2""",
        )

    def test_views_at_the_border(self) -> None:
        gm, _ = fuse(lambda x: ((a := x.t().exp() * 2).sum(0), a.view(2, 24).unsqueeze(0)), X.t())
        self.assertExpectedInline(
            text(gm),
            """\
mul, sum_1 = region(x_1: t exp mul.Tensor sum.dim_IntList)
view = view(mul, [2, 24])
unsqueeze = unsqueeze(view, 0)
return sum_1, unsqueeze""",
        )


def test_a_step_of_a_transformer() -> None:
    gm, args = gpt_step()
    result = Fuse().run(copy_graph(gm), prices())
    assert_same(gm, result.graph, args)
    after = targets(result.graph)
    assert sum("region" in each for each in after) <= 14
    assert not {"exp", "rsqrt", "tanh", "amax", "sub.Tensor"} & set(after)
    # Every product stays a library call.
    assert [t for t in after if t in ("mm", "bmm")] == [
        t for t in targets(gm) if t in ("mm", "bmm")
    ]


def test_symbolic_sizes_are_arguments_of_regions() -> None:
    gm = trace(lambda x: (x.sin() * x.shape[0]).view(-1) + 1, X, symbolic=True)
    result = Fuse().run(copy_graph(gm), prices())
    assert_same(gm, result.graph, [X])
    (region,) = [node for node in result.graph.graph.nodes if node.op == "call_module"]
    assert any(isinstance(a.meta["val"], torch.SymInt) for a in region.args)


def test_region_metadata() -> None:
    gm, result = fuse(lambda x: (x.sin() + 1, *torch.var_mean(x, 1)), X)
    (region,) = [node for node in gm.graph.nodes if node.op == "call_module"]
    assert region.meta["region"] is True
    assert isinstance(region.meta["val"], tuple)
    assert [user.name for user in region.users] == ["add", "getitem", "getitem_1"]
    assert result.decisions[0].nodes == region.meta["members"]


def test_max_nodes_is_kept() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x.sin()
        return x

    gm, result = fuse(chain, X, max_nodes=4)
    assert [len(each) for each in members(gm)] == [4, 4, 2]
    assert "5 nodes are more than max_nodes=4" in reasons(result)[0]


def test_what_leaves_and_returns_is_not_one_region() -> None:
    gm, result = fuse(lambda x: (a := x.sin() + 1) * (a @ a.t() @ a), X)
    assert reasons(result) == [
        "what one computes reaches the other through a call that stays outside"
    ]
    assert members(gm) == [["sin", "add.Tensor"]]
    refused = result.decisions[-1]
    assert refused.alternative_cost is not None and refused.before is not None
    assert refused.alternative_cost.seconds < refused.before.seconds


def test_row_and_column_reductions_of_one_value_are_one_region() -> None:
    gm, _ = fuse(lambda x: ((a := x.exp() * 2).sum(0), a.sum(1)), X)
    assert len(members(gm)) == 1


def test_other_reductions_of_one_value_are_two_regions() -> None:
    gm, result = fuse(lambda x: ((a := x.exp() * 2).sum(0), a.sum(1), a.sum()), X)
    assert len(members(gm)) <= 2
    assert any("not those of rows and columns" in reason for reason in reasons(result))


def test_cheap_producers_are_computed_where_they_are_read() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        scale = x * 2
        left = (scale + 1).exp()
        return left @ w, ((left @ w).sum() + scale).exp()

    gm, _ = fuse(fn, X, torch.randn(8, 6, dtype=torch.float64))
    assert [each.count("mul.Tensor") for each in members(gm)] == [1, 1]


def test_constants_go_into_each_kernel() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        zero = torch.full((), 0.5, dtype=torch.float64)
        return ((x.sin() + zero) @ w).cos() + zero

    gm, _ = fuse(fn, X, torch.randn(8, 6, dtype=torch.float64))
    assert [each.count("full") for each in members(gm)] == [1, 1]
    assert "full" not in targets(gm)


def test_lone_operations() -> None:
    assert members(fuse(lambda x: x.exp() @ x.t(), X)[0]) == [["exp"]]
    assert members(fuse(lambda x: x.exp() @ x.t(), X, singles=False)[0]) == []
    assert members(fuse(lambda x: (x * 2) @ x.t(), X)[0]) == []
    assert members(fuse(lambda x, y: x.sum(0) @ y, X, ROW)[0]) == []


def test_copies_and_constants_alone_are_no_region() -> None:
    assert members(fuse(lambda x: (x.t().contiguous(), torch.ones(3)), X)[0]) == []


def test_random_calls_keep_their_order() -> None:
    def fn(x: torch.Tensor) -> Any:
        a = torch.rand_like(x)
        b = (x @ x.t()).exp() + 1
        c = torch.rand_like(x)
        return a + c * 2, b

    gm, _ = fuse(fn, X)
    assert [t for t in targets(gm) if t == "rand_like"] == ["rand_like", "rand_like"]


def test_nothing_is_fused_across_a_write() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = x.sin() + 1
        x.copy_(a * 2)
        return x.cos() + a

    gm, _ = fuse(fn, X.clone())
    names = targets(gm)
    assert names.index("copy_") < names.index("cos")
    assert members(gm) == [["sin", "add.Tensor", "mul.Tensor"]]


def test_what_the_lowering_refuses_is_split() -> None:
    # One kernel cannot store (6, 8) and (8, 6) that do not align with each other.
    gm, _ = fuse(lambda x: ((a := x.sin() + 1), (a.view(8, 6) + a.view(48).view(8, 6).t().t())), X)
    assert sum(map(len, members(gm))) >= 2


def test_the_pass_is_stable() -> None:
    gm, args = gpt_step()
    once = Fuse().run(copy_graph(gm), prices()).graph
    again = Fuse().run(copy_graph(once), prices())
    assert_same(gm, again.graph, args)
    assert len(members(again.graph)) == len(members(once))


OPERATIONS: list[Callable[..., torch.Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a.sin(),
    lambda a, b: torch.where(a > b, a, b * 2),
    lambda a, b: a - b.amax(-1, keepdim=True),
    lambda a, b: a.sum(-1, keepdim=True) + b,
    lambda a, b: a.sum(0) * b,
    lambda a, b: a.t().contiguous().t() + b,
    lambda a, b: a.reshape(-1).view(a.shape) * 0.5,
    lambda a, b: (a @ b.t()) @ b,
    lambda a, b: torch.var_mean(a, -1, correction=0, keepdim=True)[1] + b,
    lambda a, b: a[:1].expand(a.shape) + b,
    lambda a, b: torch.cat([a, b])[: a.shape[0]],
]
STEP = st.tuples(
    st.integers(0, len(OPERATIONS) - 1), st.integers(0, 100), st.integers(0, 100)
)  # fmt: skip


@settings(max_examples=60)
@given(
    st.lists(STEP, min_size=1, max_size=14),
    st.sampled_from([(3, 4), (1, 5), (4, 4), (2, 1), (0, 3)]),
    st.lists(st.integers(0, 100), min_size=1, max_size=3),
)
def test_random_graphs(
    steps: list[tuple[int, int, int]], shape: tuple[int, int], results: list[int]
) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        values = [x, y]
        for kind, a, b in steps:
            left, right = values[a % len(values)], values[b % len(values)]
            values.append(OPERATIONS[kind](left, right))
        chosen = dict.fromkeys(k % (len(values) - 2) + 2 for k in results)
        return [values[k] for k in chosen]

    args = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
    if shape[0] == 0 and any(k == 4 for k, _, _ in steps):
        return
    fuse(fn, *args)


def test_prices_decide() -> None:
    # A device whose launches are free and whose memory is endless: nothing is to be saved.
    from dataclasses import replace

    from perfopt.cost_model.roofline import CostModel

    free = CostModel(replace(ROUND, launch_seconds=0.0, memory_bandwidth=1e30))
    gm = trace(lambda x: x.sin().cos(), X)
    result = Fuse(singles=False).run(copy_graph(gm), free)
    assert not result.changed
    assert reasons(result) == ["one kernel would save nothing"]


def test_a_transposing_copy_is_a_kernel_of_its_own() -> None:
    large = torch.randn(160, 130, dtype=torch.float64)

    def fn(x: torch.Tensor) -> Any:
        y = (x * 2).sin()
        return y, y.t().contiguous()

    gm, result = fuse(fn, large)
    assert members(gm) == [["mul.Tensor", "sin"], ["t", "clone"]]
    assert any("another order of memory" in reason for reason in reasons(result))
