"""A kernel as a Python module that also runs alone, on inputs that it makes up."""

from __future__ import annotations

import re
from collections.abc import Mapping

from perfopt.backends.index import Index, Size
from perfopt.backends.ir import TYPES, Kernel, Op
from perfopt.backends.show import describe
from perfopt.backends.triton.printer import TritonKernel

_EXAMPLE_SIZE = 64  # what stands for a size that is not known, in the example
_DTYPES = {name: dtype for dtype, name in TYPES.items()}
_HEAD = '''\
"""
{description}"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


'''


def symbol(name: str, label: str = "") -> str:
    """A kernel's name with a label, as an identifier."""
    return re.sub(r"\W+", "_", f"{name}__{label}" if label else name).strip("_")


def module_text(printed: TritonKernel, name: str) -> str:
    """The module of a kernel under a name: equal for equal kernels of that name."""
    description = describe(printed.kernel).replace("\\", "\\\\").replace('"""', "'''")
    return _HEAD.format(description=description) + printed.named(name) + _example(printed, name)


def _example(printed: TritonKernel, name: str) -> str:
    kernel = printed.kernel
    numbers = {size: _number(size) for size in kernel.sizes}
    lines = ["", "", 'if __name__ == "__main__":', "    import torch", ""]
    lines.append('    device = "cuda" if torch.cuda.is_available() else "cpu"')
    for symbol, size in zip(printed.sizes, kernel.sizes, strict=True):
        lines.append(f"    {symbol} = {numbers[size]}  # {size}")
    for buffer in kernel.buffers:
        count = _elements(kernel, buffer.name, numbers)
        dtype = str(_DTYPES[buffer.type])
        floats = buffer.type in ("f64", "f32", "bf16", "f16")
        make = "torch.randn" if floats and not buffer.written else "torch.zeros"
        lines.append(f"    {buffer.name} = {make}({count}, dtype={dtype}, device=device)")
    arguments = [*printed.buffers, *printed.sizes]
    arguments += [f"{key}={value}" for key, value in printed.constants.items()]
    arguments += [f"num_warps={printed.tiling.warps}", "enable_fp_fusion=False"]
    lines.append(f"    {name}[({printed.grid},)](")
    lines.append(f"        {', '.join(arguments)}")
    lines.append("    )")
    lines += [f"    print({b.name!r}, {b.name})" for b in kernel.buffers if b.written]
    return "\n".join(lines) + "\n"


def _number(size: Size) -> int:
    """A size where every symbol has the example's size."""
    if isinstance(size, int):
        return size
    return int(size.subs(dict.fromkeys(size.free_symbols, _EXAMPLE_SIZE)))


def _elements(kernel: Kernel, buffer: str, numbers: Mapping[Size, int]) -> int:
    """The elements that a buffer needs for every index to lie in it."""
    sizes = {name: _number(size) for name, size in kernel.axis_sizes().items()}
    most = 1
    for op in kernel.ops:
        if op.buffer == buffer:
            most = max(most, _reach(op.attr, sizes) + 1)
    return most


def _reach(index: Index, sizes: Mapping[str, int]) -> int:
    total = _number(index.const)
    for term, factor in index.terms:
        if isinstance(term, str):
            last = sizes.get(term, 1) - 1
        else:
            assert isinstance(term, Op)
            last = _number(term.attr.const) - 1 if term.name == "bounded" else 0
        total += max(_number(factor) * last, 0)
    return total
