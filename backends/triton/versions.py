"""What perfopt needs of Triton's runtime that Triton does not promise to keep: all of it, here.

Written for Triton 3.6 to 3.9, whose compiled kernels are called alike: the grid, a stream, the
device function, its packed metadata, three places for profilers' hooks (unused here: `None`), and
all arguments, those that are compile-time constants included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import make_backend
from triton.runtime import driver

_THREADS = 8  # that compile at a time


@dataclass(frozen=True)
class Pointer:
    """What stands for a tensor where a kernel is compiled: element type and alignment.

    `ptr_range` tells an AMD compiler that offsets fit into 32 bits of bytes, where `near`.
    """

    dtype: torch.dtype
    aligned: bool
    near: bool

    def data_ptr(self) -> int:
        """An address with the alignment in question."""
        return 16 if self.aligned else 1

    def ptr_range(self) -> int:
        """The bytes from the first element to the last, as an upper bound."""
        return 0 if self.near else 1 << 62


def whole_number(aligned: bool) -> int:
    """What stands for any 64-bit number where a kernel is compiled, or any multiple of 16."""
    return (1 << 40) + (not aligned)


@dataclass(frozen=True)
class Request:
    """A kernel to be compiled: Triton's function, and what it is called with.

    `warps` are of 32 threads; AMD's, of 64, are half as many. `checked` kernels are compiled with
    device assertions.
    """

    function: Any
    arguments: Sequence[Pointer | int]
    constants: Mapping[str, int]
    warps: int
    checked: bool


@dataclass(frozen=True)
class Ready:
    """A kernel that is loaded on a device.

    `run(x, y, z, stream, function, metadata, None, None, None, *arguments)` launches it.
    """

    run: Callable[..., None]
    function: Any
    metadata: Any


def target() -> str:
    """The architecture of the current device, as text."""
    return str(driver.active.get_current_target())


def stream_call() -> Callable[[int], int]:
    """The cheapest call for a device's current stream."""
    return driver.active.get_current_stream


def load(requests: Sequence[Request], cache: Path) -> tuple[list[Ready], int]:
    """Kernels compiled for the current device, or found in `cache`, and loaded there.

    Also how many of them were compiled. Compiled without what would part them from eager's
    results: fused multiply-adds, and denormals flushed by the library of functions.
    """
    compiled = 0

    def listen(*, cache_hit: bool, **told: Any) -> None:
        nonlocal compiled
        compiled += not cache_hit

    with _listening(listen, cache), _together(len(requests)):
        kernels = [_compiled(request) for request in requests]
    made = []
    for kernel in kernels:
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        run = kernel.run  # loads it; `function` is known only then
        made.append(Ready(run, kernel.function, kernel.packed_metadata))
    return made, compiled


def _compiled(request: Request) -> Any:
    target = driver.active.get_current_target()
    wanted = {
        "num_warps": max(request.warps * 32 // target.warp_size, 1),
        "num_stages": 1,
        "enable_fp_fusion": False,
        "enable_reflect_ftz": False,
        "debug": request.checked,
        "sanitize_overflow": False,
    }
    known = vars(make_backend(target).parse_options({"enable_fp_fusion": False}))  # or 3.9 warns
    options = {name: value for name, value in wanted.items() if name in known}
    return request.function.warmup(*request.arguments, grid=(1,), **request.constants, **options)


@contextmanager
def _listening(listen: Callable[..., None], cache: Path) -> Iterator[None]:
    """Inside, Triton's cache is `cache`, and `listen` hears of every compilation."""
    before = knobs.compilation.listener

    def both(**told: Any) -> None:
        listen(**told)
        if before is not None:
            before(**told)

    with knobs.cache.scope():
        knobs.cache.dir = str(cache)
        knobs.compilation.listener = both
        try:
            yield
        finally:
            knobs.compilation.listener = before


@contextmanager
def _together(count: int) -> Iterator[None]:
    """Inside, kernels are compiled by several threads; the end waits for them.

    What fails raises where the kernel is used: raised here, it would leave the mode switched on.
    """
    if count < 2:
        yield
        return
    with (
        ThreadPoolExecutor(min(count, _THREADS)) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        yield
