"""Devices: the figures that every price is made of.

A figure of `devices.toml` stands beside the key of its source; `Device.sources` keeps them, so
that a report can say where a peak comes from. Peaks are dense (no structured sparsity).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

ONEDNN = "float32/onednn"  # f32 products by oneDNN, where they are faster than ATen's own
Kind = Literal["gpu", "cpu"]
# What a core does where no datasheet is asked: see `host_device`.
_CLOCK = 3.0e9  # cycles per second under vector load
_PIPES = 2  # vector multiply-add pipes per core
_CORE_BANDWIDTH = 15e9  # bytes per second that one core draws from memory
_SOCKET_BANDWIDTH = 200e9  # bytes per second that all cores draw together
_CACHE_PER_CORE = 4 << 20  # bytes of last-level cache per core
_CALL = 1.5e-6  # seconds from one call in the program to the next
_VECTOR_BITS = {"AVX512": 512, "AVX2": 256}


class UnknownDeviceError(ValueError):
    """A device name that `devices.toml` does not hold."""


@dataclass(frozen=True)
class Device:
    """One device as a roofline sees it.

    `peaks` are FLOP/s of dense matrix products by the dtype of the operands ("bfloat16"; for
    accumulation in another type than usual "float16/float16"); a multiply-add counts as two.
    `vector` are FLOP/s of the lanes that pointwise code runs on, counted the same way.
    Bandwidths are bytes/s, sizes bytes, `launch_seconds` what one kernel or library call costs
    apart from its work. `cache_bandwidth` of 0.0 means unknown: the cache is then not counted on.
    """

    name: str
    kind: Kind
    peaks: Mapping[str, float]
    vector: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float
    launch_seconds: float
    cores: int
    cache_bytes: float = 0.0
    cache_bandwidth: float = 0.0
    vector_bits: int = 0
    arch: str = ""
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def matrix_peak(self, dtype: str) -> float:
        """FLOP/s of matrix products in `dtype`; float32's where the device has no such units."""
        return self.peaks.get(dtype, self.peaks["float32"])

    def vector_peak(self, dtype: str) -> float:
        """FLOP/s of pointwise code computing in `dtype`; float32's unless listed."""
        return self.vector.get(dtype, self.vector["float32"])


def _figure(entry: Mapping[str, Any], name: str, sources: dict[str, str]) -> float:
    figure = entry[name]
    sources[name] = figure["source"]
    return float(figure["value"])


def _parsed(entry: Mapping[str, Any], texts: Mapping[str, str]) -> Device:
    keys: dict[str, str] = {}
    peaks = {}
    for dtype, figure in entry["peaks"].items():
        peaks[dtype] = float(figure["value"])
        keys[f"peaks.{dtype}"] = figure["source"]
    names = ("memory_bandwidth", "memory_bytes", "launch_seconds", "cache_bytes", "cores")
    bandwidth, memory, launch, cache_bytes, cores = (_figure(entry, n, keys) for n in names)
    vector = {dtype: peaks[dtype] for dtype in ("float64", "float32")}
    return Device(
        name=entry["name"],
        kind=entry["kind"],
        peaks=MappingProxyType(peaks),
        vector=MappingProxyType(vector),
        arch=entry["arch"],
        aliases=tuple(entry["aliases"]),
        sources=MappingProxyType({name: texts[key] for name, key in keys.items()}),
        memory_bandwidth=bandwidth,
        memory_bytes=memory,
        launch_seconds=launch,
        cache_bytes=cache_bytes,
        cores=int(cores),
    )


@cache
def known_devices() -> tuple[Device, ...]:
    """The devices of `devices.toml`, in its order."""
    text = files("perfopt.cost_model").joinpath("devices.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return tuple(_parsed(entry, table["sources"]) for entry in table["device"])


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def device_named(name: str) -> Device:
    """The device of that name or alias, however spelled; "cpu" is the host.

    Raises `UnknownDeviceError` that names the nearest ones.
    """
    wanted = _plain(name)
    if wanted in ("cpu", "host"):
        return host_device()
    spellings: dict[str, Device] = {}
    for device in known_devices():
        for spelling in (device.name, *device.aliases):
            spellings[_plain(spelling)] = device
    if wanted in spellings:
        return spellings[wanted]
    near = difflib.get_close_matches(wanted, list(spellings), n=3, cutoff=0.4)
    nearest = list(dict.fromkeys(spellings[each].name for each in near))
    allowed = ", ".join(["cpu", *(device.name for device in known_devices())])
    hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
    raise UnknownDeviceError(f"unknown device {name!r}{hint}; known: {allowed}")


@cache
def _maker() -> str:
    """The vendor that the CPU names, or "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def host_device(threads: int | None = None) -> Device:
    """The CPU that this process runs on, with `threads` (default: torch's) of its cores.

    Nothing is measured: the vector width is what torch found, the rest are round figures of
    server cores of the last years (3 GHz, two multiply-add pipes, 15 GB/s per core).
    """
    threads = torch.get_num_threads() if threads is None else threads
    capability = torch.backends.cpu.get_cpu_capability()
    bits = _VECTOR_BITS.get(capability, 128)
    single = threads * _CLOCK * _PIPES * 2 * bits / 32
    peaks = {"float64": single / 2, "float32": single}
    if bits == 512 and _maker() != "GenuineIntel":
        # MKL, which multiplies for ATen, takes its AVX2 code on CPUs of other makers.
        peaks = {"float64": single / 4, "float32": single / 2, ONEDNN: single}
    memory = min(threads * _CORE_BANDWIDTH, _SOCKET_BANDWIDTH)
    rates = MappingProxyType({"float64": single / 2, "float32": single})
    sources = {f"peaks.{name}": f"{capability} at 3 GHz, 2 pipes" for name in peaks}
    sources |= dict.fromkeys(
        ("memory_bandwidth", "cache_bandwidth", "cache_bytes", "launch_seconds"), "round figure"
    )
    return Device(
        name=f"cpu ({capability}, {threads} thread{'s' if threads > 1 else ''})",
        kind="cpu",
        peaks=MappingProxyType(peaks),
        vector=rates,
        memory_bandwidth=memory,
        memory_bytes=float(64 << 30),
        launch_seconds=_CALL,
        cores=threads,
        cache_bytes=float(threads * _CACHE_PER_CORE),
        cache_bandwidth=2 * memory,
        vector_bits=bits,
        arch=capability,
        aliases=("cpu", "host"),
        sources=MappingProxyType(sources),
    )
