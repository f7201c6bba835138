"""The one interface of a pass: graph in, graph and decisions out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

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


class UserError(ValueError):
    """What a user asked of a pass cannot be had: the runner lets it through, unlike a fault."""


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


class LazyGraph(GraphModule):
    """A `GraphModule` that generates its code when it is first run or printed, not when made.

    Most graphs of a compilation are never run: the program is generated from their nodes.
    """

    def recompile(self) -> Any:
        """Forget the code: the next run generates it."""
        type(self).forward = _first_run
        vars(self).pop("_code", None)

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        if "_code" not in vars(self):
            GraphModule.recompile(self)
        return str(vars(self)["_code"])


def _first_run(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
    GraphModule.recompile(self)
    return self.forward(*args, **kwargs)


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
    """A copy with nodes of its own; parameters, submodules and `meta` values are shared."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, values)
    if result is not None:
        output = graph.output(result)
        output.meta = dict(gm.graph.output_node().meta)
    return with_graph(gm, graph)


def with_graph(gm: GraphModule, graph: fx.Graph) -> GraphModule:
    """A module of `graph` that shares what `gm` holds."""
    made = LazyGraph(torch.nn.Module(), fx.Graph())
    for kind in ("_parameters", "_buffers", "_modules"):
        getattr(made, kind).update(getattr(gm, kind))
    for name, value in vars(gm).items():
        if isinstance(value, torch.Tensor):
            setattr(made, name, value)
    made.meta.update(gm.meta)
    # The property `graph` would copy a graph that has an owner; this one is ours.
    made._graph = graph
    graph.owning_module = made
    return made
