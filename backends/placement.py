"""Operations that choose where an element comes from: joining, padding, and looking up by index.

Each has two functions, as views do: `dims` matches the result's dimensions with the operands', and
`value` computes the result at a position. What reads an operand only in part of its range does so
under a guard, so that no kernel touches memory outside of it; indices that the graph computes are
checked, and one that is out of range is an error as in eager.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol
from typing import cast as typed

import torch
from torch import fx

from perfopt.backends.aten_pointwise import convert
from perfopt.backends.axes import AxisMap, Dim
from perfopt.backends.index import Index, Size, Unsupported, simplified
from perfopt.backends.ir import Builder, Op
from perfopt.backends.views import axis_of, shape_of

aten = torch.ops.aten
Position = tuple[Index, ...]


class Walk(Protocol):
    """What the lowering offers to the rules here."""

    axes: AxisMap
    builder: Builder
    sizes: dict[str, Size]

    def dims_of(self, node: fx.Node) -> list[Dim]:
        """The dimensions of a node's value."""

    def value(self, node: fx.Node, at: Position) -> Op:
        """A node's value at a position."""

    def guarded(self, condition: Op) -> AbstractContextManager[None]:
        """Within it nothing is loaded and no index checked where `condition` is false."""


@dataclass(frozen=True)
class Placement:
    """How one such operation is lowered."""

    dims: Callable[[Walk, fx.Node], list[Dim]]
    value: Callable[[Walk, fx.Node, Position], Op]


# ---- joining and padding ------------------------------------------------------------------------


def _within(b: Builder, at: Op, low: Size, high: Size) -> Op:
    """Whether `low <= at < high`."""
    after = b.op("ge", (at, _number(b, low)), "i1")
    return b.op("and", (after, b.op("lt", (at, _number(b, high)), "i1")), "i1")


def _number(b: Builder, size: Size) -> Op:
    if isinstance(size, int):
        return b.const(size, "i64")
    return b.op("size", (), "i64", Index.of({}, size))


def _moved(at: Position, dim: int, by: Size) -> Position:
    return at[:dim] + (at[dim] + Index.of({}, by),) + at[dim + 1 :]


def _parts(node: fx.Node) -> tuple[list[fx.Node], int]:
    """What is joined, without empty tensors, and along which dimension."""
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dim = axis_of(given, len(shape_of(node)))
    listed = typed(list[fx.Node], node.args[0])
    parts = [p for p in listed if shape_of(p) != (0,) and shape_of(p)[dim] != 0]
    if not parts:
        raise Unsupported("joining nothing")
    return parts, dim


def _cat_dims(work: Walk, node: fx.Node) -> list[Dim]:
    parts, dim = _parts(node)
    alike = len({shape_of(part)[dim] for part in parts}) == 1
    first = work.dims_of(parts[0])
    for other in parts[1:]:
        for d, mine in enumerate(work.dims_of(other)):
            if d != dim or alike:
                work.axes.unify(first[d], mine)
    # Equal parts have an axis that numbers them, so that what they are made of keeps its axes.
    whole = work.axes.fresh(len(parts)) + first[dim] if alike else None
    if whole is None:
        whole = work.axes.fresh(shape_of(node)[dim])
    return [*first[:dim], whole, *first[dim + 1 :]]


def _cat(work: Walk, node: fx.Node, at: Position) -> Op:
    parts, dim = _parts(node)
    sizes = {shape_of(part)[dim] for part in parts}
    if len(sizes) == 1:
        try:
            number, inside = at[dim].divided(sizes.pop(), work.sizes)
        except Unsupported:  # not read along the axes that it was made of
            return _cat_by_place(work, node, at)
        return _cat_by_number(work, node, number, (*at[:dim], inside, *at[dim + 1 :]))
    return _cat_by_place(work, node, at)


def _cat_by_number(work: Walk, node: fx.Node, number: Index, at: Position) -> Op:
    """Equal parts, of which `number` says the one to read."""
    parts, _ = _parts(node)
    b, dtype = work.builder, node.meta["val"].dtype
    which = b.iota(number)
    result: Op | None = None
    for k, part in reversed([*enumerate(parts)]):
        here = b.op("eq", (which, b.const(k, "i64")), "i1")
        with work.guarded(here):
            value: Op = convert(b, work.value(part, at), dtype)
        result = value if result is None else b.op("select", (here, value, result), value.type)
    assert result is not None
    return result


