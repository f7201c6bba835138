"""Time of kernels that stream memory: pointwise, reductions, normalisations, gather and scatter.

Bytes cross the main memory at a share of its bandwidth, or come from the last-level cache; simple
instructions run beside them. Rows that are read twice (for a mean, a maximum) are read again from
the cache as long as it holds all rows that are in flight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from perfopt.cost_model.efficiency import Constants, constants
from perfopt.cost_model.estimate import Array, Estimate, array, bandwidth, blend
from perfopt.cost_model.specification import Device

# Simple instructions per element of what is more than a few of them.
INSTRUCTIONS = {"div": 4, "pow": 40, "tanh": 18, "gelu": 26, "exp": 10, "silu": 16, "erf": 20}
_SECTOR = 32  # bytes that one access of a GPU's memory brings
_FULL = 4  # bytes of a load from which on the memory's pipes are full
_LINE = 64  # bytes that one access of a CPU's memory brings
_ROW_WARPS = 4  # warps that work on one row of a normalisation
_SOFTMAX_WARPS = (8, 16)  # warps that work on one row of a softmax, up to _WIDE and beyond
_WIDE = 2048
_WARP_ROW = 1024  # elements of a softmax's row that one warp keeps in its registers
_WARP = 32


def pointwise(
    device: Device,
    moved: ArrayLike,
    *,
    instructions: ArrayLike = 0.0,
    dtype: str = "float32",
    load: float = _FULL,
    launch: float | None = None,
    fit: Constants | None = None,
) -> Estimate:
    """Seconds of a kernel that moves `moved` bytes and issues so many simple instructions.

    `load` is the bytes of one load or store of one lane; below 4 they do not fill the memory's
    pipes. What fits into the last-level cache is taken to be there, from the kernel before.
    `launch` replaces the fixed seconds.
    """
    fit = fit or constants("streaming", device)
    total = array(moved) / (min(load, _FULL) / _FULL if device.kind == "gpu" else 1)
    near = total * _resident(device, total, fit)
    memory = (total - near) / (bandwidth(device, total) * fit["memory_share"])
    memory = memory + near / cache_rate(device, fit)
    # A multiply-add counts as two operations in the peak, and as one instruction here.
    compute = array(instructions) / (device.vector_peak(_lane(dtype)) / 2 * fit["lane_share"])
    fixed = device.launch_seconds * fit["launch"] if launch is None else launch
    seconds = fixed + blend(memory, compute, fit["sharpness"])
    wait, start = np.zeros_like(seconds), np.broadcast_to(fixed, seconds.shape)
    return Estimate(seconds, compute, memory, wait, start)


def cache_rate(device: Device, fit: Constants) -> float:
    """Bytes/s of a stream in the last-level cache: as measured, or a multiple of the memory's."""
    usual = device.memory_bandwidth * fit["memory_share"] * fit["cache_ratio"]
    return max(device.cache_bandwidth * fit["memory_share"], usual)


def _resident(device: Device, moved: Array, fit: Constants) -> Array:
    """The share of a stream of so many bytes that the last-level cache still holds."""
    room = device.cache_bytes * fit["cache_share"]
    if not room or device.copies:  # what was measured has the caches in it
        return np.zeros_like(moved)
    return np.asarray(1 / (1 + (moved / room) ** 4))


def _lane(dtype: str) -> str:
    return dtype if dtype in ("float64", "int64") else "float32"


def normalisation(
    device: Device, rows: ArrayLike, width: ArrayLike, item: float, *,
    instructions: float = 10.0, fit: Constants | None = None, **options: Any,
) -> Estimate:  # fmt: skip
    """Seconds of a layer or RMS normalisation of `(rows, width)` elements of `item` bytes."""
    fit = fit or constants("streaming", device)
    again = _missed(device, array(rows), array(width) * item, _ROW_WARPS, fit)
    return _rows(device, rows, width, item, again, instructions, fit, **options)


def softmax(
    device: Device, rows: ArrayLike, width: ArrayLike, item: float, *,
    instructions: float = 14.0, fit: Constants | None = None, **options: Any,
) -> Estimate:  # fmt: skip
    """Seconds of a softmax over rows: short ones stay in registers, long ones are read 3 times."""
    fit = fit or constants("streaming", device)
    wide = array(width)
    few, many = _SOFTMAX_WARPS
    short = _missed(device, array(rows), np.minimum(wide, _WIDE) * item, few, fit)
    long = _missed(device, array(rows), wide * item, many, fit)
    again = 2 * np.where(wide <= _WIDE, short, np.maximum(short, long))
    again = np.where(wide <= _WARP_ROW, 0.0, again)
    return _rows(device, rows, width, item, again, instructions, fit, **options)


def _rows(
    device: Device, rows: ArrayLike, width: ArrayLike, item: float, again: Array,
    instructions: float, fit: Constants, **options: Any,
) -> Estimate:  # fmt: skip
    elements = array(rows) * array(width)
    moved = elements * item * (2 + again) / fit["row_share"]
    work = elements * instructions
    return pointwise(device, moved, instructions=work, fit=fit, **options)


def _missed(device: Device, rows: Array, row: Array, warps: int, fit: Constants) -> Array:
    """The share of second reads of rows of so many bytes that the cache no longer answers."""
    if not device.cache_bytes:
        return np.ones(np.broadcast_shapes(rows.shape, row.shape))
    resident = device.cores * max((device.warps or 48) // warps, 1)
    inside = np.minimum(rows, resident) * row / (device.cache_bytes * fit["cache_share"])
    return np.asarray(1 / (1 + np.maximum(inside, 1e-9) ** -4))


def gather(
    device: Device, rows: ArrayLike, row: ArrayLike, *, written: ArrayLike | None = None,
    fit: Constants | None = None, **options: Any,
) -> Estimate:  # fmt: skip
    """Seconds of picking `rows` rows of `row` bytes from anywhere and writing them (`written`)."""
    fit = fit or constants("streaming", device)
    reads = array(rows) * sectors(device, row)
    writes = array(rows) * array(row) if written is None else array(written)
    return pointwise(device, (reads + writes) / fit["gather_share"], fit=fit, **options)


def scatter(
    device: Device, rows: ArrayLike, row: ArrayLike, *, add: bool = False,
    fit: Constants | None = None, **options: Any,
) -> Estimate:  # fmt: skip
    """Seconds of writing `rows` rows of `row` bytes to anywhere; `add` reads them first too."""
    fit = fit or constants("streaming", device)
    reads = array(rows) * array(row)
    writes = array(rows) * sectors(device, row) * (2 if add else 1)
    return pointwise(device, (reads + writes) / fit["gather_share"], fit=fit, **options)


def sectors(device: Device, row: ArrayLike) -> Array:
    """Bytes that cross the memory where `row` bytes are picked: whole sectors."""
    sector = _LINE if device.kind == "cpu" else _SECTOR
    return np.asarray(np.ceil(array(row) / sector) * sector)


def strided_bytes(device: Device, elements: ArrayLike, item: float, stride: ArrayLike) -> Array:
    """Bytes that cross the memory where elements lie `stride` elements apart (1: together)."""
    apart = np.maximum(array(stride), 1.0) * item
    sector = _LINE if device.kind == "cpu" else _SECTOR
    return array(elements) * np.clip(apart, item, max(sector, item))
