"""Which nodes of a graph become one kernel: groups that grow by merging, and stay convex.

Views are transparent here: an edge runs from the node that computed memory to the nodes that read
it, however many views lie between. A group may not have a path that leaves it and comes back, or
the kernels could not be put in order. Every question is answered by integers used as bit sets over
the nodes' positions, so that a merge is weighed in microseconds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from perfopt.backends.lowering import REDUCTIONS
from perfopt.backends.oracle import device_of, lowerable
from perfopt.cost_model.cost import Cost
from perfopt.cost_model.ops import Work, work
from perfopt.cost_model.roofline import CostModel
from perfopt.cost_model.traffic import (
    elements,
    is_view,
    mutates,
    read_bytes,
    reads,
    users_through_views,
    value_bytes,
)
from perfopt.passes.dce import is_pure


@dataclass(eq=False)
class Group:
    """Nodes that are to be one kernel; `mask` holds their positions, `inputs` those they read.

    `before` holds everything that must run earlier, `escapes` the results with their bytes, size
    and readers, `outside` the reads that come from outside. `full` counts the elements of the
    iteration domain, `folds` those that are left by its reductions, along rows and along columns.
    """

    nodes: list[fx.Node]
    mask: int
    inputs: int
    before: int
    work: Work
    outside: dict[tuple[fx.Node, fx.Node], int]
    escapes: list[tuple[int, int, int]]  # (bytes, elements, readers)
    full: int
    folds: frozenset[int]
    device: torch.device | None
    price: Cost = field(default_factory=Cost)


@dataclass(frozen=True)
class Refusal:
    """A merge that was not made: why, and what the one kernel would have cost."""

    reason: str
    values: dict[str, object]
    before: Cost
    alternative: Cost | None = None


def bits(mask: int) -> Iterator[int]:
    """The positions in a bit set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Facts:
    """What merging needs to know of each node, found in one walk over the graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.nodes: list[fx.Node] = list(gm.graph.nodes)
        self.position = {node: k for k, node in enumerate(self.nodes)}
        self.before: list[int] = []
        self.candidates: list[fx.Node] = []
        self._walk()

    def _walk(self) -> None:
        impure = -1  # the last call whose order with others of its kind must stay
        written = False
        for k, node in enumerate(self.nodes):
            before = 0
            for operand in node.all_input_nodes:
                at = self.position[operand]
                before |= self.before[at] | 1 << at
            computes = node.op == "call_function" and not is_view(node)
            if computes and not is_pure(node):
                if impure >= 0:
                    before |= self.before[impure] | 1 << impure
                impure = k
            self.before.append(before)
            written = written or mutates(node)
            # What comes after a write may read what was written: it stays where it is.
            if not computes or written or not any(map(self.readers, result_tensors(node))):
                continue
            if lowerable(node) is None:
                self.candidates.append(node)

    def ordered(self, nodes: Collection[fx.Node]) -> tuple[fx.Node, ...]:
        """Nodes in the order of the graph."""
        return tuple(sorted(nodes, key=self.position.__getitem__))

    def readers(self, node: fx.Node) -> int:
        """The nodes that read the node's memory through any views, as a bit set."""
        mask = 0
        for user in users_through_views(node):
            mask |= 1 << self.position[user]
        return mask

    def single(self, node: fx.Node, cost: CostModel) -> Group:
        """A node as a group of its own."""
        k = self.position[node]
        escapes = [
            (value_bytes(each.meta["val"]), elements(each.meta["val"]), self.readers(each))
            for each in result_tensors(node)
        ]
        inputs = 0
        for operand in node.all_input_nodes:
            for each in _behind_views(operand):
                inputs |= 1 << self.position[each]
        full = left = max((size for _, size, _ in escapes), default=0)
        if node.target in REDUCTIONS:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            full = elements(source.meta["val"])
        group = Group(
            [node], 1 << k, inputs, self.before[k] | 1 << k, work(node),
            {(source, alias): size for source, alias, size in reads(node)},
            escapes, full, frozenset((left,) if node.target in REDUCTIONS else ()),
            device_of(node),
        )  # fmt: skip
        group.price = cost.node(node)
        return group


