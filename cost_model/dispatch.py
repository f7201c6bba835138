"""Host dispatch: a host issues calls one after the other, a device runs them as they come.

Where the host needs longer to issue a call than the device to run it, the device waits: the program
is bound by launches. Calls that are issued ahead hide the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from perfopt.cost_model.cost import Bound


@dataclass(frozen=True)
class Timeline:
    """Seconds of a program: the whole, the device's own work, and what it waited for the host."""

    seconds: float
    busy: float
    idle: float

    @property
    def bound(self) -> Bound | None:
        """ "launch" where the device waits for most of the time, else None: see its kernels."""
        return "launch" if self.idle > self.busy else None


def timeline(kernels: Iterable[float], call: float, first: float = 0.0) -> Timeline:
    """When a device finishes `kernels` (their seconds) that a host issues every `call` seconds.

    Kernels run in order. `first` are seconds before the host issues anything. A kernel of no time,
    such as a view's, costs the host its call all the same.
    """
    issued, done, busy = first, 0.0, 0.0
    for each in kernels:
        issued += call
        if each > 0:
            done = max(done, issued) + each
            busy += each
    seconds = max(done, issued)
    return Timeline(seconds, busy, seconds - busy)
