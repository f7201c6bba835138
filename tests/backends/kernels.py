"""Traces, lowers, compiles and runs regions for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from perfopt.backends.decompositions import decompositions
from perfopt.backends.lower import Lowered, lower_region
from perfopt.backends.mlir.compile import compile_kernels
from perfopt.backends.region import Size

Function = Callable[..., Any]


def traced(function: Function, *args: torch.Tensor, dynamic: bool = False) -> fx.GraphModule:
    """The functional ATen graph of `function`, with a tuple output."""

    def listed(*inner: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = function(*inner)
        return result if isinstance(result, tuple) else (result,)

    mode = "symbolic" if dynamic else "fake"
    gm = make_fx(listed, decomposition_table=decompositions(), tracing_mode=mode)(*args)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def symbols_of(gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> dict[sympy.Expr, int]:
    """The values of a dynamic graph's symbols for these arguments."""
    found: dict[sympy.Expr, int] = {}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, arg in zip(placeholders, args, strict=True):
        fake = node.meta["val"]
        pairs = [*zip(fake.shape, arg.shape, strict=True)]
        pairs += zip(fake.stride(), arg.stride(), strict=True)
        for size, value in pairs:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found[size.node.expr] = value
    return found


def launch(
    lowered: Lowered,
    entries: dict[str, Callable[..., Any]],
    args: tuple[torch.Tensor, ...],
    symbols: dict[sympy.Expr, int],
    threads: int = 2,
) -> tuple[torch.Tensor, ...]:
    """The results of a lowered region; raises `IndexError` as a program does."""

    def number(size: Size) -> int:
        return size if isinstance(size, int) else int(size.subs(symbols))

    region = lowered.region
    buffers = dict(zip(region.inputs, args, strict=True))
    for alloc in region.allocs:
        shape, strides = map(number, alloc.shape), map(number, alloc.strides)
        buffers[alloc.name] = torch.empty_strided(tuple(shape), tuple(strides), dtype=alloc.dtype)
    for call in region.calls:
        values = [buffers[a].data_ptr() if isinstance(a, str) else number(a) for a in call.args]
        if entries[call.entry](*values, threads):
            raise IndexError("index out of range")
    return tuple(buffers[name] for name in region.outputs)


def generated(
    function: Function, *args: torch.Tensor, dynamic: bool = False, lanes: int | None = None
) -> tuple[torch.Tensor, ...]:
    """What the generated kernel of `function` gives."""
    gm = traced(function, *args, dynamic=dynamic)
    lowered = lower_region("region", gm)
    entries = compile_kernels(lowered.kernels, lanes)
    return launch(lowered, entries, args, symbols_of(gm, args))
