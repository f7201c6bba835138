"""Regions of a graph: which values each must give, its subgraph, and the graph that calls it.

A region's nodes all compute; views are copied into it where they lead from one of its nodes, or
from an input, to another of its nodes. A node may be in several regions (cheap producers are), but
at most one of them, its owner, gives its value to others.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from perfopt.backends.views import VIEWS
from perfopt.cost_model.cost import Cost
from perfopt.cost_model.ops import Work, work
from perfopt.cost_model.roofline import CostModel
from perfopt.cost_model.traffic import (
    is_view,
    read_bytes,
    reads,
    root,
    users_through_views,
    value_bytes,
)
from perfopt.passes.base import LazyGraph, with_graph
from perfopt.passes.dce import is_pure
from perfopt.passes.grouping import Facts, result_tensors

Wanted = Callable[[fx.Node], bool]
Undo = tuple[list["Region"], dict[fx.Node, "Region"], dict[fx.Node, list["Region"]]]


@dataclass(frozen=True, eq=False)
class Region:
    """Computing nodes in graph order; `inner_views` brings views of inputs inside."""

    nodes: tuple[fx.Node, ...]
    inner_views: bool = True

    @cached_property
    def members(self) -> frozenset[fx.Node]:
        """The nodes as a set."""
        return frozenset(self.nodes)


class Plan:
    """The regions that a graph is to get, while cheap producers move between them."""

    def __init__(self, facts: Facts, regions: Iterable[Region]) -> None:
        self.facts = facts
        self.regions = list(regions)
        self.owner: dict[fx.Node, Region] = {n: r for r in self.regions for n in r.nodes}
        self.homes: dict[fx.Node, list[Region]] = {n: [r] for n, r in self.owner.items()}

    def gone(self, node: fx.Node) -> bool:
        """Whether regions compute the node, so that it is not called by itself any more."""
        return bool(self.homes.get(node))

    def wanted(self, result: fx.Node, region: Region) -> bool:
        """Whether something outside of `region` reads a result of one of its nodes."""
        maker = result if result in region.members else result.args[0]
        if self.owner.get(maker) is not region:  # type: ignore[arg-type]
            return False
        for reader in users_through_views(result):
            homes = self.homes.get(reader)
            if not homes or any(maker not in home.members for home in homes):
                return True
        return False

    def body(self, region: Region) -> fx.Graph:
        """The region's subgraph as the plan stands."""
        return subgraph(region, lambda result: self.wanted(result, region))

    def price(self, regions: Iterable[Region], cost: CostModel) -> Cost:
        """What regions cost as the plan stands."""
        total = Cost()
        for region in regions:
            results = [each for node in region.nodes for each in result_tensors(node)]
            moved = sum(
                value_bytes(each.meta["val"]) for each in results if self.wanted(each, region)
            )
            moved += read_bytes(
                read
                for node in region.nodes
                for read in reads(node)
                if read[0] not in region.members
            )
            total += cost.price(sum(map(work, region.nodes), Work()), moved)
        return total

    def replace(self, changes: Mapping[Region, Region]) -> Undo:
        """Put regions in the place of others; returns what `undo` needs."""
        former = (self.regions, self.owner, self.homes)
        self.regions = [changes.get(region, region) for region in self.regions]
        moved = {node: changes.get(home, home) for node, home in self.owner.items()}
        self.owner = {node: home for node, home in moved.items() if node in home.members}
        self.homes = {}
        for region in self.regions:
            for node in region.nodes:
                self.homes.setdefault(node, []).append(region)
        return former

    def undo(self, former: Undo) -> None:
        """Take back a `replace`."""
        self.regions, self.owner, self.homes = former

    def drop_empty(self) -> int:
        """Drop regions that give nothing any more; returns how many."""
        count = len(self.regions)
        while True:
            kept = [
                region
                for region in self.regions
                if any(self.wanted(r, region) for n in region.nodes for r in result_tensors(n))
            ]
            if len(kept) == len(self.regions):
                return count - len(kept)
            self.regions = kept
            left = set(kept)
            self.owner = {node: home for node, home in self.owner.items() if home in left}
            self.homes = {
                node: [home for home in homes if home in left] for node, homes in self.homes.items()
            }

    def with_node(self, region: Region, node: fx.Node) -> Region:
        """The region with one node more."""
        return Region(self.facts.ordered((*region.nodes, node)), region.inner_views)

    def without_node(self, region: Region, node: fx.Node) -> Region:
        """The region with one node less."""
        return Region(tuple(n for n in region.nodes if n is not node), region.inner_views)


