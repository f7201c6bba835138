"""From kernels to functions that Python can call on GPU tensors.

Every kernel is written to a file of its own, named by the hash of its content, and launched by a
generated function of a few lines. That function chooses the compiled kernel by what it was
compiled for: which buffers start at a multiple of 16 bytes, and whether all sizes are multiples of
16. The one for which everything is comes first; it is loaded before the first launch, the others
when they are needed. Triton's own dispatch is not involved.
"""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from perfopt.backends.ir import TYPES, Kernel
from perfopt.backends.triton.printer import TritonKernel, print_kernel
from perfopt.backends.triton.source import module_text, symbol
from perfopt.backends.triton.versions import (
    Pointer,
    Ready,
    Request,
    load,
    stream_call,
    target,
    whole_number,
)

MEMORY, DISK, COMPILED = "memory", "disk", "compiled"  # where an entry came from
_DTYPES = {name: dtype for dtype, name in TYPES.items()}
# Launchers by all that they depend on: the kernel's text, its element types, the device.
_LAUNCHER_CACHE: dict[Any, Launcher] = {}


@dataclass(frozen=True)
class Launcher:
    """A kernel's entry, Triton's function behind it, and what has it compiled beforehand.

    `ready` holds the kernels that are loaded, by what each was compiled for.
    """

    entry: Callable[..., None]
    printed: TritonKernel
    function: Any
    ready: dict[tuple[bool, ...], Ready]
    place: Callable[[tuple[bool, ...], Ready], None]


def compile_kernels(
    kernels: Sequence[Kernel],
    device: int = 0,
    folder: Path | None = None,
    labels: Mapping[str, str] | None = None,
    sources: Counter[str] | None = None,
) -> dict[str, Callable[..., None]]:
    """The entry of every kernel by name, as a function of addresses and sizes.

    An entry launches on the current stream of the GPU `device`, which must be the current one and
    that of the addresses, and returns None: an index out of range is a device assertion, as in
    eager. Kernels and what they are compiled to are kept in `folder` (None: for this process).
    `labels` (by kernel name, such as the user's source line) become part of the names that
    profilers show. Equal kernels are compiled once, under the name of the first. `sources` counts
    different kernels by where they came from: `MEMORY`, `DISK` or `COMPILED`.
    """
    folder, labels = folder or _temporary_folder(), labels or {}
    sources = Counter() if sources is None else sources
    made: dict[str, Launcher] = {}
    new: dict[Any, Launcher] = {}
    with on_gpu(device):
        for kernel in kernels:
            printed = print_kernel(kernel)
            key = (*_identity(printed), device, target())
            if key not in _LAUNCHER_CACHE and key not in new:
                name = symbol(kernel.name, labels.get(kernel.name, ""))
                function = imported(module_text(printed, name), name, folder)
                new[key] = launcher(printed, function, device, folder)
            made[kernel.name] = new.get(key) or _LAUNCHER_CACHE[key]
        compiled = _prepare(list(new.values()), folder)
    _LAUNCHER_CACHE.update(new)
    sources[MEMORY] += len(set(map(id, made.values()))) - len(new)
    sources[COMPILED] += compiled
    sources[DISK] += len(new) - compiled
    return {name: launcher.entry for name, launcher in made.items()}


def _identity(printed: TritonKernel) -> tuple[Any, ...]:
    types = tuple(buffer.type for buffer in printed.kernel.buffers)
    told = (printed.tiling.warps, printed.checked, printed.near, *printed.constants.values())
    return (printed.text, types, printed.grid, *told)


def _prepare(launchers: Sequence[Launcher], folder: Path) -> int:
    """Load the first kernel of each; how many of them were compiled for it."""
    if not launchers:
        return 0
    keys = [aligned(each.printed) for each in launchers]
    requests = [request(each, key) for each, key in zip(launchers, keys, strict=True)]
    loaded, compiled = load(requests, folder)
    for each, key, ready in zip(launchers, keys, loaded, strict=True):
        each.place(key, ready)
    return compiled


def aligned(printed: TritonKernel) -> tuple[bool, ...]:
    """What a kernel is compiled for where all buffers and sizes are multiples of 16."""
    return (True,) * (len(printed.buffers) + bool(printed.sizes))


def request(launcher: Launcher, key: tuple[bool, ...]) -> Request:
    """The kernel that is compiled for `key`: of each buffer, and of all sizes, whether a multiple
    of 16.
    """
    printed = launcher.printed
    arguments: list[Pointer | int] = [
        Pointer(_DTYPES[buffer.type], each, printed.near)
        for buffer, each in zip(printed.kernel.buffers, key, strict=False)
    ]
    arguments += [whole_number(key[-1])] * len(printed.sizes)
    return Request(
        launcher.function, arguments, printed.constants, printed.tiling.warps, printed.checked
    )


@contextmanager
def on_gpu(device: int) -> Iterator[None]:
    """Inside, the GPU of that number is the current one."""
    if torch.cuda.device_count() > 1:
        with torch.cuda.device(device):
            yield
    else:
        yield


@cache
def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="perfopt_"))


def imported(text: str, name: str, folder: Path) -> Any:
    """The function `name` of a module with this text, which is in `folder` from then on."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = written(text, folder, f"{name}_{digest}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def written(text: str, folder: Path, name: str) -> Path:
    """The file with this text; whole at every moment, and in a folder of its own where need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        if path.is_file() and path.read_text() == text:
            return path
        handle, draft = tempfile.mkstemp(dir=folder, suffix=".draft")
    except OSError:  # not ours to write to
        folder = Path(tempfile.mkdtemp(prefix="perfopt_"))
        path = folder / name
        handle, draft = tempfile.mkstemp(dir=folder, suffix=".draft")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(draft, path)
    return path


def launcher(printed: TritonKernel, function: Any, device: int, folder: Path) -> Launcher:
    """A generated function that launches a kernel on the GPU `device`; see the module."""
    ready: dict[tuple[bool, ...], Ready] = {}
    text = launcher_text(printed, device)
    space: dict[str, Any] = {"stream_of": stream_call()}

    def place(key: tuple[bool, ...], loaded: Ready) -> None:
        ready[key] = loaded
        if all(key):
            space.update(run=loaded.run, function=loaded.function, metadata=loaded.metadata)

    def other(*key: bool) -> tuple[Any, Any, Any]:
        if key not in ready:
            with on_gpu(device):
                (loaded,), _ = load([request(made, key)], folder)
            place(key, loaded)
        found = ready[key]
        return found.run, found.function, found.metadata

    space["other"] = other
    file = f"<perfopt launcher of {function.__name__}>"
    exec(compile(text, file, "exec"), space)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made = Launcher(space["launch"], printed, function, ready, place)
    return made


def launcher_text(printed: TritonKernel, device: int) -> str:
    """The text of a launcher."""
    buffers, sizes = printed.buffers, printed.sizes
    parts = [f"{name} & 15 == 0" for name in buffers]
    if sizes:
        parts.append(f"({' | '.join(sizes)}) & 15 == 0")
    arguments = ", ".join([*buffers, *sizes, *map(str, printed.constants.values())])
    head = f"{printed.grid}, 1, 1, stream_of({device})"
    return f"""\
def launch({", ".join([*buffers, *sizes])}):
    if ({" | ".join([*buffers, *sizes])}) & 15:
        run_, function_, metadata_ = other({", ".join(parts)})
        run_({head}, function_, metadata_, None, None, None, {arguments})
    else:
        run({head}, function, metadata, None, None, None, {arguments})
"""
