"""`Device`: the figures that every price is made of, and how a table of them is read.

Figures are FLOP/s (dense, no structured sparsity; a multiply-add is two), bytes/s, bytes, Hz,
seconds and watts. 0 means unknown. `docs/devices.md` explains each.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["gpu", "cpu"]
DTYPES = (
    "float64", "float32", "tf32", "bfloat16", "float16", "float8", "float6", "float4", "int8",
    "int4",
)  # fmt: skip
# With `like` a device has these figures only where it gives them itself.
_TEXTS = ("name", "kind", "vendor", "arch", "link", "fabric", "like", "note")
_FABRICS = ("", "switch", "mesh", "bridge")
_REQUIRED = ("memory_bandwidth", "memory_bytes", "cores", "peaks.float32")
_UNITS = "bytes, bytes/s, FLOP/s, Hz, seconds or watts"


class DeviceFileError(ValueError):
    """A description of a device that lacks something or holds something unknown."""


def _none() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Device:
    """One device as the cost model sees it.

    `peaks` are FLOP/s of matrix products by the dtype of the operands ("bfloat16"; where
    accumulation in another type than usual has another rate, "float16/float16"). `vector` are
    FLOP/s of the lanes that pointwise code runs on. `launch_seconds` is what one kernel or library
    call costs apart from its work, `thread_seconds` what a CPU takes to start its threads, and
    `page_seconds` what a byte costs it that the system maps anew (the results of large calls).

    `cache_*` is the L2 of a GPU, the last level of a CPU; `cache_bandwidth` of 0 means that the
    cache is not counted on. `l2_bandwidth` is the rate of a GPU's L2, `far_cache_*` the cache
    behind it (Infinity Cache). `copies` are pairs of working-set bytes and bytes/s, as measured.

    `cores` are SMs or compute units, each with `shared_bytes` of shared memory, `registers` of 32
    bits and up to `warps` resident warps of `warp_size` threads. `clock` is the boost clock,
    `matrix_clock` that of the matrix units where it differs.

    `link_*` is the fast link between devices (NVLink, xGMI): bytes/s per direction of all its
    `link_count` lanes together, within groups of `link_domain` devices. `fabric` says how they are
    wired: "switch", "mesh" or "bridge". `calibration` is the hash of the measurements that the
    figures are from, or "none".
    """

    name: str
    kind: Kind
    peaks: Mapping[str, float] = field(hash=False)
    vector: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    memory_bytes: float
    launch_seconds: float
    cores: int
    cache_bytes: float = 0.0
    cache_bandwidth: float = 0.0
    vector_bits: int = 0
    arch: str = ""
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=_none, hash=False)
    vendor: str = ""
    clock: float = 0.0
    matrix_clock: float = 0.0
    base_clock: float = 0.0
    l2_bandwidth: float = 0.0
    far_cache_bytes: float = 0.0
    far_cache_bandwidth: float = 0.0
    bus_bits: int = 0
    pin_rate: float = 0.0
    shared_bytes: float = 0.0
    registers: int = 0
    warps: int = 0
    warp_size: int = 0
    link: str = ""
    fabric: str = ""
    link_bandwidth: float = 0.0
    link_count: int = 0
    link_domain: int = 0
    pcie_bandwidth: float = 0.0
    nic_bandwidth: float = 0.0
    watts: float = 0.0
    thread_seconds: float = 0.0
    page_seconds: float = 0.0
    copies: tuple[tuple[float, float], ...] = ()
    note: str = ""
    calibration: str = "none"

    def matrix_peak(self, dtype: str, accumulate: str = "") -> float:
        """FLOP/s of matrix products in `dtype`; float32's where the device has no such units.

        With `accumulate`, the rate of sums in that type where it differs from the usual one.
        """
        usual = self.peaks.get(dtype, self.peaks["float32"])
        return self.peaks.get(f"{dtype}/{accumulate}", usual)

    def vector_peak(self, dtype: str) -> float:
        """FLOP/s of pointwise code computing in `dtype`; float32's unless listed."""
        return self.vector.get(dtype, self.vector["float32"])

    def copy_bandwidth(self, working_set: float) -> float:
        """Bytes/s, read and written together, of a copy that touches so many bytes.

        Measured where there are `copies`, between two of them in proportion; else the memory's.
        """
        if not self.copies:
            return self.memory_bandwidth
        below = self.copies[0]
        for above in self.copies:
            if working_set <= above[0]:
                if above is below:
                    return above[1]
                share = (working_set - below[0]) / (above[0] - below[0])
                return below[1] + share * (above[1] - below[1])
            below = above
        return below[1]


# What a table may hold as numbers, apart from `peaks` and `vector`.
FIGURES = tuple(
    each.name
    for each in dataclasses.fields(Device)
    if each.type in ("float", "int") and each.name != "calibration"
)
_WHOLE = tuple(each.name for each in dataclasses.fields(Device) if each.type == "int")


