"""Constants of the time model, from `efficiency.toml`, for every device.

A device takes the constants under its own name; else those of its architecture; else those of the
architecture that `[like]` names as nearest; else those of its kind ("nvidia", "amd", "cpu"); else
`generic`. A table may hold some of the constants only: the rest comes from further down the chain.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from perfopt.cost_model.specification import Device

Constants = Mapping[str, Any]
_CLOCK = 1.5e9  # cycles per second of a device whose description has none


@cache
def tables() -> Mapping[str, Any]:
    """`efficiency.toml` as it is written."""
    text = files("perfopt.cost_model").joinpath("efficiency.toml").read_text(encoding="utf-8")
    return MappingProxyType(tomllib.loads(text))


def clock(device: Device) -> float:
    """The device's boost clock in Hz, or a usual one where it is not known."""
    return device.clock or _CLOCK


def chain(device: Device) -> tuple[str, ...]:
    """The names whose constants hold for a device, the nearest first."""
    kind = "cpu" if device.kind == "cpu" else "amd" if device.vendor == "AMD" else "nvidia"
    return _chain(device.name, device.arch, kind)


@cache
def _chain(name: str, arch: str, kind: str) -> tuple[str, ...]:
    nearest: Mapping[str, str] = tables()["like"]
    names = [name, arch]
    while names[-1] in nearest and nearest[names[-1]] not in names:
        names.append(nearest[names[-1]])
    return (*names, kind, "generic")


def constants(section: str, device: Device) -> Constants:
    """The constants of a section ("gemm.matrix", "streaming") for a device."""
    return _constants(section, chain(device))


@cache
def _constants(section: str, names: tuple[str, ...]) -> Constants:
    table = _section(section)
    found: dict[str, Any] = {}
    for name in reversed(names):
        found |= table.get(name, {})
    return MappingProxyType(found)


def _section(section: str) -> Mapping[str, Any]:
    table: Any = tables()
    for key in section.split("."):
        table = table[key]
    return table


def origin(section: str, device: Device) -> str:
    """The name under which a section holds the device's constants: its own or a relative's."""
    table = _section(section)
    return next(name for name in chain(device) if name in table)
