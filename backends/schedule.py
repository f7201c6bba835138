"""How a kernel is run: its vector axis, its stages, and what stays in scratch between them.

A kernel with reductions runs in stages, one per depth of reductions: each stage walks the reduced
dimensions once, folds what it can, and stores what is complete. A value needed by several stages
is computed again from its loads, which are in cache by then, unless that costs more than keeping
it in a scratch row. The vector axis (the lane) is the one that makes the most bytes contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfopt.backends.domain import as_number
from perfopt.backends.index import Size, product
from perfopt.backends.ir import BYTES, HALF, MEMORY, Axis, Kernel, Op
from perfopt.backends.vocabulary import weight

# Recomputing fewer simple instructions than this is cheaper than scratch; what is converted on the
# way from memory is nearly always worth keeping.
KEEP_WEIGHT = {True: 2, False: 8}
SCRATCH_BYTES = 128 * 1024  # what one thread may keep on its stack of a row
COLUMN_SCRATCH_BYTES = 1024 * 1024  # and of a block of columns, half of it shared as a rule
TILE_VECTORS = 4  # vectors side by side in a tile
SHORT_TILE = 8  # rows of a tile below which turning it costs more than it saves
TILE_ROW_BYTES = 1024  # read at a stretch from every line of a turned operand
ROW_CHUNK = 8192  # elements along the vector axis in one step of the grid
# Bodies up to so many instructions run so many vectors at once; heavier ones fill the registers.
_UNROLL = ((12, 4), (48, 2))
# Of long rows, and of rows that are converted on the way, more: their sums would wait.
_UNROLL_ROWS = ((48, 4),)
LONG_ROW = {True: 192, False: 4096}  # elements from which a row is long, converted or not
# Of columns more: neighbours in a row come from memory together.
_UNROLL_COLUMNS = ((24, 8), (48, 4), (96, 2))


@dataclass(frozen=True)
class Stage:
    """One walk over the inner axes: what is folded, stored and kept in scratch on the way."""

    reductions: tuple[Op, ...]
    stores: tuple[Op, ...]
    kept: tuple[Op, ...]


@dataclass(frozen=True)
class Schedule:
    """The loops of a kernel.

    `lane` is the vector axis. With `across` it is a reduction axis and every row is folded by
    vectors; otherwise every lane holds a point of its own. `inner` are the axes that a stage
    walks, `grid` the ones that threads share out. `final` are the stores of values that do not
    vary along the inner axes. `scratch` numbers the rows of scratch that values are kept in.
    `unroll` vectors are worked on at once. A vector axis outside of
    the inner loops, or long, is cut into pieces of `chunk` elements, each one step of the grid.
    The loads `turned` are contiguous along the axis `tile` and not along the vector axis: they are
    read and transposed by tiles of `chunk` times `tile_rows` elements. Without `tile`, `turned`
    are the loads and stores of rows shorter than a vector, as many of them as it has lanes.
    """

    lane: Axis | None
    across: bool
    grid: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    stages: tuple[Stage, ...]
    final: tuple[Op, ...]
    scratch: dict[Op, int]
    unroll: int
    chunk: int
    tile: Axis | None = None
    tile_rows: int = 0
    turned: tuple[Op, ...] = ()


def levels(kernel: Kernel) -> dict[int, int]:
    """For every operation, how many reductions lie one behind the other before it."""
    found: dict[int, int] = {}
    for op in kernel.ops:
        level = max((found[a.uid] for a in op.args), default=0)
        found[op.uid] = level + 1 if op.name == "reduce" else level
    return found


def make_schedule(kernel: Kernel, lanes: int) -> Schedule:
    """The schedule for vectors of `lanes` elements."""
    lane = _lane(kernel, lanes)
    tile, turned = _turned(kernel, lane, lanes)
    across = lane is not None and lane in kernel.reduction
    inner = kernel.reduction if kernel.reduction else _pointwise_inner(kernel.parallel)
    if tile is not None and lane is not None:
        inner = (tile, lane)
    grid = tuple(a for a in kernel.parallel if a is not lane and a not in inner)
    names = frozenset(a.name for a in inner)
    level = levels(kernel)
    count = 1 + max((level[op.uid] - 1 for op in kernel.ops if op.name == "reduce"), default=0)
    walked = [s for s in kernel.stores if s.space & names]
    count = max([count] + [level[s.uid] + 1 for s in walked])
    plain = [
        Stage(
            tuple(op for op in kernel.ops if op.name == "reduce" and level[op.uid] == k + 1),
            tuple(s for s in walked if level[s.uid] == k),
            (),
        )
        for k in range(count)
    ]
    columns = bool(kernel.reduction) and not across
    short = columns and bool(turned)
    heaviest = max(stage_weight(s) for s in plain)
    table = _UNROLL_COLUMNS if columns else _row_table(kernel) if across else _UNROLL
    unroll = 1 if short else _unroll(heaviest, lane, lanes, table)
    lanes_kept = unroll * lanes if columns else 1
    kept_weight = KEEP_WEIGHT[_converts(kernel)]
    room = product(a.size for a in inner) * lanes_kept
    keep = _kept(plain, names, room, columns and not short, kept_weight)
    stages = tuple(
        Stage(s.reductions, s.stores, tuple(op for op in keep if keep[op] == k))
        for k, s in enumerate(plain)
        if s.reductions or s.stores
    )
    final = tuple(s for s in kernel.stores if not s.space & names)
    chunk = 0
    if lane is not None and not across and (columns or _large(lane.size)):
        chunk = unroll * lanes if columns else ROW_CHUNK
    rows = 0
    if tile is not None:
        types = {b.name: BYTES[b.type] for b in kernel.buffers}
        widest = max(types[op.buffer] for op in turned)
        chunk, unroll = TILE_VECTORS * lanes, min(unroll, TILE_VECTORS)
        most = SCRATCH_BYTES // (chunk * widest * len(turned))
        rows = max(min(TILE_ROW_BYTES // widest, most) // lanes, 1) * lanes
    return Schedule(
        lane, across, grid, inner, stages, final, _slots(keep, plain, names), unroll, chunk, tile,
        rows, turned,
    )  # fmt: skip


def _turned(kernel: Kernel, lane: Axis | None, lanes: int) -> tuple[Axis | None, tuple[Op, ...]]:
    """The axis along which most of the loads that jump along the vector axis are contiguous."""
    if lane is None:
        return None, ()
    if kernel.reduction:
        return None, _short_rows(kernel, lane, lanes)
    by_axis: dict[Axis, list[Op]] = {}
    for op in kernel.ops:
        if op.name != "load" or op.args or op.attr.coefficient(lane.name) in (0, 1):
            continue
        for axis in kernel.parallel:
            if axis is not lane and op.attr.coefficient(axis.name) == 1:
                by_axis.setdefault(axis, []).append(op)
    if not by_axis:
        return None, ()
    tile = max(by_axis, key=lambda axis: len(by_axis[axis]))
    if isinstance(tile.size, int) and tile.size < SHORT_TILE:
        return None, ()
    return tile, tuple(by_axis[tile])


def _short_rows(kernel: Kernel, lane: Axis, lanes: int) -> tuple[Op, ...]:
    """The loads and stores of whole rows, one behind the other, that are shorter than a vector."""
    (row, *more) = kernel.reduction
    if more or lane is row or not isinstance(row.size, int) or not 0 < row.size < lanes:
        return ()
    return tuple(
        op for op in kernel.ops
        if op.name in ("load", "store") and op.attr.coefficient(row.name) == 1
        and op.attr.coefficient(lane.name) == row.size and not op.attr.loaded()
    )  # fmt: skip


def _large(size: Size) -> bool:
    return not isinstance(size, int) or size > ROW_CHUNK


def _pointwise_inner(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The innermost axes that one step of the grid walks: more than one where they are short."""
    inner = axes[-1:]
    for axis in reversed(axes[:-1]):
        if _large(product(a.size for a in inner) * axis.size * 2):
            break
        inner = (axis, *inner)
    return inner


