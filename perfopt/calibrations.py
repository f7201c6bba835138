"""This machine's calibration: kept in the cache directory, and used for prices.

Each device has a file of its own, named by the device and by the version of torch, whose libraries
the rates are of. Without one, prices are of round figures, and nothing else changes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from perfopt.cost_model.calibration import Calibration, read
from perfopt.cost_model.device import (
    Device,
    UnknownDeviceError,
    calibrated,
    device_named,
    host_device,
)
from perfopt.options import cache_directory

Kind = Literal["cpu", "cuda"]
FOLDER = "calibrations"


def calibration_path(kind: Kind = "cpu") -> Path | None:
    """Where the calibration of this machine's device is kept; None without a cache directory."""
    directory = cache_directory()
    if directory is None:
        return None
    name = cpu_name() if kind == "cpu" else torch.cuda.get_device_name()
    slug = re.sub(r"[^a-z0-9]+", "-", f"{kind} {name}".lower()).strip("-")
    digest = hashlib.sha256(f"{name}\n{torch.__version__}".encode()).hexdigest()[:8]
    return directory / FOLDER / f"{slug}-{digest}.json"


def current(kind: Kind = "cpu") -> Calibration | None:
    """The calibration of this machine's device; None where none was made."""
    path = calibration_path(kind)
    if path is None:
        return None
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> Calibration | None:
    return read(path)


def calibration_hash() -> str:
    """The hash of the calibration that this machine's prices are from; "none" without any."""
    found = current()
    return "none" if found is None else found.hash


def present_device(threads: int | None = None) -> Device:
    """This machine's CPU, by its calibration where there is one."""
    return host_device(threads, current())


def named(name: str) -> Device:
    """The device of that name, as `device_named` finds it; those that are here as measured.

    "cpu" is this machine's, "cuda" the GPU that torch sees: of a GPU that is known only the start
    of kernels is taken from the measurements, of another every rate. Raises `UnknownDeviceError`.
    """
    plain = name.strip().lower()
    if plain in ("cpu", "host"):
        return present_device()
    return _present_gpu() if plain in ("cuda", "gpu") else device_named(name)


def _present_gpu() -> Device:
    if not torch.cuda.is_available():
        raise UnknownDeviceError("torch sees no GPU here; name one, as `perfopt devices` lists")
    found = current("cuda")
    try:
        known = device_named(torch.cuda.get_device_name())
    except UnknownDeviceError:
        if found is None:
            raise
        return _measured_gpu(found)
    if found is None:
        return known
    told = MappingProxyType({**known.sources, "launch_seconds": f"calibration {found.hash}"})
    return replace(
        known, launch_seconds=found.runs[0].launch_seconds, calibration=found.hash, sources=told
    )


def _measured_gpu(found: Calibration) -> Device:
    """A GPU that no table has, from its measurements alone."""
    rates, shape = found.runs[0], torch.cuda.get_device_properties(0)
    base = Device(
        found.device, "gpu", rates.matrix, MappingProxyType({"float32": rates.matrix["float32"]}),
        1.0, float(shape.total_memory), rates.launch_seconds, shape.multi_processor_count,
        cache_bytes=float(getattr(shape, "L2_cache_size", 0)),
    )  # fmt: skip
    return calibrated(base, found)


@cache
def cpu_model() -> str:
    """The CPU's model as the system names it."""
    model = ""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = (line.split(":", 1)[1] for line in lines if line.startswith("model name"))
        model = next(names, "").strip()
    except OSError:
        pass
    return model or platform.processor() or platform.machine()


@cache
def cpu_name() -> str:
    """The CPU's model and how many of its cores this process may use."""
    return f"{cpu_model()}, {cores()} cores, {torch.backends.cpu.get_cpu_capability()}"


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
