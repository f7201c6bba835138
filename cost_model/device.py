"""Devices by name: those of `devices.toml`, those of a user's file, and this machine's CPU."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

import torch

from perfopt.cost_model.calibration import Calibration
from perfopt.cost_model.specification import Device, DeviceFileError, nearest, parsed

ONEDNN = "float32/onednn"  # f32 products by oneDNN, where they are faster than ATen's own
# What a core does where no datasheet is asked: see `host_device`.
_CLOCK = 3.0e9  # cycles per second under vector load
_PIPES = 2  # vector multiply-add pipes per core
_CORE_BANDWIDTH = 15e9  # bytes per second that one core draws from memory
_SOCKET_BANDWIDTH = 200e9  # bytes per second that all cores draw together
_CACHE_PER_CORE = 4 << 20  # bytes of last-level cache per core
_CALL = 1.5e-6  # seconds from one call in the program to the next
_CACHED = 1.5  # how much faster than memory a working set is that lies in a cache
_VECTOR_BITS = {"AVX512": 512, "AVX2": 256}
# Makers and brands that a name may have or leave out.
_BRANDS = re.compile(r"\b(nvidia|amd|intel|tesla|geforce|instinct|radeon)\b")


class UnknownDeviceError(ValueError):
    """A device name that neither `devices.toml` nor a file holds."""


@cache
def known_devices() -> tuple[Device, ...]:
    """The devices of `devices.toml`, in its order."""
    text = files("perfopt.cost_model").joinpath("devices.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    made: dict[str, Device] = {}
    for entry in table["device"]:
        base = made[entry["like"]] if "like" in entry else None
        made[entry["name"]] = parsed(entry, table["sources"], base, "devices.toml")
    return tuple(made.values())


def plain_name(name: str) -> str:
    """A name without case, punctuation, maker and brand."""
    words = _BRANDS.sub(" ", re.sub(r"[^a-z0-9]+", " ", name.lower()))
    return words.replace(" ", "")


@cache
def _spellings() -> dict[str, Device]:
    return {
        plain_name(spelling): device
        for device in known_devices()
        for spelling in (device.name, *device.aliases)
    }


def device_named(name: str) -> Device:
    """The device of that name or alias, however spelled; "cpu" is the host.

    A path to a TOML file gives the device that it describes. Raises `UnknownDeviceError` that
    names the nearest ones, and `DeviceFileError` for a file that describes none.
    """
    if name.lower().endswith(".toml"):
        return device_from(Path(name))
    # torch's names of AMD's architectures have their features behind a colon.
    wanted = plain_name(name.split(":")[0] if name.startswith("gfx") else name)
    if wanted in ("cpu", "host"):
        return host_device()
    spellings = _spellings()
    if wanted in spellings:
        return spellings[wanted]
    near = difflib.get_close_matches(wanted, list(spellings), n=3, cutoff=0.4)
    nearby = list(dict.fromkeys(spellings[each].name for each in near))
    allowed = ", ".join(["cpu", *(device.name for device in known_devices())])
    hint = f"; nearest: {', '.join(nearby)}" if nearby else ""
    raise UnknownDeviceError(
        f"unknown device {name!r}{hint}; known: {allowed}, or the path of a .toml file"
    )


def device_from(path: Path) -> Device:
    """The device that a TOML file describes; see `docs/devices.md`.

    Raises `DeviceFileError` that names the file, the key, and what is allowed there.
    """
    try:
        entry = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnknownDeviceError(f"unknown device {str(path)!r}: there is no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DeviceFileError(f"{path}: {error}") from None
    sources = entry.pop("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(v, str) for v in sources.values()):
        raise DeviceFileError(f"{path}: sources is not a table of texts")
    return parsed(entry, sources, _like(entry.get("like"), path), str(path))


def _like(name: object, path: Path) -> Device | None:
    if name is None:
        return None
    base = _spellings().get(plain_name(name)) if isinstance(name, str) else None
    if base is None:
        hint = nearest(str(name), [n for d in known_devices() for n in (d.name, *d.aliases)])
        raise DeviceFileError(f"{path}: like is {name!r}, which is no known device{hint}")
    return base


@cache
def _maker() -> str:
    """The vendor that the CPU names, or "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


