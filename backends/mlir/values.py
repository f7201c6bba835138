"""Values of a kernel as MLIR text: where each is computed, and how memory is read and written.

A `Point` is a place in the loops where values can be computed: the row (one step of the grid), a
column of it (one vector of lanes that each hold a point of their own), or one step of the inner
loops. Every value is computed at the outermost point that fixes all the axes it varies with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perfopt.backends.index import Index, Size
from perfopt.backends.ir import BYTES, FAULTS, HALF, Buffer, Op
from perfopt.backends.mlir.text import Block, in_memory

FAULT = "perfopt_fault"  # the module's flag: which check has failed


@dataclass
class Point:
    """Positions of the axes `own` and of all that `parent` fixes; values made here, by uid."""

    block: Block
    own: frozenset[str]
    parent: Point | None = None
    positions: dict[str, str] = field(default_factory=dict)
    mask: str | None = None  # which lanes exist; None for all
    scratch: str = ""  # the element offset in every scratch row
    values: dict[int, str] = field(default_factory=dict)
    vectors: dict[int, str] = field(default_factory=dict)
    bases: dict[tuple[object, ...], str] = field(default_factory=dict)

    def home(self, space: frozenset[str]) -> Point:
        """The outermost point that fixes all of `space`."""
        point = self
        while point.parent is not None and not space & point.own:
            point = point.parent
        return point

    def position(self, axis: str) -> str:
        """The position along an axis, as an i64 value."""
        point: Point | None = self
        while point is not None:
            if axis in point.positions:
                return point.positions[axis]
            point = point.parent
        raise KeyError(axis)


@dataclass(frozen=True)
class Tile:
    """A turned piece of a buffer: rows of `width` elements from `row` and `column` on."""

    base: str
    axis: str  # the axis that its rows are numbered by
    row: str
    column: str
    width: str


class Values:
    """Computes, loads and stores the values of one kernel.

    `symbols` maps symbolic sizes to the values that hold them,
    `lane` names the vector axis ("" for none). Constants and sizes are emitted into `top`, which
    is printed before everything else.
    """

    def __init__(
        self, buffers: Sequence[Buffer], symbols: Mapping[Size, str], lane: str, top: Block
    ) -> None:
        self.memory = {b.name: b.type for b in buffers}
        self.folds = {b.name: b.fold for b in buffers}
        self.symbols = symbols
        self.lane = lane
        self.lanes = top.lanes
        self.top = top
        self.scratch: dict[int, str] = {}
        self.tiles: dict[int, Tile] = {}
        self.ready: frozenset[int] = frozenset()  # what earlier stages have put in scratch
        self._integers: dict[int, str] = {}

    # ---- sizes and addresses ----------------------------------------------------------------

    def size(self, size: Size) -> str:
        """A size as an i64 value."""
        if not isinstance(size, int):
            return self.symbols[size]
        if size not in self._integers:
            self._integers[size] = self.top.emit(f"arith.constant {size} : i64")
        return self._integers[size]

    def linear(self, index: Index, at: Point) -> str:
        """The part of an index that all lanes share, each term summed where it is fixed."""
        by_point: dict[int, list[tuple[object, Size]]] = {}
        chain = [at]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        for term, coefficient in index.terms:
            if isinstance(term, str):
                home = at.home(frozenset((term,)))
            elif self.lane in term.space:
                continue
            else:
                home = at.home(term.space)
            by_point.setdefault(id(home), []).append((term, coefficient))
        total = ""
        for point in reversed(chain):
            terms = by_point.get(id(point), [])
            const = index.const if point is chain[-1] else 0
            if not terms and const == 0:
                continue
            key = (total, const, *terms)
            if key not in point.bases:
                point.bases[key] = self._sum(point, total, terms, const)
            total = point.bases[key]
        return total or self.size(0)

    def _sum(self, at: Point, total: str, terms: list[tuple[object, Size]], const: Size) -> str:
        block = at.block
        for term, coefficient in terms:
            if isinstance(term, str):
                value = at.position(term)
            else:
                assert isinstance(term, Op)
                value = self.value(term, at)
            if coefficient != 1:
                value = block.emit(f"arith.muli {value}, {self.size(coefficient)} : i64")
            total = block.emit(f"arith.addi {total}, {value} : i64") if total else value
        if const != 0:
            number = self.size(const)
            total = block.emit(f"arith.addi {total}, {number} : i64") if total else number
        return total

    def lane_index(self, index: Index, at: Point) -> str:
        """An index that differs between lanes, as a vector of i64."""
        block, ty = at.block, f"vector<{self.lanes}xi64>"
        result = block.splat(self.linear(index, at), "i64")
        for term, coefficient in index.terms:
            if isinstance(term, str):
                if term != self.lane:
                    continue
                steps = ", ".join(map(str, range(self.lanes)))
                value = block.emit(f"arith.constant dense<[{steps}]> : {ty}")
            elif self.lane in term.space:
                value = self.vector(term, at)
            else:
                continue
            if coefficient != 1:
                factor = block.splat(self.size(coefficient), "i64")
                value = block.emit(f"arith.muli {value}, {factor} : {ty}")
            result = block.emit(f"arith.addi {result}, {value} : {ty}")
        return result

    def scattered(self, index: Index) -> bool:
        """Whether neighbouring lanes are not neighbours in memory."""
        for term, coefficient in index.terms:
            if isinstance(term, str):
                if term == self.lane and coefficient != 1:
                    return True
            elif self.lane in term.space:
                return True
        return False

    def address(self, block: Block, base: str, offset: str, memory: str) -> str:
        """The address of the element `offset` behind `base`."""
        return block.emit(
            f"llvm.getelementptr {base}[{offset}] : (!llvm.ptr, i64) -> !llvm.ptr, {memory}"
        )

    def addresses(self, block: Block, base: str, offsets: str, memory: str) -> str:
        """One address per lane."""
        n = self.lanes
        return block.emit(
            f"llvm.getelementptr {base}[{offsets}] : (!llvm.ptr, vector<{n}xi64>) -> "
            f"vector<{n}x!llvm.ptr>, {memory}"
        )

    # ---- values -----------------------------------------------------------------------------

    def is_vector(self, op: Op) -> bool:
        """Whether the value differs between lanes."""
        return self.lane in op.space

    def value(self, op: Op, at: Point) -> str:
        """The value of an operation, emitted once at its home."""
        home = at.home(op.space)
        if op.uid not in home.values:
            home.values[op.uid] = self._compute(op, home)
        return home.values[op.uid]

    def vector(self, op: Op, at: Point) -> str:
        """The value as a vector, splat where all lanes share it."""
        if self.is_vector(op):
            return self.value(op, at)
        home = at.home(op.space)
        if op.uid not in home.vectors:
            if op.name == "const":
                home.vectors[op.uid] = home.block.constant(op.attr, op.type, True)
            else:
                home.vectors[op.uid] = home.block.splat(self.value(op, home), op.type)
        return home.vectors[op.uid]

    def _compute(self, op: Op, at: Point) -> str:
        vector = self.is_vector(op)
        if op.uid in self.ready and at.scratch:
            return self._from_scratch(op, at)
        if op.name == "const":
            return at.block.constant(op.attr, op.type, False)
        if op.name == "size":
            return self.size(op.attr.const)
        if op.name == "iota":
            return self.lane_index(op.attr, at) if vector else self.linear(op.attr, at)
        if op.name in ("load", "load_if"):
            return self._load(op, at)
        assert op.name != "reduce", "a reduction is used before its stage"
        args = [self.vector(a, at) if vector else self.value(a, at) for a in op.args]
        if op.name in FAULTS:
            return self._checked(op, args, at, vector)
        return at.block.operation(op, args, vector)

    def _checked(self, op: Op, args: list[str], at: Point, vector: bool) -> str:
        """A value that passes a check; where it does not, the module's fault flag is set.

        An index outside of its dimension becomes 0.
        """
        value, *guard = args
        block, ty = at.block, at.block.type(op.type, vector)
        limit = block.constant(0, op.type, vector)
        how = "ne"
        if op.name == "bounded":
            how, limit = "ult", self.size(op.attr.const)
            limit = block.splat(limit, "i64") if vector else limit
        good = block.emit(f"arith.cmpi {how}, {value}, {limit} : {ty}")
        bad = block.unary("not", good, "i1", vector)
        for condition in guard:
            bad = block.binary("and", bad, condition, "i1", vector)
        if vector and at.mask is not None:
            bad = block.binary("and", bad, at.mask, "i1", True)
        some = bad
        if vector:
            some = block.emit(f"vector.reduction <or>, {bad} : vector<{self.lanes}xi1> into i1")
        flag, code = block.names.fresh(), self.size(FAULTS[op.name])
        block.lines += [
            f"scf.if {some} {{",
            f"{flag} = llvm.mlir.addressof @{FAULT} : !llvm.ptr",
            f"llvm.store {code}, {flag} {{alignment = 8 : i64}} : i64, !llvm.ptr",
            "}",
        ]
        if op.name == "nonzero":
            return value
        return block.select(good, value, block.constant(0, "i64", vector), "i64", vector)

    # ---- memory -----------------------------------------------------------------------------

    def _load(self, op: Op, at: Point) -> str:
        memory, block = self.memory[op.buffer], at.block
        ty, base = in_memory(memory), f"%{op.buffer}"
        vector = self.is_vector(op)
        if op.uid in self.tiles:
            address = self._in_tile(self.tiles[op.uid], at, ty)
            return block.widened(self.load_at(block, address, memory, True, None), memory, True)
        mask = at.mask if vector else None
        guard = op.args[-1] if op.name == "load_if" else None
        if guard is not None and vector:
            here = self.vector(guard, at)
            mask = block.binary("and", mask, here, "i1", True) if mask else here
        if vector and (self.scattered(op.attr) or op.attr.coefficient(self.lane) == 0):
            raw = self._gather(block, base, self.lane_index(op.attr, at), memory, mask)
        elif vector:
            address = self.address(block, base, self.linear(op.attr, at), ty)
            raw = self.load_at(block, address, memory, True, mask)
        else:
            offset = self.linear(op.attr, at)
            if guard is not None:  # the first element stands for those that are not there
                condition = self.value(guard, at)
                offset = block.select(condition, offset, self.size(0), "i64", False)
            raw = self.load_at(block, self.address(block, base, offset, ty), memory, False, None)
        return block.widened(raw, memory, vector)

    def prefetch(self, op: Op, axis: str, at: Point, steps: int = 1) -> None:
        """Ask for what a load reads so many steps further along an axis; never a fault."""
        block, offset = at.block, self.linear(op.attr, at)
        if steps:
            step = self.size(op.attr.coefficient(axis))
            if steps > 1:
                step = block.emit(f"arith.muli {step}, {self.size(steps)} : i64")
            offset = block.emit(f"arith.addi {offset}, {step} : i64")
        address = self.address(block, f"%{op.buffer}", offset, in_memory(self.memory[op.buffer]))
        block.lines.append(
            f'"llvm.intr.prefetch"({address}) <{{cache = 1 : i32, hint = 3 : i32, rw = 0 : i32}}> '
            ": (!llvm.ptr) -> ()"
        )

    def load_at(
        self, block: Block, address: str, memory: str, vector: bool, mask: str | None
    ) -> str:
        """A scalar or a contiguous vector, as it is in memory; 0 where masked off."""
        ty, align = in_memory(memory), BYTES[memory]
        kind = f"vector<{self.lanes}x{ty}>" if vector else ty
        if mask is None:
            return block.emit(
                f"llvm.load {address} {{alignment = {align} : i64}} : !llvm.ptr -> {kind}"
            )
        zero = block.emit(f"arith.constant dense<{_zero(ty)}> : {kind}")
        return block.emit(
            f"llvm.intr.masked.load {address}, {mask}, {zero} {{alignment = {align} : i32}} : "
            f"(!llvm.ptr, vector<{self.lanes}xi1>, {kind}) -> {kind}"
        )

    def _in_tile(self, tile: Tile, at: Point, ty: str) -> str:
        block = at.block
        row = block.emit(f"arith.subi {at.position(tile.axis)}, {tile.row} : i64")
        column = block.emit(f"arith.subi {at.position(self.lane)}, {tile.column} : i64")
        start = block.emit(f"arith.muli {row}, {tile.width} : i64")
        offset = block.emit(f"arith.addi {start}, {column} : i64")
        return self.address(block, tile.base, offset, ty)

    def _gather(self, block: Block, base: str, index: str, memory: str, mask: str | None) -> str:
        n, ty = self.lanes, in_memory(memory)
        addresses = self.addresses(block, base, index, ty)
        mask = mask or block.emit(f"arith.constant dense<true> : vector<{n}xi1>")
        zero = block.emit(f"arith.constant dense<{_zero(ty)}> : vector<{n}x{ty}>")
        return block.emit(
            f"llvm.intr.masked.gather {addresses}, {mask}, {zero} {{alignment = {BYTES[memory]} : "
            f"i32}} : (vector<{n}x!llvm.ptr>, vector<{n}xi1>, vector<{n}x{ty}>) -> vector<{n}x{ty}>"
        )

    def store(self, op: Op, at: Point) -> None:
        """Emit a store of a scalar, a contiguous vector, or a scatter."""
        memory, block = self.memory[op.buffer], at.block
        ty, base = in_memory(memory), f"%{op.buffer}"
        vector = self.lane in op.attr.axes()
        value = self.vector(op.args[0], at) if vector else self.value(op.args[0], at)
        if op.uid in self.tiles:
            address = self._in_tile(self.tiles[op.uid], at, ty)
            value = block.narrowed(value, memory, True)
            self.store_at(block, address, value, memory, True, None)
            return
        if op.name == "accumulate":
            value = self._accumulated(op, value, at, vector)
        value = block.narrowed(value, memory, vector)
        if vector and self.scattered(op.attr):
            n = self.lanes
            addresses = self.addresses(block, base, self.lane_index(op.attr, at), ty)
            mask = at.mask or block.emit(f"arith.constant dense<true> : vector<{n}xi1>")
            block.lines.append(
                f"llvm.intr.masked.scatter {value}, {addresses}, {mask} {{alignment = "
                f"{BYTES[memory]} : i32}} : vector<{n}x{ty}>, vector<{n}xi1> into "
                f"vector<{n}x!llvm.ptr>"
            )
            return
        address = self.address(block, base, self.linear(op.attr, at), ty)
        self.store_at(block, address, value, memory, vector, at.mask if vector else None)

    def _accumulated(self, op: Op, value: str, at: Point, vector: bool) -> str:
        """`value` folded into what the buffer holds."""
        held = Op(-1, "load", (), op.type, op.attr.axes(), op.attr, op.buffer)
        before = self._load(held, at)
        return at.block.combine(self.folds[op.buffer], value, before, op.type, vector)

    def store_at(
        self, block: Block, address: str, value: str, memory: str, vector: bool, mask: str | None
    ) -> None:
        """Store a scalar or a contiguous vector, where the mask allows."""
        ty, align = in_memory(memory), BYTES[memory]
        kind = f"vector<{self.lanes}x{ty}>" if vector else ty
        if mask is None:
            block.lines.append(
                f"llvm.store {value}, {address} {{alignment = {align} : i64}} : {kind}, !llvm.ptr"
            )
            return
        block.lines.append(
            f"llvm.intr.masked.store {value}, {address}, {mask} {{alignment = {align} : i32}} : "
            f"{kind}, vector<{self.lanes}xi1> into !llvm.ptr"
        )

    def _from_scratch(self, op: Op, at: Point) -> str:
        ty = in_memory(op.type)
        address = self.address(at.block, self.scratch[op.uid], at.scratch, ty)
        vector = self.is_vector(op)
        raw = self.load_at(at.block, address, op.type, vector, None)
        return at.block.widened(raw, op.type, vector)

    def keep(self, op: Op, at: Point) -> None:
        """Emit the store of a value into its scratch row."""
        vector = self.is_vector(op)
        value = at.block.narrowed(self.value(op, at), op.type, vector)
        address = self.address(at.block, self.scratch[op.uid], at.scratch, in_memory(op.type))
        # What lies behind the end of a row is the next row, which an operand may still be kept in.
        mask = at.mask if vector else None
        self.store_at(at.block, address, value, op.type, vector, mask)


def _zero(memory: str) -> str:
    return "0.0" if memory in ("f64", "f32") or memory in HALF else "0"