def trial(region: Region) -> fx.Graph:
    """The region's subgraph if all that is read outside of it must be given."""
    members = region.members
    return subgraph(
        region, lambda result: any(user not in members for user in users_through_views(result))
    )


class _Body:
    """A subgraph in the making: nodes are copied as they are needed."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.graph = fx.Graph()
        self.inputs: list[fx.Node] = []
        self.known: dict[fx.Node, fx.Node] = {}

    def value(self, node: fx.Node) -> fx.Node:
        """The node's value inside: copied, or an input."""
        known = self.known.get(node)
        if known is None:
            known = self._copied(node) if self._inside(node) else self._input(node)
            self.known[node] = known
        return known

    def _inside(self, node: fx.Node) -> bool:
        if node in self.region.members:
            return True
        if not is_view(node):
            return False
        if root(node) in self.region.members:
            return True
        return self.region.inner_views and node.target in VIEWS

    def _copied(self, node: fx.Node) -> fx.Node:
        for operand in node.all_input_nodes:
            self.value(operand)
        return self.graph.node_copy(node, self.known.__getitem__)

    def _input(self, node: fx.Node) -> fx.Node:
        self.inputs.append(node)
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        place = self.graph.inserting_after(last) if last else self.graph.inserting_before(
            next(iter(self.graph.nodes), None)
        )  # fmt: skip
        with place:
            made = self.graph.create_node("placeholder", node.name, (), {}, node.name)
        made.meta = {"val": node.meta.get("val")}
        return made


def subgraph(region: Region, wanted: Wanted) -> fx.Graph:
    """A graph that computes the wanted results of a region from what it reads outside.

    Its inputs are placeholders named after the outer nodes, their outer nodes lie in
    `meta["outer"]` of the output node, and those of the results in `meta["results"]`.
    """
    body = _Body(region)
    results = [
        each for node in region.nodes for each in result_tensors(node) if wanted(each)
    ]  # fmt: skip
    for node in region.nodes:
        if any(each in results for each in result_tensors(node)):
            body.value(node)
    values = tuple(body.value(each) for each in results)
    output = body.graph.output(values)
    output.meta = {"outer": tuple(body.inputs), "results": tuple(results)}
    return body.graph


def build(gm: fx.GraphModule, plan: Plan) -> tuple[fx.GraphModule, dict[Region, fx.GraphModule]]:
    """A graph that calls the plan's regions, and their own graphs in the order of the calls."""
    bodies = {region: plan.body(region) for region in plan.regions}
    graph = fx.Graph()
    made = with_graph(gm, graph)
    modules: dict[Region, fx.GraphModule] = {}
    values: dict[fx.Node, fx.Node] = {}
    for unit in _ordered(plan, bodies):
        if isinstance(unit, fx.Node):
            if is_view(unit) and unit.args[0] not in values:
                continue  # it led only to what regions now hold
            values[unit] = graph.node_copy(unit, values.__getitem__)
            continue
        name = _free_name(made)
        body = bodies[unit]
        call = _call(graph, name, unit, body, values)
        # Tensors that live in a module of their own are inputs of the region, never held by it.
        modules[unit] = LazyGraph(torch.nn.Module(), body, name)
        made.add_module(name, modules[unit])
        for k, result in enumerate(body.output_node().meta.pop("results")):
            values[result] = _item(graph, call, k, result)
        body.output_node().meta.pop("outer")
    _drop_views(graph, gm)
    return made, modules