def _row_table(kernel: Kernel) -> tuple[tuple[int, int], ...]:
    """How far to unroll what lies across the reduced dimensions."""
    size = product(axis.size for axis in kernel.reduction)
    return _UNROLL_ROWS if as_number(size) >= LONG_ROW[_converts(kernel)] else _UNROLL


def _converts(kernel: Kernel) -> bool:
    """Whether elements are converted between memory and registers."""
    return any(buffer.type in HALF for buffer in kernel.buffers)


def _unroll(
    heaviest: int, lane: Axis | None, lanes: int, table: tuple[tuple[int, int], ...]
) -> int:
    count = next((count for limit, count in table if heaviest <= limit), 1)
    if lanes < 16:  # half the registers as well
        count = min(count, 4)
    while lane is not None and isinstance(lane.size, int) and 1 < count * lanes > lane.size:
        count //= 2
    return max(count, 1)


def stage_weight(stage: Stage) -> int:
    """The instructions of one inner point, roughly: what decides how far to unroll."""
    seen: set[Op] = set()
    stack = [op.args[0] for op in stage.reductions] + list(stage.stores)
    while stack:
        op = stack.pop()
        if op not in seen and op.name != "reduce":
            seen.add(op)
            stack.extend(op.args)
    return sum(weight(op.name) for op in seen)


