"""What must hold of a graph after every pass."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from perfopt.backends.region import is_region
from perfopt.cost_model.traffic import memory, mutates


class VerifyError(RuntimeError):
    """A graph that a pass left broken; the message names the node and what is wrong."""


def verify_graph(gm: fx.GraphModule, bare: frozenset[str] = frozenset()) -> None:
    """Check one graph: order, metadata, regions. Raises `VerifyError`.

    Nodes named in `bare` may lack `meta["val"]`: calls that give nothing come without.
    """
    _check_order(gm.graph)
    for node in gm.graph.nodes:
        calls = node.op in ("call_function", "call_module")
        if calls and "val" not in node.meta and node.name not in bare:
            _fail(node, "has no meta['val']")
        if node.op == "call_module" and node.meta.get("region"):
            _check_region(gm, node)
    called = {str(node.target) for node in gm.graph.nodes if is_region(node)}
    held = {name for name in gm._modules if name.startswith("region_")}
    if held - called:
        raise VerifyError(f"regions that nothing calls: {', '.join(sorted(held - called))}")


def verify_change(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Check that `after` is valid and gives what `before` gives. Raises `VerifyError`.

    Compared are the inputs, the results' types, shapes, strides and devices, which results share
    memory with inputs or with each other, and what is written to.
    """
    bare = (node.name for node in before.graph.nodes if "val" not in node.meta)
    verify_graph(after, frozenset(bare))
    for what, of in (
        ("inputs", _inputs), ("results", _results), ("aliases among the results", _aliases),
        ("writes", _writes),
    ):  # fmt: skip
        old, new = of(before), of(after)
        if old != new:
            changed = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
            first = changed[0] if changed else (len(old), len(new))
            raise VerifyError(f"{what} changed: {first[0]} became {first[1]}")


def _fail(node: fx.Node, what: str) -> None:
    raise VerifyError(f"{node.op} {node.name!r} ({node.target}) {what}")


def _check_order(graph: fx.Graph) -> None:
    seen: set[fx.Node] = set()
    names: set[str] = set()
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                _fail(node, f"uses {operand.name!r} before it is made")
            if node not in operand.users:
                _fail(node, f"is not among the users of {operand.name!r}")
        if node.name in names:
            _fail(node, "has another node's name")
        seen.add(node)
        names.add(node.name)
    outputs = [node for node in graph.nodes if node.op == "output"]
    if len(outputs) != 1 or next(iter(reversed(graph.nodes))).op != "output":
        raise VerifyError(f"{len(outputs)} output nodes, or not at the end")


def _check_region(gm: fx.GraphModule, node: fx.Node) -> None:
    module = getattr(gm, str(node.target), None)
    if not isinstance(module, fx.GraphModule):
        _fail(node, "calls a region that does not exist")
        return
    inner = module.graph
    _check_order(inner)
    wanted = inner.find_nodes(op="placeholder")
    if len(wanted) != len(node.args):
        _fail(node, f"passes {len(node.args)} arguments, its region takes {len(wanted)}")
    results = inner.output_node().args[0]
    given = node.meta["val"]
    if not isinstance(given, tuple) or not isinstance(results, (tuple, list)):
        _fail(node, "does not give a tuple")
    types = [_type(each.meta.get("val")) for each in results]  # type: ignore[union-attr]
    if types != [_type(value) for value in given]:
        _fail(node, "has other results than its region")
    for user in node.users:
        if user.target is not operator.getitem:
            _fail(user, "uses a region's results as a whole")


def _type(value: Any) -> Any:
    """What must not change of a value, as something that compares without guards."""
    if isinstance(value, torch.Tensor):
        strides = tuple(map(str, value.stride())) if value.layout is torch.strided else ()
        return (tuple(map(str, value.shape)), strides, str(value.dtype), str(value.device))
    if isinstance(value, (tuple, list)):
        return tuple(_type(each) for each in value)
    return type(value).__name__


def _flat(graph: fx.Graph) -> list[Any]:
    leaves: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for each in value:
                collect(each)
        elif isinstance(value, dict):
            collect(list(value.values()))
        else:
            leaves.append(value)

    collect(graph.output_node().args)
    return leaves


def _inputs(gm: fx.GraphModule) -> list[Any]:
    nodes = gm.graph.find_nodes(op="placeholder")
    return [(str(node.target), _type(node.meta.get("val"))) for node in nodes]


def _results(gm: fx.GraphModule) -> list[Any]:
    return [
        _type(leaf.meta.get("val")) if isinstance(leaf, fx.Node) else leaf
        for leaf in _flat(gm.graph)
    ]


def _aliases(gm: fx.GraphModule) -> list[str]:
    first: dict[Any, str] = {}
    found = []
    for k, leaf in enumerate(_flat(gm.graph)):
        if not isinstance(leaf, fx.Node):
            found.append("")
            continue
        source = memory(leaf)
        label = f"input {source[0].target}" if source[0].op != "call_function" else ""
        if source[0].op == "call_module":
            label = ""
        # The same tensor twice is another thing than two tensors over the same memory.
        first.setdefault(leaf, f"result {k}")
        first.setdefault(source, label or f"memory of result {k}")
        found.append(f"{first[source]}, {first[leaf]}")
    return found


def _writes(gm: fx.GraphModule) -> list[str]:
    return [
        f"{node.target} to {memory(node.args[0])[0].name}"
        for node in gm.graph.nodes
        if mutates(node) and node.args and isinstance(node.args[0], fx.Node)
    ]
