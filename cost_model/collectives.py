"""Seconds of collective operations, by message size, group and link.

A ring of n devices passes (n - 1) / n of the buffer over each link, twice for an all-reduce. Small
messages carry their own flags, which costs bandwidth and no start; large ones start a pipeline and
then run at the bus's rate:

    launch + steps * hop + min(W / (packed * B), base + W / B + own share / (copy * B))

with W the bytes over one link, B what a ring reaches of the link's bandwidth, and a minimum that is
smooth. Where switches can sum (NVLS), the all-reduce of floats in groups of more than four takes
S / (switch * B) instead. All-to-all exchanges between all pairs at once. Between nodes, the data
that leaves a node crosses one adapter per device; the slower of both ways counts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfopt.cost_model.device import Device, nearest

Array = NDArray[np.float64]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")
_SHARP = 4.0  # of the smooth minimum
_PCIE_SHARE = 0.75  # of PCI Express that transfers between devices reach; assumed
_SUMMING = ("nvlink4", "nvlink5")  # generations whose switches sum
_SUMMED = ("float32", "bfloat16", "float16")
_SUMMING_GROUP = 5  # from how many ranks on sums in the switches are the faster way


class CollectiveError(ValueError):
    """A collective that the device, or the group, cannot do."""


@dataclass(frozen=True)
class Constants:
    """What is fitted: `shared` by all links, `links` by the name of a link."""

    shared: Mapping[str, float]
    links: Mapping[str, Mapping[str, float]]

    def of(self, link: str) -> Mapping[str, float]:
        """The constants of a link, or those of links without measurements."""
        return self.links.get(link, self.links["other"])


@dataclass(frozen=True)
class _Way:
    """The wires that one group uses: `link` names them, `bandwidth` is of one device's."""

    link: str
    bandwidth: float
    sums: bool


