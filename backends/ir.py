"""The kernel IR: one kernel as SSA operations over named axes, printed by every target.

A `Kernel` runs its operations at every point of the iteration domain that its axes span. Parallel
axes are independent; a `reduce` folds the reduction axes away. An operation's `space` is the set
of axes that its value varies with. Types are named as MLIR does, with `u8` for unsigned bytes and
`i1` for truth values (a byte of 0 or 1 in memory); bf16 and f16 exist in memory only, and values
are computed in f32. What every operation means is in `vocabulary`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from perfopt.backends.index import Index
from perfopt.backends.region import Size

TYPES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1}
BYTES |= {"u8": 1, "i1": 1}
HALF = frozenset({"bf16", "f16"})
# The operations that touch a buffer.
MEMORY = frozenset({"load", "load_if", "store", "accumulate"})
# What a CPU kernel returns where a check has failed, by the operation that checks.
FAULTS = {"bounded": 1, "nonzero": 2}
BLOCK = "block"  # the axis that numbers blocks of rows
BLOCK_ROWS = 64
FLOATS = frozenset({"f64", "f32", "bf16", "f16"})


def compute_type(dtype: torch.dtype) -> str:
    """The type that values of `dtype` are computed in: f32 for the 16-bit floats."""
    name = TYPES[dtype]
    return "f32" if name in HALF else name


@dataclass(frozen=True, eq=False)
class Op:
    """One SSA operation and its value.

    `load_if`, and a `bounded` or `nonzero` of two operands, happen only where the last operand is
    true.
    `attr` is the constant of `const`, the `Index` of `load`, `store` and `iota`, the kind of
    `reduce`, the intermediate type of `round`, the limit of `bounded` and the value of `size` as
    an `Index` without axes; `buffer` the one that `load` or `store` touches.
    """

    uid: int
    name: str
    args: tuple[Op, ...]
    type: str
    space: frozenset[str]
    attr: Any = None
    buffer: str = ""


@dataclass(frozen=True)
class Axis:
    """One axis of the iteration domain."""

    name: str
    size: Size


@dataclass(frozen=True)
class Buffer:
    """A tensor that the kernel reads or writes, as element type and name.

    `fold` is the kind of reduction by which `accumulate` puts values into it.
    """

    name: str
    type: str
    written: bool
    fold: str = ""


@dataclass(frozen=True)
class Kernel:
    """One kernel: buffers, axes (outermost first) and the operations in dependency order.

    `stores` are the roots; `sizes` the symbolic sizes and strides passed at every launch. With
    `blocked`, the points of the parallel axes are worked on in blocks of `BLOCK_ROWS`, each by one
    thread; the axis `BLOCK` numbers them, and what is accumulated starts from the fold's identity.
    """

    name: str
    buffers: tuple[Buffer, ...]
    parallel: tuple[Axis, ...]
    reduction: tuple[Axis, ...]
    ops: tuple[Op, ...]
    stores: tuple[Op, ...]
    sizes: tuple[Size, ...] = ()
    blocked: bool = False

    @property
    def checked(self) -> bool:
        """Whether the kernel checks values, and its entry returns non-zero for a bad one."""
        return any(op.name in FAULTS for op in self.ops)

    def axis_sizes(self) -> dict[str, Size]:
        """The size of every axis by name."""
        return {axis.name: axis.size for axis in self.parallel + self.reduction}


@dataclass
class Builder:
    """Makes operations, each distinct one once."""

    ops: list[Op] = field(default_factory=list)
    guard: Op | None = None  # loads and index checks happen only where it is true
    _known: dict[tuple[Any, ...], Op] = field(default_factory=dict)

    def op(
        self, name: str, args: tuple[Op, ...], type: str, attr: Any = None, buffer: str = ""
    ) -> Op:
        """The operation with these operands; made at its first mention."""
        key = (name, tuple(a.uid for a in args), type, _hashable(attr), buffer)
        known = self._known.get(key)
        if known is not None:
            return known
        space: frozenset[str] = frozenset().union(*(a.space for a in args))
        if isinstance(attr, Index):
            space |= attr.axes()
        made = Op(len(self.ops), name, args, type, space, attr, buffer)
        self.ops.append(made)
        self._known[key] = made
        return made

    def reduce(self, kind: str, value: Op, axes: frozenset[str]) -> Op:
        """`value` folded over `axes` by `kind`."""
        key = ("reduce", value.uid, kind, axes)
        known = self._known.get(key)
        if known is None:
            space = value.space - axes
            known = Op(len(self.ops), "reduce", (value,), value.type, space, kind)
            self.ops.append(known)
            self._known[key] = known
        return known

    def fold(self, kind: str, value: Op, axes: frozenset[str]) -> Op:
        """`value` folded over the column axes `axes`, as `reduce` does over the others."""
        space = value.space - axes
        key = ("fold", value.uid, kind, axes)
        known = self._known.get(key)
        if known is None:
            known = Op(len(self.ops), "fold", (value,), value.type, space, kind)
            self.ops.append(known)
            self._known[key] = known
        return known

    def const(self, value: float | int | bool, type: str) -> Op:
        """A constant of a type."""
        return self.op("const", (), type, attr=value)

    def cast(self, value: Op, type: str) -> Op:
        """`value` converted; nothing where it has the type already."""
        return value if value.type == type else self.op("cast", (value,), type)

    def iota(self, index: Index) -> Op:
        """The value of an index, as i64."""
        return self.op("iota", index.loaded(), "i64", index)

    def load(self, buffer: str, index: Index, memory: str) -> Op:
        """The element of `buffer` at `index`; 16-bit floats widen to f32."""
        type = "f32" if memory in HALF else memory
        if self.guard is None:
            return self.op("load", index.loaded(), type, index, buffer)
        return self.op("load_if", (*index.loaded(), self.guard), type, index, buffer)

    def bounded(self, index: Op, size: Any) -> Op:
        """An i64 index checked against `size`."""
        args = (index,) if self.guard is None else (index, self.guard)
        return self.op("bounded", args, "i64", Index.of({}, size))

    def nonzero(self, divisor: Op) -> Op:
        """An integer checked not to be 0."""
        args = (divisor,) if self.guard is None else (divisor, self.guard)
        return self.op("nonzero", args, divisor.type)


def _hashable(attr: Any) -> Any:
    # 1, 1.0, True and -0.0 are equal to others in Python, yet different constants.
    return (type(attr).__name__, repr(attr)) if isinstance(attr, (int, float)) else attr
