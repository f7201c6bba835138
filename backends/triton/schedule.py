"""How a kernel is cut into programs: its tiles, its loops and its warps.

A program works on a tile of `xblock` by `rblock` points. The points of the parallel axes are
numbered by one flat index `x`, those of the reduction axes by another, `r`; the axis that is
contiguous in memory gets the longer side of the tile. The heuristic, in short:

- pointwise: 1024 points; where operands disagree about the contiguous axis, a tile of 64 by 32
  points, so that both are read in 16-byte pieces and turned through shared memory;
- a reduction whose row is known and short stays in registers, several rows to a program where
  they are short; a longer one is walked in pieces, once for every depth of reductions;
- a reduction over columns takes 64 of them at a time;
- rows folded in blocks (`Kernel.blocked`): a program takes one block. Without row reductions it
  takes 64 columns of it at once; with them it walks the block's rows, or their pieces.

Warps are so many that a thread holds about 8 to 16 points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfopt.backends.domain import as_number
from perfopt.backends.index import Size, product
from perfopt.backends.ir import BLOCK_ROWS, BYTES, MEMORY, Axis, Kernel, Op

FLAT = 1024  # points of a program of a pointwise kernel
SMALL_FLAT = 256  # and of one that would not fill the device otherwise
FEW_POINTS = 1 << 18
TURNED = (64, 32)  # the tile of a pointwise kernel with transposed operands
ROW = 4096  # elements of the longest row that stays in registers
LOOPED_ROW = 2048  # elements of a row in one step of a loop
ROW_TILE = 1024  # points of a tile of short rows
COLUMNS = 64  # columns of a tile
COLUMN_TILE = 2048  # points of a tile of columns in one step of a loop
KEPT_COLUMNS = 4096  # points of a tile of columns that stays in registers
POINTS_PER_THREAD = 8
MOST_WARPS = 8


@dataclass(frozen=True)
class Tiling:
    """The programs of a kernel; see the module.

    `x` and `r` are the axes, outermost first, that number the two sides of a tile; `r` is empty
    where tiles have one side. `loop` names the side that a program walks in steps ("" for none);
    with `r_grid` programs share out the tiles along `r` too. `exact` says that the tiles along
    `r` fit it exactly. `blocked` programs each take one block of rows.
    """

    x: tuple[Axis, ...]
    r: tuple[Axis, ...]
    xblock: int
    rblock: int
    warps: int
    loop: str = ""
    r_grid: bool = False
    blocked: bool = False

    @property
    def exact(self) -> bool:
        """Whether no mask is needed along `r`."""
        size = product(axis.size for axis in self.r)
        if not isinstance(size, int):
            return False
        return size % self.rblock == 0 if self.loop == "r" or self.r_grid else size == self.rblock

    @property
    def rows(self) -> int:
        """The points along `x` of one program."""
        return BLOCK_ROWS if self.blocked else self.xblock


def make_tiling(kernel: Kernel) -> Tiling:
    """The tiling of a kernel, by the heuristic that the module describes."""
    if kernel.blocked:
        return _blocks(kernel)
    if not kernel.reduction:
        return _pointwise(kernel)
    row = product(axis.size for axis in kernel.reduction)
    columns = product(axis.size for axis in kernel.parallel)
    if kernel.parallel and _contiguous(kernel, kernel.parallel) > _contiguous(
        kernel, kernel.reduction
    ):
        xblock = min(COLUMNS, _power(columns, COLUMNS))
        if isinstance(row, int) and _power(row, row) * xblock <= KEPT_COLUMNS:
            return _tiling(kernel, xblock, _power(row, row))
        return _tiling(kernel, xblock, max(COLUMN_TILE // xblock, 1), "r")
    if isinstance(row, int) and row <= ROW:
        rblock = _power(row, ROW)
        return _tiling(kernel, min(max(ROW_TILE // rblock, 1), _power(columns, ROW_TILE)), rblock)
    return _tiling(kernel, 1, LOOPED_ROW if isinstance(row, int) else LOOPED_ROW // 2, "r")


def _tiling(kernel: Kernel, xblock: int, rblock: int, loop: str = "") -> Tiling:
    warps = _warps(xblock * rblock)
    return Tiling(kernel.parallel, kernel.reduction, xblock, rblock, warps, loop)


def _warps(points: int) -> int:
    return min(max(points // (32 * POINTS_PER_THREAD), 1), MOST_WARPS)


def _power(size: Size, most: int) -> int:
    """The next power of two, not beyond that of `most`, which stands for unknown sizes."""
    count = min(size, most) if isinstance(size, int) else most
    return 1 << max(count - 1, 0).bit_length()


def _pointwise(kernel: Kernel) -> Tiling:
    turned = _turned_axis(kernel)
    if turned is not None:
        others = tuple(axis for axis in kernel.parallel if axis is not turned)
        xblock = min(TURNED[0], _power(others[-1].size, TURNED[0]))
        rblock = min(TURNED[1], _power(turned.size, TURNED[1]))
        return Tiling(others, (turned,), xblock, rblock, _warps(xblock * rblock), r_grid=True)
    points = product(axis.size for axis in kernel.parallel)
    few = isinstance(points, int) and points <= FEW_POINTS
    xblock = _power(points, SMALL_FLAT if few else FLAT)
    return Tiling(kernel.parallel, (), xblock, 1, _warps(xblock))


def _turned_axis(kernel: Kernel) -> Axis | None:
    """The axis along which most of the loads that jump along the last one are contiguous."""
    if len(kernel.parallel) < 2:
        return None
    last = kernel.parallel[-1]
    count: dict[Axis, int] = {}
    for op in kernel.ops:
        if op.name != "load" or op.args or op.attr.coefficient(last.name) in (0, 1):
            continue
        for axis in kernel.parallel[:-1]:
            if op.attr.coefficient(axis.name) == 1:
                count[axis] = count.get(axis, 0) + 1
    return max(count, key=lambda axis: count[axis]) if count else None


def _contiguous(kernel: Kernel, axes: tuple[Axis, ...]) -> int:
    """The bytes that the last of `axes` makes contiguous."""
    types = {b.name: b.type for b in kernel.buffers}
    sizes = {name: as_number(size) for name, size in kernel.axis_sizes().items()}

    def moved(op: Op) -> int:
        elements = math.prod(sizes[name] for name in op.attr.axes() if name in sizes)
        return BYTES[types[op.buffer]] * elements

    touched = [op for op in kernel.ops if op.name in MEMORY]
    return sum(moved(op) for op in touched if op.attr.coefficient(axes[-1].name) == 1)


def _blocks(kernel: Kernel) -> Tiling:
    row = product(axis.size for axis in kernel.reduction)
    x, r = kernel.parallel, kernel.reduction
    if not any(op.name == "reduce" for op in kernel.ops):
        rblock = _power(row, COLUMNS)
        warps = _warps(BLOCK_ROWS * rblock // 2)
        return Tiling(x, r, BLOCK_ROWS, rblock, warps, r_grid=True, blocked=True)
    if isinstance(row, int) and row <= ROW:
        rblock = _power(row, ROW)
        xblock = min(max(ROW_TILE // rblock, 1), BLOCK_ROWS)
        return Tiling(x, r, xblock, rblock, _warps(xblock * rblock), "x", blocked=True)
    return Tiling(x, r, BLOCK_ROWS, COLUMNS, MOST_WARPS, "r", blocked=True)
