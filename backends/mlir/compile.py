"""From kernels to functions that Python can call: MLIR's passes and JIT, through torch-mlir."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from perfopt.backends.ir import Kernel
from perfopt.backends.mlir.module import ENTRIES, print_kernel, print_module
from perfopt.backends.torch_private import has_avx512_bf16

LANES = {"AVX512": 16, "AVX2": 8}  # f32 elements of one vector by torch's name of the ISA
_PIPELINE = (
    "builtin.module(convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,"
    "convert-arith-to-llvm,convert-cf-to-llvm,convert-func-to-llvm,reconcile-unrealized-casts)"
)


# Compiled entries by their kernel's text, which holds all that their code depends on.
_ENTRY_CACHE: dict[str, Any] = {}


class CompilerMissing(ImportError):
    """The torch-mlir package, which brings MLIR, is not installed."""


def host_lanes() -> int:
    """The f32 elements of one of this machine's vectors; 4 (NEON, SSE) where unknown."""
    return LANES.get(torch.backends.cpu.get_cpu_capability(), 4)


def host_has_bf16() -> bool:
    """Whether this machine rounds vectors to bf16 by itself (AVX512-BF16)."""
    return host_lanes() == LANES["AVX512"] and has_avx512_bf16()


def openmp_library() -> str:
    """torch's own OpenMP library, so that its threads run the kernels; "" where it has none."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(found[0]) if found else ""


def compile_kernels(
    kernels: Sequence[Kernel], lanes: int | None = None
) -> dict[str, Callable[..., Any]]:
    """The entry of every kernel by name, as a function of addresses, sizes and threads.

    Kernels that were compiled before in this process are used again. Raises `CompilerMissing`
    without torch-mlir. The machine code lives as long as the functions.
    """
    lanes = lanes or host_lanes()
    texts = {kernel.name: print_kernel(kernel, lanes) for kernel in kernels}
    types = {texts[kernel.name].text: _entry_type(kernel) for kernel in kernels}
    new = {text.text: text for text in texts.values() if text.text not in _ENTRY_CACHE}
    if new:
        named = {f"kernel_{number}": text for number, text in enumerate(new.values())}
        engine, addresses = _compiled(print_module(named, host_has_bf16()), len(named))
        for text, address in zip(new, addresses, strict=True):
            function = types[text](address)
            function.engine = engine
            _ENTRY_CACHE[text] = function
    return {name: _ENTRY_CACHE[text.text] for name, text in texts.items()}


def _entry_type(kernel: Kernel) -> Any:
    arguments: list[Any] = [ctypes.c_void_p] * len(kernel.buffers)
    arguments += [ctypes.c_int64] * (len(kernel.sizes) + 1)
    return ctypes.CFUNCTYPE(ctypes.c_int64 if kernel.checked else None, *arguments)


def _compiled(text: str, count: int) -> tuple[Any, list[int]]:
    """The JIT engine of a module, and the addresses of its `count` entries."""
    try:
        from torch_mlir.execution_engine import ExecutionEngine
        from torch_mlir.ir import Context, Module
        from torch_mlir.passmanager import PassManager
    except ImportError as error:
        raise CompilerMissing(str(error)) from error
    context = Context()
    context.enable_multithreading(False)
    with context:
        module = Module.parse(text)
        PassManager.parse(_PIPELINE).run(module.operation)
        libraries = [name for name in (openmp_library(),) if name]
        engine = ExecutionEngine(module, opt_level=3, shared_libs=libraries)
    table = (ctypes.c_void_p * count)()
    # The engine gives packed wrappers only: one call through it fetches all plain addresses.
    wrapper = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.raw_lookup(ENTRIES))
    address = ctypes.c_void_p(ctypes.addressof(table))
    packed = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    wrapper(ctypes.cast(packed, ctypes.c_void_p))
    return engine, [entry or 0 for entry in table]