@cache
def _memory() -> float:
    """Bytes of the machine's memory; 64 GiB where the system does not tell."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return float(64 << 30)


def host_device(threads: int | None = None, calibration: Calibration | None = None) -> Device:
    """The CPU that this process runs on, with `threads` (default: torch's) of its cores.

    With a calibration its figures are those that were measured. Without, the vector width is what
    torch found, the rest are round figures of server cores of the last years (3 GHz, two
    multiply-add pipes, 15 GB/s per core).
    """
    threads = torch.get_num_threads() if threads is None else threads
    device = _supposed(threads)
    return device if calibration is None else calibrated(device, calibration)


def calibrated(device: Device, calibration: Calibration) -> Device:
    """The device with what was measured in place of what is supposed.

    Its last level of cache is the largest working set that was copied half as fast again as the
    largest of all.
    """
    rates = calibration.at(device.cores)
    copies = tuple(sorted(rates.copies))
    memory = copies[-1][1]
    cached = [(size, rate) for size, rate in copies if rate > _CACHED * memory]
    cache_bytes, cache_bandwidth = cached[-1] if cached else (device.cache_bytes, 0.0)
    names = [f"peaks.{dtype}" for dtype in rates.matrix]
    names += [f"vector.{dtype}" for dtype in rates.vector]
    names += ["memory_bandwidth", "cache_bytes", "cache_bandwidth", "launch_seconds"]
    names += ["thread_seconds", "page_seconds"]
    told = dict.fromkeys(names, f"measured, calibration {calibration.hash}")
    return replace(
        device,
        peaks=rates.matrix,
        vector=MappingProxyType({**device.vector, **rates.vector}),
        memory_bandwidth=memory,
        cache_bytes=cache_bytes,
        cache_bandwidth=cache_bandwidth,
        launch_seconds=rates.launch_seconds,
        thread_seconds=rates.thread_seconds,
        page_seconds=rates.page_seconds,
        copies=copies,
        sources=MappingProxyType({**device.sources, **told}),
        calibration=calibration.hash,
    )


def _supposed(threads: int) -> Device:
    capability = torch.backends.cpu.get_cpu_capability()
    bits = _VECTOR_BITS.get(capability, 128)
    single = threads * _CLOCK * _PIPES * 2 * bits / 32
    peaks = {"float64": single / 2, "float32": single}
    if bits == 512 and _maker() != "GenuineIntel":
        # MKL, which multiplies for ATen, takes its AVX2 code on CPUs of other makers.
        peaks = {"float64": single / 4, "float32": single / 2, ONEDNN: single}
    memory = min(threads * _CORE_BANDWIDTH, _SOCKET_BANDWIDTH)
    rates = MappingProxyType({"float64": single / 2, "float32": single})
    names = [f"peaks.{name}" for name in peaks] + [f"vector.{name}" for name in rates]
    sources = dict.fromkeys(names, f"{capability} at 3 GHz, 2 pipes")
    sources |= dict.fromkeys(
        ("memory_bandwidth", "cache_bandwidth", "cache_bytes", "launch_seconds"), "round figure"
    )
    sources |= {"cores": "threads of torch", "vector_bits": "torch", "memory_bytes": "the system"}
    return Device(
        name=f"cpu ({capability}, {threads} thread{'s' if threads > 1 else ''})",
        kind="cpu",
        peaks=MappingProxyType(peaks),
        vector=rates,
        memory_bandwidth=memory,
        memory_bytes=_memory(),
        launch_seconds=_CALL,
        cores=threads,
        cache_bytes=float(threads * _CACHE_PER_CORE),
        cache_bandwidth=2 * memory,
        vector_bits=bits,
        arch=capability,
        aliases=("cpu", "host"),
        sources=MappingProxyType(sources),
    )
