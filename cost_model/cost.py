"""`Cost`: what a piece of a graph is predicted to take on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Bound = Literal["compute", "memory", "latency", "launch", "communication"]


@dataclass(frozen=True)
class Cost:
    """Predicted work and time.

    `flops` counts floating-point operations (a fused multiply-add is two), `bytes` those that
    cross the device's main memory, `launches` kernels or library calls, `seconds` the time.
    `bound` names the roof that takes most of the time.
    """

    flops: float = 0.0
    bytes: float = 0.0
    launches: int = 0
    seconds: float = 0.0
    bound: Bound = "launch"

    def __add__(self, other: Cost) -> Cost:
        """The cost of both, one after the other; bound by the longer of the two."""
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.launches + other.launches,
            self.seconds + other.seconds,
            self.bound if self.seconds >= other.seconds else other.bound,
        )
