"""Arithmetic written as Python operators, emitted as MLIR: what `math` is written in."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

AVX512_LANES = 16  # f32 vectors of so many elements exist on machines with AVX-512 only
_INTEGER = {"f32": "i32", "f64": "i64"}
_FLOAT = {"i32": "f32", "i64": "f64"}


@dataclass(frozen=True)
class V:
    """A value: its name in the text and its element type."""

    maker: Maker
    name: str
    kind: str

    # ---- arithmetic -------------------------------------------------------------------------

    def _with(self, op: str, other: V | float | int, swap: bool = False) -> V:
        if not isinstance(other, V):
            other = (
                self.maker.integer(int(other), self.kind)
                if self.kind in _FLOAT
                else self.maker.number(other, self.kind)
            )
        first, second = (other, self) if swap else (self, other)
        return self.maker.emit(f"arith.{op} {first.name}, {second.name}", self.kind)

    def _suffix(self, name: str) -> str:
        return name + ("i" if self.kind in _FLOAT or self.kind == "i1" else "f")

    def __add__(self, other: V | float) -> V:
        return self._with(self._suffix("add"), other)

    def __radd__(self, other: float) -> V:
        return self._with(self._suffix("add"), other, swap=True)

    def __sub__(self, other: V | float) -> V:
        return self._with(self._suffix("sub"), other)

    def __rsub__(self, other: float) -> V:
        return self._with(self._suffix("sub"), other, swap=True)

    def __mul__(self, other: V | float) -> V:
        return self._with(self._suffix("mul"), other)

    def __truediv__(self, other: V | float) -> V:
        return self._with("divf", other)

    def __rtruediv__(self, other: float) -> V:
        return self._with("divf", other, swap=True)

    def __and__(self, other: V) -> V:
        return self._with("andi", other)

    def __or__(self, other: V) -> V:
        return self._with("ori", other)

    def __invert__(self) -> V:
        return self._with("xori", self.maker.truth())

    def __lshift__(self, count: int) -> V:
        return self._with("shli", count)

    def __rshift__(self, count: int) -> V:
        return self._with("shrsi", count)

    def __neg__(self) -> V:
        return self.maker.emit(f"arith.negf {self.name}", self.kind)

    def abs(self) -> V:
        """The magnitude."""
        return self.maker.emit(f"math.absf {self.name}", self.kind)

    def sqrt(self) -> V:
        """The square root, correctly rounded."""
        return self.maker.emit(f"math.sqrt {self.name}", self.kind)

    def floor(self) -> V:
        """The largest integer that is not larger."""
        return self.maker.emit(f"math.floor {self.name}", self.kind)

    def round(self) -> V:
        """The nearest integer, the even one of two."""
        return self.maker.emit(f"math.roundeven {self.name}", self.kind)

    def copysign(self, sign: V) -> V:
        """The magnitude with the sign of another value."""
        return self.maker.emit(f"math.copysign {self.name}, {sign.name}", self.kind)

    # ---- comparison -------------------------------------------------------------------------

    def _compare(self, how: str, other: V | float) -> V:
        other = other if isinstance(other, V) else self.maker.number(other, self.kind)
        ty = self.maker.type(self.kind)
        return self.maker.emit_as(f"arith.cmpf {how}, {self.name}, {other.name} : {ty}", "i1")

    def __lt__(self, other: V | float) -> V:
        return self._compare("olt", other)

    def __gt__(self, other: V | float) -> V:
        return self._compare("ogt", other)

    def less_or_nan(self, number: float) -> V:
        """Whether the value is smaller, or NaN."""
        return self._compare("ult", number)

    def equals(self, number: float) -> V:
        """Whether the value is this number."""
        return self._compare("oeq", number)

    def equals_value(self, other: V) -> V:
        """Whether two values are the same number."""
        return self._compare("oeq", other)

    def is_integer(self, number: int) -> V:
        """Whether an integer is this one."""
        wanted = self.maker.integer(number, self.kind)
        ty = self.maker.type(self.kind)
        return self.maker.emit_as(f"arith.cmpi eq, {self.name}, {wanted.name} : {ty}", "i1")

    def select(self, yes: V, no: V) -> V:
        """`yes` where this truth value holds, else `no`."""
        ty = self.maker.type(yes.kind)
        types = f"{self.maker.type('i1')}, {ty}" if self.maker.lanes else ty
        text = f"arith.select {self.name}, {yes.name}, {no.name} : {types}"
        return self.maker.emit_as(text, yes.kind)

    def at_least(self, number: float) -> V:
        """The larger of both; NaN stays NaN."""
        limit = self.maker.number(number, self.kind)
        return (self < limit).select(limit, self)

    def at_most(self, number: float) -> V:
        """The smaller of both; NaN stays NaN."""
        limit = self.maker.number(number, self.kind)
        return (self > limit).select(limit, self)

    # ---- conversion -------------------------------------------------------------------------

    def _convert(self, op: str, kind: str) -> V:
        before, after = self.maker.type(self.kind), self.maker.type(kind)
        return self.maker.emit_as(f"arith.{op} {self.name} : {before} to {after}", kind)

    def bits(self) -> V:
        """The same bits as an integer."""
        return self._convert("bitcast", _INTEGER[self.kind])

    def floats(self) -> V:
        """The same bits as a float."""
        return self._convert("bitcast", _FLOAT[self.kind])

    def to_float(self) -> V:
        """An integer's value as a float of its width."""
        return self._convert("sitofp", _FLOAT[self.kind])

    def widened(self) -> V:
        """f32 as f64."""
        return self._convert("extf", "f64")

    def rounded(self) -> V:
        """f64 as f32."""
        return self._convert("truncf", "f32")