def _cat_by_place(work: Walk, node: fx.Node, at: Position) -> Op:
    parts, dim = _parts(node)
    b, dtype = work.builder, node.meta["val"].dtype
    place = b.iota(at[dim])
    starts: list[Size] = [0]
    for part in parts:
        starts.append(simplified(starts[-1] + shape_of(part)[dim]))
    result: Op | None = None
    for part, start, stop in reversed([*zip(parts, starts[:-1], starts[1:], strict=True)]):
        inside = _within(b, place, start, stop)
        with work.guarded(inside):
            value: Op = convert(b, work.value(part, _moved(at, dim, -start)), dtype)
        result = value if result is None else b.op("select", (inside, value, result), value.type)
    assert result is not None
    return result


def _pads(node: fx.Node) -> list[tuple[Size, Size]]:
    """The elements added before and after, by dimension."""
    given = list(node.args[1])  # type: ignore[arg-type]
    if not all(isinstance(count, int) for count in given):
        raise Unsupported("padding by a symbolic count")
    rank = len(shape_of(node))
    pairs = [(given[k], given[k + 1]) for k in range(0, len(given), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def _pad_dims(work: Walk, node: fx.Node) -> list[Dim]:
    shape, dims = shape_of(node), work.dims_of(node.args[0])  # type: ignore[arg-type]
    pads = _pads(node)
    return [dim if pads[d] == (0, 0) else work.axes.fresh(shape[d]) for d, dim in enumerate(dims)]


def _pad(work: Walk, node: fx.Node, at: Position) -> Op:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    b, dtype = work.builder, node.meta["val"].dtype
    inside: Op | None = None
    for d, (before, after) in enumerate(_pads(node)):
        if (before, after) == (0, 0):
            continue
        place = b.iota(at[d])
        here = _within(b, place, before, simplified(before + shape_of(source)[d]))
        inside = here if inside is None else b.op("and", (inside, here), "i1")
        at = _moved(at, d, -before)
    if inside is None:
        return work.value(source, at)
    with work.guarded(inside):
        value: Op = convert(b, work.value(source, at), dtype)
    fill = convert(b, node.args[2] if len(node.args) > 2 else 0, dtype)
    return b.op("select", (inside, value, fill), value.type)


def _scatter_dims(work: Walk, node: fx.Node) -> list[Dim]:
    return work.dims_of(node.args[0])  # type: ignore[arg-type]


def _scattered(work: Walk, node: fx.Node, at: Position) -> Op:
    """`slice_scatter` and `select_scatter`: one part of a tensor replaced."""
    whole, part = node.args[0], node.args[1]
    assert isinstance(whole, fx.Node) and isinstance(part, fx.Node)
    size = shape_of(whole)
    given = [*node.args[2:], *[None] * 4]
    dim = axis_of(given[0] or 0, len(size))
    start: Any = given[1] or 0
    if not isinstance(start, int) or (len(node.args) > 5 and node.args[5] != 1):
        raise Unsupported("a part whose start or step is not a constant")
    if start < 0:
        start = simplified(size[dim] + start)
    one = node.target is aten.select_scatter.default
    count: Size = 1 if one else shape_of(part)[dim]
    b, dtype = work.builder, node.meta["val"].dtype
    inside = _within(b, b.iota(at[dim]), start, simplified(start + count))
    there = at[:dim] + at[dim + 1 :] if one else _moved(at, dim, -start)
    with work.guarded(inside):
        value: Op = convert(b, work.value(part, there), dtype)
    return b.op("select", (inside, value, work.value(whole, at)), value.type)


# ---- looking up ---------------------------------------------------------------------------------


def _looked_up(work: Walk, index: Op, size: Size, negative: bool = False) -> Index:
    """A computed index, checked against `size`; from the end where `negative` are allowed."""
    b = work.builder
    index = b.cast(index, "i64")
    if negative:
        turned = b.op("add", (index, _number(b, size)), "i64")
        below = b.op("lt", (index, b.const(0, "i64")), "i1")
        index = b.op("select", (below, turned, index), "i64")
    return Index.term(b.bounded(index, size))


def _integer(index: fx.Node) -> fx.Node:
    if index.meta["val"].dtype not in (torch.int64, torch.int32):
        raise Unsupported(f"an index of {index.meta['val'].dtype}")
    return index


def _gather_dims(work: Walk, node: fx.Node) -> list[Dim]:
    source, along, index = node.args[0], node.args[1], node.args[2]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node)
    at = axis_of(along, len(shape_of(source)))
    mine, theirs = work.dims_of(index), work.dims_of(source)
    if not mine or len(mine) != len(theirs):  # eager takes 0-dim tensors, and empty ones of any
        raise Unsupported("gather whose index has other dimensions than its source")
    for d in range(len(mine)):
        if d != at:
            if shape_of(index)[d] != shape_of(source)[d]:
                raise Unsupported("gather whose index is smaller than its source")
            work.axes.unify(mine[d], theirs[d])
    return mine


def _gather(work: Walk, node: fx.Node, at: Position) -> Op:
    source, along, index = node.args[0], node.args[1], node.args[2]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node)
    dim = axis_of(along, len(at))
    chosen = _looked_up(work, work.value(_integer(index), at), shape_of(source)[dim])
    return work.value(source, (*at[:dim], chosen, *at[dim + 1 :]))


