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
    `bound` names the roof that takes most of the time, and `roof_seconds` is what that roof alone
    takes at the datasheet's figure: never more than `seconds`. `product_seconds` is what matrix
    products, convolutions and attention would take at the peak of their dtype.
    """

    flops: float = 0.0
    bytes: float = 0.0
    launches: int = 0
    seconds: float = 0.0
    bound: Bound = "launch"
    roof_seconds: float = 0.0
    product_seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """The cost of both, one after the other; bound by the longer of the two."""
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.launches + other.launches,
            self.seconds + other.seconds,
            self.bound if self.seconds >= other.seconds else other.bound,
            self.roof_seconds + other.roof_seconds,
            self.product_seconds + other.product_seconds,
        )

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the fraction of the time that products at their peak explain."""
        return min(self.product_seconds / self.seconds, 1.0) if self.seconds else 0.0

    @property
    def achieved(self) -> float:
        """The fraction of the binding roof that is reached, 0.0 to 1.0."""
        return min(self.roof_seconds / self.seconds, 1.0) if self.seconds else 0.0
