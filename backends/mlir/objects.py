"""Compiled kernels on disk: object files, loaded without MLIR.

MLIR's JIT gives the object file of a module, and llvmlite links one into the process, so that a
process whose kernels are all stored imports no MLIR. Each kernel has an entry of its own, which
names the object that holds it; objects hold all kernels that were compiled together. A graph that
changes a little thus compiles what is new in it and no more.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import logging
import platform
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import torch

from perfopt.backends.cache import Cache, Key
from perfopt.backends.ir import Kernel
from perfopt.backends.mlir.module import KernelText, print_module

log = logging.getLogger(__name__)

FORMAT = "1"  # raised when what an object holds or how it is called changes
PACKAGES = ("perfopt", "torch", "torch-mlir", "llvmlite")
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_NUMBERS = itertools.count()  # the linker takes no name twice
# Objects that are linked and in use, by their digest.
_LINKED_CACHE: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Objects:
    """Where the kernels of one compilation are kept, and under what.

    `parts` are those of every key besides the kernel, the compiler and the machine, by name.
    `label` says to people whose kernels these are; `batch` marks what is compiled together.
    """

    cache: Cache
    parts: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    batch: str = field(default_factory=lambda: uuid4().hex)

    def key(self, kernel: Kernel, text: KernelText, compiler: Mapping[str, str]) -> Key:
        """What the code of a kernel depends on; `compiler` names the compiler's settings."""
        parts = {
            "kind": "kernel",
            "text": _text_digest(text, compiler["bf16"] == "native"),
            "shape": described(kernel),
            **compiler,
            **surroundings(),
            **self.parts,
        }
        return Key(MappingProxyType(parts))

    def load(self, keys: Mapping[str, Key]) -> dict[str, tuple[int, Any]]:
        """The address of every kernel that is stored, by name, and what its code lives in."""
        wanted: dict[str, dict[str, str]] = {}  # by object: names and their symbols
        for name, key in keys.items():
            payload = self.cache.get(key)
            if payload is not None:
                place = json.loads(payload)
                wanted.setdefault(place["object"], {})[name] = place["symbol"]
        found: dict[str, tuple[int, Any]] = {}
        for digest, symbols in wanted.items():
            linked = _linked(self.cache, digest)
            if linked is not None:
                found |= {name: (linked[symbol], linked) for name, symbol in symbols.items()}
        return found

    def store(self, content: bytes, symbols: Mapping[str, tuple[Key, str]]) -> None:
        """Store an object file, and its kernels by symbol with their key and name."""
        digest = hashlib.sha256(content).hexdigest()
        payload = json.dumps({"symbols": sorted(symbols)}).encode() + b"\n" + content
        label = f"{self.label} {len(symbols)} kernels".strip()
        self.cache.put(_object_key(digest), payload, label, self.batch)
        for symbol, (key, name) in symbols.items():
            place = json.dumps({"object": digest, "symbol": symbol}).encode()
            self.cache.put(key, place, f"{self.label} {name}".strip(), self.batch)


@cache
def can_load() -> bool:
    """Whether llvmlite, which loads objects and names the processor, is there."""
    try:
        import llvmlite.binding as binding
    except (ImportError, OSError) as error:
        log.info("perfopt: compiled kernels are not kept: %s", error)
        return False
    return hasattr(binding, "JITLibraryBuilder")


def openmp_library() -> str:
    """torch's own OpenMP library, so that its threads run the kernels; "" where it has none."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(found[0]) if found else ""


def described(kernel: Kernel) -> str:
    """A kernel's sizes and types for people, as "4x8 over 16: f32, f32 to f32"."""
    sizes = ["x".join(str(axis.size) for axis in axes)
             for axes in (kernel.parallel, kernel.reduction)]  # fmt: skip
    read, written = (
        ", ".join(buffer.type for buffer in kernel.buffers if buffer.written == side)
        for side in (False, True)
    )
    return f"{' over '.join(filter(None, sizes)) or 'scalar'}: {read} to {written}"


@cache
def surroundings() -> Mapping[str, str]:
    """The machine and the packages that code depends on, by name."""
    from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

    features = get_host_cpu_features()
    library = openmp_library()
    openmp = f"{Path(library).name} {Path(library).stat().st_size}" if library else "process"
    return MappingProxyType(
        {
            **{f"version.{package}": _version(package) for package in PACKAGES},
            "format": FORMAT,
            "platform": f"{platform.system()} {platform.machine()}",
            "cpu": get_host_cpu_name(),
            "features": ",".join(sorted(name for name, there in features.items() if there)),
            "openmp": openmp,
        }
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _text_digest(text: KernelText, native_bf16: bool) -> str:
    whole = _called(text.functions, native_bf16) + text.text
    return hashlib.sha256(whole.encode()).hexdigest()


@cache
def _called(functions: frozenset[tuple[str, str]], native_bf16: bool) -> str:
    """The rest of a module around a kernel that calls these functions."""
    return print_module({"kernel": KernelText("", functions)}, native_bf16)


def _object_key(digest: str) -> Key:
    return Key(MappingProxyType({"kind": "object", "sha256": digest, "format": FORMAT}))


def _linked(kept: Cache, digest: str) -> Any:
    """The addresses of an object's symbols, which own its code; None where it cannot be had."""
    linked = _LINKED_CACHE.get(digest)
    payload = kept.get(_object_key(digest)) if linked is None else None
    if linked is None and payload is not None:
        header, _, content = payload.partition(b"\n")
        try:
            linked = _link(content, json.loads(header)["symbols"])
        except RuntimeError as error:
            log.warning("perfopt: a stored object does not load, it is compiled again: %s", error)
            return None
        _LINKED_CACHE[digest] = linked
    return linked


def _link(content: bytes, symbols: Iterable[str]) -> Any:
    """Link an object file into this process; raises RuntimeError where it cannot be."""
    from llvmlite.binding import JITLibraryBuilder

    library = ctypes.CDLL(openmp_library() or None)
    builder = JITLibraryBuilder().add_object_img(content).add_current_process()
    for name in _OPENMP:
        if function := getattr(library, name, None):
            # Another OpenMP library of the process would answer to the same names.
            builder.import_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    for symbol in symbols:
        builder.export_symbol(symbol)
    return builder.link(_linker(), f"perfopt_{next(_NUMBERS)}")


@cache
def _linker() -> Any:
    from llvmlite.binding import (
        create_lljit_compiler,
        initialize_native_asmprinter,
        initialize_native_target,
    )

    initialize_native_target()
    initialize_native_asmprinter()
    return create_lljit_compiler(use_jit_link=True, suppress_errors=True)