def _free_name(gm: fx.GraphModule) -> str:
    number = sum(name.startswith("region_") for name, _ in gm.named_children())
    while hasattr(gm, f"region_{number}"):
        number += 1
    return f"region_{number}"


def _call(
    graph: fx.Graph, name: str, region: Region, body: fx.Graph, values: dict[fx.Node, fx.Node]
) -> fx.Node:
    meta = body.output_node().meta
    arguments = tuple(values[node] for node in meta["outer"])
    call = graph.create_node("call_module", name, arguments, {}, name)
    call.meta["region"] = True
    call.meta["val"] = tuple(result.meta["val"] for result in meta["results"])
    call.meta["members"] = tuple(node.name for node in region.nodes)
    traced = (node.meta.get("stack_trace") for node in region.nodes)
    call.meta["stack_trace"] = next((trace for trace in traced if trace), None)
    return call


def _item(graph: fx.Graph, call: fx.Node, k: int, result: fx.Node) -> fx.Node:
    item = graph.create_node("call_function", operator.getitem, (call, k), {}, result.name)
    item.meta = dict(result.meta)
    return item


def _drop_views(graph: fx.Graph, before: fx.GraphModule) -> None:
    """Remove views that led only to what regions now hold."""
    unused = {node.name for node in before.graph.nodes if not node.users}
    for node in reversed(graph.nodes):
        if not node.users and node.name not in unused and is_view(node):
            graph.erase_node(node)


def _ordered(plan: Plan, bodies: Mapping[Region, fx.Graph]) -> list[fx.Node | Region]:
    """Calls and regions in an order that respects what they need, as close to the old as can be."""
    position = plan.facts.position

    def unit_of(node: fx.Node) -> fx.Node | Region:
        if node.target is operator.getitem and node.args[0] in plan.owner:
            node = node.args[0]  # type: ignore[assignment]
        return plan.owner.get(node, node)

    needs: dict[fx.Node | Region, set[fx.Node | Region]] = {}
    keys: dict[fx.Node | Region, int] = {}
    impure: fx.Node | None = None
    for node in plan.facts.nodes:
        if plan.gone(node) or unit_of(node) is not node:
            continue
        made = root(node)
        if plan.gone(made) and made not in plan.owner:
            continue  # a view of what is now computed only where it is read
        needs[node] = {unit_of(operand) for operand in node.all_input_nodes}
        keys[node] = position[node]
        if node.op == "call_function" and not is_view(node) and not is_pure(node):
            needs[node] |= {impure} if impure is not None else set()
            impure = node
    for region, body in bodies.items():
        needs[region] = {unit_of(node) for node in body.output_node().meta["outer"]}
        keys[region] = max(position[node] for node in region.nodes)
    return _sorted(needs, keys)


def _sorted(needs: dict[Any, set[Any]], keys: Mapping[Any, int]) -> list[Any]:
    waiting = {unit: len(of) for unit, of in needs.items()}
    followers: dict[Any, list[Any]] = {}
    for unit, of in needs.items():
        for needed in of:
            followers.setdefault(needed, []).append(unit)
    # A region and the last node of it that is also called by itself may share a key.
    ready = [(keys[unit], k, unit) for k, unit in enumerate(needs) if not waiting[unit]]
    heapq.heapify(ready)
    done: list[Any] = []
    number = len(needs)
    while ready:
        unit = heapq.heappop(ready)[2]
        done.append(unit)
        for follower in followers.get(unit, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                number += 1
                heapq.heappush(ready, (keys[follower], number, follower))
    if len(done) != len(needs):
        stuck = [str(unit) for unit in needs if waiting[unit] > 0]
        raise RuntimeError(f"regions that wait for each other: {', '.join(stuck[:8])}")
    return done
