"""Whether a step fits into the memory of a device, with what margin, and what holds the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from perfopt.cost_model.memory import MemoryReport

# The kinds of a memory report in the words of those who plan for memory.
HOLDERS = {
    "parameters": "parameters", "buffers": "buffers", "inputs": "inputs",
    "gradients": "gradients", "optimizer": "optimizer state", "kept": "activations",
    "results": "results", "other": "workspace",
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """Bytes that a step needs at most beside the `capacity` of a device.

    `holds` splits the peak by what holds it: the parts add up to it. `besides` are bytes that other
    graphs of the model may hold on top, at most. `fits` is None where these decide and so nobody
    knows. Nothing else is counted: neither what the driver takes, nor the allocator's gaps.
    """

    peak: int
    capacity: float
    holds: Mapping[str, int]
    besides: int = 0

    @property
    def fits(self) -> bool | None:
        """Whether the step fits; None where it depends on what other graphs hold."""
        if self.peak > self.capacity:
            return False
        return True if self.peak + self.besides <= self.capacity else None

    @property
    def margin(self) -> float:
        """Bytes that are left; negative where that many are missing."""
        return self.capacity - self.peak


def fit_of(memory: MemoryReport | None, peak: int, capacity: float, besides: int) -> Fit:
    """How the memory of a step, if it is known, fits into `capacity` bytes; most held first."""
    kinds = {} if memory is None else memory.kinds
    held = {HOLDERS[kind]: size for kind, size in kinds.items() if size}
    ordered = sorted(held.items(), key=lambda item: (-item[1], item[0]))
    return Fit(peak, capacity, MappingProxyType(dict(ordered)), besides)
