"""What an explanation consists of: plain data, priced piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from perfopt.capacity import Fit, fit_of
from perfopt.capture import GraphBreak
from perfopt.cost_model.cost import Bound, Cost
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.cost_model.device import Device
from perfopt.cost_model.memory import MemoryReport
from perfopt.workload import Workload


@dataclass(frozen=True)
class Piece:
    """One thing that runs: a region of generated kernels, or one library call.

    `name` is the region's, or that of the call's node. `operators` are the ATen operators that it
    computes and `nodes` the names of all inside, views included; `kernels` are the generated
    kernels as text, none for a library call. `source` is the user's line as `file.py:12`, or "".
    `measured` are seconds on this machine, where they were asked for. `error` is the mean absolute
    percentage error of prices of its class, None where none was ever measured.
    """

    kind: Literal["region", "library call"]
    name: str
    operators: tuple[str, ...]
    nodes: tuple[str, ...]
    kernels: tuple[str, ...]
    source: str
    cost: Cost
    measured: float | None = None
    error: float | None = None

    @property
    def factor(self) -> float | None:
        """Measured seconds over predicted ones; None where nothing was measured."""
        return (
            None
            if self.measured is None or not self.cost.seconds
            else (self.measured / self.cost.seconds)
        )


@dataclass(frozen=True)
class Ran:
    """One pass on one graph: its text in the pipeline, and the graph after it.

    `graph` is "" where the pass changed nothing.
    """

    graph_name: str
    text: str
    graph: str


@dataclass(frozen=True)
class Part:
    """One graph: "forward", "backward", "inference", or "joint", which only holds decisions.

    `number` counts Dynamo's graphs in the order of their capture, `function` is the user's.
    `operations` counts the graph's operations before the passes and `before` is their price one
    by one; `peak_bytes` is the most memory alive at once, inputs and weights included.
    """

    number: int
    kind: str
    function: str
    operations: int
    before: Cost
    peak_bytes: int
    pieces: tuple[Piece, ...]
    decisions: tuple[Decision, ...]

    @property
    def name(self) -> str:
        """Number and kind, as "0 forward"."""
        return f"{self.number} {self.kind}"

    @property
    def cost(self) -> Cost:
        """The price of its pieces, one after the other."""
        return sum((piece.cost for piece in self.pieces), Cost())


@dataclass(frozen=True)
class Line:
    """One line of the user's code: what runs for it, and what was decided about it.

    Pieces and decisions come with the part that they belong to, those that cost most first.
    """

    source: str
    pieces: tuple[tuple[Part, Piece], ...]
    decisions: tuple[tuple[Part, Decision], ...]

    @property
    def cost(self) -> Cost:
        """The price of its pieces."""
        return sum((piece.cost for _, piece in self.pieces), Cost())


@dataclass(frozen=True, repr=False)
class Explained:
    """The data of an explanation; `perfopt.Explanation` adds its text and its JSON.

    `function` names what was explained, `options` those that are not at their defaults, `versions`
    those of perfopt and torch. `memory` is that of the graph that needs most, `besides` are bytes
    that the others need at most. `workload` is what one step works through, where that is known.
    `passes` are there only where they were asked for.
    """

    function: str
    device: Device
    train: bool
    options: Mapping[str, object]
    versions: Mapping[str, str]
    graph_breaks: tuple[GraphBreak, ...]
    graphs: tuple[Part, ...]
    passes: tuple[Ran, ...] = ()
    memory: MemoryReport | None = None
    besides: int = 0
    workload: Workload | None = None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Everything that runs, what costs most first."""
        found = [piece for part in self.graphs for piece in part.pieces]
        return tuple(sorted(found, key=lambda piece: -piece.cost.seconds))

    @property
    def regions(self) -> tuple[Piece, ...]:
        """The regions that generated kernels compute, those that cost most first."""
        return tuple(piece for piece in self.pieces if piece.kind == "region")

    @property
    def library_calls(self) -> tuple[Piece, ...]:
        """The calls of ATen, those that cost most first; views, which do nothing, left out."""
        return tuple(piece for piece in self.pieces if piece.kind == "library call")

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every decision, those about the most expensive places first."""
        found = [each for part in self.graphs for each in part.decisions]
        return tuple(sorted(found, key=lambda each: -weight(each)))

    @property
    def cost(self) -> Cost:
        """The price of everything, one after the other."""
        return sum((part.cost for part in self.graphs), Cost())

    @property
    def before(self) -> Cost:
        """The price of everything without the passes."""
        return sum((part.before for part in self.graphs), Cost())

    @property
    def measured(self) -> float | None:
        """Measured seconds of everything; None where nothing was measured."""
        found = [piece.measured for piece in self.pieces if piece.measured is not None]
        return sum(found) if found else None

    @property
    def error(self) -> float | None:
        """The errors of all pieces, by their time; None where most of it has none."""
        known = [piece for piece in self.pieces if piece.error is not None]
        seconds = sum(piece.cost.seconds for piece in known)
        if 2 * seconds < self.cost.seconds or not seconds:
            return None
        return sum((piece.error or 0.0) * piece.cost.seconds for piece in known) / seconds

    @property
    def peak_bytes(self) -> int:
        """The most memory that any of the graphs needs, the optimizer's state with it."""
        if self.memory is not None:
            return self.memory.peak
        return max((part.peak_bytes for part in self.graphs), default=0)

    @property
    def fit(self) -> Fit:
        """Whether the step fits into the device's memory, and what holds it."""
        return fit_of(self.memory, self.peak_bytes, self.device.memory_bytes, self.besides)

    @property
    def rate(self) -> float | None:
        """Tokens or samples per second, one step after the other; None where not known."""
        if self.workload is None or not self.cost.seconds:
            return None
        return self.workload.count / self.cost.seconds

    @property
    def bounds(self) -> Mapping[Bound, float]:
        """Seconds by the roof that binds, the most first."""
        seconds: dict[Bound, float] = {}
        for piece in self.pieces:
            seconds[piece.cost.bound] = seconds.get(piece.cost.bound, 0.0) + piece.cost.seconds
        return dict(sorted(seconds.items(), key=lambda item: (-item[1], item[0])))

    @property
    def lines(self) -> tuple[Line, ...]:
        """Pieces and decisions by the user's line, the most expensive first."""
        pieces: dict[str, list[tuple[Part, Piece]]] = {}
        decisions: dict[str, list[tuple[Part, Decision]]] = {}
        for part in self.graphs:
            for piece in part.pieces:
                pieces.setdefault(piece.source, []).append((part, piece))
            for each in part.decisions:
                decisions.setdefault(each.source, []).append((part, each))
        lines = [
            Line(
                source,
                tuple(sorted(pieces.get(source, ()), key=lambda pair: -pair[1].cost.seconds)),
                tuple(sorted(decisions.get(source, ()), key=lambda pair: -weight(pair[1]))),
            )
            for source in dict.fromkeys([*pieces, *decisions])
        ]
        return tuple(sorted(lines, key=lambda line: (-line.cost.seconds, line.source)))

    def nodes(self) -> Iterator[str]:
        """The names that `why` knows: of regions, of operations and of what decisions name."""
        for part in self.graphs:
            for piece in part.pieces:
                yield from (piece.name, *piece.nodes)
            for each in part.decisions:
                yield from each.nodes


def weight(decision: Decision) -> float:
    """How much a decision is about, in seconds: what its place costs without it."""
    return decision.before.seconds if decision.before else 0.0


def loses(decision: Decision) -> float | None:
    """Seconds that a refused alternative would have cost more; None where it has no price."""
    if decision.verdict is not Verdict.REJECTED:
        return None
    if decision.before is None or decision.alternative_cost is None:
        return None
    return decision.alternative_cost.seconds - decision.before.seconds
