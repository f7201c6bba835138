"""From kernels to functions that Python can call: MLIR's passes and JIT, through torch-mlir."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from perfopt.backends.ir import Kernel
from perfopt.backends.mlir.module import ENTRIES, print_module

LANES = {"AVX512": 16, "AVX2": 8}  # f32 elements of one vector by torch's name of the ISA
_PIPELINE = (
    "builtin.module(convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,"
    "convert-arith-to-llvm,convert-cf-to-llvm,convert-func-to-llvm,reconcile-unrealized-casts)"
)


class CompilerMissing(ImportError):
    """The torch-mlir package, which brings MLIR, is not installed."""


def host_lanes() -> int:
    """The f32 elements of one of this machine's vectors; 4 (NEON, SSE) where unknown."""
    return LANES.get(torch.backends.cpu.get_cpu_capability(), 4)


def openmp_library() -> str:
    """torch's own OpenMP library, so that its threads run the kernels; "" where it has none."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(found[0]) if found else ""


def compile_kernels(
    kernels: Sequence[Kernel], lanes: int | None = None
) -> dict[str, Callable[..., Any]]:
    """The entry of every kernel by name, as a function of addresses, sizes and threads.

    Raises `CompilerMissing` without torch-mlir. The machine code lives as long as the functions.
    """
    try:
        from torch_mlir.execution_engine import ExecutionEngine
        from torch_mlir.ir import Context, Module
        from torch_mlir.passmanager import PassManager
    except ImportError as error:
        raise CompilerMissing(str(error)) from error
    text = print_module(kernels, lanes or host_lanes())
    context = Context()
    context.enable_multithreading(False)
    with context:
        module = Module.parse(text)
        PassManager.parse(_PIPELINE).run(module.operation)
        libraries = [name for name in (openmp_library(),) if name]
        engine = ExecutionEngine(module, opt_level=3, shared_libs=libraries)
    return _entries(engine, kernels)


def _entries(engine: Any, kernels: Sequence[Kernel]) -> dict[str, Callable[..., Any]]:
    table = (ctypes.c_void_p * len(kernels))()
    # The engine gives packed wrappers only: one call through it fetches all plain addresses.
    wrapper = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.raw_lookup(ENTRIES))
    address = ctypes.c_void_p(ctypes.addressof(table))
    packed = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    wrapper(ctypes.cast(packed, ctypes.c_void_p))
    found: dict[str, Callable[..., Any]] = {}
    for kernel, entry in zip(kernels, table, strict=True):
        arguments = [ctypes.c_void_p] * len(kernel.buffers)
        arguments += [ctypes.c_int64] * (len(kernel.sizes) + 1)  # type: ignore[list-item]
        result = ctypes.c_int64 if kernel.checked else None
        function = ctypes.CFUNCTYPE(result, *arguments)(entry)
        function.engine = engine  # type: ignore[attr-defined]
        found[kernel.name] = function
    return found
