"""MLIR text: fresh names, types, constants, and one function per vocabulary operation."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from perfopt.backends.ir import FLOATS, HALF, Op
from perfopt.backends.mlir.bf16 import NAME as TO_BF16
from perfopt.backends.mlir.math import function_name
from perfopt.backends.vocabulary import FUNCTIONS

UNSIGNED = frozenset({"u8", "i1"})
_BITS = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "u8": 8, "i1": 1}


def element(type: str) -> str:
    """The MLIR type of a value: MLIR integers carry no sign."""
    return "i8" if type == "u8" else type


def in_memory(type: str) -> str:
    """The MLIR type of an element in memory: truth values are bytes, bf16 is its bits.

    As a type of its own bf16 is rounded by a call of the C library wherever LLVM merges two values
    on processors without AVX512-BF16, and there is no such call.
    """
    if type == "bf16":
        return "i16"
    return "i8" if type in UNSIGNED else type


def number(value: float | int | bool, type: str) -> str:
    """A constant's text; floats by their bits, so that NaN, inf and -0.0 survive."""
    if type == "f64":
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    if type == "f32":
        return f"0x{_f32_bits(float(value)):08X}"
    if type == "i1":
        return "true" if value else "false"
    bits = _BITS[type]
    wrapped = int(value) & (1 << bits) - 1
    return str(wrapped - (1 << bits) if wrapped >> (bits - 1) else wrapped)


def _f32_bits(value: float) -> int:
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:  # beyond f32: the infinity of its sign, as a conversion gives
        return 0x7F800000 if value > 0 else 0xFF800000


@dataclass
class Names:
    """Fresh value names, and the math functions that the text has called so far."""

    count: int = 0
    functions: set[tuple[str, str]] = field(default_factory=set)

    def fresh(self) -> str:
        """A name that was not given before."""
        self.count += 1
        return f"%{self.count}"