@cache
def constants() -> Constants:
    """The constants of `collectives.toml`."""
    text = files("perfopt.cost_model").joinpath("collectives.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)
    links = table["link"]
    links |= {name: links[like] for name, like in table["like"].items()}
    return Constants(MappingProxyType(table["shared"]), MappingProxyType(links))


def collective_seconds(
    device: Device,
    op: str,
    bytes: float,
    group: int,
    *,
    nodes: int = 1,
    dtype: str = "bfloat16",
    nic: float = 0.0,
) -> float:
    """Seconds of one collective among `group` devices, evenly over `nodes` machines.

    `op` is one of `OPS`. `bytes` is the whole buffer as NCCL's tests count it: of all_reduce,
    broadcast and send the message, of all_gather the gathered result, of reduce_scatter the operand
    of one rank, of all_to_all what one rank sends. `dtype` decides whether switches can sum; `nic`
    are bytes/s of each device's adapter, by default the device's. A group of one takes no time.

    Raises `CollectiveError` for an unknown operation, a group that the links or nodes cannot hold,
    and devices without links.
    """
    sizes = np.asarray([bytes], np.float64)
    found = collective_array(device, op, sizes, group, nodes=nodes, dtype=dtype, nic=nic)
    return float(found[0])


def collective_array(
    device: Device,
    op: str,
    bytes: ArrayLike,
    group: int,
    *,
    nodes: int = 1,
    dtype: str = "bfloat16",
    nic: float = 0.0,
    given: Constants | None = None,
) -> Array:
    """The same for many sizes at once, in an array of their shape; `given` replaces constants."""
    sizes = np.asarray(bytes, np.float64)
    _check(op, sizes, group, nodes)
    if group == 1:
        return np.zeros(sizes.shape)
    way = _way(device, group // nodes, dtype)
    nic = nic or device.nic_bandwidth
    if nodes > 1 and not nic:
        raise CollectiveError(f"{device.name} has no nic_bandwidth, which {nodes} nodes need")
    fitted = given or constants()
    if op in ("all_to_all", "send"):
        return _pairs(fitted, way, op, sizes, group, nodes, nic)
    return _ring(fitted, way, op, sizes, group, nodes, nic)


def _check(op: str, sizes: Array, group: int, nodes: int) -> None:
    if op not in OPS:
        hint = nearest(op, OPS) or "."
        raise CollectiveError(f"unknown collective {op!r}{hint} Allowed: {', '.join(OPS)}.")
    if group < 1 or nodes < 1 or group % nodes:
        raise CollectiveError(f"{group} devices do not divide over {nodes} nodes")
    if op == "send" and group > 2:
        raise CollectiveError(f"send is between 2 devices, not {group}")
    if not np.all(sizes >= 0):
        raise CollectiveError("bytes are below 0, or not numbers")


def _way(device: Device, local: int, dtype: str) -> _Way:
    """The wires between `local` devices of one node."""
    if device.link and local <= device.link_domain:
        share = 1.0
        if device.fabric == "mesh" and local > 1:
            share = (local - 1) / (device.link_domain - 1)  # its wires to the others lie idle
        sums = device.fabric == "switch" and device.link in _SUMMING and dtype in _SUMMED
        return _Way(device.link, device.link_bandwidth * share, sums)
    if device.link and device.fabric != "bridge":
        raise CollectiveError(
            f"{local} of {device.name} in one node, but {device.link} joins {device.link_domain}: "
            f"give the nodes that they are on"
        )
    if not device.pcie_bandwidth:
        raise CollectiveError(f"{device.name} has neither links nor pcie_bandwidth")
    return _Way("pcie", device.pcie_bandwidth * _PCIE_SHARE, False)


def _ring(
    fitted: Constants, way: _Way, op: str, sizes: Array, group: int, nodes: int, nic: float
) -> Array:
    shared, link = fitted.shared, fitted.of(way.link)
    bus = way.bandwidth * link["bus"]
    rounds = 2 if op == "all_reduce" else 1
    local = group // nodes
    steps = rounds * (group - 1 if op == "broadcast" else local - 1)
    moved = sizes if op == "broadcast" else rounds * sizes * (group - 1) / group
    start = link["launch"] + steps * link["hop"]
    small = moved / (bus * shared["packed"])
    large = moved / bus
    if op != "broadcast":
        large = large + sizes / group / (bus * shared["copy"])
    if op == "all_reduce" and way.sums and local >= _SUMMING_GROUP:
        large = sizes / (bus * shared["switch"])
    if nodes > 1:
        far = rounds * sizes * (nodes - 1) / nodes / local
        hops = 2 * int(np.ceil(np.log2(nodes))) if op == "all_reduce" else nodes - 1
        start += hops * shared["net_hop"]
        small = np.maximum(small, far / (nic * shared["net_packed"]))
        large = np.maximum(large, far / (nic * shared["net_bus"]))
    return np.asarray(start + _lesser(small, link["base"] + large))


def _pairs(
    fitted: Constants, way: _Way, op: str, sizes: Array, group: int, nodes: int, nic: float
) -> Array:
    shared, link = fitted.shared, fitted.of(way.link)
    bus = way.bandwidth * link["bus"]
    peers = group - 1
    moved = sizes if op == "send" else sizes * peers / group
    start = link["launch"] + link["hop"] + peers * shared["peer"]
    small = moved / (bus * shared["pairs"])
    large = moved / bus
    if op == "all_to_all":
        large = large + sizes / group / (bus * shared["copy"])
    if nodes > 1:
        far = sizes if op == "send" else sizes * (nodes - 1) / nodes
        start += shared["net_hop"]
        small = np.maximum(small, far / (nic * shared["net_packed"]))
        large = np.maximum(large, far / (nic * shared["net_bus"]))
    return np.asarray(start + _lesser(small, shared["pairs_base"] + large))


def _lesser(first: Array, second: Array) -> Array:
    """The smooth minimum: at most either of them, and never falling in either."""
    ratio = first / second  # the second starts with a base, so it is never 0
    return np.asarray(first / (1.0 + ratio**_SHARP) ** (1.0 / _SHARP))
