"""Peak memory of a graph that runs in its order.

Memory is counted by root (see `traffic`): a view keeps its root alive. Inputs belong to the
caller and stay; results stay; everything else goes after its last use. Scratch memory inside
library calls is not counted.
"""

from __future__ import annotations

from torch import fx

from perfopt.cost_model.traffic import mutates, root, value_bytes


def last_uses(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the roots whose memory is used by it and by none after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        last[root(node)] = node
        for operand in node.all_input_nodes:
            last[root(operand)] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last.items():
        dying.setdefault(node, []).append(source)
    return dying


def peak_bytes(gm: fx.GraphModule) -> int:
    """The most bytes alive at once, inputs included."""
    dying = last_uses(gm)
    sizes: dict[fx.Node, int] = {}
    alive = 0
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            sizes[node] = value_bytes(node.meta.get("val"))
            alive += sizes[node]
    peak = alive
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if root(node) is node and not mutates(node):
            sizes[node] = value_bytes(node.meta.get("val"))
            alive += sizes[node]
            peak = max(peak, alive)
        for source in dying.get(node, ()):
            if source.op not in ("placeholder", "get_attr"):
                alive -= sizes.pop(source, 0)
    return peak
