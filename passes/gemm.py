"""Matrix products by the library that is fastest on the device.

ATen multiplies f32 matrices on CPUs by MKL, which takes its AVX2 code on CPUs of other makers than
Intel; oneDNN, which torch ships as well, takes AVX-512 wherever it is. The price decides: oneDNN's
higher peak against its longer call. The sums are added up in another order, nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from perfopt.backends.torch_private import onednn_linear
from perfopt.cost_model.cost import Cost
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.cost_model.device import ONEDNN
from perfopt.cost_model.roofline import CostModel
from perfopt.passes.base import Gate, Level, PassResult
from perfopt.passes.rewrite import replace_node
from perfopt.passes.source import source_line

aten = torch.ops.aten
_TRANSPOSES = frozenset({aten.t.default})


@dataclass(frozen=True)
class Gemm:
    """Gives each `mm` and `addmm` in f32 to oneDNN where that is predicted to be faster."""

    name: ClassVar[str] = "gemm"
    level: ClassVar[Level] = Level.GRAPH

    def run(self, graph: fx.GraphModule, cost: CostModel, gate: Gate | None = None) -> PassResult:
        """Weigh every product; rewrite those that gain."""
        gate = gate or Gate()
        if onednn_linear() is None or ONEDNN not in cost.device.peaks:
            return PassResult(graph, (), False)
        decisions: list[Decision] = []
        for node in list(graph.graph.nodes):
            operands = _operands(node)
            if operands is None:
                continue
            with graph.graph.inserting_before(node):
                made = _linear(graph.graph, node, *operands)
            before, after = cost.node(node), cost.node(made)
            if after.seconds >= before.seconds or not gate.take():
                graph.graph.erase_node(made)
                decisions.append(self._decision(node, Verdict.REJECTED, before, None, after))
                continue
            name, line = node.name, node
            decision = self._decision(line, Verdict.APPLIED, before, after, None)
            replace_node(node, made, cost)
            made.name = name
            decisions.append(decision)
        applied = any(d.verdict is Verdict.APPLIED for d in decisions)
        if applied:
            graph.graph.eliminate_dead_code()
        return PassResult(graph, tuple(decisions), applied)

    def _decision(
        self, node: fx.Node, verdict: Verdict, before: Cost, after: Cost | None, other: Cost | None
    ) -> Decision:
        rows, columns = node.meta["val"].shape
        return Decision(
            self.name,
            verdict,
            (node.name,),
            "a product of {rows} x {columns} by oneDNN"
            if verdict is Verdict.APPLIED
            else "a product of {rows} x {columns} stays with ATen's library",
            {"rows": str(rows), "columns": str(columns)},
            source_line(node),
            before,
            after,
            "" if other is None else "oneDNN",
            other,
        )


def _operands(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """The matrices and the bias of an f32 product on the CPU, or None."""
    if node.target is aten.mm.default:
        left, right, bias = node.args[0], node.args[1], None
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, left, right = node.args[:3]
        if bias.meta["val"].dim() != 1:  # type: ignore[union-attr]
            return None
    else:
        return None
    for operand in (left, right, bias):
        if operand is None:
            continue
        value = operand.meta["val"]  # type: ignore[union-attr]
        if value.dtype is not torch.float32 or value.device.type != "cpu":
            return None
        if any(isinstance(size, int) and size == 0 for size in value.shape):
            return None
    return left, right, bias


def _linear(graph: fx.Graph, node: fx.Node, left: Any, right: Any, bias: Any) -> fx.Node:
    """`left @ right + bias` as oneDNN's linear, which takes the right matrix transposed."""
    if left.target in _TRANSPOSES and left.args[0].meta["val"].is_contiguous():
        # oneDNN's linear would copy it: as a call of its own that can be a generated kernel.
        source = left
        left = graph.call_function(
            aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
        )
        value = source.meta["val"].clone(memory_format=torch.contiguous_format)
        left.meta = {**source.meta, "val": value}
    if right.target in _TRANSPOSES:
        weight = right.args[0]
    else:
        weight = graph.call_function(aten.t.default, (right,))
        weight.meta = {**right.meta, "val": right.meta["val"].t()}
    made = graph.call_function(onednn_linear(), (left, weight, bias, "none", [], ""))
    made.meta = dict(node.meta)
    return made