class Grouping:
    """The groups of a graph while they grow."""

    def __init__(self, facts: Facts, cost: CostModel, max_nodes: int) -> None:
        self.facts = facts
        self.cost = cost
        self.max_nodes = max_nodes
        self.of: dict[fx.Node, Group] = {}
        self.many: list[Group] = []  # groups of more than one node
        self.refusals: dict[fx.Node, tuple[fx.Node, Refusal]] = {}

    def grow(self, nodes: Collection[fx.Node]) -> None:
        """Merge each node, in order, with what it reads; then what reads the same."""
        for node in nodes:
            self.of[node] = self.facts.single(node, self.cost)
        for node in nodes:
            self._join(node, self._producers(node))
        for node in nodes:
            self._join(node, self._siblings(node), noted=False)

    def groups(self) -> list[Group]:
        """Every group once, in the order of its first node."""
        return list(dict.fromkeys(self.of.values()))

    def _producers(self, node: fx.Node) -> list[fx.Node]:
        """The members of groups that a node reads, the most bytes first."""
        found = [(size, source) for source, _, size in reads(node) if source in self.of]
        found.sort(key=lambda each: -each[0])
        return [source for _, source in found]

    def _siblings(self, node: fx.Node) -> list[fx.Node]:
        """Nodes before this one that read what it reads, where that is worth sharing."""
        found: list[fx.Node] = []
        at = self.facts.position[node]
        for source, _, size in reads(node):
            if size * 8 < self.of[node].full or source in self.of[node].nodes:
                continue
            near = [
                user for user in users_through_views(source)
                if user in self.of and at - WINDOW < self.facts.position[user] < at
            ]  # fmt: skip
            found += near[-NEAREST:]
        return found

    def _join(self, node: fx.Node, others: list[fx.Node], noted: bool = True) -> None:
        for other in others:
            mine, theirs = self.of[node], self.of[other]
            if mine is theirs:
                continue
            refusal = self._merge(theirs, mine)
            if refusal is not None and noted:
                known = self.refusals.get(node)
                if known is None or _saving(refusal) > _saving(known[1]):
                    self.refusals[node] = (other, refusal)

    def _merge(self, first: Group, second: Group) -> Refusal | None:
        """Merge two groups into one, or say why not."""
        before = first.price + second.price
        mask = first.mask | second.mask
        count = len(first.nodes) + len(second.nodes)
        if count > self.max_nodes:
            return Refusal(
                "{count} nodes are more than max_nodes={limit}",
                {"count": count, "limit": self.max_nodes}, before,
            )  # fmt: skip
        made = self._union(first, second, mask)
        if isinstance(made, Refusal):
            return made
        if any(turns(node) and self.facts.readers(node) & ~mask for node in made.nodes):
            return Refusal(
                "a copy into another order of memory is a kernel of its own", {}, before, made.price
            )
        if self._leaves_and_returns(made):
            return Refusal(
                "what one computes reaches the other through a call that stays outside",
                {}, before, made.price,
            )  # fmt: skip
        if made.price.seconds >= before.seconds:
            return Refusal("one kernel would save nothing", {}, before, made.price)
        for node in made.nodes:
            self.of[node] = made
        self.many = [g for g in self.many if g is not first and g is not second] + [made]
        return None

    def _union(self, first: Group, second: Group, mask: int) -> Group | Refusal:
        """Both as one group, priced; refused where their iteration domains do not fit."""
        outside = {
            key: size
            for group in (first, second)
            for key, size in group.outside.items()
            if not mask >> self.facts.position[key[0]] & 1
        }
        escapes = [each for g in (first, second) for each in g.escapes if each[2] & ~mask]
        full, folds = max(first.full, second.full), first.folds | second.folds
        moved = read_bytes((s, a, size) for (s, a), size in outside.items())
        moved += sum(size for size, _, _ in escapes)
        both = first.work + second.work
        price = self.cost.price(both, moved)
        before = first.price + second.price
        if first.device != second.device:
            values: dict[str, object] = {"a": str(first.device), "b": str(second.device)}
            return Refusal("tensors on {a} and {b}", values, before, price)
        for group in (first, second):
            if group.folds and group.full != full:
                return Refusal(
                    "a reduction of {a} elements does not fit a domain of {b}",
                    {"a": group.full, "b": full}, before, price,
                )  # fmt: skip
        if len(folds) > 1 and (len(folds) > 2 or math.prod(folds) != full):
            return Refusal(
                "reductions of {a} elements to {b} are not those of rows and columns",
                {"a": full, "b": ", ".join(map(str, sorted(folds)))}, before, price,
            )  # fmt: skip
        for _, size, _ in escapes:
            if size != full and size not in folds:
                return Refusal(
                    "results of {a} and {b} elements do not span the same domain",
                    {"a": size, "b": full}, before, price,
                )  # fmt: skip
        return Group(
            first.nodes + second.nodes, mask, (first.inputs | second.inputs) & ~mask,
            first.before | second.before, both, outside, escapes, full, folds, first.device,
            price,
        )  # fmt: skip

    def _leaves_and_returns(self, made: Group) -> bool:
        """Whether a path leaves the group and comes back, through nodes or other groups."""
        earlier = 0
        for k in bits(made.inputs):
            earlier |= self.facts.before[k] | 1 << k
        if earlier & made.mask:
            return True
        rest = [group for group in self.many if not group.mask & made.mask]
        while True:
            touched = [group for group in rest if group.mask & earlier]
            if not touched:
                return False
            for group in touched:
                earlier |= group.before
            if earlier & made.mask:
                return True
            rest = [group for group in rest if not group.mask & earlier]


WINDOW = 256  # how many nodes apart two readers of one value may be to become one kernel
NEAREST = 3  # how many earlier readers of one value are tried


def _behind_views(node: fx.Node) -> Iterator[fx.Node]:
    """What made the memory of a node's value, and the sizes that views of it are given."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        yield from (operand for operand in node.all_input_nodes if operand is not node.args[0])
        node = node.args[0]
    yield node


def _saving(refusal: Refusal) -> float:
    if refusal.alternative is None:
        return 0.0
    return refusal.before.seconds - refusal.alternative.seconds


def computes(nodes: Collection[fx.Node]) -> bool:
    """Whether any of the nodes does arithmetic, rather than only moving data."""
    return any(work(node).vector for node in nodes)


def turns(node: fx.Node) -> bool:
    """Whether the node copies a matrix into the other order of memory."""
    source = node.args[0] if node.args else None
    if node.target is not torch.ops.aten.clone.default or not isinstance(source, fx.Node):
        return False
    before, after = source.meta["val"].stride(), node.meta["val"].stride()
    return bool(before) and after[-1] == 1 and before[-1] != 1


def result_tensors(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for the tensors a node makes: itself, or the items of its tuple."""
    value: Any = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [node]
    return [user for user in node.users if user.target is operator.getitem]
