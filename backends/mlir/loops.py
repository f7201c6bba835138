"""Loops over the inner axes of a kernel, as MLIR text.

Row reductions lie across the reduced axis, with several vectors as accumulators; every loop over
vectors ends in a masked tail. Long sums are folded piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from perfopt.backends.index import Size, product
from perfopt.backends.ir import Kernel, Op
from perfopt.backends.mlir.text import Block, Names, in_memory
from perfopt.backends.mlir.values import Point, Values
from perfopt.backends.schedule import Schedule, Stage, make_schedule
from perfopt.backends.vocabulary import weight

LIGHT = 16  # instructions per point up to which a kernel waits for memory
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


class Loops:
    """The loops over the inner axes of one kernel; see `rows` for the grid around them."""

    def __init__(self, kernel: Kernel, lanes: int, names: Names) -> None:
        self.kernel = kernel
        self.names = names
        self.lanes = lanes
        self.plan: Schedule = make_schedule(kernel, lanes)
        self.top = Block(names, lanes)
        self.lane = self.plan.lane.name if self.plan.lane else ""
        symbols = {size: f"%s{k}" for k, size in enumerate(kernel.sizes)}
        self.values = Values(kernel.buffers, symbols, self.lane, self.top)
        self.ahead = self._read_ahead()
        self.block_number = ""
        self.tiles: dict[int, str] = {}  # where the turned loads are transposed
        self.inner = frozenset(a.name for a in self.plan.inner)
        self.vector_inside = self.lane in self.inner  # or every lane is a point of its own
        count = product(a.size for a in self.plan.inner)
        # A long sum is folded piece by piece, so that its error grows as that of a pairwise sum.
        self.long = not isinstance(count, int) or count > SUM_BLOCK

    def _read_ahead(self) -> list[Op]:
        """The loads of rows whose next row is fetched while this one is worked on.

        The machine's own prefetching ends at the end of a page, which is where many rows end. Where
        much is computed on the way the memory has time enough.
        """
        light = sum(weight(op.name) for op in self.kernel.ops if self.lane in op.space) <= LIGHT
        if not self.plan.across or not self.plan.grid or self.kernel.blocked or not light:
            return []
        row, found = self.plan.grid[-1].name, {}
        for op in self.kernel.ops:
            if op.name != "load" or op.args or op.attr.coefficient(self.lane) != 1:
                continue
            if op.attr.coefficient(row) != 0:
                found[op.buffer, op.attr] = op
        return list(found.values())

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
        if stage is self.plan.stages[-1] and point.mask is None:
            for op in self.ahead:
                self.values.prefetch(op, self.plan.grid[-1].name, point)
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

    def _fold_columns(
        self, block: Block, stage: Stage, at: dict[str, str], carried: list[str]
    ) -> list[str]:
        """One point of the inner loops where the vector axis is outside of them."""
        raise NotImplementedError

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
