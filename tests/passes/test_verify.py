"""The verifier catches broken graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from perfopt.passes.base import copy_graph
from perfopt.passes.fuse import Fuse
from perfopt.passes.verify import VerifyError, verify_change, verify_graph
from tests.passes.graphs import prices, trace


def fused() -> fx.GraphModule:
    gm = trace(lambda x, y: ((x * y).sin(), x.view(-1)), torch.ones(4, 4), torch.ones(4, 4))
    return Fuse().run(gm, prices()).graph


def find(gm: fx.GraphModule, op: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.op == op)


def no_value(gm: fx.GraphModule) -> None:
    del find(gm, "call_function").meta["val"]


def wrong_order(gm: fx.GraphModule) -> None:
    find(gm, "placeholder").prepend(find(gm, "call_module"))


def lost_region(gm: fx.GraphModule) -> None:
    gm.delete_submodule("region_0")


def unused_region(gm: fx.GraphModule) -> None:
    gm.add_module("region_9", gm.get_submodule("region_0"))


def wrong_arguments(gm: fx.GraphModule) -> None:
    node = find(gm, "call_module")
    node.args = node.args[:1]


def wrong_results(gm: fx.GraphModule) -> None:
    find(gm, "call_module").meta["val"] = (torch.ones(2),)


def whole_use(gm: fx.GraphModule) -> None:
    region = find(gm, "call_module")
    item = next(iter(region.users))
    item.replace_all_uses_with(region)
    gm.graph.erase_node(item)


@pytest.mark.parametrize(
    ("breaking", "message"),
    [
        (no_value, r"has no meta\['val'\]"),
        (wrong_order, "before it is made"),
        (lost_region, "calls a region that does not exist"),
        (unused_region, "regions that nothing calls: region_9"),
        (wrong_arguments, "passes 1 arguments, its region takes 2"),
        (wrong_results, "has other results than its region"),
        (whole_use, "uses a region's results as a whole"),
    ],
)
def test_broken_graphs(breaking: Callable[[fx.GraphModule], None], message: str) -> None:
    gm = fused()
    verify_graph(gm)
    breaking(gm)
    with pytest.raises(VerifyError, match=message):
        verify_graph(gm)


def test_results_must_stay() -> None:
    gm = trace(lambda x: x.sin().t().contiguous(), torch.ones(3, 4))
    other = trace(lambda x: x.sin().t(), torch.ones(3, 4))
    with pytest.raises(VerifyError, match="results changed"):
        verify_change(gm, other)


def test_aliases_must_stay() -> None:
    gm = trace(lambda x: (x.sin(), x.sin().clone()), torch.ones(3))
    other = trace(lambda x: (y := x.sin(), y.view(3)), torch.ones(3))
    with pytest.raises(VerifyError, match="aliases among the results changed"):
        verify_change(gm, other)
    gm = trace(lambda x: x.clone(), torch.ones(3))
    other = trace(lambda x: x.view(3), torch.ones(3))
    with pytest.raises(VerifyError, match="aliases among the results changed"):
        verify_change(gm, other)


def test_writes_must_stay() -> None:
    gm = trace(lambda x: x.copy_(x.sin()), torch.ones(3))
    other = copy_graph(gm)
    copy = next(node for node in other.graph.nodes if node.name == "copy_")
    copy.replace_all_uses_with(copy.args[1])
    other.graph.erase_node(copy)
    with pytest.raises(VerifyError, match=r"aliases among the results|writes changed"):
        verify_change(gm, other)


def test_inputs_must_stay() -> None:
    gm = trace(lambda x, y: x.sin(), torch.ones(3), torch.ones(3))
    other = copy_graph(gm)
    other.graph.erase_node([n for n in other.graph.nodes if n.op == "placeholder"][1])
    with pytest.raises(VerifyError, match="inputs changed"):
        verify_change(gm, other)
