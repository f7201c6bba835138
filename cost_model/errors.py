"""How wrong the model is known to be: the scoreboard that ships with the package.

`scoreboard.json` is written by `perfopt validate --tables DIR --update`, never by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from perfopt.cost_model.device import UnknownDeviceError, device_named
from perfopt.cost_model.efficiency import chain
from perfopt.cost_model.specification import Device

SCOREBOARD = "scoreboard.json"
# Families of the model, and those of the scoreboard that stand in where they have no rows.
_STAND_IN = {
    "rms_norm": "layer_norm", "reduction": "softmax", "gather": "elementwise",
    "scatter": "elementwise", "bmm": "gemm", "linear": "gemm", "convolution": "gemm",
    "region": "elementwise",
}  # fmt: skip


@dataclass(frozen=True)
class MeasuredError:
    """A mean absolute percentage error, of how many rows, from which source.

    `exact` is False where another device of the architecture, another size class or another
    operation stands in: `device`, `family` and `size_class` say which.
    """

    mape: float
    rows: int
    source: str
    device: str
    family: str
    size_class: str
    exact: bool


@cache
def scoreboard() -> tuple[Mapping[str, Any], ...]:
    """The rows of the shipped scoreboard, none where it is missing."""
    path = files("perfopt.cost_model").joinpath(SCOREBOARD)
    if not path.is_file():
        return ()
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return tuple(MappingProxyType(row) for row in rows)


def measured_error(device: Device, family: str, size_class: str) -> MeasuredError | None:
    """The error of predictions like this one, or None where nothing like it was ever measured.

    The device itself counts before others of its architecture, its size class before all sizes,
    and of several sources the one with the most rows.
    """
    families = [family, *([_STAND_IN[family]] if family in _STAND_IN else [])]
    for wanted in families:
        rows = [row for row in scoreboard() if row["family"] == wanted]
        for near in (device.name, device.arch):
            for size in (size_class, "all"):
                found = [r for r in rows if r["size_class"] == size and near in _names(r["device"])]
                if found:
                    best = max(found, key=lambda row: row["rows"])
                    exact = near == device.name and size == size_class and wanted == family
                    return MeasuredError(
                        best["mape"], best["rows"], best["source"], best["device"], wanted, size,
                        exact,
                    )  # fmt: skip
    return None


@cache
def _names(device: str) -> tuple[str, ...]:
    try:
        return chain(device_named(device))[:2]
    except UnknownDeviceError:
        return (device,)
