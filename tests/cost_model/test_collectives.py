"""Collectives: golden seconds, properties, links and nodes, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfopt.cost_model.collectives import (
    OPS,
    CollectiveError,
    collective_array,
    collective_seconds,
    constants,
)
from perfopt.cost_model.device import device_named, host_device, known_devices

MIB = 1 << 20
LINKED = [device for device in known_devices() if device.kind == "gpu"]
GOLDEN = """\
                1 KiB  64 KiB   1 MiB  16 MiB 256 MiB  microseconds, 8 devices
A100    AR      21.7    23.2    45.9   195.1  2363.4
A100    AG      15.7    16.5    28.3   118.4  1233.3
A100    A2A     12.5    18.8    23.8    93.8  1213.1
H100    AR      16.1    17.1    30.4   108.4  1263.9
H100    AG      10.7    11.1    18.3    70.8   751.2
"""


def group_of(op: str) -> int:
    return 2 if op == "send" else 8


def test_golden() -> None:
    names = {"AR": "all_reduce", "AG": "all_gather", "A2A": "all_to_all"}
    sizes = [1024, 65536, MIB, 16 * MIB, 256 * MIB]
    lines = [GOLDEN.splitlines()[0]]
    for name, short in (("A100", "AR"), ("A100", "AG"), ("A100", "A2A"), ("H100", "AR"),
                        ("H100", "AG")):  # fmt: skip
        found = collective_array(device_named(name), names[short], sizes, 8) * 1e6
        lines.append(f"{name:7} {short:4}" + "".join(f"{each:8.1f}" for each in found))
    assert "\n".join(lines) + "\n" == GOLDEN


@given(
    op=st.sampled_from(OPS), device=st.sampled_from(LINKED), size=st.floats(0, 1e11),
    factor=st.floats(1, 100),
)  # fmt: skip
def test_more_bytes_never_take_less(op: str, device: str, size: float, factor: float) -> None:
    ours = collective_array(device, op, [size, size * factor], 2)  # type: ignore[arg-type]
    assert 0 < ours[0] <= ours[1] * (1 + 1e-12) and np.isfinite(ours).all()


@given(op=st.sampled_from(OPS), size=st.floats(0, 1e11), factor=st.floats(1, 10))
def test_a_faster_link_is_never_slower(op: str, size: float, factor: float) -> None:
    slow = device_named("h100")
    fast = replace(slow, link_bandwidth=slow.link_bandwidth * factor)
    group = group_of(op)
    before, after = (collective_seconds(each, op, size, group) for each in (slow, fast))
    assert after <= before * (1 + 1e-12)


@pytest.mark.parametrize("op", OPS)
def test_large_messages_stay_below_the_link(op: str) -> None:
    for name in ("V100", "A100", "H100", "B200", "GB200", "MI300X"):
        device, size = device_named(name), 1e10
        ranks = group_of(op)
        moved = size if op in ("send", "broadcast") else size * (ranks - 1) / ranks
        seconds = collective_seconds(device, op, size, ranks)
        assert moved / device.link_bandwidth < seconds < 12 * moved / device.link_bandwidth


def test_an_array_is_what_the_single_ones_are() -> None:
    device, sizes = device_named("b200"), np.array([[1e3, 1e5], [1e7, 1e9]])
    found = collective_array(device, "reduce_scatter", sizes, 4)
    assert found.shape == sizes.shape
    assert found[1, 0] == collective_seconds(device, "reduce_scatter", 1e7, 4)


def test_one_device_takes_no_time() -> None:
    assert collective_seconds(device_named("a100"), "all_reduce", 1e9, 1) == 0.0


def test_no_bytes_take_the_start() -> None:
    device = device_named("a100")
    start = constants().of("nvlink3")
    seconds = collective_seconds(device, "all_gather", 0, 8)
    assert seconds == pytest.approx(start["launch"] + 7 * start["hop"])


def test_switches_sum_floats_in_large_groups() -> None:
    h100, a100 = device_named("h100"), device_named("a100")
    floats, integers = (
        collective_seconds(h100, "all_reduce", 1e9, 8, dtype=dtype)
        for dtype in ("bfloat16", "int8")
    )
    assert floats < 0.9 * integers
    assert collective_seconds(a100, "all_reduce", 1e9, 8) == collective_seconds(
        a100, "all_reduce", 1e9, 8, dtype="int8"
    )


def test_without_a_link_it_is_pci_express() -> None:
    l40s, pair = device_named("l40s"), device_named("H100 PCIe")
    assert collective_seconds(l40s, "all_reduce", 1e9, 4) > 1e9 * 1.5 / l40s.pcie_bandwidth
    # A bridge joins two; four of them meet on PCI Express.
    two, four = (collective_seconds(pair, "all_gather", 1e9, n) for n in (2, 4))
    assert four > 5 * two


def test_a_mesh_of_few_leaves_wires_idle() -> None:
    mi300 = device_named("mi300x")
    two, eight = (collective_seconds(mi300, "all_gather", 1e9, n) for n in (2, 8))
    assert two > 3 * eight


def test_nodes_cross_adapters() -> None:
    h100 = device_named("h100")
    inside = collective_seconds(h100, "all_reduce", 1e9, 8)
    across = collective_seconds(h100, "all_reduce", 1e9, 16, nodes=2)
    slow = collective_seconds(h100, "all_reduce", 1e9, 16, nodes=2, nic=5e9)
    assert inside < across < slow
    assert slow > 1e9 / 8 / 5e9
    for op in OPS:
        group = 2 if op == "send" else 16
        assert collective_seconds(h100, op, 1e8, group, nodes=2) > 0


@pytest.mark.parametrize(
    ("name", "op", "size", "group", "nodes", "message"),
    [
        ("a100", "allreduce", 1, 8, 1, "unknown collective 'allreduce'; did you mean 'all_reduce'"),
        ("a100", "all_reduce", 1, 0, 1, "0 devices do not divide"),
        ("a100", "all_reduce", 1, 8, 3, "8 devices do not divide over 3 nodes"),
        ("a100", "all_reduce", -1, 8, 1, "bytes are below 0"),
        ("a100", "all_reduce", float("nan"), 8, 1, "not numbers"),
        ("a100", "send", 1, 8, 1, "send is between 2 devices"),
        ("a100", "all_reduce", 1, 16, 1, "nvlink3 joins 8: give the nodes"),
        ("t4", "all_reduce", 1, 8, 2, "T4 has no nic_bandwidth"),
        ("i9-10940X", "all_reduce", 1, 2, 1, "has neither links nor pcie_bandwidth"),
    ],
)
def test_errors(name: str, op: str, size: float, group: int, nodes: int, message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        collective_seconds(device_named(name), op, size, group, nodes=nodes)


def test_the_host_has_no_links() -> None:
    with pytest.raises(CollectiveError, match="neither links"):
        collective_seconds(host_device(1), "all_reduce", 1e6, 2)