def _lane(kernel: Kernel, lanes: int) -> Axis | None:
    """The axis along which the most bytes are contiguous; short rows go across themselves."""
    types = {b.name: b.type for b in kernel.buffers}
    sizes = {name: as_number(size) for name, size in kernel.axis_sizes().items()}

    def contiguous(axis: Axis) -> int:
        total = 0
        for op in kernel.ops:
            if op.name in MEMORY and op.attr.coefficient(axis.name) == 1:
                elements = math.prod(sizes[name] for name in op.attr.axes() if name in sizes)
                total += BYTES[types[op.buffer]] * elements
        return total

    if not kernel.reduction:
        return kernel.parallel[-1] if kernel.parallel else None
    row = kernel.reduction[-1]
    if kernel.blocked:  # rows are folded into each other one by one
        return row
    column = kernel.parallel[-1] if kernel.parallel else None
    if column is None:
        return row
    if any(op.name == "reduce" and column.name not in op.space for op in kernel.ops):
        return row  # its result belongs to all columns: it is folded once
    short = isinstance(row.size, int) and row.size < lanes
    if short and not (isinstance(column.size, int) and column.size < lanes):
        return column
    return column if contiguous(column) > contiguous(row) else row


def _kept(
    stages: list[Stage], inner: frozenset[str], count: Size, columns: bool, least: int
) -> dict[Op, int]:
    """The values kept in scratch, with the stage that computes them.

    What was read along `columns` is kept too: by the next stage it has left the cache.
    """
    if len(stages) < 2 or not isinstance(count, int):
        return {}
    first: dict[Op, int] = {}
    for number, stage in enumerate(stages):
        for op in _cone(stage, inner, frozenset()):
            first.setdefault(op, number)
    keep: dict[Op, int] = {}
    room = COLUMN_SCRATCH_BYTES if columns else SCRATCH_BYTES
    # The last values first: what is kept of them spares what they are made of.
    for op in sorted(first, key=lambda op: -op.uid):
        needed = count * BYTES[op.type]
        if op.name in ("const", "iota", "cast", "store") or needed > room:
            continue
        read = op.name in ("load", "load_if")
        if not (read and columns) and (read or _weight(op, keep, inner) < least):
            continue
        later = range(first[op] + 1, len(stages))
        known = {j: frozenset(k for k in keep if keep[k] < j) for j in later}
        if any(op in _cone(stages[j], inner, known[j]) for j in later):
            keep[op] = first[op]
            room -= needed
    return keep


def _slots(keep: dict[Op, int], stages: list[Stage], inner: frozenset[str]) -> dict[Op, int]:
    """The scratch row of every kept value: that of an operand which nobody needs any more."""
    slots: dict[Op, int] = {}
    holder: list[Op] = []
    for op in sorted(keep, key=lambda op: op.uid):
        stage = keep[op]
        for slot, other in enumerate(holder):
            if BYTES[other.type] != BYTES[op.type] or keep[other] >= stage:
                continue
            later = [
                # A stage still needs the operands of what it is the one to keep.
                _cone(stages[j], inner, frozenset(k for k in keep if keep[k] < j))
                for j in range(stage + 1, len(stages))
            ]
            needs = _cone(Stage((), (op,), ()), inner, frozenset(k for k in keep if k is not op))
            if other in needs and not any(other in cone for cone in later):
                slots[op], holder[slot] = slot, op
                break
        else:
            slots[op] = len(holder)
            holder.append(op)
    return slots


def _cone(stage: Stage, inner: frozenset[str], known: frozenset[Op]) -> set[Op]:
    """The operations that a stage computes at every inner point, not looking behind `known`."""
    seen: set[Op] = set()
    stack = [op.args[0] for op in stage.reductions] + list(stage.stores)
    while stack:
        op = stack.pop()
        if op in seen or not op.space & inner or op.name == "reduce":
            continue
        seen.add(op)
        if op not in known:
            stack.extend(op.args)
    return seen


def _weight(op: Op, keep: dict[Op, int], inner: frozenset[str]) -> int:
    """The instructions that computing `op` again at every inner point would take."""
    total, stack, seen = 0, [op], set()
    while stack:
        current = stack.pop()
        if current in seen or not current.space & inner:
            continue
        seen.add(current)
        total += weight(current.name)
        if current is op or current not in keep:
            stack.extend(current.args)
    return total
