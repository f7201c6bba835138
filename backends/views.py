"""Views as index arithmetic: the dimensions that a view gives, and where it reads its operand.

Each view has two functions. `dims` makes the result's dimensions from the operand's (so that axes
are shared where they can be), `source` turns a position in the result into one in the operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from perfopt.backends.axes import AxisMap, Dim
from perfopt.backends.index import Index, Size, Unsupported, as_size, flatten, unflatten

aten = torch.ops.aten
Position = tuple[Index, ...]


@dataclass(frozen=True)
class View:
    """How one view operation relates its result to its operand."""

    dims: Callable[[AxisMap, fx.Node, list[Dim]], list[Dim]]
    source: Callable[[fx.Node, Position, Mapping[str, Size]], Position]


def shape_of(value: Any) -> tuple[Size, ...]:
    """The sizes of a node's value, or of a fake tensor, adding no guards."""
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    return tuple(as_size(size) for size in value.shape)


def operand(node: fx.Node) -> fx.Node:
    """The tensor that a view looks at."""
    value = node.args[0]
    assert isinstance(value, fx.Node)
    return value


def axis_of(dim: Any, rank: int) -> int:
    """A dimension number counted from 0."""
    if not isinstance(dim, int):
        raise Unsupported(f"dimension {dim!r}")
    return dim % rank if rank else 0


def _reshape_dims(axes: AxisMap, node: fx.Node, dims: list[Dim]) -> list[Dim]:
    result = [axes.fresh(size) for size in shape_of(node)]
    axes.unify([a for dim in dims for a in dim], [a for dim in result for a in dim])
    return result


def _reshape_source(node: fx.Node, at: Position, sizes: Mapping[str, Size]) -> Position:
    return unflatten(flatten(at, shape_of(node)), shape_of(operand(node)), sizes)


def _order(node: fx.Node) -> list[int]:
    rank = len(shape_of(operand(node)))
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [axis_of(d, rank) for d in node.args[1]]  # type: ignore[union-attr]
    elif node.target is aten.transpose.int and rank:
        a, b = axis_of(node.args[1], rank), axis_of(node.args[2], rank)
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return order


def _permute_dims(axes: AxisMap, node: fx.Node, dims: list[Dim]) -> list[Dim]:
    return [dims[d] for d in _order(node)]


def _permute_source(node: fx.Node, at: Position, sizes: Mapping[str, Size]) -> Position:
    result = [Index()] * len(at)
    for out, source in enumerate(_order(node)):
        result[source] = at[out]
    return tuple(result)


def _expand_dims(axes: AxisMap, node: fx.Node, dims: list[Dim]) -> list[Dim]:
    shape, source = shape_of(node), shape_of(operand(node))
    lead = len(shape) - len(source)
    result: list[Dim] = []
    for d, size in enumerate(shape):
        same = d >= lead and source[d - lead] != 1
        result.append(dims[d - lead] if same else axes.fresh(size))
    return result


def _expand_source(node: fx.Node, at: Position, sizes: Mapping[str, Size]) -> Position:
    source = shape_of(operand(node))
    lead = len(at) - len(source)
    return tuple(Index() if size == 1 else at[d + lead] for d, size in enumerate(source))


def _unsqueeze_dims(axes: AxisMap, node: fx.Node, dims: list[Dim]) -> list[Dim]:
    at = axis_of(node.args[1], len(dims) + 1)
    return dims[:at] + [[]] + dims[at:]


def _unsqueeze_source(node: fx.Node, at: Position, sizes: Mapping[str, Size]) -> Position:
    dim = axis_of(node.args[1], len(at))
    return at[:dim] + at[dim + 1 :]


def _squeezed(node: fx.Node) -> set[int]:
    source = shape_of(operand(node))
    if node.target is aten.squeeze.default:
        chosen = set(range(len(source)))
    else:
        given = node.args[1]
        listed = given if isinstance(given, (list, tuple)) else [given]
        chosen = {axis_of(d, len(source)) for d in listed}
    return {d for d in chosen if d < len(source) and source[d] == 1}


def _squeeze_dims(axes: AxisMap, node: fx.Node, dims: list[Dim]) -> list[Dim]:
    gone = _squeezed(node)
    return [dim for d, dim in enumerate(dims) if d not in gone]