def nearest(given: str, allowed: Iterable[str]) -> str:
    """The likeliest meant, as "; did you mean ...?", or ""."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def parsed(
    entry: Mapping[str, Any], sources: Mapping[str, str], base: Device | None, origin: str
) -> Device:
    """The device that a table describes; what it leaves out is `base`'s, if there is one.

    A table named like one of `sources` holds figures from there; figures outside of such tables
    are from `origin`. Raises `DeviceFileError` that names the key, what is allowed and the nearest.
    """
    values: dict[str, Any] = {}
    rates: dict[str, dict[str, float]] = {"peaks": {}, "vector": {}}
    told: dict[str, str] = {}
    for key, value in entry.items():
        if key in sources:
            _take(value, sources[key], values, rates, told, origin)
    own = {key: value for key, value in entry.items() if key not in sources}
    texts = {key: _text(key, own.pop(key), origin) for key in _TEXTS if key in own}
    aliases = own.pop("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
        raise DeviceFileError(f"{origin}: aliases is {aliases!r}, not a list of names")
    _take(own, origin, values, rates, told, origin)
    texts.pop("like", None)
    values |= {**texts, "aliases": tuple(aliases)}
    if base is not None:
        return _based(base, values, rates, told, origin)
    missing = [key for key in _REQUIRED if key not in told]
    if "name" not in texts:
        missing.insert(0, "name")
    if missing:
        raise DeviceFileError(f"{origin}: {', '.join(missing)} missing")
    values.setdefault("kind", "gpu")
    if "launch_seconds" not in values:
        values["launch_seconds"], told["launch_seconds"] = 2.5e-6, "assumed"
    return Device(
        **values,
        peaks=MappingProxyType(rates["peaks"]),
        vector=MappingProxyType(_vector(rates)),
        sources=MappingProxyType(told),
    )


def _vector(rates: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What is given, and the matrix rates of the two types that vector lanes always have."""
    usual = {each: rates["peaks"][each] for each in DTYPES[:2] if each in rates["peaks"]}
    return {**usual, **rates["vector"]}


def _based(
    base: Device,
    values: dict[str, Any],
    rates: Mapping[str, Mapping[str, float]],
    told: Mapping[str, str],
    origin: str,
) -> Device:
    """`base` with what is given in its place."""
    if values.get("name") is None:
        raise DeviceFileError(f"{origin}: name missing")
    return dataclasses.replace(
        base,
        **{"note": "", **values},
        peaks=MappingProxyType({**base.peaks, **rates["peaks"]}),
        vector=MappingProxyType({**base.vector, **rates["vector"]}),
        sources=MappingProxyType({**base.sources, **told}),
    )


def _take(
    table: Any,
    source: str,
    values: dict[str, Any],
    rates: Mapping[str, dict[str, float]],
    told: dict[str, str],
    origin: str,
) -> None:
    """Move the figures of one source where they belong."""
    if not isinstance(table, Mapping):
        raise DeviceFileError(f"{origin}: {table!r} is not a table of figures")
    for key, value in table.items():
        if key in rates:
            if not isinstance(value, Mapping):
                raise DeviceFileError(f"{origin}: {key} is {value!r}, not a table by dtype")
            for dtype, rate in value.items():
                _check_dtype(key, dtype, origin)
                rates[key][dtype] = _number(f"{key}.{dtype}", rate, origin)
                told[f"{key}.{dtype}"] = source
        elif key in FIGURES:
            number = _number(key, value, origin)
            values[key] = int(number) if key in _WHOLE else number
            told[key] = source
        else:
            allowed = (*_TEXTS, "aliases", *rates, *FIGURES)
            hint = nearest(key, allowed)
            raise DeviceFileError(
                f"{origin}: unknown key {key!r}{hint or '.'} Allowed: {', '.join(allowed)}."
            )


def _check_dtype(key: str, name: str, origin: str) -> None:
    dtype, _, accumulate = name.partition("/")
    if dtype not in DTYPES or (accumulate and (accumulate not in DTYPES or key != "peaks")):
        hint = nearest(dtype, DTYPES)
        raise DeviceFileError(
            f"{origin}: {key} has no {name!r}{hint or '.'} Allowed: {', '.join(DTYPES)}"
            + (", and two of them as 'float16/float16'." if key == "peaks" else ".")
        )


def _number(key: str, value: Any, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise DeviceFileError(
            f"{origin}: {key} is {value!r}, not a number above 0 (in {_UNITS}, without a unit)"
        )
    return float(value)


def _text(key: str, value: Any, origin: str) -> str:
    if not isinstance(value, str):
        raise DeviceFileError(f"{origin}: {key} is {value!r}, not text")
    if key == "kind" and value not in ("gpu", "cpu"):
        raise DeviceFileError(f"{origin}: kind is {value!r}; allowed: gpu, cpu")
    if key == "fabric" and value not in _FABRICS:
        raise DeviceFileError(f"{origin}: fabric is {value!r}; allowed: {', '.join(_FABRICS[1:])}")
    return value