@dataclass
class Block:
    """Lines of one straight-line piece, for values that are vectors of `lanes` or scalars."""

    names: Names
    lanes: int
    lines: list[str] = field(default_factory=list)

    def emit(self, text: str) -> str:
        """Append `name = text`; returns the name."""
        name = self.names.fresh()
        self.lines.append(f"{name} = {text}")
        return name

    def type(self, type: str, vector: bool) -> str:
        """The MLIR type of a value of an IR type."""
        return f"vector<{self.lanes}x{element(type)}>" if vector else element(type)

    def constant(self, value: float | int | bool, type: str, vector: bool) -> str:
        """A constant, splat where it is a vector."""
        text = number(value, type)
        if not vector:
            return self.emit(
                f"arith.constant {text}" + ("" if type == "i1" else f" : {element(type)}")
            )
        return self.emit(f"arith.constant dense<{text}> : {self.type(type, True)}")

    def splat(self, name: str, type: str) -> str:
        """A scalar as a vector of equal elements."""
        return self.emit(f"vector.broadcast {name} : {element(type)} to {self.type(type, True)}")

    # ---- operations -------------------------------------------------------------------------

    def compare(self, how: str, x: str, y: str, type: str, vector: bool) -> str:
        """A comparison; every one but `ne` is false for NaN."""
        ty = self.type(type, vector)
        if type in FLOATS:
            how = {"ne": "une"}.get(how, "o" + how)
            return self.emit(f"arith.cmpf {how}, {x}, {y} : {ty}")
        if how not in ("eq", "ne"):
            how = ("u" if type in UNSIGNED else "s") + how
        return self.emit(f"arith.cmpi {how}, {x}, {y} : {ty}")

    def select(self, condition: str, x: str, y: str, type: str, vector: bool) -> str:
        """`x` where the condition holds, else `y`."""
        ty = self.type(type, vector)
        if not vector:
            return self.emit(f"arith.select {condition}, {x}, {y} : {ty}")
        mask = self.type("i1", True)
        return self.emit(f"arith.select {condition}, {x}, {y} : {mask}, {ty}")

    def extreme(self, how: str, x: str, y: str, type: str, vector: bool) -> str:
        """The larger (`max`) or smaller (`min`) value; NaN where either is."""
        chosen = self.compare("gt" if how == "max" else "lt", x, y, type, vector)
        result = self.select(chosen, x, y, type, vector)
        if type not in FLOATS:
            return result
        # The comparison is false with a NaN on either side and gave y; so only x needs a look.
        nan = self.emit(f"arith.cmpf uno, {x}, {x} : {self.type(type, vector)}")
        return self.select(nan, x, result, type, vector)

    def combine(self, kind: str, x: str, y: str, type: str, vector: bool) -> str:
        """One step of a reduction: `x` folded into `y`."""
        if kind in ("max", "min"):
            return self.extreme(kind, x, y, type, vector)
        op = {"sum": "add", "prod": "mul", "or": "or", "and": "and"}[kind]
        return self.binary(op, x, y, type, vector)

    def binary(self, name: str, x: str, y: str, type: str, vector: bool) -> str:
        """An arithmetic or bitwise operation of two operands of one type."""
        ty = self.type(type, vector)
        if type in FLOATS:
            return self.emit(f"arith.{name}f {x}, {y} : {ty}")
        if name in ("idiv", "irem"):
            return self._divided(name, x, y, type, vector)
        table = {"shl": "shli", "shr": "shrui" if type in UNSIGNED else "shrsi"}
        return self.emit(f"arith.{table.get(name, name + 'i')} {x}, {y} : {ty}")

    def _divided(self, name: str, x: str, y: str, type: str, vector: bool) -> str:
        """The quotient or remainder of integers, without the traps of 0 and of the least by -1.

        Lanes behind the end hold zeros too. What wraps around is the least integer itself.
        """
        ty, unsigned = self.type(type, vector), type in UNSIGNED
        zero, one = (self.constant(n, type, vector) for n in (0, 1))
        safe = self.select(self.compare("eq", y, zero, type, vector), one, y, type, vector)
        if not unsigned:
            below = self.compare("eq", y, self.constant(-1, type, vector), type, vector)
            safe = self.select(below, one, safe, type, vector)
        op = ("div" if name == "idiv" else "rem") + ("ui" if unsigned else "si")
        result = self.emit(f"arith.{op} {x}, {safe} : {ty}")
        if unsigned or name == "irem":
            return result
        return self.select(below, self.binary("sub", zero, x, type, vector), result, type, vector)

    def operation(self, op: Op, args: list[str], vector: bool) -> str:
        """The value of a pointwise operation of the vocabulary."""
        name, type = op.name, op.type
        if name in FUNCTIONS:
            ty = self.type(type, vector)
            self.names.functions.add((name, ty))
            types = ", ".join([ty] * len(args))
            return self.emit(
                f"func.call @{function_name(name, ty)}({', '.join(args)}) : ({types}) -> {ty}"
            )
        if name in ("max", "min"):
            return self.extreme(name, args[0], args[1], type, vector)
        if name in ("eq", "ne", "lt", "le", "gt", "ge"):
            return self.compare(name, args[0], args[1], op.args[0].type, vector)
        if name == "select":
            return self.select(args[0], args[1], args[2], type, vector)
        if name == "cast":
            return self.cast(args[0], op.args[0].type, type, vector)
        if name == "round":
            return self.widened(self.narrowed(args[0], op.attr, vector), op.attr, vector)
        if len(args) == 1:
            return self.unary(name, args[0], type, vector)
        if name == "copysign":
            return self.emit(f"math.copysign {args[0]}, {args[1]} : {self.type(type, vector)}")
        return self.binary(name, args[0], args[1], type, vector)

    def unary(self, name: str, x: str, type: str, vector: bool) -> str:
        """neg, abs, not, sqrt and the roundings."""
        ty = self.type(type, vector)
        if name == "not":
            return self.binary(
                "xor", x, self.constant(-1 if type != "i1" else 1, type, vector), type, vector
            )
        if type in FLOATS:
            known = {"neg": "arith.negf", "abs": "math.absf", "round_even": "math.roundeven"}
            return self.emit(f"{known.get(name, 'math.' + name)} {x} : {ty}")
        zero = self.constant(0, type, vector)
        negative = self.binary("sub", zero, x, type, vector)
        if name == "neg":
            return negative
        return self.select(self.compare("lt", x, zero, type, vector), negative, x, type, vector)

    def cast(self, x: str, source: str, type: str, vector: bool) -> str:
        """A conversion by eager's rules: out of range, a float becomes what x86 gives."""
        before, after = self.type(source, vector), self.type(type, vector)
        if before == after:
            return x
        if source in FLOATS and type in FLOATS:
            how = "extf" if type == "f64" or source in ("bf16", "f16") else "truncf"
            return self.emit(f"arith.{how} {x} : {before} to {after}")
        if type in FLOATS:
            how = "uitofp" if source in UNSIGNED else "sitofp"
            return self.emit(f"arith.{how} {x} : {before} to {after}")
        if source not in FLOATS:
            if _BITS[source] < _BITS[type]:
                how = "extui" if source in UNSIGNED else "extsi"
                return self.emit(f"arith.{how} {x} : {before} to {after}")
            return self.emit(f"arith.trunci {x} : {before} to {after}")
        wide = type if type in ("i64", "i32") else "i32"
        converted = self._to_integer(x, source, wide, vector)
        return self.cast(converted, wide, type, vector)

    def transposed(self, rows: list[str], memory: str) -> list[str]:
        """As many vectors as they have elements, as the columns of a matrix."""
        n, ty = self.lanes, f"vector<{self.lanes}x{memory}>"
        step = n // 2
        while step:
            low = [j if not j & step else n + j - step for j in range(n)]
            high = [j + step if not j & step else n + j for j in range(n)]
            for i in range(n):
                if not i & step:
                    pair = f"{rows[i]}, {rows[i + step]}"
                    rows[i], rows[i + step] = (
                        self.emit(f"vector.shuffle {pair} {order} : {ty}, {ty}")
                        for order in (low, high)
                    )
            step //= 2
        return rows

    def dealt(self, vectors: list[str], memory: str) -> list[str]:
        """Rows of as many elements as there are vectors, packed into them, as their columns."""
        n, count = self.lanes, len(vectors)
        return [
            self._picked(vectors, [divmod(row * count + c, n) for row in range(n)], memory)
            for c in range(count)
        ]

    def packed(self, columns: list[str], memory: str) -> list[str]:
        """The reverse of `dealt`."""
        n, count = self.lanes, len(columns)
        places = [divmod(flat, count)[::-1] for flat in range(n * count)]
        return [self._picked(columns, places[n * k : n * (k + 1)], memory) for k in range(count)]

    def _picked(self, vectors: list[str], places: list[tuple[int, int]], memory: str) -> str:
        """A vector of elements that each come from a vector, by its number, and a lane of it."""
        n, ty = self.lanes, f"vector<{self.lanes}x{memory}>"
        result, done = "", [False] * n
        for number in sorted({number for number, _ in places}):
            if not result:
                result = vectors[number]
                order = [lane if here == number else 0 for here, lane in places]
                done = [here == number for here, _ in places]
                result = self.emit(f"vector.shuffle {result}, {result} {order} : {ty}, {ty}")
                continue
            order = [
                k if done[k] or here != number else n + lane
                for k, (here, lane) in enumerate(places)
            ]
            done = [old or here == number for old, (here, _) in zip(done, places, strict=True)]
            result = self.emit(f"vector.shuffle {result}, {vectors[number]} {order} : {ty}, {ty}")
        return result

    def widened(self, raw: str, memory: str, vector: bool) -> str:
        """An element as memory holds it, as the value that is computed with."""
        if memory == "bf16":
            before, i32 = self.type("i16", vector), self.type("i32", vector)
            wide = self.emit(f"arith.extui {raw} : {before} to {i32}")
            high = self.emit(f"arith.shli {wide}, {self.constant(16, 'i32', vector)} : {i32}")
            return self.emit(f"arith.bitcast {high} : {i32} to {self.type('f32', vector)}")
        if memory in HALF:
            before, after = self.type(memory, vector), self.type("f32", vector)
            return self.emit(f"arith.extf {raw} : {before} to {after}")
        if memory == "i1":
            return self.compare("ne", raw, self.constant(0, "u8", vector), "u8", vector)
        return raw

    def narrowed(self, value: str, memory: str, vector: bool) -> str:
        """A value as an element of memory; 16-bit floats round to nearest even."""
        if memory == "bf16":
            return self._to_bf16(value, vector)
        if memory == "f16":
            before, after = self.type("f32", vector), self.type(memory, vector)
            return self.emit(f"arith.truncf {value} : {before} to {after}")
        return self.cast(value, "i1", "u8", vector) if memory == "i1" else value

    def _to_bf16(self, value: str, vector: bool) -> str:
        before = self.type("f32", vector)
        self.names.functions.add((TO_BF16, before))
        return self.emit(
            f"func.call @{function_name(TO_BF16, before)}({value}) : "
            f"({before}) -> {self.type('i16', vector)}"
        )

    def _to_integer(self, x: str, source: str, type: str, vector: bool) -> str:
        limit = float(1 << (_BITS[type] - 1))
        low = self.constant(-limit, source, vector)
        high = self.constant(limit, source, vector)
        fits = self.binary(
            "and",
            self.compare("ge", x, low, source, vector),
            self.compare("lt", x, high, source, vector),
            "i1",
            vector,
        )
        safe = self.select(fits, x, self.constant(0.0, source, vector), source, vector)
        before, after = self.type(source, vector), self.type(type, vector)
        converted = self.emit(f"arith.fptosi {safe} : {before} to {after}")
        smallest = self.constant(-(1 << (_BITS[type] - 1)), type, vector)
        return self.select(fits, converted, smallest, type, vector)
