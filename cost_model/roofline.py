"""`CostModel`: work into seconds on one device, and the name of the roof that binds.

    seconds = launch + max(FLOPs / peak, bytes / bandwidth)

A peak is approached only by large products and a bandwidth only by long streams, so a price is a
floor: good for comparing two ways to do the same thing on one device, which is what passes do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import fx

from perfopt.cost_model.cost import Bound, Cost
from perfopt.cost_model.device import ONEDNN, Device
from perfopt.cost_model.estimate import Estimate
from perfopt.cost_model.liveness import peak_bytes
from perfopt.cost_model.ops import Work, work
from perfopt.cost_model.pricing import estimated, streamed
from perfopt.cost_model.traffic import is_view, read_bytes, reads, region_bytes, written_bytes

ONEDNN_CALL = 9e-6  # seconds by which a call of oneDNN's linear is longer than one of ATen's mm


class CostModel:
    """Prices of nodes, regions and graphs on one `Device`.

    Symbolic sizes count at their hints. With `tf32`, float32 products use the tf32 peak.
    """

    def __init__(self, device: Device, tf32: bool = False) -> None:
        self.device = device
        self.tf32 = tf32

    def price(self, done: Work, moved: float, launches: int = 1) -> Cost:
        """The cost of `done` FLOPs and `moved` bytes in `launches` kernels."""
        device = self.device
        dtype = "tf32" if self.tf32 and done.matrix_dtype == "float32" else done.matrix_dtype
        # A simple instruction is one FLOP where the peak counts a multiply-add as two.
        products = done.matrix / device.matrix_peak(dtype)
        compute = products + done.vector / (device.vector_peak(done.vector_dtype) / 2)
        memory = self._memory_seconds(moved)
        launch = launches * device.launch_seconds
        roofs: list[tuple[float, Bound]] = [
            (launch, "launch"), (memory, "memory"), (compute, "compute"),
        ]  # fmt: skip
        bound = max(roofs, key=lambda roof: roof[0])[1]
        seconds = launch + max(compute, memory)
        flops, roof = done.matrix + done.vector, max(compute, memory)
        return Cost(flops, float(moved), launches, seconds, bound, roof, products)

    def _memory_seconds(self, moved: float) -> float:
        """Seconds to move bytes: what the last-level cache holds at its rate, the rest slower."""
        device = self.device
        cached = min(moved, device.cache_bytes) if device.cache_bandwidth else 0.0
        seconds = (moved - cached) / device.memory_bandwidth
        return seconds + (cached / device.cache_bandwidth if cached else 0.0)

    def node(self, node: fx.Node) -> Cost:
        """The cost of one node alone. Views, items, inputs and outputs cost nothing."""
        if node.op == "call_module" and node.meta.get("region"):
            return self._region(node)
        if node.op != "call_function" or is_view(node) or not _on_device(node):
            return Cost()
        done = work(node)
        moved = read_bytes(reads(node)) + written_bytes(node)
        price = self.price(done, moved)
        if self.device.kind == "gpu":
            return self._as(price, estimated(self.device, node, done, moved))
        if done.matrix_dtype == ONEDNN:
            price = replace(price, seconds=price.seconds + ONEDNN_CALL)
        return price

    def _region(self, node: fx.Node) -> Cost:
        owner = node.graph.owning_module
        module = getattr(owner, str(node.target))
        assert isinstance(module, fx.GraphModule)
        return self.nodes_as_region([n for n in module.graph.nodes if n.op == "call_function"])

    def nodes_as_region(self, nodes: Collection[fx.Node]) -> Cost:
        """The cost of the nodes as one kernel.

        Inputs from outside are read once, results that are used outside are written once.
        """
        members = set(nodes)
        done = sum((work(node) for node in nodes), Work())
        moved = region_bytes(members)
        price = self.price(done, moved)
        if self.device.kind == "gpu":
            return self._as(price, streamed(self.device, moved, done))
        return price

    def _as(self, floor: Cost, found: Estimate) -> Cost:
        """The cost with the seconds of an estimate, which is no less than the roofs allow."""
        seconds = max(float(found.seconds), floor.roof_seconds)
        bound: Any = str(found.bound)
        return replace(floor, seconds=seconds, bound=bound)

    def graph(self, gm: fx.GraphModule) -> Cost:
        """The cost of every node, one after the other."""
        return sum((self.node(node) for node in gm.graph.nodes), Cost())

    def peak_bytes(self, gm: fx.GraphModule) -> int:
        """The most bytes alive at once when the graph runs in its order; see `liveness`."""
        return peak_bytes(gm)


def _on_device(node: fx.Node) -> bool:
    """Whether the node makes tensors: arithmetic on sizes runs in Python and is not priced."""
    value = node.meta.get("val")
    return value is None or isinstance(value, (tuple, list)) or hasattr(value, "stride")
