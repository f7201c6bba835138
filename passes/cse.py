"""Common subexpressions: what is computed twice from the same operands is computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from perfopt.cost_model.decision import Decision, Verdict
from perfopt.cost_model.roofline import CostModel
from perfopt.cost_model.traffic import mutates, users_through_views
from perfopt.passes.base import Gate, Level, PassResult
from perfopt.passes.dce import is_pure
from perfopt.passes.rewrite import replace_node
from perfopt.passes.source import source_line


def _key(value: Any) -> Any:
    """An argument as something hashable; 1, 1.0 and True are apart, and so are 0.0 and -0.0."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_key, value))
    if isinstance(value, slice):
        return ("slice", _key(value.start), _key(value.stop), _key(value.step))
    return (type(value).__name__, repr(value))


def _escapes(node: fx.Node) -> bool:
    """Whether the node's memory is returned from the graph."""
    return any(user.op == "output" for user in users_through_views(node))


@dataclass(frozen=True)
class Cse:
    """Shares equal pure calls; one decision per call that goes.

    Random operations are never shared, nor two calls whose results are both returned: eager gives
    two tensors there.
    """

    name: ClassVar[str] = "cse"
    level: ClassVar[Level] = Level.JOINT

    def run(self, graph: fx.GraphModule, cost: CostModel, gate: Gate | None = None) -> PassResult:
        """Walk the graph once, replacing each call that an earlier one equals."""
        gate = gate or Gate()
        known: dict[Any, fx.Node] = {}
        decisions: list[Decision] = []
        for node in list(graph.graph.nodes):
            if mutates(node):
                known.clear()  # what was computed before may read other values after
            size = node.meta.get("val")
            if isinstance(size, torch.SymInt):
                # One expression of the graph's sizes is one number, however it is come by.
                key: Any = ("size", size.node.expr)
            elif node.op == "call_function" and is_pure(node):
                key = (node.target, _key(node.args), _key(sorted(node.kwargs.items())))
            else:
                continue
            earlier = known.setdefault(key, node)
            if not node.users or node.op != "call_function":
                continue
            if earlier is node or earlier.meta.get("recompute") != node.meta.get("recompute"):
                continue
            if _escapes(node) and _escapes(earlier):
                continue
            if not gate.take():
                break
            line = source_line(node)
            before, after = replace_node(node, earlier, cost)
            decisions.append(
                Decision(
                    self.name,
                    Verdict.APPLIED,
                    (node.name, earlier.name),
                    "{node} is {earlier} computed again",
                    {"node": node.name, "earlier": earlier.name},
                    line,
                    before,
                    after,
                )
            )
        return PassResult(graph, tuple(decisions), bool(decisions))