def _embedding_dims(work: Walk, node: fx.Node) -> list[Dim]:
    table, index = node.args[0], node.args[1]
    assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
    return [*work.dims_of(index), work.dims_of(table)[1]]


def _embedding(work: Walk, node: fx.Node, at: Position) -> Op:
    table, index = node.args[0], node.args[1]
    assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
    row = _looked_up(work, work.value(_integer(index), at[:-1]), shape_of(table)[0])
    return work.value(table, (row, at[-1]))


def _index_select_dims(work: Walk, node: fx.Node) -> list[Dim]:
    source, along, index = node.args[0], node.args[1], node.args[2]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node)
    dims, dim = work.dims_of(source), axis_of(along, len(shape_of(source)))
    if not dims or len(shape_of(index)) != 1:
        raise Unsupported("index_select of or by a 0-dim tensor")
    return [*dims[:dim], work.dims_of(index)[0], *dims[dim + 1 :]]


def _index_select(work: Walk, node: fx.Node, at: Position) -> Op:
    source, along, index = node.args[0], node.args[1], node.args[2]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node)
    dim = axis_of(along, len(at))
    chosen = _looked_up(work, work.value(_integer(index), (at[dim],)), shape_of(source)[dim])
    return work.value(source, (*at[:dim], chosen, *at[dim + 1 :]))


def _indices(node: fx.Node) -> tuple[dict[int, fx.Node], int, int]:
    """The index tensors by dimension, where their own dimensions stand, and how many they are."""
    given: Any = node.args[1]
    indices = {d: _integer(index) for d, index in enumerate(given) if index is not None}
    places = sorted(indices)
    adjacent = places == list(range(places[0], places[-1] + 1))
    return indices, places[0] if adjacent else 0, max(len(shape_of(i)) for i in indices.values())


def _index_dims(work: Walk, node: fx.Node) -> list[Dim]:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    indices, start, rank = _indices(node)
    shape = shape_of(node)[start : start + rank]
    joined: list[Dim | None] = [None] * rank
    for index in indices.values():
        sizes, dims = shape_of(index), work.dims_of(index)
        for d, dim in enumerate(dims):
            place = d + rank - len(dims)
            known = joined[place]
            if sizes[d] == 1:
                continue
            if known is None:
                joined[place] = dim
            else:
                work.axes.unify(known, dim)
    middle = [
        work.axes.fresh(size) if dim is None else dim
        for dim, size in zip(joined, shape, strict=True)
    ]
    rest = [dim for d, dim in enumerate(work.dims_of(source)) if d not in indices]
    return [*rest[:start], *middle, *rest[start:]]


def _index(work: Walk, node: fx.Node, at: Position) -> Op:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    indices, start, rank = _indices(node)
    middle, rest = at[start : start + rank], iter((*at[:start], *at[start + rank :]))
    position: list[Index] = []
    for d, size in enumerate(shape_of(source)):
        if d not in indices:
            position.append(next(rest))
            continue
        shape = shape_of(indices[d])
        there = middle[rank - len(shape) :]
        there = tuple(Index() if n == 1 else i for n, i in zip(shape, there, strict=True))
        position.append(_looked_up(work, work.value(indices[d], there), size, negative=True))
    return work.value(source, tuple(position))


_SCATTER = Placement(_scatter_dims, _scattered)
PLACEMENTS: dict[Any, Placement] = {
    aten.cat.default: Placement(_cat_dims, _cat),
    aten.constant_pad_nd.default: Placement(_pad_dims, _pad),
    aten.slice_scatter.default: _SCATTER,
    aten.select_scatter.default: _SCATTER,
    aten.gather.default: Placement(_gather_dims, _gather),
    aten.embedding.default: Placement(_embedding_dims, _embedding),
    aten.index_select.default: Placement(_index_select_dims, _index_select),
    aten.index.Tensor: Placement(_index_dims, _index),
}
