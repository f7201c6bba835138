"""Row and column reductions in one region, as two kernels that read the inputs once.

The first walks the rows, a block of them at a time; what is summed over the rows is folded into a
row of partial results of its block. The second folds the partial results of all blocks. The blocks
have a fixed number of rows, so that results do not depend on the number of threads, and they are
short, so that the error of a long sum grows as that of a pairwise one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perfopt.backends.domain import make_kernel, ordered_axes, reachable
from perfopt.backends.index import Index, Size, Unsupported, product
from perfopt.backends.ir import BLOCK, BLOCK_ROWS, Buffer, Builder, Kernel, Op
from perfopt.backends.torch_private import floor_div

SHORT_ROW = 16  # elements of a row below which most of a vector would be idle


@dataclass(frozen=True)
class Scratch:
    """A buffer between two kernels: its element type by the names of the IR, and its length."""

    name: str
    type: str
    size: Size


def split_columns(
    name: str,
    buffers: Sequence[Buffer],
    stores: Sequence[Op],
    sizes: Mapping[str, Size],
    reduction: frozenset[str],
    columns: frozenset[str],
) -> tuple[list[Kernel], list[Scratch]]:
    """The kernels of `stores`, whose `fold`s go over the axes `columns`; raises `Unsupported`.

    `reduction` are the axes of the row reductions: together they must span the whole domain.
    """
    ops = reachable(stores)
    folds = [op for op in ops if op.name == "fold"]
    late = _behind(ops)
    first = [store for store in stores if store.uid not in late]
    row = ordered_axes(reduction, [store.attr for store in first], ops, sizes)
    width = product(axis.size for axis in row)
    blocks = floor_div(product(sizes[axis] for axis in columns) + BLOCK_ROWS - 1, BLOCK_ROWS)
    place = Index.of(
        {axis.name: product(a.size for a in row[k + 1 :]) for k, axis in enumerate(row)}
    )
    partial: list[Buffer] = []
    scratch: list[Scratch] = []
    for number, fold in enumerate(folds):
        if not columns <= fold.args[0].space or fold.args[0].uid in late:
            raise Unsupported("a column reduction of what does not vary along the column")
        partial.append(Buffer(f"part{number}", fold.type, True, fold.attr))
        scratch.append(Scratch(f"part{number}", fold.type, blocks * width))
    place += Index.of({BLOCK: width})
    made = [
        _accumulate(ops[-1].uid + 1 + k, fold.args[0], place, buffer.name)
        for k, (fold, buffer) in enumerate(zip(folds, partial, strict=True))
    ]
    rows = make_kernel(
        f"{name}_rows", [*buffers, *partial], [*first, *made], sizes, reduction, columns
    )
    last = [store for store in stores if store.uid in late]
    if any(not store.attr.axes() <= reduction for store in last):
        raise Unsupported("what was summed over columns meets the rows again")
    finish = _finishing(last, folds, partial, place)
    sizes = {**sizes, BLOCK: blocks}
    kernel = make_kernel(
        f"{name}_columns", [*buffers, *partial], finish, sizes, frozenset((BLOCK,))
    )
    read = {b.name: replace(b, written=False, fold="") for b in partial}
    kernel = replace(kernel, buffers=tuple(read.get(b.name, b) for b in kernel.buffers))
    return [rows, kernel], scratch


def _accumulate(uid: int, value: Op, place: Index, buffer: str) -> Op:
    return Op(uid, "accumulate", (value,), value.type, value.space | place.axes(), place, buffer)


def _behind(ops: Sequence[Op]) -> set[int]:
    """The folds and all operations that depend on them."""
    found: set[int] = set()
    for op in ops:
        if op.name == "fold" or any(arg.uid in found for arg in op.args):
            found.add(op.uid)
    return found


def _finishing(
    stores: Sequence[Op], folds: Sequence[Op], partial: Sequence[Buffer], place: Index
) -> list[Op]:
    """The stores made again on top of reductions over the blocks' partial results."""
    b = Builder()
    new: dict[int, Op] = {}
    for fold, buffer in zip(folds, partial, strict=True):
        loaded = b.load(buffer.name, place, buffer.type)
        new[fold.uid] = b.reduce(fold.attr, loaded, frozenset((BLOCK,)))
    for op in reachable(stores, stop=frozenset(new)):
        if op.uid in new:
            continue
        if op.name == "reduce":
            raise Unsupported("a column reduction that meets a row reduction again")
        attr = op.attr
        if isinstance(attr, Index):
            terms = {t if isinstance(t, str) else new[t.uid]: value for t, value in attr.terms}
            attr = Index.of(terms, attr.const)
        args = tuple(new[arg.uid] for arg in op.args)
        new[op.uid] = b.op(op.name, args, op.type, attr, op.buffer)
    return [new[store.uid] for store in stores]


def in_blocks(kernel: Kernel) -> bool:
    """Whether a kernel that sums over columns alone does better by blocks of rows.

    It does where rows lie one behind the other in memory: then it reads and writes in that order.
    """
    if not kernel.reduction or not kernel.parallel:
        return False
    width = product(axis.size for axis in kernel.parallel)
    if isinstance(width, int) and width < SHORT_ROW:
        return False
    names = frozenset(axis.name for axis in kernel.reduction)
    folded: set[int] = set()
    for op in kernel.ops:
        if any(arg.uid in folded for arg in op.args):
            if op.name == "reduce" or op.space & names:
                return False  # what was summed meets the rows again
            folded.add(op.uid)
        elif op.name == "reduce":
            folded.add(op.uid)
    lane = kernel.parallel[-1].name
    reads = [op.attr for op in kernel.ops if op.name == "load" and op.space & names]
    return all(index.coefficient(lane) == 1 for index in reads)
