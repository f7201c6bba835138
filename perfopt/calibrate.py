"""This machine's calibration: where it is kept, and devices that use it."""

from __future__ import annotations

from perfopt.cost_model.device import Device, device_named


def named(name: str) -> Device:
    """The device of that name; this machine's, where it was calibrated, by its measurements."""
    return device_named(name)
