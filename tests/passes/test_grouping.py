"""Groups: what merging must not do."""

from __future__ import annotations

import torch
from torch import fx

from perfopt.passes.grouping import Facts, Group, Grouping, Refusal, bits
from tests.passes.graphs import prices, trace

X = torch.randn(6, 8)


def test_bits() -> None:
    assert list(bits(0b101001)) == [0, 3, 5]
    assert list(bits(0)) == []


def start(gm: fx.GraphModule) -> tuple[Grouping, dict[str, fx.Node]]:
    facts = Facts(gm)
    grouping = Grouping(facts, prices(), 64)
    for node in facts.candidates:
        grouping.of[node] = facts.single(node, prices())
    return grouping, {node.name: node for node in facts.nodes}


def crossing(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sin -> a product -> cos, and exp -> a product -> tan."""
    return (x.sin() @ x.t()).cos(), (y.exp() @ x).tan()


def test_a_cycle_through_another_group_is_seen() -> None:
    gm = trace(crossing, X, torch.randn(6, 6))

    def merge(grouping: Grouping, one: str, other: str) -> Refusal | None:
        return grouping._merge(grouping.of[nodes[one]], grouping.of[nodes[other]])

    grouping, nodes = start(gm)
    assert merge(grouping, "sin", "tan") is None
    # sin and tan are one: cos comes after them, exp before.
    refusal = merge(grouping, "cos", "exp")
    assert refusal is not None and "stays outside" in refusal.reason
    grouping, nodes = start(gm)
    assert merge(grouping, "cos", "exp") is None
    refusal = merge(grouping, "sin", "tan")
    assert refusal is not None and "stays outside" in refusal.reason


def test_domains() -> None:
    gm = trace(lambda x: (x.sin().sum(1), x.cos().sum(0), x[:2].exp(), x.sum()), X)
    grouping, nodes = start(gm)

    def union(one: str, other: str) -> Group | Refusal:
        first, second = grouping.of[nodes[one]], grouping.of[nodes[other]]
        return grouping._union(first, second, first.mask | second.mask)

    assert isinstance(union("sin", "sum_1"), Group)
    assert isinstance(union("sum_1", "sum_2"), Group)  # rows and columns
    assert isinstance(union("sum_1", "sum_3"), Refusal)
    assert isinstance(union("sin", "exp"), Refusal)


def test_results_nobody_reads_are_no_candidates() -> None:
    gm = trace(lambda x: (x.sin(), x.cos() + 1)[1], X)
    assert [node.name for node in Facts(gm).candidates] == ["cos", "add"]


def test_calls_after_a_write_are_no_candidates() -> None:
    gm = trace(lambda x: (x.sin() + 1, x.copy_(x.cos()), x.tan())[0], X)
    assert [node.name for node in Facts(gm).candidates] == ["sin", "add", "cos"]
