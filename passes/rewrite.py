"""Replacing a node by another, priced."""

from __future__ import annotations

from torch import fx

from perfopt.cost_model.cost import Cost
from perfopt.cost_model.roofline import CostModel
from perfopt.cost_model.traffic import users_through_views


def replace_node(node: fx.Node, by: fx.Node, cost: CostModel) -> tuple[Cost, Cost]:
    """Let every user of `node` use `by`, and erase `node`; the cost of what changed by it.

    A reader's price can change too: one that read both now reads one. Such readers are in both
    costs, so that costs of replacements one after the other add up.
    """
    readers = list(dict.fromkeys(users_through_views(node)))
    priced = {reader: cost.node(reader) for reader in readers}
    before, after = cost.node(node), Cost()
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
    for reader, old in priced.items():
        new = cost.node(reader)
        if new != old:
            before, after = before + old, after + new
    return before, after
