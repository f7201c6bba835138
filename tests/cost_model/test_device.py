"""Devices: names, sources, errors."""

from __future__ import annotations

import pytest

from perfopt.cost_model.device import (
    Device,
    UnknownDeviceError,
    device_named,
    host_device,
    known_devices,
)


@pytest.mark.parametrize("device", known_devices(), ids=lambda d: d.name)
def test_every_device_is_complete(device: Device) -> None:
    assert device_named(device.name) is device
    for figure in ("memory_bandwidth", "memory_bytes", "launch_seconds", "cores", "cache_bytes"):
        assert getattr(device, figure) > 0
        assert device.sources[figure]
    assert set(device.sources) >= {f"peaks.{dtype}" for dtype in device.peaks}
    assert device.peaks["float32"] > device.peaks["float64"] * 0.5
    # Bytes per FLOP of real devices; a slip of a power of ten falls out of it.
    assert 5e-3 < device.memory_bandwidth / device.peaks["float32"] < 0.2


def test_the_devices_asked_for_are_known() -> None:
    for name in ("V100", "T4", "A10", "A100", "L4", "L40S", "RTX4090", "H100", "H200", "B200",
                 "MI250X", "MI300X"):  # fmt: skip
        assert device_named(name).kind == "gpu"


def test_aliases_are_unique() -> None:
    names = [n for d in known_devices() for n in {d.name, *d.aliases}]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("spelled", ["a100", "A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"])
def test_spellings(spelled: str) -> None:
    assert device_named(spelled).name == "A100-SXM4-80GB"


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(UnknownDeviceError, match=r"unknown device 'H1000'; nearest: H100"):
        device_named("H1000")


def test_missing_units_fall_back_to_float32() -> None:
    v100 = device_named("V100")
    assert "bfloat16" not in v100.peaks
    assert v100.matrix_peak("bfloat16") == v100.peaks["float32"]


def test_the_host_scales_with_its_threads() -> None:
    one, two = host_device(1), host_device(2)
    assert two.peaks["float32"] == 2 * one.peaks["float32"]
    assert one.peaks["float64"] == one.peaks["float32"] / 2
    assert device_named("cpu").kind == "cpu"
