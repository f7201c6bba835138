"""What programs do otherwise on a GPU than on a CPU: allocate, launch, take scalars there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from perfopt.backends.torch_private import empty_strided_cpu, empty_strided_cuda

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


@cache
def allocator(device: torch.device, home: torch.device | None) -> Allocate:
    """The cheapest call that makes a tensor on `device`, of sizes, strides and a dtype.

    `home` is the GPU that is the current one whenever the call happens.
    """
    if device.type == "cpu":
        return empty_strided_cpu
    if device == home:
        return empty_strided_cuda

    def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty_strided


def entry_on(
    device: torch.device, home: torch.device | None, entry: Callable[..., Any]
) -> Callable[..., Any]:
    """A kernel's entry that launches on `device`: as it is where `home` is that device."""
    if device.type == "cpu" or device == home:
        return entry

    @wraps(entry)
    def launch(*arguments: int) -> None:
        with torch.cuda.device(device):
            entry(*arguments)

    return launch


def number_on(device: torch.device, x: Tensor) -> Tensor:
    """A CPU tensor of one number without dimensions, on a GPU; nothing waits for it.

    The number is an argument of the kernel that fills the result, so that the CPU tensor may
    change at once.
    """
    return torch.full((), x.item(), dtype=x.dtype, device=device)


def elsewhere(index: int, program: Callable[..., Any], inputs: list[Any]) -> Any:
    """Run a program with the GPU of that number as the current one."""
    with torch.cuda.device(index):
        return program(inputs)


def several_gpus() -> bool:
    """Whether the current GPU can be another than the one that is needed."""
    return torch.cuda.device_count() > 1
