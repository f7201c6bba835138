"""From kernels to functions that Python can call on GPU tensors.

Every kernel is written to a file of its own, named by the hash of its content, and launched by a
generated function of a few lines. That function looks up the compiled kernel by what it was
compiled for: the device, which buffers start at a multiple of 16 bytes, and whether all sizes are
multiples of 16. After the first launch of each, Triton's own dispatch is not involved.
"""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from typing import cast as typed

from perfopt.backends.ir import TYPES, Kernel
from perfopt.backends.triton.printer import TritonKernel, print_kernel
from perfopt.backends.triton.source import module_text
from perfopt.backends.triton.versions import Pointer, Ready, device_calls, jitted, load, target

_DTYPES = {name: dtype for dtype, name in TYPES.items()}
# Launchers by all that they depend on: the kernel's text, its element types, the device's kind.
_LAUNCHER_CACHE: dict[Any, Callable[..., None]] = {}


def default_folder() -> Path:
    """Where generated kernels are written unless told otherwise."""
    return Path.home() / ".cache" / "perfopt" / "triton"


def compile_kernels(
    kernels: Sequence[Kernel],
    folder: Path | None = None,
    labels: Mapping[str, str] | None = None,
) -> dict[str, Callable[..., None]]:
    """The entry of every kernel by name, as a function of tensors and sizes.

    An entry takes the arguments of the CPU entry of the same kernel, but tensors for addresses,
    and no number of threads. It launches on the current stream of the current device, which must
    be that of the tensors, and returns None: an index out of range is a device assertion, as in
    eager. Kernels are written to `folder`; `labels` (by kernel name, such as the user's source
    line) become part of the names that profilers show. Equal kernels are compiled once, under the
    name of the first. Compilation is put off to the first launch with each alignment.
    """
    folder, labels = folder or default_folder(), labels or {}
    entries: dict[str, Callable[..., None]] = {}
    for kernel in kernels:
        printed = print_kernel(kernel)
        types = tuple(buffer.type for buffer in kernel.buffers)
        key = (printed.text, types, printed.tiling.warps, *printed.constants.values(), target())
        if key not in _LAUNCHER_CACHE:
            name = symbol(kernel.name, labels.get(kernel.name, ""))
            function = imported(module_text(printed, name), name, folder)
            _LAUNCHER_CACHE[key] = launcher(printed, function)
        entries[kernel.name] = _LAUNCHER_CACHE[key]
    return entries


def symbol(name: str, label: str = "") -> str:
    """A kernel's name with a label, as an identifier."""
    return re.sub(r"\W+", "_", f"{name}__{label}" if label else name).strip("_")


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


def launcher(printed: TritonKernel, function: Any) -> Callable[..., None]:
    """A generated function that launches a kernel; see the module."""
    device, stream = device_calls()
    ready: dict[Any, tuple[Any, ...]] = {}
    variants = (jitted(function, printed.sizes), jitted(function))
    types = [_DTYPES[buffer.type] for buffer in printed.kernel.buffers]

    def prepare(key: Any, addresses: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
        arguments: list[Pointer | int] = [
            Pointer(dtype, address % 16 == 0, printed.near)
            for dtype, address in zip(types, addresses, strict=True)
        ]
        made: Ready = load(
            variants[all(size % 16 == 0 for size in sizes)], [*arguments, *sizes],
            printed.constants, printed.tiling.warps, printed.checked,
        )  # fmt: skip
        ready[key] = (made.run, *made.before[:2])
        return ready[key]

    text = launcher_text(printed)
    space: dict[str, Any] = {
        "device_of": device,
        "stream_of": stream,
        "ready": ready,
        "prepare": prepare,
    }
    file = f"<perfopt launcher of {function.__name__}>"
    exec(compile(text, file, "exec"), space)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: Any = space["launch"]
    made.kernel = function
    made.printed = printed
    return typed(Callable[..., None], made)


def launcher_text(printed: TritonKernel) -> str:
    """The text of a launcher."""
    buffers, sizes = printed.buffers, printed.sizes
    lines = [f"def launch({', '.join([*buffers, *sizes])}):"]
    lines += [f"    {name} = {name}.data_ptr()" for name in buffers]
    lines.append("    key = device = device_of()")
    test = f"({' | '.join([*buffers, *sizes])}) & 15"
    parts = [f"{name} & 15 == 0" for name in buffers]
    if sizes:
        test += "".join(f" or not -2147483648 <= {name} < 2147483648" for name in sizes)
        parts.append(f"({' | '.join(sizes)}) & 15 == 0")
        parts += [f"-2147483648 <= {name} < 2147483648" for name in sizes]
    lines.append(f"    if {test}:")
    lines.append(f"        key = (device, {', '.join(parts)})")
    lines.append("    kernel = ready.get(key)")
    lines.append("    if kernel is None:")
    made = f"({', '.join(buffers)},), ({', '.join(sizes)}{',' * bool(sizes)})"
    lines.append(f"        kernel = prepare(key, {made})")
    lines.append("    run, function, metadata = kernel")
    arguments = [*buffers, *sizes, *map(str, printed.constants.values())]
    lines.append(
        f"    run({printed.grid}, 1, 1, stream_of(device), function, metadata, None, None, None, "
        f"{', '.join(arguments)})"
    )
    return "\n".join(lines) + "\n"