def _squeeze_source(node: fx.Node, at: Position, sizes: Mapping[str, Size]) -> Position:
    gone, left = _squeezed(node), iter(at)
    rank = len(shape_of(operand(node)))
    return tuple(Index() if d in gone else next(left) for d in range(rank))


def _select_dims(axes: AxisMap, node: fx.Node, dims: list[Dim]) -> list[Dim]:
    at = axis_of(node.args[1], len(dims))
    return dims[:at] + dims[at + 1 :]


def _select_source(node: fx.Node, at: Position, sizes: Mapping[str, Size]) -> Position:
    source = shape_of(operand(node))
    dim = axis_of(node.args[1], len(source))
    chosen = node.args[2]
    if not isinstance(chosen, int):
        raise Unsupported("select at an index that is not a constant")
    start: Size = chosen if chosen >= 0 else source[dim] + chosen
    return at[:dim] + (Index.of({}, start),) + at[dim:]


def _slice_bounds(node: fx.Node) -> tuple[int, Size, int]:
    source = shape_of(operand(node))
    args = list(node.args[1:]) + [None] * 4
    dim = axis_of(args[0] or 0, len(source))
    start: Any = args[1] or 0
    step = node.args[4] if len(node.args) > 4 else 1
    if not isinstance(start, int) or not isinstance(step, int):
        raise Unsupported("a slice whose start or step is not a constant")
    size = source[dim]
    if start < 0:
        if not isinstance(size, int):
            raise Unsupported("a slice from the end of a symbolic dimension")
        start = max(size + start, 0)
    return dim, start, step


def _slice_dims(axes: AxisMap, node: fx.Node, dims: list[Dim]) -> list[Dim]:
    dim, start, step = _slice_bounds(node)
    shape, source = shape_of(node), shape_of(operand(node))
    if shape[dim] == source[dim]:
        return dims
    return dims[:dim] + [axes.fresh(shape[dim])] + dims[dim + 1 :]


def _slice_source(node: fx.Node, at: Position, sizes: Mapping[str, Size]) -> Position:
    dim, start, step = _slice_bounds(node)
    moved = at[dim].times(step) + Index.of({}, start)
    return at[:dim] + (moved,) + at[dim + 1 :]


def _flip_source(node: fx.Node, at: Position, sizes: Mapping[str, Size]) -> Position:
    shape = shape_of(node)
    turned = {axis_of(d, len(shape)) for d in node.args[1]}  # type: ignore[union-attr]
    return tuple(
        index.times(-1) + Index.of({}, shape[d] - 1) if d in turned else index
        for d, index in enumerate(at)
    )


def _same_dims(axes: AxisMap, node: fx.Node, dims: list[Dim]) -> list[Dim]:
    return dims


def _same_source(node: fx.Node, at: Position, sizes: Mapping[str, Size]) -> Position:
    return at


def _flip_dims(axes: AxisMap, node: fx.Node, dims: list[Dim]) -> list[Dim]:
    return [axes.fresh(size) for size in shape_of(node)]


_RESHAPE = View(_reshape_dims, _reshape_source)
_PERMUTE = View(_permute_dims, _permute_source)
_SQUEEZE = View(_squeeze_dims, _squeeze_source)
_SAME = View(_same_dims, _same_source)

VIEWS: dict[Any, View] = {
    aten.view.default: _RESHAPE,
    aten.reshape.default: _RESHAPE,
    aten._unsafe_view.default: _RESHAPE,
    aten.permute.default: _PERMUTE,
    aten.transpose.int: _PERMUTE,
    aten.t.default: _PERMUTE,
    aten.expand.default: View(_expand_dims, _expand_source),
    aten.unsqueeze.default: View(_unsqueeze_dims, _unsqueeze_source),
    aten.squeeze.default: _SQUEEZE,
    aten.squeeze.dim: _SQUEEZE,
    aten.squeeze.dims: _SQUEEZE,
    aten.select.int: View(_select_dims, _select_source),
    aten.slice.Tensor: View(_slice_dims, _slice_source),
    aten.flip.default: View(_flip_dims, _flip_source),
    aten.alias.default: _SAME,
    aten.detach.default: _SAME,
}
# Copies: the same values in a buffer of their own.
COPIES = frozenset({aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default})
VIEWS |= dict.fromkeys(COPIES, _SAME)
