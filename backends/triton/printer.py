"""Kernels as readable Triton source.

The text of a kernel is one `@triton.jit` function over its buffers, its sizes and the sides of its
tile. Operations stand in the order of the IR; a reduction whose row does not fit on chip becomes
one loop over the row for every depth of reductions, with what is cheap computed again from loads.
An index that is out of range stops the kernel by a device assertion, as eager's kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfopt.backends.index import product
from perfopt.backends.ir import BLOCK, BLOCK_ROWS, Kernel, Op
from perfopt.backends.schedule import Stage, levels
from perfopt.backends.triton.expressions import COMBINE, combined, constant, identity
from perfopt.backends.triton.schedule import Tiling, make_tiling
from perfopt.backends.triton.values import Scope, Values

_INDENT = "    "
_LIMIT = 2**31  # beyond it, indices take 64 bits


@dataclass(frozen=True)
class TritonKernel:
    """A kernel as Triton source, with all that a launch needs to know.

    `text` holds the functions, with KERNEL for the kernel's name; `grid` is the number of programs
    as Python over the names of `sizes`. `constants` are passed by name; `checked` kernels are
    compiled with device assertions, and with `near` all offsets fit into 31 bits of bytes.
    """

    kernel: Kernel
    tiling: Tiling
    text: str
    grid: str
    buffers: tuple[str, ...]
    sizes: tuple[str, ...]
    constants: dict[str, int]
    checked: bool
    near: bool

    def named(self, name: str) -> str:
        """The functions under a name."""
        return self.text.replace("KERNEL", name)


def print_kernel(kernel: Kernel, tiling: Tiling | None = None) -> TritonKernel:
    """A kernel as Triton source; equal kernels give equal text, whatever their names."""
    return _Printer(kernel, tiling or make_tiling(kernel)).kernel_text()


class _Printer(Values):
    """Prints one kernel."""

    def kernel_text(self) -> TritonKernel:
        self._wide = self._needs_wide()
        self._body()
        buffers = tuple(b.name for b in self.kernel.buffers)
        sizes = tuple(self.names.values())
        constants = {"XBLOCK": self.tiling.xblock}
        if self.tiling.r:
            constants["RBLOCK"] = self.tiling.rblock
        parameters = [*buffers, *sizes, *(f"{name}: tl.constexpr" for name in constants)]
        lines = [f"def KERNEL({', '.join(parameters)}):"]
        lines += [_INDENT + line for line in self.outer.lines]
        helpers = [
            f"@triton.jit\ndef {name}(a, b):\n    return {COMBINE[name]}\n\n\n"
            for name in sorted(self.helpers)
        ]
        text = "".join(helpers) + "@triton.jit\n" + "\n".join(lines) + "\n"
        return TritonKernel(
            self.kernel, self.tiling, text, self._grid(), buffers, sizes, constants,
            self.kernel.checked, not self._wide,
        )  # fmt: skip

    # ---- programs and positions -------------------------------------------------------------

    def _grid(self) -> str:
        tiles = [_pieces(self.extent(self.tiling.x), self.tiling.rows)]
        if self.tiling.r_grid:
            tiles.append(_pieces(self.extent(self.tiling.r), self.tiling.rblock))
        return " * ".join(tiles)

    def _needs_wide(self) -> bool:
        """Whether some index may not fit into 32 bits."""
        if self.kernel.sizes:
            return True
        sizes = self.kernel.axis_sizes()
        points = product(sizes.values())
        if not isinstance(points, int) or points >= _LIMIT // 8:
            return True
        for op in self.kernel.ops:
            if op.buffer:
                terms = [(t, v) for t, v in op.attr.terms if isinstance(t, str)]
                reach = sum(abs(v) * sizes.get(t, points) for t, v in terms) + abs(op.attr.const)
                if reach >= _LIMIT // 8:
                    return True
        return False

    def _body(self) -> None:
        outer, lines = self.outer, self.outer.lines
        if self._wide:
            lines += [f"{name} = tl.cast({name}, tl.int64)" for name in self.names.values()]
        lines.append(f"xnumel = {self.extent(self.tiling.x)}")
        if self.tiling.r:
            lines.append(f"rnumel = {self.extent(self.tiling.r)}")
        self._program()
        if self.tiling.loop == "r":
            self._rows_piece_by_piece()
        elif self.tiling.loop == "x":
            self._block_row_by_row()
        else:
            outer.own = self.x | self.r | {BLOCK}
            self._straight(self.kernel.ops)

    def _program(self) -> None:
        lines, tiling = self.outer.lines, self.tiling
        program = "tl.program_id(0)" + (".to(tl.int64)" if self._wide else "")
        first = program
        if tiling.r_grid:
            lines += [f"program = {program}", "tiles = (rnumel + RBLOCK - 1) // RBLOCK"]
            first = "program // tiles"
        if tiling.blocked:
            lines.append(f"block = {first}")
            self.outer.positions[BLOCK] = "block"
            first = "block"
        if tiling.loop != "x":
            lines.append(f"x = {first} * XBLOCK + {self._lanes('x')}")
            lines.append("xmask = x < xnumel")
        if tiling.r_grid:
            lines.append(f"r = program % tiles * RBLOCK + {self._lanes('r')}")
        elif tiling.r and tiling.loop != "r":
            wide = ".to(tl.int64)" if self._wide else ""
            lines.append(f"r = {self._lanes('r')}{wide}")
        if tiling.r and tiling.loop != "r" and not tiling.exact:
            lines.append("rmask = r < rnumel")

    def _lanes(self, side: str) -> str:
        shape = "" if not self.tiling.r else ("[:, None]" if side == "x" else "[None, :]")
        return f"tl.arange(0, {side.upper()}BLOCK){shape}"

    # ---- straight code ----------------------------------------------------------------------

    def _straight(self, ops: tuple[Op, ...]) -> None:
        """All operations once, in order."""
        for op in ops:
            if op.name == "store":
                self.store(op)
            elif op.name == "accumulate":
                self._fold_rows(op)
            elif op.name != "const":
                self.value(op)

    def _fold_rows(self, op: Op) -> None:
        """The rows of the tile, which are the whole block, folded and stored."""
        kind = self.folds[op.buffer]
        value = self.kept(self.value(op.args[0]), kind, op.type, "x")
        scope = self.scope()
        name = self.fresh("total")
        scope.lines.append(f"{name} = {self.fold(kind, value, op.type, 0)}")
        self.accumulated(op, name)

    # ---- loops ------------------------------------------------------------------------------

    def _block_row_by_row(self) -> None:
        """A block of rows that fit on chip, folded into accumulators on the way."""
        outer = self.outer
        outer.own = self.r | {BLOCK}
        inside = self.inner = Scope(self.x, outer)
        wide = ".to(tl.int64)" if self._wide else ""
        inside.lines += [
            f"x = block * {BLOCK_ROWS} + first + {self._lanes('x')}{wide}",
            "xmask = x < xnumel",
        ]
        totals: list[tuple[Op, str]] = []
        for op in self.kernel.ops:
            if op.name == "store":
                self.store(op)
            elif op.name == "accumulate":
                kind = self.folds[op.buffer]
                total = self.fresh("total")
                outer.lines.append(f"{total} = {self._start(kind, op.type)}")
                value = self.kept(self.value(op.args[0]), kind, op.type, "x")
                inside.lines.append(f"{total} = {combined(kind, total, value, op.type)}")
                totals.append((op, total))
            elif op.name != "const":
                self.value(op)
        self._close(f"for first in range(0, {BLOCK_ROWS}, XBLOCK):", inside)
        for op, total in totals:
            name = self.fresh("total")
            text = self.fold(self.folds[op.buffer], total, op.type, 0)
            outer.lines.append(f"{name} = {text}")
            self.accumulated(op, name)

    def _rows_piece_by_piece(self) -> None:
        """Rows walked once for every depth of reductions; what is complete is stored."""
        outer, kernel = self.outer, self.kernel
        outer.own = self.x | {BLOCK}
        level = levels(kernel)
        walked = [s for s in kernel.stores if (s.space | s.attr.axes()) & self.r]
        deepest = max((level[op.uid] - 1 for op in kernel.ops if op.name == "reduce"), default=0)
        for depth in range(1 + max([deepest] + [level[s.uid] for s in walked])):
            reductions = [
                op for op in kernel.ops if op.name == "reduce" and level[op.uid] == depth + 1
            ]
            stores = [s for s in walked if level[s.uid] == depth]
            if reductions or stores:
                self._walk(Stage(tuple(reductions), tuple(stores), ()))
        for store in kernel.stores:
            if store not in walked:
                self.store(store)

    def _walk(self, stage: Stage) -> None:
        """One loop over the row."""
        outer = self.outer
        inside = self.inner = Scope(self.r, outer)
        wide = ".to(tl.int64)" if self._wide else ""
        inside.lines.append(f"r = first + {self._lanes('r')}{wide}")
        if not self.tiling.exact:
            inside.lines.append("rmask = r < rnumel")
        totals: list[str] = []
        for op in stage.reductions:
            total = self.fresh("total")
            totals.append(total)
            outer.lines.append(f"{total} = {self._start(op.attr, op.type)}")
            value = self.kept(self.value(op.args[0]), op.attr, op.type, "r")
            inside.lines.append(f"{total} = {combined(op.attr, total, value, op.type)}")
        for store in stage.stores:
            if store.name == "accumulate":
                self._fold_rows(store)
            else:
                self.store(store)
        self._close("for first in range(0, rnumel, RBLOCK):", inside)
        for op, total in zip(stage.reductions, totals, strict=True):
            name = outer.values[op.uid] = self.fresh()
            outer.lines.append(f"{name} = {self.fold(op.attr, total, op.type, 1)}")

    def _start(self, kind: str, type: str) -> str:
        value = constant(identity(kind, type), type)
        return value.replace("[]", "[XBLOCK, RBLOCK]", 1)

    def _close(self, head: str, inside: Scope) -> None:
        """Append a loop with the lines of its scope to the outer one."""
        self.outer.lines.append(head)
        self.outer.lines += [_INDENT + line for line in inside.lines]
        self.inner = None


def _pieces(extent: str, piece: int) -> str:
    """How many pieces cover an extent, as text."""
    if extent.isdigit():
        return str(-(-int(extent) // piece))
    whole = f"({extent} + {piece - 1})" if piece > 1 else f"({extent})"
    return f"({whole} // {piece})" if piece > 1 else whole
