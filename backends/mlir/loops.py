"""The loops of a kernel as MLIR text, after its schedule.

`NAME_rows` runs a range of the kernel's grid. In each step of it stand, by schedule:
pointwise bodies, walking a piece of the vector axis; row reductions, whose vectors lie across the
reduced axis, with several accumulators; and column reductions, where a block of columns is folded
at once, every lane a column of its own. Every loop over vectors ends in a masked tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from perfopt.backends.index import Size, product
from perfopt.backends.ir import BLOCK, BLOCK_ROWS, Kernel, Op
from perfopt.backends.mlir.text import Block, Names, in_memory
from perfopt.backends.mlir.values import Point, Values
from perfopt.backends.schedule import Schedule, Stage, make_schedule

SUM_BLOCK = 256  # steps after which a running sum of unknown length is set aside
_IDENTITY = {"sum": 0, "prod": 1, "or": 0, "and": 1}
_LIMITS = {"i64": 63, "i32": 31, "i16": 15, "i8": 7}

Body = Callable[[Block, str, list[str]], list[str]]


def identity(kind: str, type: str) -> float | int | bool:
    """The value that a reduction starts from."""
    if kind not in ("max", "min"):
        return float(_IDENTITY[kind]) if type in ("f32", "f64") else _IDENTITY[kind]
    if type in ("f32", "f64"):
        return float("-inf") if kind == "max" else float("inf")
    if type in ("u8", "i1"):
        return 0 if kind == "max" else {"u8": 255, "i1": 1}[type]
    bits = _LIMITS[type]
    return -(1 << bits) if kind == "max" else (1 << bits) - 1


def _piece(size: Size, unit: int) -> int:
    """The elements summed in one go of `size`, `unit` in each step: about the root of the steps."""
    if not isinstance(size, int):
        return SUM_BLOCK * unit
    return max(128, 1 << (size // unit).bit_length() // 2) * unit


class RowsPrinter:
    """Prints `NAME_rows` of one kernel."""

    def __init__(self, kernel: Kernel, lanes: int, names: Names) -> None:
        self.kernel = kernel
        self.names = names
        self.lanes = lanes
        self.plan: Schedule = make_schedule(kernel, lanes)
        self.top = Block(names, lanes)
        self.lane = self.plan.lane.name if self.plan.lane else ""
        symbols = {size: f"%s{k}" for k, size in enumerate(kernel.sizes)}
        self.values = Values(kernel.buffers, symbols, self.lane, self.top)
        self.block_number = ""
        self.inner = frozenset(a.name for a in self.plan.inner)
        self.vector_inside = self.lane in self.inner  # or every lane is a point of its own
        count = product(a.size for a in self.plan.inner)
        # A long sum is folded piece by piece, so that its error grows as that of a pairwise sum.
        self.long = not isinstance(count, int) or count > SUM_BLOCK

    # ---- the function -----------------------------------------------------------------------

    def text(self) -> str:
        """The function."""
        grid = Block(self.names, self.lanes)
        self._allocate_scratch()
        step = self._block if self.kernel.blocked else self._step
        self._loop(grid, "%begin", "%end", self.values.size(1), [], step)
        lines = self.top.lines + grid.lines
        body = "\n".join("  " + line for line in lines)
        buffers = [f"%{b.name}: !llvm.ptr {{llvm.noalias}}" for b in self.kernel.buffers]
        sizes = [f"%s{k}: i64" for k in range(len(self.kernel.sizes))]
        args = ", ".join([*buffers, *sizes, "%begin: i64", "%end: i64"])
        return f"func.func private @KERNEL_rows({args}) {{\n{body}\n  return\n}}\n"

    def _allocate_scratch(self) -> None:
        columns = self.plan.unroll * self.lanes if self.plan.chunk else 1
        count = product(a.size for a in self.plan.inner)
        for op in self.plan.scratch:
            assert isinstance(count, int)
            total = self.values.size(count * columns + self.lanes)
            self.values.scratch[op.uid] = self.top.emit(
                f"llvm.alloca {total} x {in_memory(op.type)} {{alignment = 64 : i64}} : (i64) -> "
                "!llvm.ptr"
            )

    def extents(self, block: Block) -> list[tuple[str, str]]:
        """The grid's axes and how many steps each has, the vector axis' pieces last."""
        found = [(axis.name, self.number(block, axis.size)) for axis in self.plan.grid]
        lane, chunk = self.plan.lane, self.plan.chunk
        if lane is not None and chunk:
            if isinstance(lane.size, int):
                found.append((lane.name, self.number(block, -(-lane.size // chunk))))
            else:
                size, most = self.number(block, lane.size), self.number(block, chunk - 1)
                more = block.emit(f"arith.addi {size}, {most} : i64")
                pieces = block.emit(f"arith.divui {more}, {self.number(block, chunk)} : i64")
                found.append((lane.name, pieces))
        return found

    def steps(self, block: Block) -> str:
        """The number of steps of the grid."""
        total = self.number(block, 1)
        for _, count in self.extents(block):
            total = block.emit(f"arith.muli {total}, {count} : i64")
        if not self.kernel.blocked:
            return total
        more = block.emit(f"arith.addi {total}, {self.number(block, BLOCK_ROWS - 1)} : i64")
        return block.emit(f"arith.divui {more}, {self.number(block, BLOCK_ROWS)} : i64")

    def _block(self, block: Block, step: str, carried: list[str]) -> list[str]:
        """A block of rows, folded into partial results that start from the identity."""
        whole = Point(block, frozenset((BLOCK,)), positions={BLOCK: step})
        kinds = {b.name: b.fold for b in self.kernel.buffers}
        first = []
        for op in self.kernel.stores:
            if op.name == "accumulate":
                value = identity(kinds[op.buffer], op.type)
                start = Op(-1 - len(first), "const", (), op.type, frozenset(), value)
                first.append(replace(op, name="store", args=(start,)))
        self._nest(block, Stage((), tuple(first), ()), [], 0, {}, whole)
        rows = self.values.size(1)
        for _, count in self.extents(self.top):
            rows = self.top.emit(f"arith.muli {rows}, {count} : i64")
        size = self.values.size(BLOCK_ROWS)
        begin = block.emit(f"arith.muli {step}, {size} : i64")
        end = block.emit(f"arith.addi {begin}, {size} : i64")
        end = block.emit(f"arith.minsi {end}, {rows} : i64")

        def row(inside: Block, position: str, carried: list[str]) -> list[str]:
            self.block_number = step
            return self._step(inside, position, carried)

        self._loop(block, begin, end, self.values.size(1), [], row)
        return carried

    def number(self, block: Block, size: Size) -> str:
        """A size as an i64 value, in any function of the kernel."""
        return (
            self.values.size(size)
            if not isinstance(size, int)
            else block.emit(f"arith.constant {size} : i64")
        )

    def _step(self, block: Block, step: str, carried: list[str]) -> list[str]:
        """One step of the grid."""
        positions: dict[str, str] = {}
        extents = self.extents(self.top)
        for number, (axis, count) in reversed(list(enumerate(extents))):
            if number == 0:
                positions[axis] = step
                break
            positions[axis] = block.emit(f"arith.remui {step}, {count} : i64")
            step = block.emit(f"arith.divui {step}, {count} : i64")
        start = positions.pop(self.lane, "")
        if self.kernel.blocked:
            positions[BLOCK] = self.block_number
        row = Point(block, frozenset(positions), positions=positions)
        if self.plan.chunk:
            start = block.emit(f"arith.muli {start}, {self.values.size(self.plan.chunk)} : i64")
        if not self.plan.lane:
            for store in self.kernel.stores:
                self.values.store(store, row)
        elif self.plan.across:
            self._row_reductions(row)
        elif self.kernel.reduction:
            self._columns(row, start)
        else:
            self._pointwise(row, start)
        return carried

    # ---- pointwise bodies and row reductions ------------------------------------------------

    def _pointwise(self, row: Point, start: str) -> None:
        if not self.plan.chunk:
            self._nest(row.block, self.plan.stages[0], [], 0, {}, row)
            return
        block, lane = row.block, self.plan.inner[-1]
        end = block.emit(f"arith.addi {start}, {self.values.size(self.plan.chunk)} : i64")
        stop = block.emit(f"arith.minsi {end}, {self.values.size(lane.size)} : i64")
        self._lanes(row, self.plan.stages[0], {}, start, stop, [], lane.size)

    def _row_reductions(self, row: Point) -> None:
        for stage in self._stages():
            start = [
                self._start(row.block, op) for op in stage.reductions for _ in self._unrolled()
            ]
            totals = self._nest(row.block, stage, start, 0, {}, row)
            for number, op in enumerate(stage.reductions):
                width = self.plan.unroll
                parts = totals[number * width : (number + 1) * width]
                row.values[op.uid] = self._folded(row.block, op, parts)
        for store in self.plan.final:
            self.values.store(store, row)

    def _stages(self) -> Iterator[Stage]:
        """The stages in order; those after the one that keeps a value read it from scratch."""
        ready: frozenset[int] = frozenset()
        for stage in self.plan.stages:
            self.values.ready = ready
            yield stage
            ready |= {op.uid for op in stage.kept}

    def _unrolled(self) -> range:
        return range(self.plan.unroll)

    def _start(self, block: Block, op: Op) -> str:
        return block.constant(identity(op.attr, op.type), op.type, True)

    def _carried(self, stage: Stage, values: Sequence[str]) -> list[tuple[str, str]]:
        types = [self.top.type(op.type, True) for op in stage.reductions for _ in self._unrolled()]
        return list(zip(values, types, strict=True))

    def _merged(self, block: Block, stage: Stage, left: list[str], right: list[str]) -> list[str]:
        ops = [op for op in stage.reductions for _ in self._unrolled()]
        return [
            block.combine(op.attr, x, y, op.type, True)
            for op, x, y in zip(ops, left, right, strict=True)
        ]

    def _nest(
        self, block: Block, stage: Stage, totals: list[str], depth: int, at: dict[str, str],
        outer: Point,
    ) -> list[str]:  # fmt: skip
        """The loops over the inner axes from `depth` on; returns the accumulators."""
        axis = self.plan.inner[depth]
        last = depth == len(self.plan.inner) - 1
        unit = self.lanes * self.plan.unroll if last and self.vector_inside else 1
        piece = _piece(axis.size, unit)
        size = self.values.size(axis.size)
        if not stage.reductions or (isinstance(axis.size, int) and axis.size <= piece):
            return self._walk(block, stage, totals, depth, at, outer, self.values.size(0), size)

        def one(inside: Block, start: str, carried: list[str]) -> list[str]:
            end = inside.emit(f"arith.addi {start}, {self.values.size(piece)} : i64")
            stop = inside.emit(f"arith.minsi {end}, {size} : i64")
            ops = [op for op in stage.reductions for _ in self._unrolled()]
            fresh = [self._start(inside, op) for op in ops]
            found = self._walk(inside, stage, fresh, depth, at, outer, start, stop)
            return self._merged(inside, stage, found, carried)

        zero, step = self.values.size(0), self.values.size(piece)
        return self._loop(block, zero, size, step, self._carried(stage, totals), one)

    def _walk(
        self, block: Block, stage: Stage, totals: list[str], depth: int, at: dict[str, str],
        outer: Point, start: str, stop: str,
    ) -> list[str]:  # fmt: skip
        """One loop over `[start, stop)` of the inner axis `depth`, and what lies in it."""
        axis = self.plan.inner[depth]
        if depth == len(self.plan.inner) - 1 and self.vector_inside:
            row = Point(block, frozenset(), outer)
            return self._lanes(row, stage, at, start, stop, totals, axis.size)

        def one(inside: Block, position: str, carried: list[str]) -> list[str]:
            here = at | {axis.name: position}
            if depth == len(self.plan.inner) - 1:
                return self._fold_columns(inside, stage, here, carried)
            if not self.long or not stage.reductions:
                return self._nest(inside, stage, carried, depth + 1, here, outer)
            ops = [op for op in stage.reductions for _ in self._unrolled()]
            fresh = [self._start(inside, op) for op in ops]
            found = self._nest(inside, stage, fresh, depth + 1, here, outer)
            return self._merged(inside, stage, found, carried)

        one_step = self.values.size(1)
        return self._loop(block, start, stop, one_step, self._carried(stage, totals), one)

    def _lanes(
        self, row: Point, stage: Stage, at: dict[str, str], start: str, stop: str,
        totals: list[str], size: Size,
    ) -> list[str]:  # fmt: skip
        """The vector axis from `start` to `stop`: unrolled whole vectors, then the tail."""
        block, width = row.block, self.plan.unroll
        unit = self.lanes * width
        exact = isinstance(size, int) and size % unit == 0
        main_end = stop
        if not exact:
            length = block.emit(f"arith.subi {stop}, {start} : i64")
            rest = block.emit(f"arith.remui {length}, {self.values.size(unit)} : i64")
            main_end = block.emit(f"arith.subi {stop}, {rest} : i64")

        def whole(inside: Block, position: str, carried: list[str]) -> list[str]:
            found = list(carried)
            for k in self._unrolled():
                here = position
                if k:
                    here = inside.emit(
                        f"arith.addi {position}, {self.values.size(k * self.lanes)} : i64"
                    )
                point = self._point(inside, row, at | {self.lane: here}, None)
                self._work(point, stage, found, k)
            return found

        def tail(inside: Block, position: str, carried: list[str]) -> list[str]:
            found = list(carried)
            mask = None
            if not (isinstance(size, int) and size % self.lanes == 0):
                mask = self._mask(inside, position, stop)
            point = self._point(inside, row, at | {self.lane: position}, mask)
            self._work(point, stage, found, 0)
            return found

        if not isinstance(size, int) or size >= unit:
            carried = self._carried(stage, totals) if totals else []
            totals = self._loop(block, start, main_end, self.values.size(unit), carried, whole)
        if not exact:
            carried = self._carried(stage, totals) if totals else []
            one = self.values.size(self.lanes)
            totals = self._loop(block, main_end, stop, one, carried, tail)
        return totals

    def _point(self, block: Block, parent: Point, at: dict[str, str], mask: str | None) -> Point:
        scratch = ""
        if self.plan.scratch:
            for axis in self.plan.inner:
                size = self.values.size(axis.size)
                if scratch:
                    scratch = block.emit(f"arith.muli {scratch}, {size} : i64")
                    scratch = block.emit(f"arith.addi {scratch}, {at[axis.name]} : i64")
                else:
                    scratch = at[axis.name]
        return Point(block, self.inner, parent, at, mask, scratch)

    def _mask(self, block: Block, position: str, stop: str) -> str:
        n = self.lanes
        rest = block.emit(f"arith.subi {stop}, {position} : i64")
        rest = block.emit(f"arith.minsi {rest}, {self.values.size(n)} : i64")
        short = block.emit(f"arith.trunci {rest} : i64 to i32")
        limit = block.emit(f"vector.broadcast {short} : i32 to vector<{n}xi32>")
        steps = ", ".join(map(str, range(n)))
        lanes = block.emit(f"arith.constant dense<[{steps}]> : vector<{n}xi32>")
        return block.emit(f"arith.cmpi slt, {lanes}, {limit} : vector<{n}xi32>")

    def _work(self, point: Point, stage: Stage, totals: list[str], column: int) -> None:
        """What a stage does at one inner point; folds into the accumulators of `column`."""
        for op in stage.kept:
            self.values.keep(op, point)
        for store in stage.stores:
            self.values.store(store, point)
        for number, op in enumerate(stage.reductions):
            value = self.values.vector(op.args[0], point)
            if point.mask is not None and self.plan.across:
                start = point.block.constant(identity(op.attr, op.type), op.type, True)
                value = point.block.select(point.mask, value, start, op.type, True)
            slot = number * self.plan.unroll + column
            totals[slot] = point.block.combine(op.attr, value, totals[slot], op.type, True)

    def _folded(self, block: Block, op: Op, parts: list[str]) -> str:
        """Several accumulators as one scalar."""
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [
                block.combine(op.attr, x, y, op.type, True)
                for x, y in zip(parts[:half], parts[half:], strict=True)
            ]
        value, n = parts[0], self.lanes
        ty = in_memory(op.type) if op.type != "i1" else "i1"
        while n > 1:
            n //= 2
            low, high = (
                block.emit(
                    f"vector.extract_strided_slice {value} {{offsets = [{offset}], sizes = [{n}], "
                    f"strides = [1]}} : vector<{2 * n}x{ty}> to vector<{n}x{ty}>"
                )
                for offset in (0, n)
            )
            value = Block(block.names, n, block.lines).combine(op.attr, low, high, op.type, True)
        return block.emit(f"vector.extract {value}[0] : {ty} from vector<1x{ty}>")

    # ---- column reductions ------------------------------------------------------------------

    def _columns(self, row: Point, start: str) -> None:
        """A block of columns: at full width, or masked where fewer are left."""
        size, block = self.plan.lane.size, row.block  # type: ignore[union-attr]
        whole = isinstance(size, int) and size % self.plan.chunk == 0
        if whole:
            self._column_block(row, block, start, masked=False)
            return
        full, part = Block(self.names, self.lanes), Block(self.names, self.lanes)
        self._column_block(row, full, start, masked=False)
        self._column_block(row, part, start, masked=True)
        end = block.emit(f"arith.addi {start}, {self.values.size(self.plan.chunk)} : i64")
        fits = block.emit(f"arith.cmpi sle, {end}, {self.values.size(size)} : i64")
        block.lines += [f"scf.if {fits} {{", *full.lines, "} else {", *part.lines, "}"]

    def _column_block(self, row: Point, block: Block, start: str, masked: bool) -> None:
        # Values of the row alone stand before the branch; what follows is of these columns.
        self._points = []
        for k in self._unrolled():
            position = start
            if k:
                position = block.emit(
                    f"arith.addi {start}, {self.values.size(k * self.lanes)} : i64"
                )
            mask = None
            if masked:
                mask = self._mask(block, position, self.values.size(self.plan.lane.size))  # type: ignore[union-attr]
            column = Point(block, frozenset((self.lane,)), row, {self.lane: position}, mask)
            self._points.append(column)
        for stage in self._stages():
            first = [self._start(block, op) for op in stage.reductions for _ in self._unrolled()]
            totals = self._nest(block, stage, first, 0, {}, row)
            for number, op in enumerate(stage.reductions):
                for k in self._unrolled():
                    self._points[k].values[op.uid] = totals[number * self.plan.unroll + k]
        for store in self.plan.final:
            for column in self._points:
                self.values.store(store, column)

    def _fold_columns(
        self, block: Block, stage: Stage, at: dict[str, str], carried: list[str]
    ) -> list[str]:
        found = list(carried)
        for k, column in enumerate(self._points):
            point = self._point(block, column, at, column.mask)
            if point.scratch:
                factor = self.values.size(self.plan.unroll * self.lanes)
                offset = block.emit(f"arith.muli {point.scratch}, {factor} : i64")
                shift = self.values.size(k * self.lanes)
                point.scratch = block.emit(f"arith.addi {offset}, {shift} : i64")
            self._work(point, stage, found, k)
        return found

    # ---- scf --------------------------------------------------------------------------------

    def _loop(
        self, block: Block, start: str, stop: str, step: str, carried: list[tuple[str, str]],
        body: Body,
    ) -> list[str]:  # fmt: skip
        """A counted loop with carried values; returns what they are after it."""
        inside = Block(self.names, self.lanes)
        position = self.names.fresh()
        inner = [self.names.fresh() for _ in carried]
        results = body(inside, position, inner)
        head = f"scf.for {position} = {start} to {stop} step {step}"
        if not carried:
            block.lines += [f"{head} : i64 {{", *inside.lines, "}"]
            return []
        types = ", ".join(ty for _, ty in carried)
        pairs = zip(inner, carried, strict=True)
        starts = ", ".join(f"{name} = {value}" for name, (value, _) in pairs)
        name = self.names.fresh()
        block.lines += [
            f"{name}:{len(carried)} = {head} iter_args({starts}) -> ({types}) : i64 {{",
            *inside.lines,
            f"scf.yield {', '.join(results)} : {types}",
            "}",
        ]
        return [f"{name}#{k}" for k in range(len(carried))]
