"""One MLIR module for all kernels of a captured graph.

Every kernel becomes three functions: `NAME_rows` runs a range of its grid, `NAME_team` is what
each thread of torch's OpenMP pool runs, and `NAME` is the entry that the program calls with the
addresses of its buffers, its sizes and the number of threads. Small kernels stay on the calling
thread. A kernel that checks indices returns whether one was out of range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfopt.backends.ir import Kernel
from perfopt.backends.mlir.math import definitions
from perfopt.backends.mlir.rows import RowsPrinter
from perfopt.backends.mlir.text import Block, Names
from perfopt.backends.mlir.values import FAULT

GRAIN = (
    16384  # points of the iteration domain below which a further thread costs more than it saves
)
ENTRIES = "perfopt_entries"  # stores the address of every kernel's entry, in order

_HEADER = f"""\
llvm.func @GOMP_parallel(!llvm.ptr, !llvm.ptr, i32, i32)
llvm.func @omp_get_thread_num() -> i32
llvm.func @omp_get_num_threads() -> i32
llvm.mlir.global internal @{FAULT}(0 : i64) : i64
"""


@dataclass(frozen=True)
class KernelText:
    """One kernel's functions, with @KERNEL for its name, and the math functions that they call."""

    text: str
    functions: frozenset[tuple[str, str]]

    def named(self, name: str) -> str:
        """The text with the kernel's name in it."""
        return self.text.replace("@KERNEL", f"@{name}")


def print_kernel(kernel: Kernel, lanes: int) -> KernelText:
    """The functions of a kernel for vectors of `lanes` elements; equal for equal kernels."""
    names = Names()
    printer = RowsPrinter(kernel, lanes, names)
    rows = printer.text()
    buffers = [f"%{b.name}" for b in kernel.buffers]
    sizes = [f"%s{k}" for k in range(len(kernel.sizes))]
    values = [(name, "!llvm.ptr") for name in buffers] + [(name, "i64") for name in sizes]
    parts = [rows, _team(values, names), _entry(kernel, lanes, values, printer, names)]
    return KernelText("\n".join(parts), frozenset(names.functions))


def print_module(kernels: Mapping[str, KernelText], native_bf16: bool = False) -> str:
    """The module of kernels by name; with `native_bf16` for machines with AVX512-BF16."""
    block = Block(Names(), 1)
    for number, name in enumerate(kernels):
        slot = block.emit(
            f"llvm.getelementptr %out[{number}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr"
        )
        entry = block.emit(f"llvm.mlir.addressof @{name} : !llvm.ptr")
        block.lines.append(f"llvm.store {entry}, {slot} : !llvm.ptr, !llvm.ptr")
    table = f"llvm.func @{ENTRIES}(%out: !llvm.ptr) {{\n{_text(block)}  llvm.return\n}}\n"
    functions = frozenset().union(*(kernel.functions for kernel in kernels.values()))
    parts = [kernel.named(name) for name, kernel in kernels.items()]
    return "\n".join([_HEADER, definitions(sorted(functions), native_bf16), *parts, table])


def _text(block: Block) -> str:
    return "".join(f"  {line}\n" for line in block.lines)


def _call_rows(values: Sequence[tuple[str, str]], begin: str, end: str) -> str:
    args = ", ".join([value for value, _ in values] + [begin, end])
    types = ", ".join([ty for _, ty in values] + ["i64", "i64"])
    return f"func.call @KERNEL_rows({args}) : ({types}) -> ()"


def _slot(block: Block, context: str, number: int) -> str:
    return block.emit(f"llvm.getelementptr {context}[{number}] : (!llvm.ptr) -> !llvm.ptr, i64")


def _team(values: Sequence[tuple[str, str]], names: Names) -> str:
    """What one thread runs: its share of the grid, from the arguments packed in memory."""
    block = Block(names, 1)
    loaded = []
    for number, (_, ty) in enumerate(values):
        slot = _slot(block, "%context", number)
        loaded.append((block.emit(f"llvm.load {slot} : !llvm.ptr -> {ty}"), ty))
    slot = _slot(block, "%context", len(values))
    steps = block.emit(f"llvm.load {slot} : !llvm.ptr -> i64")
    thread, team = (
        block.emit(f"llvm.sext {block.emit(f'llvm.call @{call}() : () -> i32')} : i32 to i64")
        for call in ("omp_get_thread_num", "omp_get_num_threads")
    )
    one = block.emit("arith.constant 1 : i64")
    bounds = []
    for share in (thread, block.emit(f"arith.addi {thread}, {one} : i64")):
        scaled = block.emit(f"arith.muli {steps}, {share} : i64")
        bounds.append(block.emit(f"arith.divui {scaled}, {team} : i64"))
    block.lines.append(_call_rows(loaded, *bounds))
    head = "llvm.func internal @KERNEL_team(%context: !llvm.ptr)"
    return f"{head} {{\n{_text(block)}  llvm.return\n}}\n"


def _entry(
    kernel: Kernel,
    lanes: int,
    values: Sequence[tuple[str, str]],
    printer: RowsPrinter,
    names: Names,
) -> str:
    block = Block(names, lanes)
    steps = printer.steps(block)
    axes = kernel.parallel + kernel.reduction
    points = _product(block, [printer.number(block, axis.size) for axis in axes])
    grain = block.emit(f"arith.constant {GRAIN} : i64")
    useful = block.emit(f"arith.divui {points}, {grain} : i64")
    useful = block.emit(f"arith.minsi {useful}, {steps} : i64")
    threads = block.emit(f"arith.minsi {useful}, %threads : i64")
    one, zero = (block.emit(f"arith.constant {n} : i64") for n in (1, 0))
    alone = block.emit(f"arith.cmpi sle, {threads}, {one} : i64")
    packed = Block(names, lanes)
    count = packed.emit(f"arith.constant {len(values) + 1} : i64")
    context = packed.emit(f"llvm.alloca {count} x i64 {{alignment = 8 : i64}} : (i64) -> !llvm.ptr")
    for number, (value, ty) in enumerate([*values, (steps, "i64")]):
        slot = _slot(packed, context, number)
        packed.lines.append(f"llvm.store {value}, {slot} : {ty}, !llvm.ptr")
    team = packed.emit("llvm.mlir.addressof @KERNEL_team : !llvm.ptr")
    short = packed.emit(f"arith.trunci {threads} : i64 to i32")
    flags = packed.emit("arith.constant 0 : i32")
    packed.lines.append(
        f"llvm.call @GOMP_parallel({team}, {context}, {short}, {flags}) : "
        "(!llvm.ptr, !llvm.ptr, i32, i32) -> ()"
    )
    call = _call_rows(values, zero, steps)
    block.lines += [f"scf.if {alone} {{", call, "} else {", *packed.lines, "}"]
    result, back = "", ""
    if kernel.checked:
        flag = block.emit(f"llvm.mlir.addressof @{FAULT} : !llvm.ptr")
        fault = block.emit(f"llvm.load {flag} : !llvm.ptr -> i64")
        block.lines.append(f"llvm.store {zero}, {flag} : i64, !llvm.ptr")
        result, back = " -> i64", f" {fault} : i64"
    args = ", ".join([f"{name}: {ty}" for name, ty in values] + ["%threads: i64"])
    return f"llvm.func @KERNEL({args}){result} {{\n{_text(block)}  llvm.return{back}\n}}\n"


def _product(block: Block, factors: Sequence[str]) -> str:
    total = block.emit("arith.constant 1 : i64")
    for factor in factors:
        total = block.emit(f"arith.muli {total}, {factor} : i64")
    return total
