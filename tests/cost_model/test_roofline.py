"""Prices: FLOPs, bytes, launches and seconds of nodes, regions and graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from perfopt.cost_model.cost import Cost
from perfopt.cost_model.device import Device
from perfopt.cost_model.ops import work
from perfopt.cost_model.roofline import CostModel

aten = torch.ops.aten
UNIT = Device(
    name="unit", kind="cpu", peaks={"float32": 2e9, "bfloat16": 4e9, "tf32": 8e9},
    vector={"float32": 2e9}, memory_bandwidth=1e9, memory_bytes=1e9, launch_seconds=1e-6, cores=1,
)  # fmt: skip


def trace(fn: Any, *args: Any, symbolic: bool = False) -> torch.fx.GraphModule:
    return make_fx(fn, tracing_mode="symbolic" if symbolic else "fake")(*args)


def last(gm: torch.fx.GraphModule) -> torch.fx.Node:
    return [node for node in gm.graph.nodes if node.op == "call_function"][-1]


def cost(fn: Any, *args: Any) -> Cost:
    return CostModel(UNIT).node(last(trace(fn, *args)))


def test_pointwise() -> None:
    found = cost(torch.add, torch.ones(1000), torch.ones(1000))
    assert found == Cost(1000, 12000, 1, 1e-6 + 12e-6, "memory", 12e-6)
    assert found.achieved == pytest.approx(12 / 13) and found.mfu == 0.0


def test_functions_cost_more_than_one_flop() -> None:
    assert cost(torch.exp, torch.ones(1000)).flops == 10_000
    assert cost(torch.exp, torch.ones(1000)).bound == "compute"


def test_reductions_count_what_they_fold() -> None:
    assert cost(lambda x: x.sum(0), torch.ones(10, 100)).flops == 1000
    assert cost(lambda x: x.sum(0), torch.ones(10, 100)).bytes == 4400


def test_broadcast_operands_are_read_once() -> None:
    found = cost(torch.add, torch.ones(100, 100), torch.ones(100, 1).expand(100, 100))
    assert found.bytes == 2 * 40000 + 400


def test_the_same_operand_twice_is_read_once() -> None:
    x = torch.ones(1000)
    assert cost(lambda x: torch.mul(x, x), x).bytes == 8000


def test_two_views_of_one_tensor_read_no_more_than_it_holds() -> None:
    both = cost(lambda x: x.view(-1) + x.view(4, 250).view(1000), torch.ones(1000))
    assert both.bytes == 8000
    halves = cost(lambda x: x[:100] + x[100:200], torch.ones(1000))
    assert halves.bytes == 1200


def test_views_and_items_cost_nothing() -> None:
    gm = trace(lambda x: x.t().unsqueeze(0).expand(3, 5, 4), torch.ones(4, 5))
    assert CostModel(UNIT).graph(gm) == Cost()
    gm = trace(lambda x: torch.var_mean(x, 0), torch.ones(4, 5))
    model = CostModel(UNIT)
    items = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert [model.node(node).launches for node in items] == [1, 0, 0]
    assert model.node(items[0]).bytes == 80 + 40


def test_gathering_reads_what_it_gives() -> None:
    index = torch.zeros(10, dtype=torch.int64)
    found = cost(torch.embedding, torch.ones(1000, 8), index)
    assert found.bytes == 10 * 8 * 4 * 2 + 80


def test_copying_over_does_not_read_the_target() -> None:
    assert cost(lambda x, y: x.copy_(y), torch.ones(100), torch.ones(100)).bytes == 800


PRODUCTS = {
    "mm": (torch.mm, [(8, 16), (16, 32)], 2 * 8 * 16 * 32),
    "bmm": (torch.bmm, [(3, 8, 16), (3, 16, 32)], 2 * 3 * 8 * 16 * 32),
    "addmm": (torch.addmm, [(32,), (8, 16), (16, 32)], 2 * 8 * 16 * 32),
    "conv": (torch.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3)], 2 * 2 * 6 * 6 * 4 * 3 * 9),
    "transposed": (torch.conv_transpose2d, [(2, 3, 8, 8), (3, 4, 3, 3)], 2 * 2 * 64 * 3 * 4 * 9),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products(case: str) -> None:
    fn, shapes, flops = PRODUCTS[case]
    assert work(last(trace(fn, *(torch.ones(s) for s in shapes)))).matrix == flops


def test_attention() -> None:
    q = torch.ones(2, 4, 8, 16)
    gm = trace(torch.nn.functional.scaled_dot_product_attention, q, q, q)
    done = [work(node).matrix for node in gm.graph.nodes]
    assert max(done) == 2 * 2 * (2 * 4 * 8 * 16) * 8


def test_the_dtype_names_the_peak() -> None:
    x = torch.ones(100, 100)
    half = cost(torch.mm, x.bfloat16(), x.bfloat16())
    single = cost(torch.mm, x, x)
    assert (single.seconds - 1e-6) == pytest.approx(2 * (half.seconds - 1e-6))
    node = last(trace(torch.mm, x, x))
    assert CostModel(UNIT, tf32=True).node(node).seconds < single.seconds


def test_symbolic_sizes_count_at_their_hints_and_add_no_guard() -> None:
    gm = trace(lambda x: torch.softmax(x * 2, -1), torch.ones(6, 50), symbolic=True)
    shape = next(iter(gm.graph.nodes)).meta["val"].shape
    guards = len(shape[0].node.shape_env.guards)
    model = CostModel(UNIT)
    assert model.graph(gm).bytes == 4 * 300 * 4
    assert model.peak_bytes(gm) == 3 * 300 * 4
    assert len(shape[0].node.shape_env.guards) == guards
    assert all(isinstance(x, (int, float)) for x in (model.graph(gm).bytes, model.graph(gm).flops))


def test_a_region_reads_and_writes_its_border_once() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = x + y
        b = a * x
        return b.exp(), a

    gm = trace(fn, torch.ones(1000), torch.ones(1000))
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    found = CostModel(UNIT).nodes_as_region(nodes)
    assert (found.launches, found.bytes, found.flops) == (1, 4 * 4000, 12_000)


def test_a_cache_of_known_speed_is_counted_on() -> None:
    cached = Device(
        name="c", kind="cpu", peaks={"float32": 1e15}, vector={"float32": 1e15},
        memory_bandwidth=1e9, memory_bytes=1e9, launch_seconds=0.0, cores=1,
        cache_bytes=6000.0, cache_bandwidth=2e9,
    )  # fmt: skip
    node = last(trace(torch.add, torch.ones(1000), torch.ones(1000)))
    assert CostModel(cached).node(node).seconds == pytest.approx(3e-6 + 6e-6)


def test_costs_add() -> None:
    one = Cost(1, 2, 1, 3.0, "memory")
    assert one + Cost(1, 1, 1, 5.0, "compute") == Cost(2, 3, 2, 8.0, "compute")
