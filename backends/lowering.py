"""From a set of FX nodes to one kernel.

First every node's dimensions are matched up into axes (`axes`), then every output is evaluated at
the point of the iteration domain that it is stored at, walking back through the nodes: a view
moves the point, a pointwise operation computes there, a reduction folds its axes, and a node
outside the set is a load. The same walk, thrown away, answers whether nodes can be one kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from perfopt.backends import aten_pointwise as pw
from perfopt.backends.axes import AxisMap, Dim, axis_name
from perfopt.backends.columns import Scratch, in_blocks, split_columns
from perfopt.backends.domain import make_kernel
from perfopt.backends.index import Index, Size, Unsupported, as_size, flatten, product
from perfopt.backends.ir import HALF, TYPES, Buffer, Builder, Kernel, Op, compute_type
from perfopt.backends.placement import PLACEMENTS
from perfopt.backends.views import VIEWS, axis_of, shape_of

aten = torch.ops.aten
Position = tuple[Index, ...]
Fold = Callable[[str, Op], Op]

_ARANGES = {aten.arange.default, aten.arange.start, aten.arange.start_step}
_GENERATORS = {aten.full.default, aten.scalar_tensor.default, *_ARANGES}
_GENERATORS |= {aten.full_like.default, aten.zeros_like.default, aten.ones_like.default}
_CONVERSIONS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default}
REDUCTIONS: dict[Any, str] = {
    aten.sum.dim_IntList: "sum", aten.sum.default: "sum", aten.mean.dim: "mean",
    aten.mean.default: "mean", aten.amax.default: "max", aten.amin.default: "min",
    aten.max.default: "max", aten.min.default: "min", aten.prod.default: "prod",
    aten.prod.dim_int: "prod", aten.any.default: "or", aten.any.dim: "or", aten.any.dims: "or",
    aten.all.default: "and", aten.all.dim: "and", aten.all.dims: "and",
    aten.var.correction: "var", aten.var_mean.correction: "var_mean",
    aten.argmax.default: "argmax", aten.argmin.default: "argmin",
    aten.max.dim: "max_dim", aten.min.dim: "min_dim",
}  # fmt: skip
_PAIRS = {aten.var_mean.correction, aten.max.dim, aten.min.dim}  # with two results
KNOWN = (
    set(pw.POINTWISE) | set(VIEWS) | set(REDUCTIONS) | _GENERATORS | _CONVERSIONS
    | set(PLACEMENTS) | {operator.getitem}
)  # fmt: skip


@dataclass(frozen=True)
class LoweredNodes:
    """Kernels, to be launched in order, with the nodes behind their buffers."""

    kernels: list[Kernel]
    inputs: dict[str, fx.Node]
    outputs: dict[str, fx.Node]
    scratch: list[Scratch]


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node with one tensor result; raises `Unsupported` for others."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Unsupported(f"{node} has no tensor result")
    return value


def reduced_dims(node: fx.Node) -> tuple[list[int], bool]:
    """The dimensions that a reduction folds, and whether it keeps them with size 1."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rank = len(shape_of(source))
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if given is None or given == [] or rank == 0:
        given = list(range(rank))
    listed = given if isinstance(given, (list, tuple)) else [given]
    keep = node.kwargs.get("keepdim", False)
    if node.target in (aten.var.correction, aten.var_mean.correction):
        return sorted(axis_of(d, rank) for d in listed), bool(keep)
    keep = node.args[2] if len(node.args) > 2 else keep
    return sorted({axis_of(d, rank) for d in listed}), bool(keep)


