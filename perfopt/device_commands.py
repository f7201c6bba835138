"""`perfopt devices` and `perfopt calibrate`: what is known of devices, and what is measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from perfopt.cost_model.calibration import Calibration
from perfopt.cost_model.device import Device, known_devices
from perfopt.cost_model.specification import FIGURES

Answer = tuple[str, int]
Bar = Callable[[], AbstractContextManager[Callable[[str, float], None]]]
WIDTH = 80
# The unit of each figure, and what one of it is in the figure's own unit.
_RATE, _WORK, _TICKS = ("GB/s", 1e9), ("TFLOP/s", 1e12), ("MHz", 1e6)
_MIB, _TIME = ("MiB", float(1 << 20)), ("us", 1e-6)
_UNITS = {
    "memory_bandwidth": _RATE, "cache_bandwidth": _RATE, "l2_bandwidth": _RATE,
    "far_cache_bandwidth": _RATE, "link_bandwidth": _RATE, "pcie_bandwidth": _RATE,
    "nic_bandwidth": _RATE, "memory_bytes": ("GB", 1e9), "cache_bytes": _MIB,
    "far_cache_bytes": _MIB, "shared_bytes": ("KiB", 1024.0), "clock": _TICKS,
    "matrix_clock": _TICKS, "base_clock": _TICKS, "pin_rate": ("Gbit/s", 1e9), "watts": ("W", 1.0),
    "launch_seconds": _TIME, "thread_seconds": _TIME, "page_seconds": ("us/MiB", 1e-6 / (1 << 20)),
}  # fmt: skip
_FABRICS = {
    "switch": "each to each through switches", "mesh": "wired to each other", "bridge": "in pairs",
}  # fmt: skip
_BUSY = 0.5  # of the cores that others run on: what is measured beside them says little
_COLUMNS = ("float64", "float32", "bfloat16", "float16", "float8")


def add_device_commands(commands: Any, bar: Bar) -> None:
    """Add the commands to an argparse command group, as `add_commands` does.

    `bar` opens a progress bar and gives what tells it the step and the part that is done.
    """
    parser = commands.add_parser(
        "devices",
        help="the devices that are known, or one of them with its sources",
        description="List the devices that can be named anywhere, or show every figure of one and "
        "where it comes from. NAME is spelled in any way, or the path of a .toml file.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a device, 'cpu', or a .toml file")
    parser.add_argument("--json", action="store_true", help="JSON: every figure, in SI units")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    parser.set_defaults(run=_devices)
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine, for prices that are of it",
        description="Measure what this machine copies, multiplies and starts in a second, and keep "
        "it for every later prediction and compilation. Best on an idle machine.",
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="N", help="how long, about (default 20)"
    )
    parser.add_argument("--json", action="store_true", help="JSON: every figure, in SI units")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    parser.set_defaults(run=_calibrate, bar=bar)


def _calibrate(args: argparse.Namespace) -> Answer:
    from perfopt.calibrate import calibrate
    from perfopt.calibrations import calibration_path, cores
    from perfopt.cost_model.calibration import dumps

    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    with args.bar() as tell:
        made = calibrate(args.seconds, tell)
    if args.json:
        tables = [
            {
                "hash": each.calibration.hash,
                "path": str(calibration_path(each.calibration.kind) or ""),
                "refused": each.refused,
                **json.loads(dumps(each.calibration)),
            }
            for each in made
        ]
        return _json(tables), 0
    lines: list[str] = []
    for each in made:
        found = each.calibration
        path = calibration_path(found.kind)
        where = f"kept in {path}" if path else "not kept: there is no cache directory"
        lines += [found.device, f"  calibration {found.hash}, {where}", "", *_measured(found), ""]
        if each.refused:
            lines += [*_wrapped(f"Not kept: {each.refused}."), ""]
    if busy > _BUSY * cores() and not any(each.refused for each in made):
        lines += [f"The machine was busy (load {busy:.1f}): measure again when it is idle.", ""]
    return "\n".join(lines[:-1]) + "\n", 0


def _measured(made: Calibration) -> Iterator[str]:
    counts = [f"{each.threads} threads" if each.threads else "" for each in made.runs]
    yield f"{'':26}" + "".join(f"{count.replace('1 threads', '1 thread'):>13}" for count in counts)
    first = made.runs[0]
    for dtype in first.matrix:
        cells = (f"{each.matrix[dtype] / 1e9:7.0f} GFLOP/s" for each in made.runs)
        yield f"  {'products ' + dtype:24} " + "".join(f"{cell:>13}" for cell in cells)
    for dtype in first.vector:
        cells = (f"{each.vector[dtype] / 1e9:7.0f} GFLOP/s" for each in made.runs)
        yield f"  {'vector code ' + dtype:24} " + "".join(f"{cell:>13}" for cell in cells)
    for k, (size, _) in enumerate(first.copies):
        cells = (f"{each.copies[k][1] / 1e9:.1f} GB/s" for each in made.runs)
        yield f"  {f'copy of {size / 1024:.0f} KiB':24} " + "".join(f"{cell:>13}" for cell in cells)
    names = {"launch_seconds": "a call", "dispatch_seconds": "its start by the host",
             "thread_seconds": "starting threads"}  # fmt: skip
    for key, what in names.items():
        if any(getattr(each, key) for each in made.runs):
            cells = (f"{getattr(each, key) * 1e6:.2f} us" for each in made.runs)
            yield f"  {what:24} " + "".join(f"{cell:>13}" for cell in cells)
    if any(each.page_seconds for each in made.runs):
        cells = (f"{each.page_seconds * (1 << 20) * 1e6:.0f} us" for each in made.runs)
        yield f"  {'a MiB of new memory':24} " + "".join(f"{cell:>13}" for cell in cells)


def _devices(args: argparse.Namespace) -> Answer:
    from perfopt.calibrations import named

    if args.name is None:
        if args.json:
            return _json([_table(device) for device in known_devices()]), 0
        return "\n".join(_list()) + "\n", 0
    device = named(args.name)
    if args.json:
        return _json(_table(device)), 0
    return "\n".join(_one(device)) + "\n", 0


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _table(device: Device) -> dict[str, Any]:
    table = {each.name: getattr(device, each.name) for each in dataclasses.fields(device)}
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in table.items()}


def _list() -> Iterator[str]:
    yield f"{'':19} {'arch':>7} {'GB':>5} {'GB/s':>6}   dense TFLOP/s of matrix products"
    heads = " ".join(f"{name.replace('float', 'f'):>7}" for name in _COLUMNS)
    yield f"{'':40} {heads}"
    for each in known_devices():
        rates = " ".join(f"{_tera(each.peaks.get(name)):>7}" for name in _COLUMNS)
        yield (
            f"{each.name:19} {each.arch:>7} {each.memory_bytes / 1e9:5.0f} "
            f"{each.memory_bandwidth / 1e9:6.0f} {rates}"
        )
    yield ""
    yield "`perfopt devices NAME` shows every figure and its source; also of a .toml file."


def _tera(rate: float | None) -> str:
    return "-" if rate is None else _digits(rate / 1e12)


def _digits(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}"


def _one(device: Device) -> Iterator[str]:
    maker = f"{device.vendor} " if device.vendor else ""
    yield f"{device.name}: {maker}{device.kind}, {device.arch}"
    if device.aliases:
        yield from _wrapped(f"also {', '.join(device.aliases)}")
    if device.note:
        yield from _wrapped(device.note)
    if device.link:
        yield f"  linked by {device.link}, {_FABRICS[device.fabric]}"
    if "cpu" in device.aliases:
        yield f"  calibration {device.calibration}"
    yield ""
    numbers: dict[str, int] = {}
    for key, text in _figures(device):
        source = device.sources.get(key)
        number = numbers.setdefault(source, len(numbers) + 1) if source else None
        yield f"  {key:24} {text:>16}  {'' if number is None else f'[{number}]'}".rstrip()
    for size, rate in device.copies:
        label, text = f"copy of {_digits(size / 1024)} KiB", f"{_digits(rate / 1e9)} GB/s"
        yield f"  {label:24} {text:>16}"
    yield ""
    for source, number in numbers.items():
        yield from textwrap.wrap(
            source, WIDTH, initial_indent=f"  [{number}] ", subsequent_indent="      "
        )


def _figures(device: Device) -> Iterator[tuple[str, str]]:
    for kind in ("peaks", "vector"):
        for dtype, rate in getattr(device, kind).items():
            yield f"{kind}.{dtype}", f"{_digits(rate / _WORK[1])} {_WORK[0]}"
    for key in FIGURES:
        value = getattr(device, key)
        if value:
            unit, size = _UNITS.get(key, ("", 1.0))
            yield key, f"{_digits(value / size)} {unit}".strip()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
