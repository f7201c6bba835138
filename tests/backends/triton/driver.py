"""A stand-in for a GPU's driver: kernels are compiled for it, loaded and launched, and kept.

What it keeps is exactly what a launch on that GPU would get: the compiled kernel, the grid and the
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_PROPERTIES = {
    "max_shared_mem": 232448,
    "multiprocessor_count": 132,
    "max_num_regs": 65536,
    "warpSize": 32,
}


@dataclass(frozen=True)
class Launch:
    """One launch: the source with its specialisation, the compiled kernel, grid and arguments."""

    source: Any
    metadata: Any
    binary: bytes
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


@dataclass
class FakeDriver(DriverBase):
    """The driver of a GPU that is not there; `run`, where given, does what a launch would do."""

    target: GPUTarget
    launches: list[Launch] = field(default_factory=list)
    run: Callable[[Launch], None] | None = None

    def __post_init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=self._load_binary, get_device_properties=lambda device: _PROPERTIES
        )

    def _load_binary(self, name: str, binary: bytes, shared: int, device: int) -> Any:
        return None, (name, binary), 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def run(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            launch = Launch(source, metadata, function[1], (x, y, z), rest[4:])
            self.launches.append(launch)
            if self.run is not None:
                self.run(launch)

        return run

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, type: Any) -> str:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def pretending(target: str) -> Iterator[FakeDriver]:
    """Within it Triton compiles for `target`, and launches are kept by the driver."""
    stand_in = FakeDriver(TARGETS[target])
    # Without a GPU there is no driver to go back to, and asking for one fails.
    before = driver._active
    driver.set_active(stand_in)
    try:
        yield stand_in
    finally:
        driver._active = before
