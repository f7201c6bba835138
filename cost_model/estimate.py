"""`Estimate`: predicted seconds of many shapes at once, split into what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfopt.cost_model.specification import Device

Array = NDArray[np.float64]
_NAMES = np.array(["compute", "memory", "latency", "launch"])


def array(value: ArrayLike) -> Array:
    """The value as float64, so that no product of sizes overflows."""
    return np.asarray(value, dtype=np.float64)


def blend(first: Any, second: Any, sharpness: float) -> Array:
    """The time of two things that overlap: the longer, and more the nearer the other is.

    At `sharpness` infinity it is the maximum, at 1 the sum.
    """
    longer = np.maximum(first, second)
    shorter = np.minimum(first, second)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(longer > 0, shorter / longer, 0.0)
    return np.asarray(longer * (1 + ratio**sharpness) ** (1 / sharpness))


def bandwidth(device: Device, moved: Array) -> Array:
    """Bytes/s of streams of so many bytes: as measured of their size, or the memory's."""
    if not device.copies:
        return np.full(np.shape(moved), device.memory_bandwidth)
    sizes, rates = np.array(device.copies).T
    # Nothing larger may take less time: the seconds of the measured sizes, made to rise.
    seconds = np.maximum.accumulate(sizes / rates)
    inside = np.interp(moved, sizes, seconds)
    inside = np.where(moved < sizes[0], moved / rates[0], inside)
    beyond = seconds[-1] + (moved - sizes[-1]) / rates[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = moved / np.where(moved > sizes[-1], beyond, inside)
    return np.where(moved > 0, found, rates[0])


@dataclass(frozen=True)
class Estimate:
    """Seconds of each shape, and the part of each resource alone; all arrays of one shape.

    `compute` is what the arithmetic units take, `memory` the traffic of the main memory, `latency`
    what is spent waiting (the start of tiles, chains of dependent steps), `launch` the fixed part.
    `seconds` is more than the longest of them and at most their sum.
    """

    seconds: Array
    compute: Array
    memory: Array
    latency: Array
    launch: Array

    @property
    def bound(self) -> NDArray[np.str_]:
        """The name of the longest part: "compute", "memory", "latency" or "launch"."""
        parts = np.broadcast_arrays(self.compute, self.memory, self.latency, self.launch)
        return np.asarray(_NAMES[np.argmax(np.stack(parts), axis=0)])
