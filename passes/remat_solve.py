"""Which values to keep for the backward pass: the frontier of time against peak memory.

For a price of memory, the best choice is a minimum cut: keeping a value costs its bytes, computing
it again costs seconds and needs what it is made of. A sweep over prices gives the convex hull of
(seconds, bytes kept). Between two neighbours of the hull lie choices that follow the one up to a
point of the forward pass and the other behind it. Every choice is then judged by the simulated
peak of its whole schedule, and those that nothing beats are the frontier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch import fx

from perfopt.cost_model.traffic import value_bytes
from perfopt.passes.remat_schedule import Halves, Schedule, Simulator, keepable

_UNITS = 1 << 28  # what the greatest capacity of a network is scaled to
_FOREVER = (1 << 31) - 1
CUTS = 24  # minimum cuts at most
STEPS = 8  # choices between two neighbours of the hull
EFFORT = 500_000  # nodes that all simulations look at; seconds would not be repeatable


@dataclass(frozen=True)
class Choice:
    """Values to keep, the seconds that computing the others again takes, and its schedule."""

    kept: frozenset[fx.Node]
    seconds: float
    schedule: Schedule = field(compare=False)

    @property
    def peak(self) -> int:
        """Bytes alive at most."""
        return self.schedule.peak


@dataclass
class Problem:
    """One joint graph: what may be kept, at which price, and what must or must not be."""

    parts: Halves
    seconds: Mapping[fx.Node, float]  # of computing a forward node again
    must_keep: frozenset[fx.Node] = frozenset()
    must_recompute: frozenset[fx.Node] = frozenset()
    kernels: bool = True  # whether fused operations need no memory of their own

    def __post_init__(self) -> None:
        self.effort = EFFORT
        self.simulator = Simulator(self.parts, self.kernels)
        # What the forward pass does not need itself is computed once, wherever that is.
        self.again = {
            node: self.seconds[node] if node in self.parts.required else 0.0
            for node in self.parts.forward
        }
        own = set(self.parts.forward)
        needed: dict[fx.Node, None] = dict.fromkeys(self.parts.wanted)
        for node in needed.copy():
            needed.update(dict.fromkeys(_behind(node, own)))
        order = {node: k for k, node in enumerate(self.parts.forward)}
        self.nodes = sorted(needed, key=order.__getitem__)
        self.depth = self._depths(order)
        self._own = own

    def _depths(self, order: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
        """How far into the forward pass a value belongs: where its last operand is made.

        What the backward pass alone needs stands behind the whole forward pass in the graph.
        """
        depths: dict[fx.Node, int] = {}
        for node in self.parts.forward:
            inner = [depths[arg] for arg in node.all_input_nodes if arg in depths]
            own = node in self.parts.required or not inner
            depths[node] = order[node] if own else max(inner)
        return depths

    def choice(self, kept: Collection[fx.Node]) -> Choice:
        """A choice with what it costs; of `kept`, what the backward pass does not reach is left."""
        self.effort -= len(self.parts.forward) + len(self.parts.backward)
        forced = {node for node in self.must_keep if keepable(node)}
        reached = self.reached((set(kept) | forced) - self.must_recompute)
        schedule = self.simulator.schedule(reached)
        again = sum(self.again[node] for node in schedule.recomputed)
        return Choice(reached, again, schedule)

    def reached(self, kept: set[fx.Node]) -> frozenset[fx.Node]:
        """What of `kept` the backward pass reads, itself or to compute something again."""
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        stack = list(self.parts.wanted)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in kept:
                found.add(node)
            else:
                stack.extend(arg for arg in node.all_input_nodes if arg in self._own)
        return frozenset(found)


def _behind(node: fx.Node, own: set[fx.Node]) -> Iterable[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        for arg in stack.pop().all_input_nodes:
            if arg in own and arg not in seen:
                seen.add(arg)
                stack.append(arg)
    return seen


class _Network:
    """The minimum cut of a problem, for any price of memory.

    Of each node there are two vertices, "available" and "computed again". Cutting between them
    keeps the value; cutting behind the second computes it again, which makes its operands
    available.
    """

    def __init__(self, problem: Problem) -> None:
        self.nodes = problem.nodes
        number = {node: k for k, node in enumerate(self.nodes)}
        wanted = set(problem.parts.wanted)
        heads, tails, prices, fixed = [], [], [], []
        self.source, self.sink = 2 * len(number), 2 * len(number) + 1

        def edge(head: int, tail: int, bytes: float, seconds: float) -> None:
            heads.append(head)
            tails.append(tail)
            prices.append(bytes)
            fixed.append(seconds)

        for node, k in number.items():
            if node in wanted:
                edge(self.source, 2 * k, 0.0, np.inf)
            again = np.inf if node in problem.must_keep else problem.again[node]
            free = keepable(node) and node not in problem.must_recompute
            edge(2 * k, 2 * k + 1, value_bytes(node.meta.get("val")) if free else 0.0,
                 0.0 if free else np.inf)  # fmt: skip
            edge(2 * k + 1, self.sink, 0.0, again)
            for arg in node.all_input_nodes:
                if arg in number:
                    edge(2 * k + 1, 2 * number[arg], 0.0, np.inf)
        self.heads, self.tails = np.array(heads), np.array(tails)
        self.prices, self.fixed = np.array(prices), np.array(fixed)

    def kept(self, price: float) -> frozenset[fx.Node]:
        """What to keep where a byte costs so many seconds."""
        capacity = self.prices * price + self.fixed
        finite = capacity[np.isfinite(capacity)]
        scale = _UNITS / max(float(finite.sum()), 1e-30)
        units = np.where(
            np.isfinite(capacity), np.minimum(np.ceil(capacity * scale), _FOREVER), _FOREVER
        ).astype(np.int32)
        size = self.sink + 1
        graph = csr_matrix((units, (self.heads, self.tails)), shape=(size, size))
        flow = maximum_flow(graph, self.source, self.sink).flow
        rest = graph - flow
        rest.data[rest.data < 0] = 0
        rest.eliminate_zeros()
        reached = breadth_first_order(rest, self.source, return_predecessors=False)
        near = np.zeros(size, dtype=bool)
        near[reached] = True
        return frozenset(
            node for k, node in enumerate(self.nodes)
            if near[2 * k] and not near[2 * k + 1] and keepable(node)
        )  # fmt: skip


def frontier(problem: Problem) -> list[Choice]:
    """The choices that no other beats in both seconds and peak, the fastest first.

    More memory never costs time on it. Large graphs get fewer choices: see `EFFORT`.
    """
    pool = [problem.choice(frozenset(n for n in problem.nodes if keepable(n)))]
    if problem.nodes:
        pool += _hull(problem)
        corners = best(pool)
        for left, right in zip(corners[:-1], corners[1:], strict=True):
            pool += _between(problem, left, right)
        pool = _searched(problem, best(pool))
    return best(pool)


def _searched(problem: Problem, pool: list[Choice]) -> list[Choice]:
    """The pool, with what keeping or recomputing one value more makes of its best choices.

    A minimum cut spares bytes that are kept; this looks at the peak itself. It goes on while it
    finds something and effort is left.
    """
    known = {choice.kept for choice in pool}
    values = [node for node in problem.nodes if keepable(node)]
    fresh = best(pool)
    while fresh and problem.effort > 0:
        made: list[Choice] = []
        for choice in reversed(fresh):  # the smallest first: it decides what is possible at all
            for node in values:
                changed = choice.kept ^ {node}
                if problem.effort <= 0 or changed in known:
                    continue
                known.add(changed)
                found = problem.choice(changed)
                known.add(found.kept)
                made.append(found)
        pool = best([*pool, *made])
        new = {id(choice) for choice in made}
        fresh = [choice for choice in pool if id(choice) in new]
    return pool


def best(pool: Sequence[Choice]) -> list[Choice]:
    """Those that no other is as fast as with less memory; the fastest first."""
    found: list[Choice] = []
    for each in sorted(pool, key=lambda c: (c.seconds, c.peak, len(c.kept))):
        if not found or each.peak < found[-1].peak:
            found.append(each)
    return found


def _hull(problem: Problem) -> list[Choice]:
    """Minimum cuts between keeping all that is worth it and keeping nothing that can be avoided."""
    network = _Network(problem)
    seconds = sum(problem.again[node] for node in problem.nodes)
    held = sum(value_bytes(n.meta.get("val")) for n in problem.nodes if keepable(n))
    typical = max(seconds, 1e-12) / max(held, 1)
    cheap, dear = (problem.choice(network.kept(typical * f)) for f in (1e-6, 1e6))
    found = [cheap, dear]
    pairs = [(cheap, dear)]
    while pairs and len(found) < CUTS and problem.effort > 0:
        low, high = pairs.pop(0)
        spared, paid = low.schedule.kept - high.schedule.kept, high.seconds - low.seconds
        if spared <= 0 or paid <= 0:
            continue
        made = problem.choice(network.kept(paid / spared))
        if made.kept in (low.kept, high.kept):
            continue
        found.append(made)
        pairs += [(low, made), (made, high)]
    return found


def _between(problem: Problem, left: Choice, right: Choice) -> list[Choice]:
    """Choices that follow `right` in a part of the forward pass and `left` in the rest."""
    different = sorted(left.kept ^ right.kept, key=problem.depth.__getitem__)
    found = []
    for step in range(1, STEPS):
        if problem.effort <= 0 or len(different) < 2:
            break
        border = problem.depth[different[step * len(different) // STEPS]]

        def mixed(first: Choice, second: Choice, border: int = border) -> set[fx.Node]:
            return {n for n in first.kept if problem.depth[n] < border} | {
                n for n in second.kept if problem.depth[n] >= border
            }

        found += [problem.choice(mixed(right, left)), problem.choice(mixed(left, right))]
    return found
