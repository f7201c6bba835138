"""From kernels to functions that Python can call: MLIR's passes and JIT, through torch-mlir.

What was compiled before comes from this process or, given `Objects`, from the disk.
"""

from __future__ import annotations

import ctypes
import logging
import tempfile
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from perfopt.backends.cache import Key
from perfopt.backends.ir import Kernel
from perfopt.backends.mlir.module import ENTRIES, KernelText, print_kernel, print_module
from perfopt.backends.mlir.objects import Objects, can_load, openmp_library
from perfopt.backends.torch_private import has_avx512_bf16

log = logging.getLogger(__name__)

LANES = {"AVX512": 16, "AVX2": 8}  # f32 elements of one vector by torch's name of the ISA
MEMORY, DISK, COMPILED = "memory", "disk", "compiled"  # where an entry came from
_PIPELINE = (
    "builtin.module(convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,"
    "convert-arith-to-llvm,convert-cf-to-llvm,convert-func-to-llvm,reconcile-unrealized-casts)"
)
_LEVEL = 3  # of LLVM's optimization
_RECENT = 4096  # entries that are kept though nothing uses them

# Compiled entries by their kernel's text, which holds all that their code depends on: those that
# programs use, and the latest, which live on.
_ENTRY_CACHE: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_RECENT_CACHE: OrderedDict[str, Any] = OrderedDict()


class CompilerMissing(ImportError):
    """The torch-mlir package, which brings MLIR, is not installed."""


def host_lanes() -> int:
    """The f32 elements of one of this machine's vectors; 4 (NEON, SSE) where unknown."""
    return LANES.get(torch.backends.cpu.get_cpu_capability(), 4)


def host_has_bf16() -> bool:
    """Whether this machine rounds vectors to bf16 by itself (AVX512-BF16)."""
    return host_lanes() == LANES["AVX512"] and has_avx512_bf16()


def compile_kernels(
    kernels: Sequence[Kernel],
    lanes: int | None = None,
    objects: Objects | None = None,
    sources: Counter[str] | None = None,
) -> dict[str, Callable[..., Any]]:
    """The entry of every kernel by name, as a function of addresses, sizes and threads.

    Kernels that were compiled before in this process are used again, and so are those that
    `objects` holds, which gets the others. `sources` counts different kernels by where their
    entries came from: `MEMORY`, `DISK` or `COMPILED`. Raises `CompilerMissing` without torch-mlir.
    The machine code lives as long as the functions.
    """
    lanes = lanes or host_lanes()
    texts = {kernel.name: print_kernel(kernel, lanes) for kernel in kernels}
    wanted = {texts[kernel.name].text: (kernel, texts[kernel.name]) for kernel in kernels}
    known = {text: _ENTRY_CACHE.get(text) for text in wanted}
    entries = {text: entry for text, entry in known.items() if entry is not None}
    missing = {text: made for text, made in wanted.items() if text not in entries}
    keys: dict[str, Key] = {}
    if missing and objects is not None and can_load():
        compiler = _compiler(lanes)
        keys = {text: objects.key(*made, compiler) for text, made in missing.items()}
    loaded = objects.load(keys) if objects is not None and keys else {}
    entries |= {text: _entry(wanted[text][0], *place) for text, place in loaded.items()}
    new = {text: made for text, made in missing.items() if text not in loaded}
    entries |= _made(new, objects, keys)
    for text, entry in entries.items():
        _remember(text, entry)
    if sources is not None:
        counts = {COMPILED: len(new), DISK: len(loaded), MEMORY: len(wanted) - len(missing)}
        sources.update(counts)
    return {name: entries[text.text] for name, text in texts.items()}


def _made(
    new: Mapping[str, tuple[Kernel, KernelText]], objects: Objects | None, keys: Mapping[str, Key]
) -> dict[str, Any]:
    """New entries by text, compiled as one module; those that have keys are stored."""
    if not new:
        return {}
    names = {text: f"kernel_{number}" for number, text in enumerate(new)}
    module = print_module({names[text]: made[1] for text, made in new.items()}, host_has_bf16())
    engine, addresses = _compiled(module, len(new), bool(keys))
    if objects is not None and keys and (content := _object_file(engine)):
        symbols = {names[text]: (keys[text], kernel.name) for text, (kernel, _) in new.items()}
        objects.store(content, symbols)
    pairs = zip(new.items(), addresses, strict=True)
    return {text: _entry(kernel, address, engine) for (text, (kernel, _)), address in pairs}


def _compiler(lanes: int) -> dict[str, str]:
    """The settings that kernels are compiled with, as parts of keys."""
    return {
        "lanes": str(lanes),
        "bf16": "native" if host_has_bf16() else "emulated",
        "mlir": _PIPELINE,
        "level": str(_LEVEL),
    }


def _entry(kernel: Kernel, address: int, owner: Any) -> Any:
    """The function at an address, which lives in what `owner` keeps alive."""
    arguments: list[Any] = [ctypes.c_void_p] * len(kernel.buffers)
    arguments += [ctypes.c_int64] * (len(kernel.sizes) + 1)
    result = ctypes.c_int64 if kernel.checked else None
    function = ctypes.CFUNCTYPE(result, *arguments)(address)
    function.owner = owner  # type: ignore[attr-defined]
    return function


def _remember(text: str, entry: Any) -> None:
    _ENTRY_CACHE[text] = _RECENT_CACHE[text] = entry
    _RECENT_CACHE.move_to_end(text)
    while len(_RECENT_CACHE) > _RECENT:
        _RECENT_CACHE.popitem(last=False)


def _compiled(text: str, count: int, kept: bool) -> tuple[Any, list[int]]:
    """The JIT engine of a module, and the addresses of its `count` entries.

    Where it is `kept` the engine has its object file.
    """
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
        engine = ExecutionEngine(
            module, opt_level=_LEVEL, shared_libs=libraries, enable_object_dump=kept
        )
    table = (ctypes.c_void_p * count)()
    # The engine gives packed wrappers only: one call through it fetches all plain addresses.
    wrapper = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.raw_lookup(ENTRIES))
    address = ctypes.c_void_p(ctypes.addressof(table))
    packed = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    wrapper(ctypes.cast(packed, ctypes.c_void_p))
    return engine, [entry or 0 for entry in table]


def _object_file(engine: Any) -> bytes:
    """The object file of an engine; empty where there is no room to write it."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernels.o")
            engine.dump_to_object_file(str(path))
            return path.read_bytes()
    except OSError as error:
        log.info("perfopt: compiled kernels are not kept: %s", error)
        return b""
