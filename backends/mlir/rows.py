"""`NAME_rows` of a kernel: the steps of its grid, as MLIR text.

In each step stand, by schedule: a pointwise body, walking a piece of the vector axis, or a tile of
it where operands disagree about which axis is contiguous; row reductions; column reductions, where
a block of columns is folded at once, every lane a column of its own; or a block of rows, folded
into partial results.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import sympy

from perfopt.backends.index import Size, product
from perfopt.backends.ir import BLOCK, BLOCK_ROWS, BYTES, Op
from perfopt.backends.mlir.loops import Loops, identity
from perfopt.backends.mlir.text import Block, in_memory
from perfopt.backends.mlir.values import Point, Tile
from perfopt.backends.schedule import Stage

CACHE_LINE = 64  # bytes
LINES_AHEAD = 8  # lines of a tile between asking for one and working on it


class RowsPrinter(Loops):
    """Prints `NAME_rows` of one kernel."""

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
        rows: dict[int, str] = {}
        for op, number in self.plan.scratch.items():
            assert isinstance(count, int)
            if number not in rows:
                total = self.values.size(count * columns + self.lanes)
                rows[number] = self.top.emit(
                    f"llvm.alloca {total} x {in_memory(op.type)} {{alignment = 64 : i64}} : "
                    "(i64) -> !llvm.ptr"
                )
            self.values.scratch[op.uid] = rows[number]
        if not self.plan.turned:
            return
        lines = self.plan.tile_rows or self.plan.inner[0].size
        size = self.values.size(product((self.plan.chunk, lines)))
        for op in self.plan.turned:
            memory = in_memory(self.values.memory[op.buffer])
            self.tiles[op.uid] = self.top.emit(
                f"llvm.alloca {size} x {memory} {{alignment = 64 : i64}} : (i64) -> !llvm.ptr"
            )

    def extents(self, block: Block) -> list[tuple[str, str]]:
        """The grid's axes and how many steps each has, the vector axis' pieces last."""
        found = [(axis.name, self.number(block, axis.size)) for axis in self.plan.grid]
        lane, tile = self.plan.lane, self.plan.tile
        if lane is not None and self.plan.chunk:
            found.append((lane.name, self._pieces(block, lane.size, self.plan.chunk)))
        if tile is not None:
            found.append((tile.name, self._pieces(block, tile.size, self.plan.tile_rows)))
        return found

    def _pieces(self, block: Block, size: Size, piece: int) -> str:
        if isinstance(size, int):
            return self.number(block, -(-size // piece))
        whole, most = self.number(block, size), self.number(block, piece - 1)
        more = block.emit(f"arith.addi {whole}, {most} : i64")
        return block.emit(f"arith.divui {more}, {self.number(block, piece)} : i64")

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
        first: list[Op] = []
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
        tile = positions.pop(self.plan.tile.name) if self.plan.tile else ""
        if self.kernel.blocked:
            positions[BLOCK] = self.block_number
        row = Point(block, frozenset(positions), positions=positions)
        if self.plan.chunk:
            start = block.emit(f"arith.muli {start}, {self.values.size(self.plan.chunk)} : i64")
        if not self.plan.lane:
            for store in self.kernel.stores:
                self.values.store(store, row)
        elif self.plan.tile:
            self._tile(row, start, tile)
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
        lane = self.plan.inner[-1]
        stop = self._end(row.block, start, self.plan.chunk, lane.size)
        self._lanes(row, self.plan.stages[0], {}, start, stop, [], lane.size)

    def _tile(self, row: Point, start: str, number: str) -> None:
        """A tile: the turned operands are transposed into it, then the body walks its rows."""
        block, lane, axis = row.block, self.plan.lane, self.plan.tile
        assert lane is not None and axis is not None
        stop = self._end(block, start, self.plan.chunk, lane.size)
        first = block.emit(f"arith.muli {number}, {self.values.size(self.plan.tile_rows)} : i64")
        last = self._end(block, first, self.plan.tile_rows, axis.size)
        width = self.values.size(self.plan.chunk)
        for op in self.plan.turned:
            tile = Tile(self.tiles[op.uid], axis.name, first, start, width)
            self._turn(row, op, tile, stop, last)
            self.values.tiles[op.uid] = tile
        exact = lane.size if isinstance(lane.size, int) and not lane.size % self.plan.chunk else 0

        def one(inside: Block, position: str, carried: list[str]) -> list[str]:
            line = Point(inside, frozenset(), row)
            at = {axis.name: position}
            self._fetch_lines(Point(inside, frozenset((axis.name,)), row, at), start)
            self._fetch_next_tile(inside, row, start, last, position)
            size = exact or sympy.Symbol("unknown")
            return self._lanes(line, self.plan.stages[0], at, start, stop, carried, size)

        self._loop(block, first, last, self.values.size(1), [], one)

    def _fetch_lines(self, line: Point, start: str) -> None:
        """Ask for what is read of a line that comes soon: each is far from the last in memory."""
        assert self.plan.tile is not None
        for op in self.kernel.ops:
            if op.name != "load" or op in self.plan.turned or op.attr.loaded():
                continue
            if op.attr.coefficient(self.lane) != 1 or op.attr.coefficient(self.plan.tile.name) == 0:
                continue
            for here in self._cache_lines(line.block, op, start):
                point = Point(line.block, self.inner, line, {self.lane: here})
                self.values.prefetch(op, self.plan.tile.name, point, LINES_AHEAD)

    def _cache_lines(self, block: Block, op: Op, start: str) -> list[str]:
        """Where along the vector axis each cache line of a tile's line begins."""
        step = CACHE_LINE // BYTES[self.values.memory[op.buffer]]
        return [
            block.emit(f"arith.addi {start}, {self.values.size(shift)} : i64")
            for shift in range(0, self.plan.chunk, step)
        ]

    def _fetch_next_tile(
        self, block: Block, row: Point, start: str, last: str, position: str
    ) -> None:
        """Ask for this step's share of the next tile, so that memory works while a tile is used."""
        values, axis, size = self.values, self.plan.tile, self.values.size
        assert axis is not None
        done = block.emit(f"arith.addi {position}, {size(self.plan.tile_rows)} : i64")
        done = block.emit(f"arith.subi {done}, {last} : i64")
        for op in self.plan.turned:
            step = CACHE_LINE // BYTES[values.memory[op.buffer]]
            pieces, each = max(self.plan.tile_rows // step, 1), max(self.plan.chunk // step, 1)
            first = block.emit(f"arith.muli {done}, {size(each)} : i64")
            line = block.emit(f"arith.divui {first}, {size(pieces)} : i64")
            line = block.emit(f"arith.addi {start}, {line} : i64")
            place = block.emit(f"arith.remui {first}, {size(pieces)} : i64")
            place = block.emit(f"arith.muli {place}, {size(step)} : i64")
            place = block.emit(f"arith.addi {last}, {place} : i64")
            for number in range(each):
                here = block.emit(f"arith.addi {place}, {size(number * step)} : i64")
                point = Point(block, self.inner, row, {self.lane: line, axis.name: here})
                values.prefetch(op, axis.name, point, 0)

    def _end(self, block: Block, start: str, piece: int, size: Size) -> str:
        end = block.emit(f"arith.addi {start}, {self.values.size(piece)} : i64")
        return block.emit(f"arith.minsi {end}, {self.values.size(size)} : i64")

    def _turn(self, row: Point, op: Op, tile: Tile, stop: str, last: str) -> None:
        """Read vectors along the tile's rows, and store them as its columns."""
        values, n = self.values, self.lanes
        memory = values.memory[op.buffer]
        ty = in_memory(memory)
        final = row.block.emit(f"arith.subi {stop}, {values.size(1)} : i64")

        def square(inside: Block, column: str, here: str) -> None:
            mask = self._mask(inside, here, last)
            rows = []
            for k in range(n):
                # Lines behind the end are read again: nobody looks at their columns.
                line = inside.emit(f"arith.addi {column}, {values.size(k)} : i64")
                line = inside.emit(f"arith.minsi {line}, {final} : i64")
                point = Point(inside, self.inner, row, {self.lane: line, tile.axis: here})
                offset = values.linear(op.attr, point)
                address = values.address(inside, f"%{op.buffer}", offset, ty)
                rows.append(values.load_at(inside, address, memory, True, mask))
            shift = inside.emit(f"arith.subi {here}, {tile.row} : i64")
            shift = inside.emit(f"arith.muli {shift}, {tile.width} : i64")
            offset = inside.emit(f"arith.subi {column}, {tile.column} : i64")
            offset = inside.emit(f"arith.addi {offset}, {shift} : i64")
            for k, turned in enumerate(inside.transposed(rows, ty)):
                down = inside.emit(f"arith.addi {offset}, {values.size(k * self.plan.chunk)} : i64")
                address = values.address(inside, tile.base, down, ty)
                values.store_at(inside, address, turned, memory, True, None)

        def one(inside: Block, column: str, carried: list[str]) -> list[str]:
            def part(deeper: Block, here: str, carried: list[str]) -> list[str]:
                square(deeper, column, here)
                return carried

            return self._loop(inside, tile.row, last, values.size(n), [], part)

        self._loop(row.block, tile.column, stop, values.size(n), [], one)

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

    # ---- column reductions ------------------------------------------------------------------

    @cached_property
    def _columns_ahead(self) -> list[Op]:
        """The loads of columns that jump from row to row: the machine does not foresee them."""
        axis = self.plan.inner[-1].name
        return [
            op for op in self.kernel.ops
            if op.name == "load" and not op.attr.loaded() and op not in self.plan.turned
            and op.attr.coefficient(self.lane) == 1 and op.attr.coefficient(axis) != 0
        ]  # fmt: skip

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
        assert self.plan.lane is not None
        stop = self.values.size(self.plan.lane.size)
        self._points = []
        for k in self._unrolled():
            position = start
            if k:
                position = block.emit(
                    f"arith.addi {start}, {self.values.size(k * self.lanes)} : i64"
                )
            mask = None
            if masked:
                mask = self._mask(block, position, stop)
            column = Point(block, frozenset((self.lane,)), row, {self.lane: position}, mask)
            self._points.append(column)
        for op in self.plan.turned:
            self._short_rows(row, block, op, start, masked)
        for stage in self._stages():
            first = [self._start(block, op) for op in stage.reductions for _ in self._unrolled()]
            totals = self._nest(block, stage, first, 0, {}, row)
            for number, op in enumerate(stage.reductions):
                for k in self._unrolled():
                    self._points[k].values[op.uid] = totals[number * self.plan.unroll + k]
        for store in self.plan.final:
            for column in self._points:
                self.values.store(store, column)
        for op in self.plan.turned:
            if op.name == "store":
                self._short_rows(row, block, op, start, masked, done=True)

    def _short_rows(
        self, row: Point, block: Block, op: Op, start: str, masked: bool, done: bool = False
    ) -> None:
        """Rows shorter than a vector between memory, where they are packed, and a tile of columns.

        Loads are brought into the tile before the stages, stores out of it when they are `done`.
        """
        values, n, axis = self.values, self.lanes, self.plan.inner[0]
        count, memory = int(axis.size), values.memory[op.buffer]
        ty, zero = in_memory(memory), values.size(0)
        base = self.tiles[op.uid]
        values.tiles[op.uid] = Tile(base, axis.name, zero, start, values.size(n))
        if op.name == "store" and not done:
            return
        first = Point(block, self.inner | {self.lane}, row, {self.lane: start, axis.name: zero})
        flat = values.linear(op.attr, first)
        left = ""
        if masked:
            assert self.plan.lane is not None
            rest = block.emit(f"arith.subi {values.size(self.plan.lane.size)}, {start} : i64")
            left = block.emit(f"arith.muli {rest}, {values.size(count)} : i64")
        outside, inside, masks = [], [], []
        for k in range(count):
            here = block.emit(f"arith.addi {flat}, {values.size(k * n)} : i64")
            outside.append(values.address(block, f"%{op.buffer}", here, ty))
            inside.append(values.address(block, base, values.size(k * n), ty))
            masks.append(self._mask(block, values.size(k * n), left) if masked else None)
        sources, targets = (inside, outside) if done else (outside, inside)
        wanted = [None] * count if done else masks
        vectors = [
            values.load_at(block, address, memory, True, mask)
            for address, mask in zip(sources, wanted, strict=True)
        ]
        vectors = block.packed(vectors, ty) if done else block.dealt(vectors, ty)
        allowed = masks if done else [None] * count
        for address, vector, mask in zip(targets, vectors, allowed, strict=True):
            values.store_at(block, address, vector, memory, True, mask)

    def _fold_columns(
        self, block: Block, stage: Stage, at: dict[str, str], carried: list[str]
    ) -> list[str]:
        found = list(carried)
        ahead = self._columns_ahead if stage is self.plan.stages[0] else []
        for k, column in enumerate(self._points):
            point = self._point(block, column, at, column.mask)
            if column.mask is None:
                for op in ahead:
                    self.values.prefetch(op, self.plan.inner[-1].name, point, LINES_AHEAD)
            if point.scratch:
                factor = self.values.size(self.plan.unroll * self.lanes)
                offset = block.emit(f"arith.muli {point.scratch}, {factor} : i64")
                shift = self.values.size(k * self.lanes)
                point.scratch = block.emit(f"arith.addi {offset}, {shift} : i64")
            self._work(point, stage, found, k)
        return found