@dataclass
class Maker:
    """Emits the lines of one function over vectors of `lanes` elements, or scalars for 0."""

    element: str
    lanes: int
    lines: list[str] = field(default_factory=list)
    library: set[str] = field(default_factory=set)
    count: int = 0
    known: dict[str, V] = field(default_factory=dict)

    @staticmethod
    def of(type: str) -> Maker:
        """A maker of functions of an MLIR type."""
        if not type.startswith("vector"):
            return Maker(type, 0)
        lanes, element = type[len("vector<") : -1].split("x")
        return Maker(element, int(lanes))

    def type(self, kind: str) -> str:
        """The MLIR type of values of an element type."""
        return f"vector<{self.lanes}x{kind}>" if self.lanes else kind

    def argument(self, name: str) -> V:
        """An argument of the function."""
        return V(self, name, self.element)

    def emit(self, text: str, kind: str) -> V:
        """A line whose operands have the type of its result."""
        return self.emit_as(f"{text} : {self.type(kind)}", kind)

    def emit_as(self, text: str, kind: str) -> V:
        """A line that carries its types."""
        self.count += 1
        name = f"%v{self.count}"
        self.lines.append(f"{name} = {text}")
        return V(self, name, kind)

    def _constant(self, text: str, kind: str) -> V:
        text = f"dense<{text}>" if self.lanes else text
        key = f"arith.constant {text} : {self.type(kind)}"
        if key not in self.known:
            self.known[key] = self.emit_as(key, kind)
        return self.known[key]

    def number(self, value: float, kind: str = "") -> V:
        """A float constant, by its bits."""
        if (kind or self.element) == "f64":
            return self._constant(
                f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}", "f64"
            )
        return self._constant(f"0x{struct.unpack('<I', struct.pack('<f', value))[0]:08X}", "f32")

    def integer(self, value: int, kind: str) -> V:
        """An integer constant."""
        return self._constant(str(value), kind)

    def truth(self) -> V:
        """True in every lane."""
        if not self.lanes:
            return self.emit_as("arith.constant true", "i1")
        return self._constant("true", "i1")

    def fma(self, a: V, b: V | float, c: V | float) -> V:
        """`a * b + c`, rounded once."""
        b = b if isinstance(b, V) else self.number(b, a.kind)
        c = c if isinstance(c, V) else self.number(c, a.kind)
        return self.emit(f"math.fma {a.name}, {b.name}, {c.name}", a.kind)

    def polynomial(self, x: V, factors: Sequence[float]) -> V:
        """The polynomial with these factors, lowest power first."""
        result = self.number(factors[-1], x.kind)
        for factor in reversed(factors[:-1]):
            result = self.fma(result, x, factor)
        return result

    def scaled(self, p: V, k: V) -> V:
        """`p` times 2 to the integer `k`, in f32; rounded once where the result is denormal."""
        if self.lanes == AVX512_LANES:
            return self._scaled_avx512(p, k)
        number = self._whole(k)
        half = number >> 1  # in two steps, of which none overflows
        for part in (half, number - half):
            p = p * ((part << 23) + self.integer(0x3F800000, "i32")).floats()
        return p

    def scaled_little(self, p: V, k: V) -> V:
        """As `scaled`, for `p` around 1 and magnitudes of `k` below 126."""
        if self.lanes == AVX512_LANES:
            return self._scaled_avx512(p, k)
        return p * ((self._whole(k) << 23) + self.integer(0x3F800000, "i32")).floats()

    def _whole(self, k: V) -> V:
        return (k + 1.5 * 2**23).bits() - self.integer(0x4B400000, "i32")

    def _scaled_avx512(self, p: V, k: V) -> V:
        ty = self.type("f32")
        if "scalef" not in self.known:
            self.lines.append("%lanes = llvm.mlir.constant(-1 : i16) : i16")
            self.lines.append("%mode = llvm.mlir.constant(4 : i32) : i32")
            self.known["scalef"] = p
        return self.emit_as(
            f'llvm.call_intrinsic "llvm.x86.avx512.mask.scalef.ps.512"({p.name}, {k.name}, '
            f"{p.name}, %lanes, %mode) : ({ty}, {ty}, {ty}, i16, i32) -> {ty}",
            "f32",
        )

    def by_lane(self, function: str, args: Sequence[V]) -> V:
        """A function of the C library, called for every lane."""
        self.library.add(function)
        kind = args[0].kind
        types = ", ".join([kind] * len(args))
        if not self.lanes:
            names = ", ".join(arg.name for arg in args)
            return self.emit_as(f"llvm.call @{function}({names}) : ({types}) -> {kind}", kind)
        result, ty = args[0], self.type(kind)
        for lane in range(self.lanes):
            picked = [
                self.emit_as(f"vector.extract {arg.name}[{lane}] : {kind} from {ty}", kind)
                for arg in args
            ]
            names = ", ".join(value.name for value in picked)
            value = self.emit_as(f"llvm.call @{function}({names}) : ({types}) -> {kind}", kind)
            text = f"vector.insert {value.name}, {result.name} [{lane}] : {kind} into {ty}"
            result = self.emit_as(text, kind)
        return result

    def unless(self, rare: V, usual: V, other: Callable[[], V]) -> V:
        """`usual` where `rare` holds in no lane; else, in those where it does, `other`."""
        some = rare
        if self.lanes:
            text = f"vector.reduction <or>, {rare.name} : {self.type('i1')} into i1"
            some = self.emit_as(text, "i1")
        outer, self.lines = self.lines, []
        known = dict(self.known)
        mixed = rare.select(other(), usual)
        inner, self.lines, self.known = self.lines, outer, known
        ty = self.type(usual.kind)
        text = "\n    ".join(
            [f"scf.if {some.name} -> ({ty}) {{", *inner, f"scf.yield {mixed.name} : {ty}",
             "} else {", f"scf.yield {usual.name} : {ty}", "}"]
        )  # fmt: skip
        return self.emit_as(text, usual.kind)
