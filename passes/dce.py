"""Dead code: what nobody uses is not computed."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from perfopt.backends.region import is_region
from perfopt.cost_model.cost import Cost
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.cost_model.roofline import CostModel
from perfopt.passes.base import Gate, Level, PassResult
from perfopt.passes.source import first_source_line

_KNOWN = frozenset({"aten", "prims"})


def is_pure(node: fx.Node) -> bool:
    """Whether a call does nothing but give its result.

    Random operations move the generator's state, operations of other libraries may do anything.
    """
    if is_region(node):
        return True
    if node.op != "call_function" or node.is_impure():
        return False
    target: Any = node.target
    if hasattr(target, "_schema"):
        return target.namespace in _KNOWN and not target._schema.is_mutable
    return getattr(target, "__module__", "") in (operator.__name__, "_operator", "math", "torch")


@dataclass(frozen=True)
class Dce:
    """Removes calls without users that do nothing else; one decision for all of them."""

    name: ClassVar[str] = "dce"
    level: ClassVar[Level] = Level.JOINT

    def run(self, graph: fx.GraphModule, cost: CostModel, gate: Gate | None = None) -> PassResult:
        """Remove dead calls, last first; inputs stay."""
        dead = self._sites(graph)
        if not dead or not (gate or Gate()).take():
            return PassResult(graph, (), False)
        decision = Decision(
            self.name,
            Verdict.APPLIED,
            tuple(node.name for node in reversed(dead)),
            "{count} calls whose results nobody uses are dropped",
            {"count": len(dead)},
            first_source_line(reversed(dead)),
            sum(map(cost.node, dead), Cost()),
            Cost(),
        )
        for node in dead:
            graph.graph.erase_node(node)
        return PassResult(graph, (decision,), True)

    def _sites(self, graph: fx.GraphModule) -> list[fx.Node]:
        dead: dict[fx.Node, None] = {}
        for node in reversed(graph.graph.nodes):
            if all(user in dead for user in node.users) and is_pure(node):
                dead[node] = None
        return list(dead)
