"""Bytes: views, memory, reads and writes."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from perfopt.cost_model.traffic import (
    is_view,
    memory,
    mutates,
    root,
    tensor_bytes,
    users_through_views,
    written_bytes,
)


def calls(fn, *args) -> dict[str, fx.Node]:
    return {n.name: n for n in make_fx(fn, tracing_mode="fake")(*args).graph.nodes}


def test_memory_counts_repeated_elements_once() -> None:
    assert tensor_bytes(torch.ones(3, 4)) == 48
    assert tensor_bytes(torch.ones(3, 1).expand(3, 4)) == 12
    assert tensor_bytes(torch.ones(()).expand(5)) == 4
    assert tensor_bytes(torch.ones(0, 4)) == 0
    assert tensor_bytes(torch.ones(2, dtype=torch.bool)) == 2


def test_views_lead_to_their_root() -> None:
    nodes = calls(lambda x: x.sin().view(6).unsqueeze(0).cos(), torch.ones(2, 3))
    assert is_view(nodes["view"]) and not is_view(nodes["cos"])
    assert root(nodes["unsqueeze"]) is nodes["sin"]
    assert list(users_through_views(nodes["sin"])) == [nodes["cos"]]


def test_items_have_memory_of_their_own_unless_they_are_views() -> None:
    nodes = calls(lambda x: torch.var_mean(x.sin(), 0), torch.ones(2, 3))
    assert memory(nodes["getitem_1"]) == (nodes["var_mean"], 1)
    nodes = calls(lambda x: x.sin().split(1), torch.ones(2, 3))
    assert memory(nodes["getitem_1"]) == (nodes["sin"], 0)


def test_writes_to_operands() -> None:
    nodes = calls(lambda x, y: x.copy_(y), torch.ones(6), torch.ones(6))
    assert mutates(nodes["copy_"])
    assert written_bytes(nodes["copy_"]) == 24
    assert not is_view(nodes["copy_"])
