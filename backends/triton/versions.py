"""What perfopt needs of Triton's runtime that Triton does not promise to keep: all of it, here.

Written for Triton 3.6 to 3.9, whose compiled kernels are called alike: the grid, a stream, the
device function, its packed metadata, three places for profilers' hooks (unused here: `None`), and
all arguments, those that are compile-time constants included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.compiler import make_backend
from triton.runtime import driver


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


@dataclass(frozen=True)
class Ready:
    """A kernel that is loaded on a device: `run(x, y, z, stream, *before, *arguments)` launches."""

    run: Callable[..., None]
    before: tuple[Any, ...]


def target() -> str:
    """The architecture of the current device, as text."""
    return str(driver.active.get_current_target())


def device_calls() -> tuple[Callable[[], int], Callable[[int], int]]:
    """The cheapest calls for the current device, and for a device's current stream."""
    active = driver.active
    return active.get_current_device, active.get_current_stream


def jitted(function: Any, plain: Sequence[str] = ()) -> Any:
    """The jitted `function` again, indifferent to the values of its parameters `plain`."""
    return triton.jit(function.fn, do_not_specialize=list(plain))


def load(
    function: Any,
    arguments: Sequence[Pointer | int],
    constants: Mapping[str, int],
    warps: int,
    checked: bool,
) -> Ready:
    """A kernel compiled for the current device and loaded there.

    Compiled without what would part it from eager's results: fused multiply-adds, and denormals
    flushed by the library of functions. With `checked`, device assertions hold.
    """
    wanted = {
        "num_warps": warps,
        "num_stages": 1,
        "enable_fp_fusion": False,
        "enable_reflect_ftz": False,
        "debug": checked,
        "sanitize_overflow": False,
    }
    known = make_backend(driver.active.get_current_target()).parse_options({}).__dict__
    options = {name: value for name, value in wanted.items() if name in known}
    kernel = function.warmup(*arguments, grid=(1,), **constants, **options)
    run = kernel.run  # loads it; `function` is known only then
    return Ready(run, (kernel.function, kernel.packed_metadata, None, None, None))
