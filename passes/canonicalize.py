"""One spelling per operation: calls that change nothing are dropped, exactly.

Only what is the same to the last bit goes: `x * 1` and `x - 0`, not `x + 0`, which turns -0.0 into
0.0. A call that gives memory of its own goes only where nobody could tell the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from perfopt.cost_model.decision import Decision, Verdict
from perfopt.cost_model.roofline import CostModel
from perfopt.cost_model.traffic import mutates, root, users_through_views
from perfopt.passes.base import Gate, Level, PassResult
from perfopt.passes.rewrite import replace_node
from perfopt.passes.source import source_line

aten = torch.ops.aten
_RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
_PERMUTES = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
# The identity wherever shape, strides and offset stay.
_VIEWS = _RESHAPES | {
    aten.expand.default, aten.slice.Tensor, aten.alias.default, aten.detach.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
_CASTS = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
_COPIES = _CASTS | {aten.clone.default, aten.contiguous.default}
_TIMES = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
_MINUS = frozenset({aten.sub.Tensor, aten.sub.Scalar})
_PLUS = frozenset({aten.add.Tensor, aten.add.Scalar})
# Constants in the shape of an operand whose values they do not read.
_LIKE = {aten.full_like.default: None, aten.zeros_like.default: 0, aten.ones_like.default: 1}
# Every value of the first is a value of the second.
_WIDER = {
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
    torch.int32: {torch.int64, torch.float64},
    torch.int16: {torch.int32, torch.int64, torch.float32, torch.float64},
    torch.int8: {torch.int16, torch.int32, torch.int64, torch.float32, torch.float64},
    torch.uint8: {torch.int16, torch.int32, torch.int64, torch.float32, torch.float64},
}
Spelling = tuple[Any, tuple[Any, ...], dict[str, Any], str]


def _tensor(value: Any) -> torch.Tensor | None:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _layout(tensor: torch.Tensor) -> Any:
    """Shape, strides, offset and kind of a tensor as a value that compares without guards."""
    sizes = [*tensor.shape, *tensor.stride(), tensor.storage_offset()]
    return ([str(size) for size in sizes], tensor.dtype, tensor.device)


def _same_layout(left: Any, right: Any, offset: bool = True) -> bool:
    a, b = _tensor(left), _tensor(right)
    if a is None or b is None or a.layout != torch.strided or b.layout != torch.strided:
        return False
    if a.ndim != b.ndim or a.dtype != b.dtype:
        return False
    one, other = _layout(a), _layout(b)
    return bool(one == other if offset else (one[0][:-1], *one[1:]) == (other[0][:-1], *other[1:]))


def _order(node: fx.Node) -> list[int]:
    tensor = _tensor(node)
    rank = tensor.ndim if tensor is not None else 0
    order = list(range(rank))
    given: Any = node.args[1:]
    if node.target is aten.permute.default:
        order = [d % rank for d in given[0]]
    elif node.target is aten.transpose.int and rank:
        a, b = given[0] % rank, given[1] % rank
        order[a], order[b] = order[b], order[a]
    elif node.target is aten.t.default:
        order.reverse()
    return order


@dataclass(frozen=True)
class Canonicalize:
    """Drops calls that give back what they are given; one decision per call."""

    name: ClassVar[str] = "canonicalize"
    level: ClassVar[Level] = Level.JOINT

    def run(self, graph: fx.GraphModule, cost: CostModel, gate: Gate | None = None) -> PassResult:
        """Walk the graph once in order, so that chains collapse from their start."""
        gate = gate or Gate()
        written = {
            root(arg)
            for node in graph.graph.nodes if mutates(node)
            for arg in node.all_input_nodes
        }  # fmt: skip
        decisions: list[Decision] = []
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or not node.users:
                continue
            respelled = self._respelled(node)
            if respelled is not None and gate.take():
                decisions.append(self._rewritten(node, respelled, cost))
                continue
            found = self._same_as(node, written)
            if found is None:
                continue
            source, why = found
            if not gate.take():
                break
            decisions.append(self._replaced(node, source, why, cost))
        return PassResult(graph, tuple(decisions), bool(decisions))

    def _replaced(self, node: fx.Node, source: fx.Node, why: str, cost: CostModel) -> Decision:
        line = source_line(node)
        before, after = replace_node(node, source, cost)
        return Decision(
            self.name,
            Verdict.APPLIED,
            (node.name,),
            "{node} is {source}: {why}",
            {"node": node.name, "source": source.name, "why": why},
            line,
            before,
            after,
        )

    def _respelled(self, node: fx.Node) -> Spelling | None:
        """The one spelling of a call that has several, and why; None where it has it already."""
        if node.target in _LIKE and _static(node):
            tensor, fill = node.meta["val"], _LIKE[node.target]
            args = (list(tensor.shape), node.args[1] if fill is None else fill)
            kwargs = {
                "dtype": tensor.dtype, "layout": tensor.layout, "device": tensor.device,
                "pin_memory": False,
            }  # fmt: skip
            return aten.full.default, args, kwargs, "only the shape of its operand counts"
        if node.target in (aten.arange.default, aten.arange.start):
            bounds = node.args if node.target is aten.arange.start else (0, *node.args)
            return aten.arange.start_step, (*bounds, 1), dict(node.kwargs), "start, end and step"
        return None

    def _rewritten(self, node: fx.Node, spelling: Spelling, cost: CostModel) -> Decision:
        target, args, kwargs, why = spelling
        before, old = cost.node(node), node.target
        node.target, node.args, node.kwargs = target, args, kwargs
        return Decision(
            self.name,
            Verdict.APPLIED,
            (node.name,),
            "{node}: {old} is written as {new} ({why})",
            {"node": node.name, "old": str(old), "new": str(target), "why": why},
            source_line(node),
            before,
            cost.node(node),
        )

    def _same_as(self, node: fx.Node, written: set[fx.Node]) -> tuple[fx.Node, str] | None:
        """The node that `node` may be replaced by, and why; None where it may not."""
        view = self._view_of(node)
        if view is not None:
            # Eager returns a tensor object of its own for a view.
            returned = any(user.op == "output" for user in node.users)
            return None if returned else view
        copy = self._copy_of(node)
        if copy is None or not _indistinct(node, copy[0], written):
            return None
        return copy

    def _view_of(self, node: fx.Node) -> tuple[fx.Node, str] | None:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        if node.target in _VIEWS and _same_layout(node, source):
            return source, "the view shows all of it as it is"
        for kind in (_RESHAPES, _PERMUTES):
            if node.target not in kind:
                continue
            if kind is _PERMUTES and _order(node) == sorted(_order(node)):
                return source, "the order of the dimensions stays"
            base = source.args[0] if source.target in kind else None
            if not isinstance(base, fx.Node) or not _same_layout(node, base):
                continue
            if kind is _RESHAPES:
                return base, "one reshape undoes the other"
            first, second = _order(source), _order(node)
            if [first[d] for d in second] == list(range(len(second))):
                return base, "one permutation undoes the other"
        return None

    def _copy_of(self, node: fx.Node) -> tuple[fx.Node, str] | None:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        if node.target in _COPIES and _same_layout(node, source, offset=False):
            return source, "the copy has the same type and layout"
        if node.target in _CASTS and source.target in _CASTS:
            base, middle = source.args[0], _tensor(source)
            first = _tensor(base)
            if first is not None and middle is not None and isinstance(base, fx.Node):
                exact = middle.dtype in _WIDER.get(first.dtype, set())
                if exact and _same_layout(node, base, offset=False):
                    return base, "the type in between holds every value"
        if self._neutral(node) and _same_layout(node, source, offset=False):
            return source, "the constant changes no value"
        return None

    def _neutral(self, node: fx.Node) -> bool:
        if len(node.args) != 2 or node.kwargs:
            return False
        constant, tensor = node.args[1], _tensor(node)
        if not isinstance(constant, (int, float)) or tensor is None:
            return False
        if node.target in _TIMES:
            return constant == 1
        if node.target in _MINUS:
            return constant == 0 and str(float(constant)) == "0.0"
        exact = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
        return node.target in _PLUS and constant == 0 and exact


def _static(node: fx.Node) -> bool:
    """Whether the result is a plain tensor whose sizes are numbers, laid out row by row."""
    tensor = _tensor(node)
    if tensor is None or type(tensor.shape) is not torch.Size or tensor.layout != torch.strided:
        return False
    sizes = [*tensor.shape, *tensor.stride()]
    return all(type(size) is int for size in sizes) and tensor.is_contiguous()


def _indistinct(node: fx.Node, source: fx.Node, written: set[fx.Node]) -> bool:
    """Whether two memories may become one: neither is written to, and not both are seen."""
    of_source = root(source)
    if of_source in written or node in written or root(node) in written:
        return False
    if not any(user.op == "output" for user in users_through_views(node)):
        return True
    if of_source.op != "call_function":
        return False
    return not any(user.op == "output" for user in users_through_views(of_source))
