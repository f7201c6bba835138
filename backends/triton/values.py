"""Values of a kernel as Triton text: where each is computed, and how memory is read and written.

A `Scope` is a straight-line piece of the kernel: its body, or that of a loop in it. Every value is
computed once, in the outermost scope that knows all the axes it varies with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perfopt.backends.index import Index, Size, product, simplified
from perfopt.backends.ir import BLOCK, HALF, Axis, Kernel, Op
from perfopt.backends.triton.expressions import (
    COMBINE,
    TYPES,
    constant,
    folded,
    identity,
    inlined,
    operation,
)
from perfopt.backends.triton.schedule import Tiling


@dataclass
class Scope:
    """Lines of one piece, and what they define: values by uid, positions by axis."""

    own: frozenset[str]  # the axes whose positions are known here and not further out
    parent: Scope | None = None
    lines: list[str] = field(default_factory=list)
    values: dict[int, str] = field(default_factory=dict)
    positions: dict[str, str] = field(default_factory=dict)

    def home(self, space: frozenset[str]) -> Scope:
        """The outermost scope that knows all of `space`."""
        scope = self
        while scope.parent is not None and not space & scope.own:
            scope = scope.parent
        return scope


class Values:
    """Computes, loads and stores the values of one kernel."""

    def __init__(self, kernel: Kernel, tiling: Tiling) -> None:
        self.kernel = kernel
        self.tiling = tiling
        self.memory = {b.name: b.type for b in kernel.buffers}
        self.folds = {b.name: b.fold for b in kernel.buffers}
        self.names = {size: f"s{k}" for k, size in enumerate(kernel.sizes)}
        self.x = frozenset(axis.name for axis in tiling.x)
        self.r = frozenset(axis.name for axis in tiling.r)
        self.groups = {axis.name: (group, axes) for group, axes in self.sides() for axis in axes}
        self.helpers: set[str] = set()
        self.inner: Scope | None = None
        self.outer = Scope(frozenset())
        self._count = 0

    def sides(self) -> Sequence[tuple[str, tuple[Axis, ...]]]:
        """The names of the flat indices, with the axes that they number."""
        return ("x", self.tiling.x), ("r", self.tiling.r)

    def scope(self) -> Scope:
        """The innermost scope."""
        return self.inner or self.outer

    def fresh(self, stem: str = "v") -> str:
        """A name that was not given before."""
        self._count += 1
        return f"{stem}{self._count - 1}"

    # ---- sizes and positions ----------------------------------------------------------------

    def size(self, size: Size) -> str:
        """A size as text."""
        return str(size) if isinstance(size, int) else self.names[size]

    def extent(self, axes: Sequence[Axis]) -> str:
        """The number of points of some axes, as text."""
        known = product(axis.size for axis in axes if isinstance(axis.size, int))
        parts = [self.size(axis.size) for axis in axes if not isinstance(axis.size, int)]
        if known != 1 or not parts:
            parts.append(str(known))
        return " * ".join(parts)

    def position(self, axis: str) -> str:
        """The position along an axis: a name in the scope that knows it."""
        home = self.scope().home(frozenset((axis,)))
        if axis not in home.positions:
            group, axes = self.groups[axis]
            home.positions[axis] = axis
            home.lines.append(f"{axis} = {self._decoded(group, axes, axis)}")
        return home.positions[axis]

    def _decoded(self, flat: str, axes: Sequence[Axis], axis: str) -> str:
        number = next(k for k, each in enumerate(axes) if each.name == axis)
        inside = axes[number + 1 :]
        text = flat
        if inside:
            by = self.extent(inside)
            text = f"{text} // ({by})" if " " in by else f"{text} // {by}"
        if number:
            text = f"{text} % {self.size(axes[number].size)}"
        return text

    def index(self, index: Index) -> str:
        """An index as text; operands that lie as the points are numbered use the flat index."""
        factors: dict[str, Size] = {}
        loaded = []
        for term, value in index.terms:
            if isinstance(term, str):
                factors[term] = value
            else:
                assert isinstance(term, Op)
                loaded.append(self._times(self.value(term), value))
        parts = []
        for group, axes in self.sides():
            flat = self._flat(axes, factors)
            if flat is not None:
                parts.append(self._times(group, flat))
                factors = {a: f for a, f in factors.items() if a not in self._names(axes)}
        parts += [self._times(self.position(axis), factor) for axis, factor in factors.items()]
        parts += loaded
        if index.const != 0:
            parts.append(self.size(index.const))
        return (" + ".join(parts) or "0").replace("+ -", "- ")

    @staticmethod
    def _names(axes: Sequence[Axis]) -> set[str]:
        return {axis.name for axis in axes}

    @staticmethod
    def _flat(axes: Sequence[Axis], factors: Mapping[str, Size]) -> Size | None:
        """The factor of the flat index that stands for all axes of a side, if there is one."""
        if not axes or any(axis.name not in factors for axis in axes):
            return None
        for outer, inner in zip(axes, axes[1:], strict=False):
            if factors[outer.name] != simplified(factors[inner.name] * inner.size):
                return None
        return factors[axes[-1].name]

    def _times(self, text: str, factor: Size) -> str:
        return text if factor == 1 else f"{text} * {self.size(factor)}"

    # ---- masks ------------------------------------------------------------------------------

    def mask(self, space: frozenset[str], *conditions: str) -> str:
        """Where all of the points exist that `space` varies with; "" for everywhere."""
        parts = ["xmask"] if space & self.x else []
        if space & self.r and not self.tiling.exact:
            parts.append("rmask")
        return " & ".join([*parts, *conditions])

    def kept(self, value: str, kind: str, type: str, side: str) -> str:
        """A tile with the identity of a reduction where points along `side` do not exist."""
        if side == "r" and self.tiling.exact:
            return value
        return f"tl.where({side}mask, {value}, {constant(identity(kind, type), type)})"

    # ---- values -----------------------------------------------------------------------------

    def value(self, op: Op) -> str:
        """The value of an operation, as a name or a literal; computed at its first mention."""
        if op.name == "const":
            return constant(op.attr, op.type)
        home = self.scope().home(op.space)
        if op.uid not in home.values:
            text = self._compute(op)
            name = home.values[op.uid] = self.fresh()
            home.lines.append(f"{name} = {text}")
        return home.values[op.uid]

    def _compute(self, op: Op) -> str:
        if op.name == "size":
            return f"tl.cast({self.size(op.attr.const)}, tl.int64)"
        if op.name == "iota":
            return f"tl.cast({self.index(op.attr)}, tl.int64)"
        if op.name in ("load", "load_if"):
            return self._load(op)
        if op.name == "bounded":
            return self._bounded(op)
        if op.name == "nonzero":  # on GPUs eager does not look
            return self.value(op.args[0])
        if op.name == "reduce":
            return self._reduce(op)
        return operation(op, self._operands(op))

    def _operands(self, op: Op) -> list[str]:
        """The operands; constants as literals beside one of their type that is none."""
        plain = op.args[1:] if op.name == "select" else op.args
        literal = op.name not in ("round", "cast") and any(a.name != "const" for a in plain)
        result = []
        for number, arg in enumerate(op.args):
            text = None
            in_reach = arg in plain and (number or op.name != "select")
            if arg.name == "const" and literal and in_reach:
                text = inlined(arg.attr, arg.type)
            result.append(self.value(arg) if text is None else text)
        return result

    def _reduce(self, op: Op) -> str:
        """A reduction over a row that is there as a whole."""
        (arg,) = op.args
        value = self.value(arg)
        if not arg.space & self.r:
            rows = "XBLOCK" if arg.space & self.x else "1"
            value = f"tl.broadcast_to({value}, [{rows}, RBLOCK])"
        return self.fold(op.attr, self.kept(value, op.attr, op.type, "r"), op.type, 1)

    def fold(self, kind: str, value: str, type: str, axis: int) -> str:
        """A tile folded along one side."""
        text, helper = folded(kind, value, type, axis)
        if helper:
            assert helper in COMBINE
            self.helpers.add(helper)
        return text

    def _bounded(self, op: Op) -> str:
        """An index that is in range; where one was not, the launch fails as eager's does."""
        index = self.value(op.args[0])
        scope = self.scope().home(op.space)
        good = self.fresh("good")
        scope.lines.append(f"{good} = ({index} >= 0) & ({index} < {self.size(op.attr.const)})")
        mask = self.mask(op.space, *(self.value(guard) for guard in op.args[1:]))
        allowed = f"{good} | ~({mask})" if mask else good
        scope.lines.append(f'tl.device_assert({allowed}, "index out of range")')
        return f"tl.where({good}, {index}, 0)"

    # ---- memory -----------------------------------------------------------------------------

    def _load(self, op: Op) -> str:
        memory = self.memory[op.buffer]
        conditions = [self.value(op.args[-1])] if op.name == "load_if" else []
        mask = self.mask(op.space, *conditions)
        index = self.index(op.attr)
        text = f"{op.buffer} + ({index})" if " " in index else f"{op.buffer} + {index}"
        guard = f", {mask}, other=0" if mask else ""
        wide = ".to(tl.float32)" if memory in HALF else ""
        return f"tl.load({self._spread(text, op)}{guard}){wide}"

    def _spread(self, pointer: str, op: Op) -> str:
        """A pointer as wide as its mask: a guard may vary where the address does not."""
        if op.name != "load_if" or op.space <= op.attr.axes():
            return pointer
        sides = ["XBLOCK" if op.space & self.x else "1"]
        if self.tiling.r:
            sides.append("RBLOCK" if op.space & self.r else "1")
        return f"tl.broadcast_to({pointer}, [{', '.join(sides)}])"

    def store(self, op: Op) -> None:
        """Emit a store where all of its points exist."""
        axes = op.attr.axes()
        index = self.index(op.attr)
        value = self.value(op.args[0])
        if not axes & (self.x | self.r):  # a single number: a tile of one point
            index = "x" if index == "0" else f"x + {index}"
            axes |= self.x
        self._store(op, index, value, self.mask(axes) or "")

    def _store(self, op: Op, index: str, value: str, mask: str) -> None:
        memory = self.memory[op.buffer]
        if memory in HALF:
            value = f"{value}.to({TYPES[memory]})"
        home = self.scope().home(op.space | op.attr.axes())
        if not self.x and not op.attr.axes() & self.r:
            mask = "xmask"
        pointer = f"{op.buffer} + ({index})" if " " in index else f"{op.buffer} + {index}"
        guard = f", {mask}" if mask else ""
        home.lines.append(f"tl.store({pointer}, {value}{guard})")

    def accumulated(self, op: Op, value: str) -> None:
        """Emit the store of what a block of rows was folded to."""
        self._store(op, self.index(op.attr), value, self.mask(op.attr.axes() - {BLOCK}))
