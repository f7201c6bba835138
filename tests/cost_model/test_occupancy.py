"""Occupancy of generated kernels, and the host that issues them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfopt.cost_model.device import device_named, known_devices
from perfopt.cost_model.dispatch import timeline
from perfopt.cost_model.occupancy import Occupancy, occupancy, stream_share, waves

GPUS = [device for device in known_devices() if device.kind == "gpu"]


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "expected"),
    [
        (256, 32, 0, Occupancy(8, 64, 1.0, "warps")),
        (256, 64, 0, Occupancy(4, 32, 0.5, "registers")),
        (1024, 32, 0, Occupancy(2, 64, 1.0, "warps")),
        (32, 16, 0, Occupancy(32, 32, 0.5, "blocks")),
        (128, 255, 0, Occupancy(2, 8, 0.125, "registers")),
        (256, 32, 100_000, Occupancy(2, 16, 0.25, "shared memory")),
        (33, 0, 0, Occupancy(32, 64, 1.0, "warps")),
    ],
)
def test_h100(threads: int, registers: int, shared: float, expected: Occupancy) -> None:
    assert occupancy(device_named("h100"), threads, registers, shared) == expected


def test_blocks_that_do_not_fit() -> None:
    h100 = device_named("h100")
    with pytest.raises(ValueError, match="too many shared memory for a core of H100"):
        occupancy(h100, 128, 32, 1e6)
    with pytest.raises(ValueError, match="too many registers"):
        occupancy(h100, 1024, 128)
    with pytest.raises(ValueError, match="threads is 0"):
        occupancy(h100, 0)
    with pytest.raises(ValueError, match="at most 255"):
        occupancy(h100, 32, 256)


@given(
    device=st.sampled_from(GPUS), threads=st.integers(1, 512), registers=st.integers(1, 64),
    more=st.integers(0, 64),
)  # fmt: skip
def test_more_registers_never_hold_more(
    device: object, threads: int, registers: int, more: int
) -> None:
    few = occupancy(device, threads, registers)  # type: ignore[arg-type]
    many = occupancy(device, threads, registers + more)  # type: ignore[arg-type]
    assert 0 < many.warps <= few.warps and many.share <= few.share <= 1


def test_few_warps_stream_slower() -> None:
    h100 = device_named("h100")
    full, thin = occupancy(h100, 256, 32), occupancy(h100, 128, 255)
    assert stream_share(h100, full) == 1.0
    assert stream_share(h100, thin, load=4) < stream_share(h100, thin, load=16) < 0.5
    assert waves(h100, 132 * 8, full) == 1 and waves(h100, 132 * 8 + 1, full) == 2


def test_a_host_that_is_slower_than_its_device() -> None:
    slow = timeline([1e-6] * 100, call=5e-6)
    assert slow.bound == "launch" and slow.seconds == pytest.approx(501e-6)
    assert slow.idle == pytest.approx(401e-6)
    fast = timeline([50e-6] * 100, call=5e-6)
    assert fast.bound is None and fast.seconds == pytest.approx(5005e-6)
    assert timeline([], 1.0).seconds == 0
    # Views take the host's time alone.
    assert timeline([0.0] * 10, call=1e-6, first=5e-6).seconds == pytest.approx(15e-6)


@given(st.lists(st.floats(0, 1), max_size=20), st.floats(0, 1))
def test_a_program_takes_no_less_than_its_parts(kernels: list[float], call: float) -> None:
    found = timeline(kernels, call)
    assert found.seconds >= max(sum(kernels), call * len(kernels)) * (1 - 1e-9)
    assert found.seconds <= (sum(kernels) + call * len(kernels)) * (1 + 1e-9)
