"""A joint graph as forward and backward pass: what is alive when, whatever is kept or recomputed.

What a backward pass needs of the forward pass is kept, or recomputed just before its first use.
Memory is counted by what holds it (views hold nothing), fused operations give no memory of their
own, and everything is freed after its last use, as programs free it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from perfopt.backends.lowering import KNOWN
from perfopt.cost_model.traffic import held_bytes, is_view, made, memory
from perfopt.passes.dce import is_pure

RESULTS = "perfopt_forward_results"  # of the output's `meta`: how many results are the forward's
Place = tuple[fx.Node, int]  # what holds memory: the node that makes it, and which of its results
_LASTING = 1 << 60  # a position behind every other


@dataclass(frozen=True)
class Halves:
    """A joint graph taken apart, its nodes in order.

    `forward` nodes do not depend on `tangents`, `backward` nodes do; `required` are the forward
    nodes that `results` need, `wanted` those that the backward pass reads or returns.
    """

    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]

    @cached_property
    def required(self) -> frozenset[fx.Node]:
        """The forward nodes that the forward pass' own results need."""
        return frozenset(behind(self.results))

    @cached_property
    def wanted(self) -> tuple[fx.Node, ...]:
        """The forward nodes, views left out, that backward nodes read."""
        inside = set(self.forward)
        found: dict[fx.Node, None] = {}
        for node in self.backward:
            found.update(dict.fromkeys(arg for arg in node.all_input_nodes if arg in inside))
        found.update(dict.fromkeys(node for node in self.gradients if node in inside))
        return tuple(found)


def halves(graph: fx.Graph) -> Halves:
    """The halves of a joint graph whose output says, under `RESULTS`, where gradients begin."""
    output = graph.output_node()
    count = output.meta[RESULTS]
    flat = list(output.args[0])  # type: ignore[arg-type]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    tangents = [node for node in inputs if node.name.startswith("tangents")]
    behind_tangents = set(tangents)
    forward, backward = [], []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if any(arg in behind_tangents for arg in node.all_input_nodes):
            behind_tangents.add(node)
            backward.append(node)
        else:
            forward.append(node)
    return Halves(
        tuple(node for node in inputs if node not in behind_tangents),
        tuple(tangents),
        tuple(forward),
        tuple(backward),
        tuple(node for node in flat[:count] if isinstance(node, fx.Node)),
        tuple(node for node in flat[count:] if isinstance(node, fx.Node)),
    )


def behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and everything that they are made of, inputs left out."""
    seen: set[fx.Node] = set()
    stack = [node for node in nodes if node.op != "placeholder"]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(arg for arg in node.all_input_nodes if arg.op != "placeholder")
    return seen


def keepable(node: fx.Node) -> bool:
    """Whether the node's value is memory of its own that can be kept for the backward pass."""
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True  # of no size
    if not isinstance(value, torch.Tensor):
        return False
    if not is_view(node):
        return True
    # An item of an operation with several results.
    return node.target is operator.getitem and memory(node)[0] is node.args[0]


def just_in_time(gm: fx.GraphModule) -> None:
    """Move what a backward graph recomputes to just before its first use, in place.

    `gm` is one that the splitter made: its operations that do not depend on the gradients from
    above are recomputed.
    """
    graph = gm.graph
    given = {n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("tangents")}
    again: dict[fx.Node, int] = {}
    for number, node in enumerate(graph.nodes):
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if is_pure(node) and not any(arg in given for arg in node.all_input_nodes):
            again[node] = number
        else:
            given.add(node)
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()
    output = graph.output_node()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or node in again:
            continue
        found: set[fx.Node] = set()
        stack = [arg for arg in node.all_input_nodes if arg in again and arg not in placed]
        while stack:
            each = stack.pop()
            if each not in placed:
                placed.add(each)
                found.add(each)
                stack += [a for a in each.all_input_nodes if a in again and a not in placed]
        order += [*sorted(found, key=again.__getitem__), node]
    for node in order:
        if node is not output:
            output.prepend(node)
    gm.recompile()


def fused(node: fx.Node) -> bool:
    """Whether a generated kernel can hold the node, as far as its operator tells."""
    return node.op == "call_function" and node.target in KNOWN


@dataclass(frozen=True)
class Schedule:
    """What a choice of kept values comes to.

    `peak` bytes are alive at most from forward entry to backward exit, inputs, results and
    gradients included; `at` is the node that is computed then. `kept` are bytes kept for the
    backward pass beside inputs and results, `recomputed` the nodes that it computes again.
    `alive` has the bytes alive after every computed node, forward then backward.
    """

    peak: int
    at: str
    kept: int
    recomputed: tuple[fx.Node, ...]
    alive: tuple[tuple[str, int], ...]


