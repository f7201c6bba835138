"""Kernels as MLIR text: loops in `scf`, values as explicit vectors, addresses as LLVM pointers.

Every kernel becomes three functions: `NAME_rows` runs a range of its grid, `NAME_team` is what
each thread of torch's OpenMP pool runs, and `NAME` is the entry that the program calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from perfopt.backends.index import Index, Size
from perfopt.backends.ir import BYTES, HALF, Axis, Kernel, Op
from perfopt.backends.mlir.text import Block, Names, in_memory, number
from perfopt.backends.schedule import Schedule, Stage, make_schedule
from perfopt.backends.vocabulary import weight

POINTWISE_BLOCK = 8192  # elements of one grid step along the vector axis
SUM_BLOCK = 2048  # steps after which a running sum is set aside, to bound its error
IDENTITY: dict[str, float] = {"sum": 0.0, "prod": 1.0, "or": 0.0, "and": 1.0}
INT_LIMITS = {"i64": 63, "i32": 31, "i16": 15, "i8": 7}


def identity(kind: str, type: str) -> float | int | bool:
    """The value that a reduction starts from."""
    if kind not in ("max", "min"):
        return IDENTITY[kind] if type in ("f32", "f64") else int(IDENTITY[kind])
    if type in ("f32", "f64"):
        return float("-inf") if kind == "max" else float("inf")
    if type in ("u8", "i1"):
        return (0 if kind == "max" else (255 if type == "u8" else 1))
    bits = INT_LIMITS[type]
    return -(1 << bits) if kind == "max" else (1 << bits) - 1


@dataclass
class Point:
    """Where the inner body stands: positions of the axes, the mask, and values made there."""

    positions: dict[str, str]
    mask: str | None = None
    values: dict[int, str] = field(default_factory=dict)
    vectors: dict[int, str] = field(default_factory=dict)
    scratch: str = ""  # the element offset in scratch rows


class KernelPrinter:
    """Prints one kernel; see `print_kernel`."""

    def __init__(self, kernel: Kernel, lanes: int, names: Names) -> None:
        self.kernel = kernel
        self.lanes = lanes
        self.names = names
        self.plan: Schedule = make_schedule(kernel, lanes)
        self.memory = {b.name: b.type for b in kernel.buffers}
        self.symbols = {size: f"%s{k}" for k, size in enumerate(kernel.sizes)}
        self.inner_names = frozenset(a.name for a in self.plan.inner)
        self.lane = self.plan.lane.name if self.plan.lane else ""
        self.row = Point({})  # values that do not vary along the inner axes
        self.outer = Block(names, lanes)
        self.scratch: dict[int, str] = {}

    # ---- sizes and addresses ----------------------------------------------------------------

    def size(self, block: Block, size: Size) -> str:
        """A size as an i64 value."""
        if isinstance(size, int):
            return block.emit(f"arith.constant {size} : i64")
        return self.symbols[size]

    def linear(self, block: Block, index: Index, at: Point, skip: str = "") -> str:
        """The scalar part of an index, without the terms of axis `skip` and of vectors."""
        total = ""
        for term, coefficient in index.terms:
            if isinstance(term, str):
                if term == skip:
                    continue
                value = at.positions.get(term) or self.row.positions[term]
            elif self.lane in term.space:
                continue
            else:
                value = self.value(term, at, block)
            if coefficient != 1:
                factor = self.size(block, coefficient)
                value = block.emit(f"arith.muli {value}, {factor} : i64")
            total = block.emit(f"arith.addi {total}, {value} : i64") if total else value
        if index.const != 0 or not total:
            const = self.size(block, index.const)
            total = block.emit(f"arith.addi {total}, {const} : i64") if total else const
        return total

    def vector_index(self, block: Block, index: Index, at: Point) -> str:
        """An index that differs by lane, as a vector of i64."""
        ty = f"vector<{self.lanes}xi64>"
        base = self.linear(block, index, at)
        result = block.splat(base, "i64")
        for term, coefficient in index.terms:
            if isinstance(term, str):
                if term != self.lane:
                    continue
                steps = block.emit(
                    f"arith.constant dense<[{', '.join(map(str, range(self.lanes)))}]> : {ty}"
                )
            elif self.lane in term.space:
                steps = self.vector(term, at, block)
            else:
                continue
            if coefficient != 1:
                factor = block.splat(self.size(block, coefficient), "i64")
                steps = block.emit(f"arith.muli {steps}, {factor} : {ty}")
            result = block.emit(f"arith.addi {result}, {steps} : {ty}")
        return result

    def by_lane(self, index: Index) -> bool:
        """Whether the index differs between lanes in another way than by steps of one."""
        for term, coefficient in index.terms:
            if isinstance(term, str):
                if term == self.lane and coefficient != 1:
                    return True
            elif self.lane in term.space:
                return True
        return False

    def address(self, block: Block, buffer: str, offset: str, type: str) -> str:
        """The address of an element."""
        return block.emit(
            f"llvm.getelementptr %{buffer}[{offset}] : (!llvm.ptr, i64) -> !llvm.ptr, {type}"
        )

    # ---- values -----------------------------------------------------------------------------

    def is_vector(self, op: Op) -> bool:
        """Whether the value differs between lanes."""
        return self.lane in op.space

    def value(self, op: Op, at: Point, block: Block) -> str:
        """The value of an operation at a point, computed where it varies and only once there."""
        home = at if op.space & (self.inner_names | {self.lane}) else self.row
        if op.uid in home.values:
            return home.values[op.uid]
        if home is self.row and at is not self.row:
            block = self.outer
        result = self.compute(op, home, block)
        home.values[op.uid] = result
        return result

    def vector(self, op: Op, at: Point, block: Block) -> str:
        """The value as a vector, splat where all lanes share it."""
        if self.is_vector(op):
            return self.value(op, at, block)
        if op.uid not in at.vectors:
            if op.name == "const":
                at.vectors[op.uid] = block.constant(op.attr, op.type, True)
            else:
                at.vectors[op.uid] = block.splat(self.value(op, at, block), op.type)
        return at.vectors[op.uid]

    def compute(self, op: Op, at: Point, block: Block) -> str:
        """Emit one operation."""
        vector = self.is_vector(op)
        if op.uid in self.scratch and at.scratch:
            return self._from_scratch(op, at, block)
        if op.name == "const":
            return block.constant(op.attr, op.type, False)
        if op.name == "size":
            return self.size(block, op.attr.const)
        if op.name == "iota":
            return self.vector_index(block, op.attr, at) if vector else self.linear(block, op.attr, at)
        if op.name == "load":
            return self.load(op, at, block)
        if op.name == "reduce":
            raise AssertionError(f"reduction {op.uid} is used before its stage")
        args = [self.vector(a, at, block) if vector else self.value(a, at, block) for a in op.args]
        return block.operation(op, args, vector)

    def load(self, op: Op, at: Point, block: Block) -> str:
        """Emit a load: a scalar, a contiguous vector, or a gather."""
        memory = self.memory[op.buffer]
        ty = in_memory(memory)
        vector = self.is_vector(op)
        if not vector:
            address = self.address(block, op.buffer, self.linear(block, op.attr, at), ty)
            raw = block.emit(f"llvm.load {address} {{alignment = {BYTES[memory]} : i64}} : !llvm.ptr -> {ty}")
        elif self.by_lane(op.attr):
            raw = self._gather(op, at, block, memory)
        else:
            address = self.address(block, op.buffer, self.linear(block, op.attr, at), ty)
            raw = self._load_vector(block, address, memory, at.mask)
        return self._widened(block, raw, memory, vector)

    def _load_vector(self, block: Block, address: str, memory: str, mask: str | None) -> str:
        ty = f"vector<{self.lanes}x{in_memory(memory)}>"
        align = BYTES[memory]
        if mask is None:
            return block.emit(f"llvm.load {address} {{alignment = {align} : i64}} : !llvm.ptr -> {ty}")
        zero = block.emit(f"arith.constant dense<{_zero(in_memory(memory))}> : {ty}")
        return block.emit(
            f"llvm.intr.masked.load {address}, {mask}, {zero} {{alignment = {align} : i32}} : "
            f"(!llvm.ptr, vector<{self.lanes}xi1>, {ty}) -> {ty}"
        )

    def _gather(self, op: Op, at: Point, block: Block, memory: str) -> str:
        n, ty = self.lanes, in_memory(memory)
        index = self.vector_index(block, op.attr, at)
        addresses = block.emit(
            f"llvm.getelementptr %{op.buffer}[{index}] : (!llvm.ptr, vector<{n}xi64>) -> "
            f"vector<{n}x!llvm.ptr>, {ty}"
        )
        mask = at.mask or block.emit(f"arith.constant dense<true> : vector<{n}xi1>")
        zero = block.emit(f"arith.constant dense<{_zero(ty)}> : vector<{n}x{ty}>")
        return block.emit(
            f"llvm.intr.masked.gather {addresses}, {mask}, {zero} {{alignment = {BYTES[memory]} : "
            f"i32}} : (vector<{n}x!llvm.ptr>, vector<{n}xi1>, vector<{n}x{ty}>) -> vector<{n}x{ty}>"
        )

    def _widened(self, block: Block, raw: str, memory: str, vector: bool) -> str:
        if memory in HALF:
            before, after = block.type(memory, vector), block.type("f32", vector)
            return block.emit(f"arith.extf {raw} : {before} to {after}")
        if memory == "i1":
            zero = block.constant(0, "u8", vector)
            return block.compare("ne", raw, zero, "u8", vector)
        return raw

    def _narrowed(self, block: Block, value: str, memory: str, vector: bool) -> str:
        if memory in HALF:
            before, after = block.type("f32", vector), block.type(memory, vector)
            return block.emit(f"arith.truncf {value} : {before} to {after}")
        return block.cast(value, "i1", "u8", vector) if memory == "i1" else value

    def store(self, op: Op, at: Point, block: Block) -> None:
        """Emit a store of a scalar, a contiguous vector, or a scatter."""
        memory = self.memory[op.buffer]
        ty, align = in_memory(memory), BYTES[memory]
        vector = self.lane in op.attr.axes()
        value = self.vector(op.args[0], at, block) if vector else self.value(op.args[0], at, block)
        value = self._narrowed(block, value, memory, vector)
        kind = f"vector<{self.lanes}x{ty}>" if vector else ty
        if vector and self.by_lane(op.attr):
            n = self.lanes
            index = self.vector_index(block, op.attr, at)
            addresses = block.emit(
                f"llvm.getelementptr %{op.buffer}[{index}] : (!llvm.ptr, vector<{n}xi64>) -> "
                f"vector<{n}x!llvm.ptr>, {ty}"
            )
            mask = at.mask or block.emit(f"arith.constant dense<true> : vector<{n}xi1>")
            block.lines.append(
                f"llvm.intr.masked.scatter {value}, {addresses}, {mask} {{alignment = {align} : i32}}"
                f" : {kind}, vector<{n}xi1> into vector<{n}x!llvm.ptr>"
            )
            return
        address = self.address(block, op.buffer, self.linear(block, op.attr, at), ty)
        self._store_at(block, address, value, kind, align, at.mask if vector else None)

    def _store_at(
        self, block: Block, address: str, value: str, kind: str, align: int, mask: str | None
    ) -> None:
        if mask is None:
            block.lines.append(
                f"llvm.store {value}, {address} {{alignment = {align} : i64}} : {kind}, !llvm.ptr"
            )
            return
        block.lines.append(
            f"llvm.intr.masked.store {value}, {address}, {mask} {{alignment = {align} : i32}} : "
            f"{kind}, vector<{self.lanes}xi1> into !llvm.ptr"
        )

    def _from_scratch(self, op: Op, at: Point, block: Block) -> str:
        ty = in_memory(op.type)
        address = block.emit(
            f"llvm.getelementptr {self.scratch[op.uid]}[{at.scratch}] : (!llvm.ptr, i64) -> "
            f"!llvm.ptr, {ty}"
        )
        vector = self.is_vector(op)
        kind = f"vector<{self.lanes}x{ty}>" if vector else ty
        raw = block.emit(f"llvm.load {address} {{alignment = 4 : i64}} : !llvm.ptr -> {kind}")
        return self._widened(block, raw, op.type, vector)

    def keep(self, op: Op, at: Point, block: Block) -> None:
        """Emit the store of a value into its scratch row."""
        vector = self.is_vector(op)
        value = self._narrowed(block, self.value(op, at, block), op.type, vector)
        ty = in_memory(op.type)
        address = block.emit(
            f"llvm.getelementptr {self.scratch[op.uid]}[{at.scratch}] : (!llvm.ptr, i64) -> "
            f"!llvm.ptr, {ty}"
        )
        kind = f"vector<{self.lanes}x{ty}>" if vector else ty
        self._store_at(block, address, value, kind, 4, None)


def _zero(memory: str) -> str:
    return "0.0" if memory in ("f64", "f32", "bf16", "f16") else "0"


def stage_weight(plan: Schedule, stage: Stage) -> int:
    """The instructions of one inner point, roughly: what decides how far to unroll."""
    seen: set[Op] = set()
    stack = [op.args[0] for op in stage.reductions] + list(stage.stores)
    while stack:
        op = stack.pop()
        if op not in seen and op.name != "reduce":
            seen.add(op)
            stack.extend(op.args)
    return sum(weight(op.name) for op in seen) + len(plan.scratch)


__all__ = ["Axis", "KernelPrinter", "Point", "identity", "number", "stage_weight"]
