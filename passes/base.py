"""The one interface of a pass: graph in, graph and decisions out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

import torch
from torch import fx
from torch.fx import GraphModule

from perfopt.cost_model.decision import Decision
from perfopt.cost_model.roofline import CostModel


class Level(Enum):
    """Which graph a pass works on."""

    PRE = "pre"  # Dynamo's graph: neither functional nor ATen
    JOINT = "joint"  # forward and backward together, functional ATen
    GRAPH = "graph"  # forward, backward or inference alone, functional ATen


@dataclass(frozen=True)
class PassResult:
    """What a pass made: the graph (changed in place or not) and the decisions behind it."""

    graph: GraphModule
    decisions: tuple[Decision, ...]
    changed: bool


class Gate:
    """Counts applied decisions against a limit, so that a wrong result is found by halving it."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.taken = 0

    def take(self) -> bool:
        """Whether one more decision may be applied; counts it if so."""
        if self.limit is not None and self.taken >= self.limit:
            return False
        self.taken += 1
        return True


class Pass(Protocol):
    """A frozen dataclass whose fields are the pass's options.

    `run` gets a graph that it may change in place (the runner copied it) and returns it, or
    another. It may leave the graph broken in between, never at the end. It asks `gate` before
    each decision that it applies; without a gate everything is allowed.
    """

    name: ClassVar[str]
    level: ClassVar[Level]

    def run(self, graph: GraphModule, cost: CostModel, gate: Gate | None = None) -> PassResult:
        """Transform `graph`, deciding by `cost`."""
        ...


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy with nodes of its own; parameters, submodules and `meta` values are shared.

    No code is generated: `recompile()` makes the copy runnable.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, values)
    if result is not None:
        output = graph.output(result)
        output.meta = dict(gm.graph.output_node().meta)
    return with_graph(gm, graph)


def with_graph(gm: GraphModule, graph: fx.Graph) -> GraphModule:
    """A module of `graph` that shares what `gm` holds; runnable after `recompile()`."""
    made = GraphModule(torch.nn.Module(), fx.Graph())
    for kind in ("_parameters", "_buffers", "_modules"):
        getattr(made, kind).update(getattr(gm, kind))
    for name, value in vars(gm).items():
        if isinstance(value, torch.Tensor):
            setattr(made, name, value)
    made.meta.update(gm.meta)
    # Not through the property `graph`, which generates the code at once.
    made._graph = graph
    graph.owning_module = made
    return made
