"""Parting a joint graph within a memory budget, judged by the graphs that will run."""

from __future__ import annotations

from typing import Any

from torch import fx

from perfopt.backends.torch_private import split_joint
from perfopt.cost_model.memory import memory_of
from perfopt.passes.base import Level, copy_graph
from perfopt.passes.remat import PLAN, Planned, Remat, decided, impossible, kept_values, mark
from perfopt.passes.remat_schedule import just_in_time
from perfopt.passes.remat_solve import Choice
from perfopt.pipelines import run_passes
from perfopt.records import Compilation

Halves = tuple[fx.GraphModule, fx.GraphModule]


def split_within(
    job: Compilation, joint: fx.GraphModule, inputs: Any, shared: bool, **given: Any
) -> Halves:
    """Forward and backward graph of a joint graph that the pass `remat` has marked.

    The pass chose by a forecast of what becomes memory. Here the graph passes run on trial; where
    their graphs need more than the budget, a smaller choice is taken. Raises `BudgetError`.
    """
    plan: Planned = joint.meta[PLAN]
    chosen, first = plan.chosen, plan.frontier[0]
    count = given["num_fwd_outputs"]

    def parted(choice: Choice) -> tuple[Halves, int, str]:
        mark(plan.problem, choice)
        made = _split(joint, inputs, shared, given)
        return made, *_peak(job, made, count)

    halves, peak, at = parted(chosen)
    budget = plan.budget
    if plan.share:
        usual = peak if chosen is first else parted(first)[1]
        budget = int(plan.share * usual)
    room = budget
    while peak > budget:
        room = min(room, chosen.peak) - (peak - budget)
        chosen, former = _next(plan, chosen, room), chosen
        if chosen is former and plan.share:
            break  # of several graphs, one may need all that it has: a fraction is no promise
        if chosen is former:
            raise impossible(budget, peak, at, plan.problem.parts)
        halves, peak, at = parted(chosen)
    decision = decided(chosen, first, peak, budget)
    job.decisions[:] = [
        decision if each.pass_name == Remat.name else each for each in job.decisions
    ]
    return halves


def _next(plan: Planned, chosen: Choice, room: int) -> Choice:
    """The fastest choice within `room`, else the smallest."""
    smaller = [each for each in plan.frontier if each.peak < chosen.peak]
    fitting = [each for each in smaller if each.peak <= room]
    return fitting[0] if fitting else smaller[-1] if smaller else chosen


def _split(joint: fx.GraphModule, inputs: Any, shared: bool, given: dict[str, Any]) -> Halves:
    forward, backward = split_joint(copy_graph(joint), inputs, shared, kept_values, **given)
    just_in_time(backward)
    return forward, backward


def _peak(job: Compilation, halves: Halves, results: int) -> tuple[int, str]:
    """What the graphs will need once the graph passes have run on them."""
    trial = Compilation(job.number, job.options, device=job.device, plans=[])
    forward, backward = (run_passes(trial, Level.GRAPH, gm, []) for gm in halves)
    found = memory_of(forward.graph, backward.graph, results=results)
    return found.peak, found.at
