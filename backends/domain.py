"""The iteration domain of a kernel: which axes are left, in which order, and which collapse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from perfopt.backends.index import Index, Size, Unsupported, simplified
from perfopt.backends.ir import BLOCK, MEMORY, Axis, Buffer, Kernel, Op

_HINT = 97  # stands for every symbol where strides are only compared with each other


def as_number(size: Size) -> int:
    """A size as a number to sort by; symbols count as one fixed value."""
    if isinstance(size, int):
        return size
    return int(size.subs(dict.fromkeys(size.free_symbols, _HINT)))


def reachable(roots: Sequence[Op], stop: frozenset[int] = frozenset()) -> list[Op]:
    """The operations that the roots need, in order of their making; not those behind `stop`."""
    seen: dict[int, Op] = {}
    stack = list(roots)
    while stack:
        op = stack.pop()
        if op.uid in seen:
            continue
        seen[op.uid] = op
        if op.uid not in stop:
            stack.extend(op.args)
    return [seen[uid] for uid in sorted(seen)]


def make_kernel(
    name: str,
    buffers: Sequence[Buffer],
    stores: Sequence[Op],
    sizes: Mapping[str, Size],
    reduction: frozenset[str],
    blocked: frozenset[str] = frozenset(),
) -> Kernel:
    """The kernel over the axes that `stores` and `reduction` span; raises `Unsupported`.

    With `blocked`, these are the parallel axes, worked on in blocks.
    """
    ops = reachable(stores)
    plain = [store for store in stores if store.name == "store"]
    parallel = blocked or frozenset().union(*(s.attr.axes() for s in plain)) - reduction
    for store in plain:
        axes = store.attr.axes()
        if not parallel <= axes:
            raise Unsupported("results that do not span the same dimensions")
        folded = (axes | store.space) & reduction
        if folded and not reduction <= axes:
            raise Unsupported("a result that spans only some of the reduced dimensions")
        if not store.space <= parallel | reduction:
            raise Unsupported("a value that varies over more dimensions than are stored")
    stray = frozenset().union(*(op.space for op in ops)) - parallel - reduction - {BLOCK}
    if stray:
        raise Unsupported("a dimension that is neither stored nor reduced")
    indices = [op.attr for op in ops if op.name in MEMORY or op.name == "iota"]
    written = [s.attr for s in plain]
    kernel = Kernel(
        name=name,
        buffers=tuple(b for b in buffers if any(op.buffer == b.name for op in ops)),
        parallel=ordered_axes(parallel, written, ops, sizes),
        reduction=ordered_axes(reduction, written, ops, sizes),
        ops=tuple(ops),
        stores=tuple(stores),
        blocked=bool(blocked),
    )
    return _with_sizes(_collapsed(kernel, indices))


def ordered_axes(
    axes: frozenset[str], stores: Sequence[Index], ops: Sequence[Op], sizes: Mapping[str, Size]
) -> tuple[Axis, ...]:
    """Axes from the largest stride to the smallest, as the first index that has them says.

    The index of the largest store speaks first, then those of the loads among `ops`.
    """
    indices = sorted(stores, key=lambda index: -len(index.axes()))
    indices += [op.attr for op in ops if op.name in ("load", "load_if")]

    def key(axis: str) -> tuple[int, str]:
        for index in indices:
            stride = index.coefficient(axis)
            if stride != 0:
                return (-abs(as_number(stride)), axis)
        return (0, axis)

    return tuple(Axis(axis, sizes[axis]) for axis in sorted(axes, key=key))


def _mergeable(outer: Axis, inner: Axis, indices: Sequence[Index]) -> bool:
    return all(
        index.coefficient(outer.name) == simplified(index.coefficient(inner.name) * inner.size)
        for index in indices
    )


def _collapsed(kernel: Kernel, indices: Sequence[Index]) -> Kernel:
    """Neighbouring axes that every index walks as one become one."""
    merged: dict[str, str] = {}

    def collapse(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        result: list[Axis] = []
        for axis in axes:
            if result and _mergeable(result[-1], axis, indices):
                outer = result.pop()
                merged[outer.name] = axis.name
                axis = Axis(axis.name, simplified(outer.size * axis.size))
            result.append(axis)
        return tuple(result)

    parallel, reduction = collapse(kernel.parallel), collapse(kernel.reduction)
    if not merged:
        return kernel
    return _without(replace(kernel, parallel=parallel, reduction=reduction), frozenset(merged))


def _without(kernel: Kernel, gone: frozenset[str]) -> Kernel:
    """The kernel with the axes `gone`, which others now cover, taken out of every index."""
    new: dict[int, Op] = {}

    def moved(index: Index) -> Index:
        terms = {
            term if isinstance(term, str) else new[term.uid]: value
            for term, value in index.terms
            if term not in gone
        }
        return Index.of(terms, index.const)

    for op in kernel.ops:
        attr = moved(op.attr) if isinstance(op.attr, Index) else op.attr
        args = tuple(new[a.uid] for a in op.args)
        new[op.uid] = replace(op, args=args, attr=attr, space=op.space - gone)
    return replace(
        kernel,
        ops=tuple(new[op.uid] for op in kernel.ops),
        stores=tuple(new[op.uid] for op in kernel.stores),
    )


def _with_sizes(kernel: Kernel) -> Kernel:
    """The kernel with its symbolic sizes, strides and offsets listed as arguments."""
    found: dict[Size, None] = {}
    for axis in kernel.parallel + kernel.reduction:
        found[axis.size] = None
    for op in kernel.ops:
        if isinstance(op.attr, Index):
            for _, value in op.attr.terms:
                found[value] = None
            found[op.attr.const] = None
    symbolic = sorted((s for s in found if not isinstance(s, int)), key=str)
    return replace(kernel, sizes=tuple(symbolic))
