"""Fit the constants of `cost_model/collectives.toml` to measured collectives.

    python -m benchmarks.fit_collectives DIR

DIR holds `aiconfigurator/nccl_collectives.csv` (system, device, op_name, nccl_dtype, num_gpus,
message size in elements, latency_ms). Prints the constants, the mean absolute percentage error by
device and operation, and the same for each device with the constants that the others give: those
of all links fitted without it, and the geometric mean of theirs for its own link.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from perfopt.cost_model.collectives import Constants, collective_array, constants
from perfopt.cost_model.device import Device, device_named

Array = NDArray[np.float64]
NAMES = {"alltoall": "all_to_all"}
DTYPES = {"half": ("float16", 2), "int8": ("int8", 1)}
LINK = ("launch", "hop", "bus", "base")
SHARED = ("packed", "copy", "switch", "pairs", "peer", "pairs_base")
START = {
    "launch": 8e-6, "hop": 1e-6, "bus": 0.7, "base": 25e-6, "packed": 0.4, "copy": 2.2,
    "switch": 0.6, "pairs": 0.03, "peer": 0.25e-6, "pairs_base": 6e-6,
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """Measured seconds of one operation in one group, by bytes."""

    device: Device
    op: str
    dtype: str
    group: int
    sizes: Array
    seconds: Array

    def predicted(self, given: Constants) -> Array:
        """What the model says with these constants."""
        return collective_array(
            self.device, self.op, self.sizes, self.group, dtype=self.dtype, given=given
        )


def read(folder: Path) -> list[Series]:
    """The rows of the table, one series for each device, operation, dtype and group."""
    found: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    with (folder / "aiconfigurator/nccl_collectives.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = (row["system"], row["op_name"], row["nccl_dtype"], row["num_gpus"])
            elements = float(row["message_size_elems_or_bytes"])
            size = elements * DTYPES[row["nccl_dtype"]][1]
            found.setdefault(key, []).append((size, float(row["latency_ms"]) * 1e-3))
    return [
        Series(
            device_named(system), NAMES.get(op, op), DTYPES[dtype][0], int(group),
            *np.array(rows).T,
        )
        for (system, op, dtype, group), rows in found.items()
    ]  # fmt: skip


def constants_of(logs: Array, links: Sequence[str]) -> Constants:
    """Constants from the logarithms that the fit works on."""
    values = [float(each) for each in np.exp(logs)]
    table = {
        link: dict(zip(LINK, values[k * len(LINK) :], strict=False)) for k, link in enumerate(links)
    }
    every = np.exp(logs[: len(LINK) * len(links)]).reshape(len(links), -1)
    mean = np.exp(np.log(every).mean(axis=0))
    table["other"] = dict(zip(LINK, map(float, mean), strict=True))
    shared = {**constants().shared, **dict(zip(SHARED, values[-len(SHARED) :], strict=True))}
    return Constants(MappingProxyType(shared), MappingProxyType(table))


def fit(series: Sequence[Series]) -> Constants:
    """The constants with the least deviation of logarithms, far ones counted less."""
    links = list(dict.fromkeys(each.device.link for each in series))

    def off(logs: Array) -> Array:
        given = constants_of(logs, links)
        return np.concatenate([np.log(s.predicted(given) / s.seconds) for s in series])

    start = [START[name] for name in LINK] * len(links) + [START[name] for name in SHARED]
    found = least_squares(off, np.log(start), loss="soft_l1", f_scale=0.1)
    return constants_of(found.x, links)


def error(series: Sequence[Series], given: Constants, device: Device, op: str) -> float:
    """The mean absolute percentage error of one device and operation."""
    own = [s for s in series if s.device is device and s.op == op]
    return 100 * float(
        np.mean(np.concatenate([abs(s.predicted(given) / s.seconds - 1) for s in own]))
    )


def main(argv: Sequence[str]) -> int:
    """Fit, and print what came out."""
    if len(argv) != 1:
        print(__doc__)
        return 2
    series = read(Path(argv[0]))
    devices = list(dict.fromkeys(s.device for s in series))
    ops = list(dict.fromkeys(s.op for s in series))
    fitted, shipped = fit(series), constants()
    for name, value in fitted.shared.items():
        print(f"{name:11} {value:.3g}")
    for link, table in fitted.links.items():
        print(f"{link:11} " + "  ".join(f"{name} {value:.3g}" for name, value in table.items()))
    print(f"\nmean error, %      {' '.join(f'{op:>15}' for op in ops)}")
    for device in devices:
        rest = fit([s for s in series if s.device is not device])
        rows = {"shipped": shipped, "fitted": fitted, "left out": rest}
        for name, given in rows.items():
            cells = (f"{error(series, given, device, op):15.1f}" for op in ops)
            print(f"{device.name:15} {name:8} {' '.join(cells)}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