class Simulator:
    """Schedules of one joint graph; see the module. Without `kernels` nothing is fused."""

    def __init__(self, parts: Halves, kernels: bool = True) -> None:
        self.parts = parts
        self.kernels = kernels
        self._own = set(parts.forward)
        self._inputs = sum({_place(n): held_bytes(n) for n in parts.primals}.values())
        self._results = {_place(node) for node in parts.results}
        self._gradients = {_place(node) for node in parts.gradients}
        self._order = {node: k for k, node in enumerate(parts.forward)}

    def schedule(self, kept: Collection[fx.Node]) -> Schedule:
        """The schedule that keeps these values and recomputes what else is needed."""
        forward, sequence, recomputed = self.sequences(kept)
        places = {_place(node) for node in kept}
        before = {_place(node) for node in self.parts.primals}
        lasting = places | self._results
        events = _Alive(self._inputs)
        events.walk(forward, before, lasting, set(lasting) if self.kernels else None)
        at_end = {_place(n): held_bytes(n) for n in (*self.parts.results, *kept)}
        tangents = {_place(n): held_bytes(n) for n in self.parts.tangents}
        events.now += sum(tangents.values())
        stays = before | self._results | self._gradients
        resident = before | set(at_end) | set(tangents)
        owned = {
            place: size for place, size in {**at_end, **tangents}.items() if place not in stays
        }
        events.walk(sequence, resident, stays, stays if self.kernels else None, owned)
        return Schedule(
            events.peak, events.at, sum(held_bytes(n) for n in kept), tuple(recomputed),
            tuple(events.alive),
        )  # fmt: skip

    def sequences(
        self, kept: Collection[fx.Node]
    ) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """The order of the forward pass, that of the backward pass, and what it recomputes."""
        needed = self.parts.required | behind(kept)
        forward = [node for node in self.parts.forward if node in needed]
        done = set(kept)
        sequence: list[fx.Node] = []
        recomputed: list[fx.Node] = []
        for node in self.parts.backward:
            for again in self._missing(node, done):
                sequence.append(again)
                recomputed.append(again)
            sequence.append(node)
        return forward, sequence, recomputed

    def _missing(self, node: fx.Node, done: set[fx.Node]) -> list[fx.Node]:
        """The forward nodes to be computed again before `node`, in order."""
        found: set[fx.Node] = set()
        stack = [arg for arg in node.all_input_nodes if arg in self._own and arg not in done]
        while stack:
            each = stack.pop()
            if each in done:
                continue
            done.add(each)
            found.add(each)
            stack.extend(a for a in each.all_input_nodes if a in self._own and a not in done)
        return sorted(found, key=self._order.__getitem__)


class _Alive:
    """Bytes alive along sequences of nodes."""

    def __init__(self, start: int) -> None:
        self.now = start
        self.peak = start
        self.at = ""
        self.alive: list[tuple[str, int]] = []

    def walk(
        self,
        sequence: Sequence[fx.Node],
        resident: set[Place],
        lasting: set[Place],
        solid: set[Place] | None,
        owned: dict[Place, int] | None = None,
    ) -> None:
        """Compute `sequence`: `resident` memory is there, `lasting` memory is not freed.

        What is `solid` is memory even where kernels could fuse it away, everything for None;
        `owned` is what is there before and freed after its last use.
        """
        present = set(sequence)
        inlined = {
            node for node in (sequence if solid is not None else ())
            if solid is not None and fused(node) and not is_view(node) and _place(node) not in solid
            and isinstance(node.meta.get("val"), torch.Tensor)
            and all(fused(user) for user in _users(node, present))
        }  # fmt: skip
        reads: dict[fx.Node, frozenset[Place]] = {}
        last: dict[Place, int] = {}
        for position, node in enumerate(sequence):
            if is_view(node):
                continue
            found: set[Place] = set()
            for arg in node.all_input_nodes:
                maker = _place(arg)[0]
                if maker in inlined:
                    found |= reads.get(maker, frozenset())
                else:
                    found.add(_place(arg))
            reads[node] = frozenset(found)
            for place in found:
                last[place] = position
        dying: dict[int, list[Place]] = {}
        for place, position in last.items():
            dying.setdefault(position, []).append(place)
        sizes = dict(owned or {})
        for place in [place for place in sizes if place not in last]:
            self.now -= sizes.pop(place)  # nobody reads it
        for position, node in enumerate(sequence):
            if not is_view(node) and node not in inlined:
                for place, size in made(node):
                    if place not in resident:
                        sizes[place] = size
                        self.now += size
                if self.now > self.peak:
                    self.peak, self.at = self.now, node.name
                for place, _ in made(node):
                    if place not in last and place not in lasting:
                        self.now -= sizes.pop(place, 0)
            for place in dying.get(position, ()):
                if place not in lasting:
                    self.now -= sizes.pop(place, 0)
            self.alive.append((node.name, self.now))


def _users(node: fx.Node, present: set[fx.Node]) -> list[fx.Node]:
    """The users among `present`, views walked forward."""
    found = []
    for user in node.users:
        if user in present:
            found += _users(user, present) or [user] if is_view(user) else [user]
    return found


def _place(node: fx.Node) -> Place:
    return memory(node)
