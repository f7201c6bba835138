"""Fusion: pointwise chains and fans, and row reductions with what feeds and follows them.

Groups grow greedily in the order of the graph (`grouping`), each merge priced by the cost model.
What the lowering then refuses is split again. Cheap producers whose readers all lie in kernels are
computed there instead of being stored. Each group becomes a region: a submodule and its call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from perfopt.backends.lowering import REDUCTIONS
from perfopt.backends.oracle import fusible
from perfopt.cost_model.cost import Cost
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.cost_model.ops import work
from perfopt.cost_model.roofline import CostModel
from perfopt.cost_model.traffic import elements, root, users_through_views
from perfopt.passes.base import Gate, Level, PassResult
from perfopt.passes.grouping import Facts, Group, Grouping, Refusal, computes, turns
from perfopt.passes.regions import Plan, Region, build, trial
from perfopt.passes.source import first_source_line, source_line

FUNCTION = 8  # instructions per element from which a lone operation is worth a kernel of its own
LARGE_COPY = 16384  # elements from which a transposing copy is quicker by tiles than ATen's
MOST_COPIES = 4  # kernels that one operation may be computed in
CHEAP = 4  # instructions per element up to which an operation may be computed twice


@dataclass(frozen=True)
class Fuse:
    """Makes regions of at most `max_nodes` operations; one decision per region.

    With `singles`, lone operations that compute a function (exp, gelu) and transposing copies
    become regions too: the price is the same and the kernel ours.
    """

    max_nodes: int = 64
    singles: bool = True

    name: ClassVar[str] = "fuse"
    level: ClassVar[Level] = Level.GRAPH

    def run(self, graph: fx.GraphModule, cost: CostModel, gate: Gate | None = None) -> PassResult:
        """Form the regions and call them; `graph` itself stays as it is."""
        gate = gate or Gate()
        facts = Facts(graph)
        grouping = Grouping(facts, cost, self.max_nodes)
        grouping.grow(facts.candidates)
        regions: list[Region] = []
        for group in grouping.groups():
            if self._wanted(group.nodes):
                regions += self._checked(group.nodes, facts, grouping, cost)
        regions.sort(key=lambda region: facts.position[region.nodes[-1]])
        regions = [region for region in regions if gate.take()]
        refused = self._refused(grouping, regions)
        if not regions:
            return PassResult(graph, refused, False)
        plan = Plan(facts, regions)
        _absorb(plan, cost)
        gate.taken -= plan.drop_empty()
        made, bodies = build(graph, plan)
        owned: set[fx.Node] = set()
        decisions = []
        for region, body in bodies.items():
            new = [node for node in region.nodes if node not in owned and plan.gone(node)]
            owned.update(new)
            decisions.append(self._applied(region, new, body, cost))
        return PassResult(made, (*decisions, *refused), True)

    def _wanted(self, nodes: list[fx.Node]) -> bool:
        if len(nodes) > 1:
            return computes(nodes)
        value = nodes[0].meta["val"]
        if not self.singles or not hasattr(value, "stride") or nodes[0].target in REDUCTIONS:
            return False
        if turns(nodes[0]):
            return elements(value) >= LARGE_COPY
        return elements(value) > 1 and work(nodes[0]).vector >= FUNCTION * elements(value)

    def _checked(
        self, nodes: list[fx.Node], facts: Facts, grouping: Grouping, cost: CostModel
    ) -> list[Region]:
        """The nodes as one region, or, where the lowering refuses, as the largest that it takes."""
        nodes = list(facts.ordered(nodes))
        region = Region(tuple(nodes))
        reason = _refusal(region)
        if reason is not None:
            region = Region(tuple(nodes), inner_views=False)
            reason = reason if _refusal(region) is not None else None
        if reason is None:
            return [region]
        if len(nodes) == 1:
            return []
        careful = _Careful(facts, cost, self.max_nodes)
        careful.grow(nodes)
        whole, groups = grouping.of[nodes[0]].price, careful.groups()
        apart = sum((group.price for group in groups), Cost())
        for group in groups[1:]:
            why = Refusal("the kernel cannot be made: {why}", {"why": reason}, apart, whole)
            grouping.refusals[group.nodes[0]] = (groups[0].nodes[0], why)
        return [
            region
            for group in groups
            if self._wanted(group.nodes)
            for region in self._checked(group.nodes, facts, grouping, cost)
        ]

    def _applied(
        self, region: Region, nodes: list[fx.Node], body: fx.GraphModule, cost: CostModel
    ) -> Decision:
        inner = [node for node in body.graph.nodes if node.op == "call_function"]
        results = len(body.graph.output_node().all_input_nodes)
        reason = "{count} operations in one kernel with {results} results"
        copied = len(region.nodes) - len(nodes)
        return Decision(
            self.name,
            Verdict.APPLIED,
            tuple(node.name for node in region.nodes),
            reason + ("; {copied} of them are computed in another as well" if copied else ""),
            {"count": len(region.nodes), "results": results, "copied": copied},
            first_source_line(region.nodes),
            sum(map(cost.node, nodes), Cost()),
            cost.nodes_as_region(inner),
        )

    def _refused(self, grouping: Grouping, regions: list[Region]) -> tuple[Decision, ...]:
        """The merges that were not made in the end, one per node: the one that would save most."""
        home = {node: region for region in regions for node in region.nodes}
        decisions = []
        for node, (other, refusal) in grouping.refusals.items():
            if node in home and home.get(node) is home.get(other):
                continue
            decisions.append(
                Decision(
                    self.name,
                    Verdict.REJECTED,
                    (other.name, node.name),
                    refusal.reason,
                    refusal.values,
                    source_line(node),
                    refusal.before,
                    None,
                    "one kernel",
                    refusal.alternative,
                )
            )
        return tuple(decisions)


def _calls(body: fx.Graph) -> list[fx.Node]:
    return [node for node in body.nodes if node.op == "call_function"]


def _refusal(region: Region) -> str | None:
    """Why the lowering does not take the region as it stands by itself, or None."""
    return fusible(_calls(trial(region)))


class _Careful(Grouping):
    """Growth that asks the lowering about every merge."""

    def _union(self, first: Group, second: Group, mask: int) -> Group | Refusal:
        made = super()._union(first, second, mask)
        if isinstance(made, Refusal):
            return made
        why = _refusal(Region(self.facts.ordered(made.nodes)))
        if why is None:
            return made
        return Refusal("{why}", {"why": why}, first.price + second.price, made.price)


def _absorb(plan: Plan, cost: CostModel) -> None:
    """Compute cheap producers in the kernels that read them, where all readers are kernels."""
    for node in reversed(plan.facts.candidates):
        own = plan.owner.get(node)
        if own is None and plan.gone(node):
            continue
        readers = list(users_through_views(node))
        inside = [home for reader in readers for home in plan.homes.get(reader, ())]
        targets = [home for home in dict.fromkeys(inside) if node not in home.members]
        if not targets or len(targets) > MOST_COPIES or not all(map(plan.gone, readers)):
            continue
        if not _cheap(node):
            continue
        changes = {home: plan.with_node(home, node) for home in targets}
        kept = own
        if own is not None and own not in inside and len(own.nodes) > 1:
            kept = plan.without_node(own, node)
            changes[own] = kept
        before = plan.price(targets + ([own] if own else []), cost)
        if own is None:
            before = before + cost.node(node)
        undo = plan.replace(changes)
        now = list(changes.values())
        after = plan.price(now + ([kept] if kept and kept not in now else []), cost)
        saves = after.seconds < before.seconds
        # What the node reads must now be given by those who kept it to themselves before.
        read = map(root, node.all_input_nodes)
        asked = dict.fromkeys([*now, *(plan.owner[each] for each in read if each in plan.owner)])
        if not saves or any(fusible(_calls(plan.body(region))) for region in asked):
            plan.undo(undo)


def _cheap(node: fx.Node) -> bool:
    """Whether the node is pointwise, or makes constants, in few instructions per element."""
    value = node.meta["val"]
    if not hasattr(value, "stride") or node.target in REDUCTIONS:
        return False
    return work(node).vector <= CHEAP * max(elements(value), 1)
