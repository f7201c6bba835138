"""`Calibration`: what was measured of one machine, and the file that it is kept in.

A file is JSON. It is written whole or not at all, and one that cannot be read counts as none: a
spoilt cache must not keep anything from being compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

SCHEMA = "perfopt.calibration/1"
_SHORT = 12  # digits of a hash


class CalibrationError(ValueError):
    """Text that is no calibration."""


@dataclass(frozen=True)
class Rates:
    """What was measured with so many threads; 0 threads: of a GPU.

    `matrix` and `vector` are FLOP/s by dtype, `copies` pairs of working-set bytes and bytes/s, read
    and written together. `launch_seconds` is what a small call takes, on a GPU what a small kernel
    takes there; `dispatch_seconds` what the host takes to start one. `thread_seconds` is the start
    of all threads, `page_seconds` what a byte of memory costs that the system maps anew.
    """

    threads: int
    matrix: Mapping[str, float] = field(hash=False)
    vector: Mapping[str, float] = field(hash=False)
    copies: tuple[tuple[float, float], ...]
    launch_seconds: float
    dispatch_seconds: float = 0.0
    thread_seconds: float = 0.0
    page_seconds: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Measurements of one device; `hash` is of all that they say."""

    device: str
    kind: Literal["cpu", "cuda"]
    torch: str
    runs: tuple[Rates, ...]

    @cached_property
    def hash(self) -> str:
        """Twelve hexadecimal digits that change with any figure."""
        return hashlib.sha256(dumps(self).encode()).hexdigest()[:_SHORT]

    def at(self, threads: int) -> Rates:
        """The rates with so many threads: of the nearest number below that was measured.

        Matrix and vector rates grow in proportion to the threads beyond it.
        """
        below = [each for each in self.runs if each.threads <= threads] or [self.runs[0]]
        found = max(below, key=lambda each: each.threads)
        if found.threads in (0, threads):
            return found
        grown = threads / found.threads
        matrix, vector = (
            MappingProxyType({dtype: rate * grown for dtype, rate in table.items()})
            for table in (found.matrix, found.vector)
        )
        return dataclasses.replace(found, threads=threads, matrix=matrix, vector=vector)


def dumps(calibration: Calibration) -> str:
    """The calibration as JSON; equal ones give equal text."""
    runs = []
    for each in calibration.runs:
        table: dict[str, Any] = {f.name: getattr(each, f.name) for f in dataclasses.fields(each)}
        runs.append(table | {"matrix": dict(each.matrix), "vector": dict(each.vector)})
    whole = {
        "schema": SCHEMA, "device": calibration.device, "kind": calibration.kind,
        "torch": calibration.torch, "runs": runs,
    }  # fmt: skip
    return json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def loads(text: str) -> Calibration:
    """What `dumps` wrote; raises `CalibrationError`."""
    try:
        whole = json.loads(text)
        if whole["schema"] != SCHEMA:
            raise CalibrationError(f"schema is {whole['schema']!r}, not {SCHEMA!r}")
        runs = tuple(_rates(each) for each in whole["runs"])
        made = Calibration(whole["device"], whole["kind"], whole["torch"], runs)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CalibrationError(f"no calibration: {error}") from error
    if not runs:
        raise CalibrationError("no calibration: it has no runs")
    return made


def _rates(table: dict[str, Any]) -> Rates:
    rates = Rates(
        **table
        | {
            "threads": int(table["threads"]),
            "matrix": MappingProxyType({k: float(v) for k, v in table["matrix"].items()}),
            "vector": MappingProxyType({k: float(v) for k, v in table["vector"].items()}),
            "copies": tuple((float(size), float(rate)) for size, rate in table["copies"]),
        }
    )
    positive = [*rates.matrix.values(), *rates.vector.values(), *(r for _, r in rates.copies)]
    if "float32" not in rates.matrix or not rates.copies or not rates.launch_seconds > 0:
        raise CalibrationError("a rate is missing")
    if not all(0 < each < 1e30 for each in positive):
        raise CalibrationError("a rate is not above 0")
    return rates


def read(path: Path) -> Calibration | None:
    """The calibration in a file; None where there is no file, or none that can be used."""
    try:
        return loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, CalibrationError):
        return None


def write(path: Path, calibration: Calibration) -> None:
    """Keep the calibration in a file, whole or not at all; raises `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dumps(calibration))
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
