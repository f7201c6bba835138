"""Kernels as text to read: one line per operation, with the axes that its value varies with."""

from __future__ import annotations

from perfopt.backends.index import Index
from perfopt.backends.ir import MEMORY, Kernel, Op


def index_text(index: Index, numbers: dict[int, int]) -> str:
    """An index such as `77*a0 + a1 + %3 + 5`; loaded values by their numbers."""
    parts = []
    for term, factor in index.terms:
        name = term if isinstance(term, str) else f"%{numbers[term.uid]}"
        parts.append(name if factor == 1 else f"{_factor(factor)}*{name}")
    if index.const != 0 or not parts:
        parts.append(str(index.const))
    return " + ".join(parts).replace("+ -", "- ")


def _factor(factor: object) -> str:
    text = str(factor)
    return f"({text})" if " " in text else text


def describe(kernel: Kernel) -> str:
    """The kernel: its buffers, its axes and its operations."""
    used = frozenset().union(*(op.space for op in kernel.ops))
    numbers = {op.uid: number for number, op in enumerate(kernel.ops)}
    buffers = ", ".join(f"{b.name}: {b.type}" for b in kernel.buffers)
    axes = [f"{a.name}={a.size}" for a in kernel.parallel]
    if kernel.reduction:
        axes += ["|", *(f"{a.name}={a.size}" for a in kernel.reduction)]
    lines = [f"kernel {kernel.name}({buffers}) over [{' '.join(axes)}]"]
    for op in kernel.ops:
        lines.append(f"  {_operation(op, numbers)}{_space(op, used)}")
    return "\n".join(lines) + "\n"


def _operation(op: Op, numbers: dict[int, int]) -> str:
    args = [f"%{numbers[arg.uid]}" for arg in op.args]
    if op.name in MEMORY:
        place = f"{op.buffer}[{index_text(op.attr, numbers)}]"
        if op.name in ("store", "accumulate"):
            return f"{op.name} {place}, {args[0]}"
        guard = f" if {args[-1]}" if op.name == "load_if" else ""
        return f"%{numbers[op.uid]} = load {place}{guard} : {op.type}"
    if isinstance(op.attr, Index):
        args.append(index_text(op.attr, numbers))
    elif op.attr is not None:
        args.append(str(op.attr))
    return f"%{numbers[op.uid]} = {op.name} {', '.join(args)} : {op.type}"


def _space(op: Op, used: frozenset[str]) -> str:
    if op.name in ("store", "accumulate", "const") or not used:
        return ""
    return f"  [{' '.join(sorted(op.space))}]"
