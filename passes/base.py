"""The one interface of a pass: graph in, graph and decisions out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

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


class Pass(Protocol):
    """A frozen dataclass whose fields are the pass's options.

    `run` gets a graph that it may change in place (the runner copied it) and returns it.
    It may leave the graph broken in between, never at the end.
    """

    name: ClassVar[str]
    level: ClassVar[Level]

    def run(self, graph: GraphModule, cost: CostModel) -> PassResult:
        """Transform `graph`, deciding by `cost`."""
        ...
