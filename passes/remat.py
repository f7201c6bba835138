"""Rematerialization: a training graph that stays within a memory budget.

Decides which forward values are kept for the backward pass and which are computed again just before
they are needed. What counts is the peak of the whole schedule, from forward entry to backward exit,
with inputs, results and gradients. The choice is the fastest one on the frontier that fits.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from perfopt.cost_model.cost import Cost
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.cost_model.roofline import CostModel
from perfopt.cost_model.traffic import is_view, memory, value_bytes
from perfopt.passes.base import Gate, Level, PassResult, UserError
from perfopt.passes.dce import is_pure
from perfopt.passes.remat_schedule import RESULTS, Halves, fused, halves
from perfopt.passes.remat_solve import Choice, Problem, frontier

MARK = "perfopt_remat"  # node.meta: "keep" or "recompute", which the splitter acts on
KEEP, RECOMPUTE = "keep", "recompute"
PLAN = "perfopt_remat_plan"  # graph.meta: what a smaller choice is taken from if need be
_TINY = 1e-9  # seconds: what costs nothing is kept rather than computed again


class BudgetError(UserError):
    """No choice of what to recompute stays within the budget."""


@dataclass(frozen=True)
class Remat:
    """Keeps or recomputes forward values so that training stays within `budget` bytes.

    Without a budget (0) nothing is decided here, and torch's minimum cut parts the graph. With
    `share` above 0 the budget is that fraction of the peak with nothing recomputed.
    """

    name: ClassVar[str] = "remat"
    level: ClassVar[Level] = Level.JOINT
    budget: int = 0
    share: float = 0.0
    kernels: bool = True  # whether kernels will be generated, whose inner values need no memory

    def run(self, graph: fx.GraphModule, cost: CostModel, gate: Gate | None = None) -> PassResult:
        """Mark what is kept and what is recomputed; raises `BudgetError`."""
        if not self.budget and not self.share:
            return PassResult(graph, (), False)
        if RESULTS not in graph.graph.output_node().meta:
            return PassResult(graph, (), False)  # no backward pass: nothing is kept for one
        problem = posed(graph, cost, self.kernels)
        found = frontier(problem)
        chosen = self._fitting(found, problem)
        first = found[0]
        if chosen.kept != first.kept and not (gate or Gate()).take():
            chosen = first
        mark(problem, chosen)
        graph.meta[PLAN] = Planned(problem, tuple(found), chosen, self.budget, self.share)
        return PassResult(graph, (decided(chosen, first),), True)

    def _fitting(self, found: list[Choice], problem: Problem) -> Choice:
        budget = self.budget or int(self.share * found[0].peak)
        for each in found:
            if each.peak <= budget:
                return each
        if self.share:
            return found[-1]  # judged by the graphs themselves
        raise impossible(budget, found[-1].peak, found[-1].schedule.at, problem.parts)


def _missed(peak: int | None, budget: int | None, values: dict[str, Any]) -> str:
    if peak is None or budget is None or peak <= budget:
        return ""
    values["budget"] = bytes_text(budget)
    return "; the budget of {budget} cannot be met, this is the least"


@dataclass(frozen=True)
class Planned:
    """The frontier that a choice was taken from, for a budget in bytes or a share of the peak."""

    problem: Problem
    frontier: tuple[Choice, ...]
    chosen: Choice
    budget: int
    share: float


def decided(
    chosen: Choice, first: Choice, peak: int | None = None, budget: int | None = None
) -> Decision:
    """The decision for a choice beside keeping everything.

    `peak` is that of the final graphs, where they are known; above `budget`, it is the least.
    """
    again = [node.name for node in chosen.schedule.recomputed if not is_view(node)]
    values: dict[str, Any] = {
        "kept": len(chosen.kept),
        "again": len(again),
        "peak": bytes_text(chosen.peak if peak is None else peak),
        "before": bytes_text(first.peak),
    }
    return Decision(
        Remat.name,
        Verdict.APPLIED if chosen.kept != first.kept else Verdict.NOTE,
        tuple(again),
        "{kept} values kept for the backward pass, {again} operations run again: peak {peak}, "
        "{before} with nothing recomputed" + _missed(peak, budget, values),
        values,
        "",
        Cost(),
        Cost(seconds=chosen.seconds, bound="compute"),
    )


def posed(graph: fx.GraphModule, cost: CostModel, kernels: bool = True) -> Problem:
    """The problem of a joint graph, with the user's checkpoints as conditions."""
    parts = halves(graph.graph)
    again = frozenset(n for n in parts.forward if _policy(n) in _AGAIN)
    saved = frozenset(
        n for n in parts.forward
        if n not in again and (_policy(n) in _SAVED or not _repeatable(n))
    )  # fmt: skip
    # Of an operation with several results those are kept, not the tuple of them.
    saved |= {item for node in saved for item in node.users if item.target is operator.getitem}
    prices = {n: price_again(n, cost) for n in parts.forward}
    return Problem(parts, prices, saved, again, kernels)


