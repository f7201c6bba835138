"""Peak memory of a training or inference step: by kind, by module, over time.

The forward and backward graph run in their order; memory is counted by what holds it, freed after
its last use. The optimizer's state is there all along, its step comes after the backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from perfopt.cost_model.traffic import held_bytes, is_view, made, memory, mutates

# Bytes of state per byte of parameter, and of what the step itself holds besides.
OPTIMIZERS = {"none": (0.0, 0.0), "sgd": (0.0, 0.0), "momentum": (1.0, 0.0), "adamw": (2.0, 1.0)}
KINDS = ("parameters", "buffers", "inputs", "gradients", "optimizer", "kept", "results", "other")
_OUTSIDE = "(no module)"
_ROOT = re.compile(r"^(L\b\.?)?(self|fn|args\[\d+\])?")  # how Dynamo calls the model itself
Place = tuple[fx.Node, int]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes alive at the peak, and where they are.

    `at` is the node that is computed then, or "optimizer step"; `kinds` split the peak: parameters,
    buffers, inputs, gradients, the optimizer's state, what is kept for the backward pass, results,
    and other values of that moment. `modules` are bytes kept for the backward pass by the module
    that made them, the most first. `timeline` has the bytes after every node, forward then
    backward.
    """

    peak: int
    at: str
    kinds: Mapping[str, int]
    modules: Mapping[str, int]
    timeline: tuple[tuple[str, int], ...]

    def fits(self, capacity: float) -> bool:
        """Whether the peak is within `capacity` bytes."""
        return self.peak <= capacity


class _Walk:
    """Bytes alive by kind along a graph."""

    def __init__(self, always: Mapping[str, int]) -> None:
        self.now = dict.fromkeys(KINDS, 0) | dict(always)
        self.held: dict[Place, tuple[str, int]] = {}
        self.peak = sum(self.now.values())
        self.at, self.split = "", dict(self.now)
        self.timeline: list[tuple[str, int]] = []

    def add(self, place: Place, kind: str, size: int) -> None:
        if place not in self.held:
            self.held[place] = (kind, size)
            self.now[kind] += size

    def drop(self, place: Place) -> None:
        kind, size = self.held.pop(place, ("other", 0))
        self.now[kind] -= size

    def look(self, name: str) -> None:
        total = sum(self.now.values())
        if total > self.peak:
            self.peak, self.at, self.split = total, name, dict(self.now)

    def run(self, graph: fx.Graph, kinds: Mapping[Place, str], stays: Collection[Place]) -> None:
        """Compute the graph; results are of the kinds given, everything else is "other"."""
        last: dict[Place, int] = {}
        order = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        for number, node in enumerate(order):
            for arg in node.all_input_nodes:
                last[memory(arg)] = number
        dying: dict[int, list[Place]] = {}
        for place, number in last.items():
            dying.setdefault(number, []).append(place)
        for number, node in enumerate(order):
            if not is_view(node) and not mutates(node):
                for place, size in made(node):
                    self.add(place, kinds.get(place, "other"), size)
                self.look(node.name)
                for place, _ in made(node):
                    if place not in last and place not in stays:
                        self.drop(place)
            for place in dying.get(number, ()):
                if place not in stays:
                    self.drop(place)
            self.timeline.append((node.name, sum(self.now.values())))


def memory_of(
    forward: fx.Graph,
    backward: fx.Graph | None = None,
    *,
    results: int | None = None,
    parameters: Collection[str] = (),
    buffers: Collection[str] = (),
    optimizer: str = "none",
) -> MemoryReport:
    """The memory of a step whose forward graph gives `results`, then what it keeps for `backward`.

    `parameters` and `buffers` are names of the forward graph's inputs; those of the backward graph
    have the names of what the forward graph kept. Raises `ValueError` for an unknown `optimizer`.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is {optimizer!r}; allowed: {', '.join(OPTIMIZERS)}")
    inputs = [node for node in forward.nodes if node.op == "placeholder"]
    outputs = _results(forward)
    own = outputs[:results] if backward is not None else outputs
    kept = outputs[results:] if backward is not None else []
    weights = sum(held_bytes(n) for n in inputs if n.name in parameters)
    state, step = OPTIMIZERS[optimizer]
    walk = _Walk({"optimizer": int(state * weights)})
    for node in inputs:
        name = node.name
        kind = "parameters" if name in parameters else "buffers" if name in buffers else "inputs"
        walk.add(memory(node), kind, held_bytes(node))
    walk.look("forward entry")
    kinds = {memory(node): "kept" for node in kept} | {memory(node): "results" for node in own}
    stays = set(kinds) | {memory(node) for node in inputs}
    walk.run(forward, kinds, stays)
    modules = _modules(kept, {memory(node) for node in inputs})
    if backward is not None:
        _backward(walk, backward, {node.name: node for node in (*inputs, *outputs)}, kept)
        after = {**walk.now, "other": int(step * weights)}
        if sum(after.values()) > walk.peak:
            walk.peak, walk.at, walk.split = sum(after.values()), "optimizer step", after
    split = {kind: size for kind, size in walk.split.items() if size}
    return MemoryReport(
        walk.peak, walk.at, MappingProxyType(split), MappingProxyType(modules),
        tuple(walk.timeline),
    )  # fmt: skip


def _backward(
    walk: _Walk, graph: fx.Graph, known: Mapping[str, fx.Node], kept: Sequence[fx.Node]
) -> None:
    """The backward graph after the forward one: its inputs hold what was kept."""
    stays = {place for place in walk.held if walk.held[place][0] != "kept"}
    moved: set[Place] = set()
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        source = known.get(node.name)
        if source is not None and memory(source) in moved:
            walk.held[memory(node)] = ("kept", 0)  # another view of it
        elif source is None or memory(source) not in walk.held:
            walk.add(memory(node), "inputs", held_bytes(node))  # gradients from above
        elif memory(source) not in stays:
            walk.held[memory(node)] = walk.held.pop(memory(source))
            moved.add(memory(source))
        else:
            stays.add(memory(node))
            walk.held[memory(node)] = ("inputs", 0)
    gradients = {memory(node): "gradients" for node in _results(graph)}
    walk.run(graph, gradients, stays | set(gradients))


def _results(graph: fx.Graph) -> list[fx.Node]:
    (results,) = graph.output_node().args
    return [node for node in results if isinstance(node, fx.Node)]  # type: ignore[union-attr]


def _modules(kept: Sequence[fx.Node], inputs: Collection[Place]) -> dict[str, int]:
    """Bytes kept by the module whose forward made them."""
    found: dict[str, int] = {}
    seen: set[Place] = set(inputs)
    for node in kept:
        place = memory(node)
        if place in seen:
            continue
        seen.add(place)
        name = module_of(place)
        found[name] = found.get(name, 0) + held_bytes(node)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def module_of(place: Place) -> str:
    """The innermost module of the user that a value comes from, as a path; else "(no module)"."""
    node, number = place
    module = getattr(node.graph.owning_module, str(node.target), None)
    if node.op == "call_module" and isinstance(module, fx.GraphModule):
        node = module.graph.output_node().args[0][number]  # type: ignore[index, assignment]
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return _OUTSIDE
    path = str(list(stack.values())[-1][0])
    path = path.replace("._modules['", ".").replace("['", ".").replace("']", "")
    return _ROOT.sub("", path).strip(".") or _OUTSIDE
