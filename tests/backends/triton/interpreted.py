"""Regions by their Triton kernels, in the interpreter."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import sympy
import torch

from perfopt.backends.ir import Kernel
from perfopt.backends.lower import Lowered, lower_region
from perfopt.backends.region import Size
from perfopt.backends.triton.printer import TritonKernel, print_kernel
from perfopt.backends.triton.source import module_text
from tests.backends.kernels import Function, symbols_of, traced
from tests.backends.triton.interpreter import interpret


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="perfopt_interpreted_"))


def function_of(printed: TritonKernel) -> Any:
    """The kernel's function, from a file that holds its whole module."""
    text = module_text(printed, printed.kernel.name)
    path = _folder() / f"kernel_{abs(hash(text))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, printed.kernel.name)


def interpreted(
    function: Function, *args: torch.Tensor, dynamic: bool = False, exact: bool = False
) -> tuple[torch.Tensor, ...]:
    """What the Triton kernels of `function` give."""
    gm = traced(function, *args, dynamic=dynamic)
    lowered = lower_region("region", gm, exact)
    return run_lowered(lowered, args, symbols_of(gm, args))


def run_lowered(
    lowered: Lowered, args: tuple[torch.Tensor, ...], symbols: dict[sympy.Expr, int]
) -> tuple[torch.Tensor, ...]:
    """The results of a region's launches, one after the other."""

    def number(size: Size) -> int:
        return size if isinstance(size, int) else int(size.subs(symbols))

    region = lowered.region
    buffers = dict(zip(region.inputs, args, strict=True))
    for alloc in region.allocs:
        shape, strides = map(number, alloc.shape), map(number, alloc.strides)
        made = torch.empty_strided(tuple(shape), tuple(strides), dtype=alloc.dtype)
        buffers[alloc.name] = made
    kernels = {kernel.name: kernel for kernel in lowered.kernels}
    for call in region.calls:
        kernel = kernels[call.entry]
        given = [buffers[a] if isinstance(a, str) else number(a) for a in call.args]
        _launch(kernel, given)
    return tuple(buffers[name] for name in region.outputs)


def _launch(kernel: Kernel, given: list[Any]) -> None:
    printed = print_kernel(kernel)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    sizes = [x for x in given if not isinstance(x, torch.Tensor)]
    space: dict[str, Any] = dict(zip(printed.sizes, sizes, strict=True))
    grid = int(eval(printed.grid, {"min": min, "max": max}, space))
    written = [buffer.written for buffer in kernel.buffers]
    interpret(function_of(printed), grid, tensors, written, sizes, printed.constants)