_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _policy(node: fx.Node) -> Any:
    return node.meta.get("recompute")


def _repeatable(node: fx.Node) -> bool:
    """Whether computing the node twice gives the same, and nothing else happens."""
    if is_view(node) or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
        return True
    tags = getattr(node.target, "tags", ())
    return is_pure(node) and torch.Tag.nondeterministic_seeded not in tags


def price_again(node: fx.Node, cost: CostModel) -> float:
    """Seconds that computing a forward value again takes.

    What a kernel can hold lands in a kernel of the backward pass, which reads its memory anyway: it
    costs its arithmetic alone. Views cost nothing.
    """
    if is_view(node):
        return 0.0
    whole = cost.node(node)
    if not fused(node):
        return max(whole.seconds, _TINY)
    return max(whole.flops / (cost.device.vector_peak("float32") / 2), _TINY)


def impossible(budget: int, least: int, at: str, parts: Halves) -> BudgetError:
    """The error for a budget below `least` bytes, which are alive when `at` is computed."""
    held = ", ".join(f"{what} {bytes_text(size)}" for what, size in holders(parts).items())
    return BudgetError(
        f"memory_budget is {bytes_text(budget)}: this graph needs at least {bytes_text(least)}, at "
        f"{at}, however much is recomputed; of these, {held}"
    )


def holders(parts: Halves) -> Mapping[str, int]:
    """Bytes that no choice can spare: inputs with weights, gradients, results."""

    def total(nodes: tuple[fx.Node, ...]) -> int:
        return sum({memory(n): value_bytes(n.meta.get("val")) for n in nodes}.values())

    return {
        "inputs and weights": total(parts.primals),
        "gradients": total(parts.gradients),
        "results": total(parts.results),
    }


def mark(problem: Problem, choice: Choice) -> None:
    """Annotate every forward node that the backward pass needs."""
    for node in problem.nodes:
        node.meta[MARK] = KEEP if node in choice.kept else RECOMPUTE


def kept_values(graph: fx.Graph) -> list[fx.Node] | None:
    """What marks say to keep, inputs included; None for a graph without marks."""
    if not any(MARK in node.meta for node in graph.nodes):
        return None
    parts = halves(graph)
    own = set(parts.forward)
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    stack = [arg for node in parts.backward for arg in node.all_input_nodes]
    stack += parts.gradients
    while stack:
        node = stack.pop()
        if node in seen or (node not in own and node.op != "placeholder"):
            continue
        seen.add(node)
        if node in own and node.meta.get(MARK, KEEP) == RECOMPUTE:
            stack.extend(node.all_input_nodes)
        elif node not in parts.tangents:
            found[node] = None
    order = {node: number for number, node in enumerate(graph.nodes)}
    return sorted(found, key=order.__getitem__)


def bytes_text(size: int) -> str:
    """Bytes with a binary unit, to three digits."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"
