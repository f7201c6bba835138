"""What a compilation leaves behind for reports: graphs, decisions, programs, seconds by stage."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import fx

from perfopt.backends.ir import Kernel
from perfopt.backends.program import Program
from perfopt.calibrations import calibration_hash
from perfopt.cost_model.decision import Decision
from perfopt.cost_model.device import Device
from perfopt.options import Options
from perfopt.passes.pipeline import Step

STAGES = ("dynamo", "autograd", "passes", "lowering", "kernels", "program")


@dataclass(frozen=True)
class Plan:
    """What a graph would be compiled to: `captured` is the graph before the passes, `graph` after.

    `kernels` holds those of every region that can be lowered, by the region's name.
    """

    kind: str
    captured: fx.GraphModule
    graph: fx.GraphModule
    kernels: Mapping[str, tuple[Kernel, ...]]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class GraphRecord:
    """One compiled graph: "forward", "backward" or "inference".

    `nodes` counts its operations after decomposition, before fusion. `sources` counts different
    kernels by where their code came from: "memory", "disk" or "compiled". `plan` has the graphs
    that it was made of.
    """

    kind: str
    nodes: int
    program: Program
    plan: Plan
    sources: Mapping[str, int] = field(default_factory=dict)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions of its own passes and of its lowering."""
        return self.plan.decisions


@dataclass
class Clock:
    """Seconds that each call and region of one graph took, run by run, by its name."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    last: float = 0.0

    def __call__(self, name: str) -> None:
        """`name` has ended; "" where the graph begins."""
        now = time.perf_counter()
        if name:
            self.seconds.setdefault(name, []).append(now - self.last)
        self.last = time.perf_counter()


@dataclass(eq=False)
class Compilation:
    """One of Dynamo's graphs on its way through the stages; filled as they run.

    `number` is Dynamo's own, as in its logs. `decisions` are those made on Dynamo's graph and on
    the joint graph. `seconds` adds up by stage; "autograd" is what no other stage accounts for.
    Where `plans` is a list nothing is compiled: it gets what would be, priced for `device`, and
    `history` what each pass made of each graph.
    """

    number: str
    options: Options
    owner: Any = None  # the object by which torch.compile called the backend
    code: CodeType | None = None  # the user's function that Dynamo was compiling
    graphs: list[GraphRecord] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    backend_seconds: float = 0.0  # from Dynamo's call to the callable
    applied: list[Decision] = field(default_factory=list)  # so far, what `limit` counts
    device: Device | None = None  # what prices are for; None: this machine
    plans: list[Plan] | None = None
    history: list[tuple[str, tuple[Step, ...]]] = field(default_factory=list)  # of plans, by graph
    calibration: str = field(default_factory=calibration_hash)  # what this machine's prices are of
    clocks: dict[str, Clock] | None = None  # by graph; where there are any, each piece is timed
    inputs: tuple[str, ...] = ()  # kinds of Dynamo's inputs: parameters, buffers or inputs
    results: int | None = None  # how many results of the forward graph are the user's
    order: int = field(default_factory=time.monotonic_ns)

    def __post_init__(self) -> None:
        COMPILATIONS_CACHE.add(self)

    @property
    def function(self) -> str:
        """The name of the user's function; "" where it is not known."""
        return self.code.co_qualname.replace("<locals>.", "") if self.code else ""

    def every_decision(self) -> Iterator[Decision]:
        """Its own decisions, then those of its graphs."""
        yield from self.decisions
        for graph in self.graphs:
            yield from graph.decisions

    def clock(self, kind: str) -> Clock | None:
        """The clock of a graph, where pieces are timed."""
        return None if self.clocks is None else self.clocks.setdefault(kind, Clock())

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


COMPILATIONS_CACHE: weakref.WeakSet[Compilation] = weakref.WeakSet()
"""Every compilation whose program is still in use."""