class Lowering:
    """One walk over the nodes of a region; see the module."""

    def __init__(
        self, nodes: Sequence[fx.Node], exact_rounding: bool = False, blocks: bool = False
    ) -> None:
        self.blocks = blocks  # a reduction is one over columns, block by block
        self.nodes = list(nodes)
        self.members = set(nodes)
        self.exact = exact_rounding
        self.axes = AxisMap()
        self.builder = Builder()
        self.dims: dict[fx.Node, list[Dim]] = {}
        self.reduction: frozenset[str] = frozenset()
        self.columns: frozenset[str] = frozenset()  # folded too, in a second kernel
        self.sizes: dict[str, Size] = {}
        self.inputs: dict[fx.Node, str] = {}
        self.guard: Op | None = None
        self._known: dict[tuple[fx.Node, Position, Op | None], Op] = {}

    # ---- axes -------------------------------------------------------------------------------

    def find_axes(self) -> None:
        """Match up the dimensions of all nodes; raises `Unsupported`."""
        for node in self.nodes:
            self.dims[node] = self._dims(node)
        for node, dims in self.dims.items():
            atoms = [atom for dim in dims for atom in self.axes.resolve(dim)]
            if len(set(atoms)) < len(atoms):  # x + x.t(), or one arange along rows and columns
                raise Unsupported(f"two dimensions of {node} would be one axis")
        folded = {self._folded(node) for node in self.nodes if node.target in REDUCTIONS}
        # A reduction over dimensions of size 1 folds nothing and goes with any other.
        folded.discard(frozenset())
        self._choose_rows(sorted(folded, key=sorted))
        for dims in self.dims.values():
            for dim in dims:
                for atom in self.axes.resolve(dim):
                    self.sizes[axis_name(atom)] = self.axes.size(atom)

    def _folded(self, node: fx.Node) -> frozenset[str]:
        """The axes that a reduction folds."""
        source = self.dims[self._source(node)]
        atoms = [a for d in reduced_dims(node)[0] for a in self.axes.resolve(source[d])]
        return frozenset(axis_name(a) for a in atoms)

    def _choose_rows(self, folded: list[frozenset[str]]) -> None:
        """Of two sets of reduced axes, rows are those that a reduction folds on the way."""
        if len(folded) > 2 or (len(folded) == 2 and folded[0] & folded[1]):
            raise Unsupported("reductions over different dimensions")
        if len(folded) < 2:
            self.reduction = folded[0] if folded else frozenset()
            if self.blocks:
                self.columns, self.reduction = self.reduction, frozenset()
            return
        needed: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node in needed or node.target in REDUCTIONS:
                needed.update(node.all_input_nodes)
        inside = {self._folded(n) for n in needed & self.members if n.target in REDUCTIONS}
        inside.discard(frozenset())
        if len(inside) > 1:
            raise Unsupported("reductions over different dimensions, one behind the other")
        # Where neither is needed by a reduction, the rows are what the last reduction folds.
        self.reduction = inside.pop() if inside else folded[-1]
        self.columns = folded[1 - folded.index(self.reduction)]

    def dims_of(self, node: fx.Node) -> list[Dim]:
        """The dimensions of a member, or of an input at its first sight."""
        if node not in self.dims:
            self.dims[node] = [self.axes.fresh(size) for size in shape_of(tensor_of(node))]
        return self.dims[node]

    def _source(self, node: fx.Node) -> fx.Node:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            raise Unsupported(f"{node.target} of a constant")
        return source

    def _dims(self, node: fx.Node) -> list[Dim]:
        target = node.target
        if target not in KNOWN:
            raise Unsupported(f"{target} is not lowered")
        if target is operator.getitem:
            return self.dims_of(self._source(node))
        if target in VIEWS:
            return VIEWS[target].dims(self.axes, node, self.dims_of(self._source(node)))
        if target in REDUCTIONS:
            gone, keep = reduced_dims(node)
            dims = self.dims_of(self._source(node))
            if keep:
                return [[] if d in gone else dim for d, dim in enumerate(dims)]
            return [dim for d, dim in enumerate(dims) if d not in gone]
        if target in _GENERATORS:
            return [self.axes.fresh(size) for size in shape_of(tensor_of(node))]
        if target in PLACEMENTS:
            return PLACEMENTS[target].dims(self, node)
        return self._broadcast(node)

    def _broadcast(self, node: fx.Node) -> list[Dim]:
        shape = shape_of(tensor_of(node))
        result: list[Dim | None] = [None] * len(shape)
        for arg in node.all_input_nodes:
            if not isinstance(arg.meta.get("val"), torch.Tensor):
                continue
            dims, lead = self.dims_of(arg), len(shape) - len(shape_of(arg))
            for d, dim in enumerate(dims):
                if shape_of(arg)[d] == 1:
                    continue
                known = result[d + lead]
                if known is None:
                    result[d + lead] = dim
                else:
                    self.axes.unify(known, dim)
        return [
            self.axes.fresh(size) if dim is None else dim
            for dim, size in zip(result, shape, strict=True)
        ]

    # ---- values -----------------------------------------------------------------------------

    def canonical(self, node: fx.Node) -> Position:
        """The point of a node's value that belongs to one point of the domain."""
        return tuple(self.axes.index(dim) for dim in self.dims_of(node))

    def value(self, node: fx.Node, at: Position) -> Op:
        """The value of a node at a position; raises `Unsupported`."""
        key = (node, at, self.guard)
        known = self._known.get(key)
        if known is None:
            known = self._load(node, at) if node not in self.members else self._compute(node, at)
            self._known[key] = known
        return known

    @contextmanager
    def guarded(self, condition: Op) -> Iterator[None]:
        """Within it nothing is loaded and no index checked where `condition` is false."""
        outer, b = self.guard, self.builder
        self.guard = condition if outer is None else b.op("and", (outer, condition), "i1")
        b.guard = self.guard
        try:
            yield
        finally:
            self.guard = b.guard = outer

    @contextmanager
    def _unguarded(self) -> Iterator[None]:
        """Within it no guard holds: a reduction folds its whole domain, wherever it is read."""
        outer, self.guard, self.builder.guard = self.guard, None, None
        try:
            yield
        finally:
            self.guard = self.builder.guard = outer

    def _load(self, node: fx.Node, at: Position) -> Op:
        tensor = tensor_of(node)
        if node not in self.inputs:
            self.inputs[node] = f"in{len(self.inputs)}"
        flat = Index()
        for index, stride in zip(at, tensor.stride(), strict=True):
            flat = flat + index.times(as_size(stride))
        return self.builder.load(self.inputs[node], flat, pw.memory_type(tensor.dtype))

    def _compute(self, node: fx.Node, at: Position) -> Op:
        target = node.target
        if target in VIEWS:
            return self.value(self._source(node), VIEWS[target].source(node, at, self.sizes))
        if target in REDUCTIONS:
            with self._unguarded():
                return self._reduction(node, at, 0)
        if target is operator.getitem:
            return self._item(node, at)
        if target in _GENERATORS:
            return self._generated(node, at)
        if target in PLACEMENTS:
            return PLACEMENTS[target].value(self, node, at)
        if target in _CONVERSIONS:
            return self._converted(node, at)
        return self._rounded(node, self._pointwise(node, at))

    def _operand(self, arg: Any, at: Position) -> Any:
        if not isinstance(arg, fx.Node):
            return arg
        value = arg.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            size = as_size(value)
            return self.builder.op("size", (), "i64", attr=Index.of({}, size))
        lead = len(at) - len(shape_of(tensor_of(arg)))
        shape = shape_of(arg)
        return self.value(
            arg, tuple(Index() if shape[d] == 1 else at[d + lead] for d in range(len(shape)))
        )

    def _pointwise(self, node: fx.Node, at: Position) -> Op:
        rule_kind, rule = pw.POINTWISE[node.target]
        operands = [self._operand(arg, at) for arg in node.args]
        dtype = pw.result_dtype(node)
        if rule_kind == pw.PROMOTE:
            dtype = pw.common_dtype(node)
        operands = [pw.as_eager_has_it(node.target, x, dtype) for x in operands]
        if rule_kind != pw.KEEP:
            first = 1 if rule_kind == pw.CONDITION else 0
            operands[first:] = [pw.convert(self.builder, x, dtype) for x in operands[first:]]
        elif any(not isinstance(x, Op) for x in operands):
            raise Unsupported(f"{node.target} of a constant")
        return rule(self.builder, node, operands)

    def _rounded(self, node: fx.Node, value: Op) -> Op:
        half = TYPES.get(pw.result_dtype(node), "")
        if self.exact and half in HALF:
            return self.builder.op("round", (value,), value.type, attr=half)
        return value

    def _converted(self, node: fx.Node, at: Position) -> Op:
        dtype = pw.result_dtype(node)
        value = pw.convert(self.builder, self._operand(node.args[0], at), dtype)
        source = tensor_of(self._source(node)).dtype
        # A conversion that the user's graph asks for rounds, unlike what is kept inside.
        if pw.memory_type(dtype) in HALF and source != dtype:
            return self.builder.op("round", (value,), value.type, attr=TYPES[dtype])
        return value

    def _generated(self, node: fx.Node, at: Position) -> Op:
        dtype = pw.result_dtype(node)
        if node.target in _ARANGES:
            args = (0, *node.args) if node.target is aten.arange.default else node.args
            start, _, step = (*args, 1)[:3]
            if not isinstance(start, int) or not isinstance(step, int):
                raise Unsupported("arange whose start or step is not an integer constant")
            index = at[0].times(step) + Index.of({}, start)
            return pw.convert(self.builder, self.builder.iota(index), dtype)
        if node.target in (aten.zeros_like.default, aten.ones_like.default):
            fill: Any = int(node.target is aten.ones_like.default)
        else:
            fill = node.args[0 if node.target is aten.scalar_tensor.default else 1]
        if isinstance(fill, fx.Node):
            fill = self._operand(fill, ())
        return pw.convert(self.builder, fill, dtype)

    def _item(self, node: fx.Node, at: Position) -> Op:
        producer, number = self._source(node), node.args[1]
        if producer.target not in _PAIRS or producer not in self.members:
            raise Unsupported(f"an item of {producer.target}")
        with self._unguarded():
            return self._reduction(producer, at, int(number))  # type: ignore[arg-type]

    # ---- reductions -------------------------------------------------------------------------

    def _reduction(self, node: fx.Node, at: Position, item: int) -> Op:
        source = self._source(node)
        gone, keep = reduced_dims(node)
        whole = self.canonical(source)
        kept = [d for d in range(len(whole)) if d not in gone]
        positions = [at[d] for d in kept] if keep else list(at)
        if any(whole[d] != index for d, index in zip(kept, positions, strict=True)):
            raise Unsupported("a reduction read at another position than it is computed at")
        dtype = node.meta["val"]
        dtype = dtype[item].dtype if isinstance(dtype, (tuple, list)) else dtype.dtype
        value = self.value(source, whole)
        axes = self._folded(node)
        count = product(shape_of(source)[d] for d in gone)
        kind = REDUCTIONS[node.target]
        b = self.builder
        make = b.fold if axes and axes == self.columns else b.reduce
        # Dimensions of size 1 have no axis: there is nothing to fold.
        fold: Fold = lambda how, x: make(how, x, axes) if axes else x  # noqa: E731
        result = self._fold(node, kind, value, dtype, count, item, fold)
        half = TYPES.get(dtype, "")
        if self.exact and half in HALF:
            return self.builder.op("round", (result,), result.type, attr=half)
        return result

    def _fold(
        self, node: fx.Node, kind: str, value: Op, dtype: torch.dtype, count: Size, item: int,
        fold: Fold,
    ) -> Op:  # fmt: skip
        b = self.builder
        if kind in ("or", "and"):
            return pw.convert(b, fold(kind, pw.truth(b, value)), dtype)
        if kind in ("argmax", "argmin", "max_dim", "min_dim"):
            found = fold("max" if "max" in kind else "min", value)
            return self._place(node, value, found, fold) if "arg" in kind or item else found
        value = pw.convert(b, value, dtype)
        if kind in ("sum", "prod", "max", "min"):
            return fold(kind, value)
        mean = self._over(fold("sum", value), count)
        if kind == "mean" or (kind == "var_mean" and item == 1):
            return mean
        correction = node.kwargs.get("correction")
        correction = 1 if correction is None else correction
        if not isinstance(correction, (int, float)):
            raise Unsupported("a variance whose correction is not a constant")
        apart = b.op("sub", (value, mean), value.type)
        squares = fold("sum", b.op("mul", (apart, apart), value.type))
        return self._variance(squares, count, correction)

    def _place(self, node: fx.Node, value: Op, found: Op, fold: Fold) -> Op:
        """The first place of the extreme value `found`, or of the first NaN where there is one."""
        b, source = self.builder, self._source(node)
        gone, _ = reduced_dims(node)
        at, shape = self.canonical(source), shape_of(source)
        flat = flatten(tuple(at[d] for d in gone), tuple(shape[d] for d in gone))
        here = b.op("eq", (value, found), "i1")
        if pw.is_float(value):
            here = b.op("or", (here, b.op("ne", (value, value), "i1")), "i1")
        last = b.const((1 << 63) - 1, "i64")
        return fold("min", b.op("select", (here, b.iota(flat), last), "i64"))

    def _over(self, total: Op, count: Size) -> Op:
        return self.builder.op("div", (total, self._number(count, total.type)), total.type)

    def _variance(self, squares: Op, count: Size, correction: float) -> Op:
        b = self.builder
        if isinstance(count, int):
            return b.op("div", (squares, b.const(float(max(count - correction, 0)), squares.type)),
                        squares.type)  # fmt: skip
        rest = b.op("sub", (self._number(count, squares.type),
                            b.const(float(correction), squares.type)), squares.type)  # fmt: skip
        rest = b.op("max", (rest, b.const(0.0, squares.type)), squares.type)
        return b.op("div", (squares, rest), squares.type)

    def _number(self, count: Size, type: str) -> Op:
        if isinstance(count, int):
            return self.builder.const(float(count), type)
        return self.builder.cast(self.builder.op("size", (), "i64", Index.of({}, count)), type)


def outputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes whose values are used outside of the set, in order."""
    members = set(nodes)
    return [
        node for node in nodes
        if any(user not in members for user in node.users)
        and isinstance(node.meta.get("val"), torch.Tensor)
    ]  # fmt: skip


def build_kernels(
    name: str,
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node] | None = None,
    exact_rounding: bool = False,
) -> LoweredNodes:
    """The kernels that compute `outputs` (default: what is used outside); raises `Unsupported`."""
    outputs = outputs_of(nodes) if outputs is None else list(outputs)
    made = _build(name, nodes, outputs, exact_rounding)
    if len(made.kernels) == 1 and in_blocks(made.kernels[0]):
        with suppress(Unsupported):
            return _build(name, nodes, outputs, exact_rounding, blocks=True)
    return made


def _build(
    name: str,
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    exact_rounding: bool,
    blocks: bool = False,
) -> LoweredNodes:
    work = Lowering(nodes, exact_rounding, blocks)
    work.find_axes()
    if not outputs:
        raise Unsupported("nothing is computed")
    stores: list[Op] = []
    written: dict[str, fx.Node] = {}
    buffers: list[Buffer] = []
    for node in dict.fromkeys(outputs):
        tensor = tensor_of(node)
        at = work.canonical(node)
        name_out = f"out{len(written)}"
        flat = Index()
        for index, stride in zip(at, tensor.stride(), strict=True):
            flat = flat + index.times(as_size(stride))
        value = work.value(node, at)
        if value.type != compute_type(tensor.dtype):
            raise Unsupported(f"{node} is computed as {value.type}, stored as {tensor.dtype}")
        stores.append(work.builder.op("store", (value,), value.type, flat, name_out))
        written[name_out] = node
        buffers.append(Buffer(name_out, pw.memory_type(tensor.dtype), True))
    reads = [
        Buffer(buffer, pw.memory_type(tensor_of(node).dtype), False)
        for node, buffer in work.inputs.items()
    ]
    buffers = reads + buffers
    scratch: list[Scratch] = []
    if work.columns:
        if blocks:
            spanned = frozenset().union(*(store.attr.axes() | store.space for store in stores))
            work.reduction = spanned - work.columns
        kernels, scratch = split_columns(
            name, buffers, stores, work.sizes, work.reduction, work.columns
        )
    else:
        kernels = [make_kernel(name, buffers, stores, work.sizes, work.reduction)]
    return LoweredNodes(kernels, {b: n for n, b in work.inputs.items()}, written, scratch)
