"""`Options`: everything a user can ask for, checked at once; and the one reader of the environment.

`PERFOPT_DISABLE=1` switches perfopt off: every graph runs as eager runs it. `PERFOPT_CACHE_DIR` is
the folder for compiled kernels, `PERFOPT_CACHE_LIMIT` bounds it.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfopt.backends.cache import LIMIT

MODES = ("default", "aten")
_UNITS = {
    "": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZES = ("bytes as 500000000", "a number with a unit as '20GiB' or '500MB'")
_BUDGETS = (*_SIZES, "a fraction of the usual peak from above 0.0 to 1.0", "'auto'", "None")


class OptionError(ValueError):
    """An option that does not exist or a value that it does not take.

    `key` names the option, `allowed` what it could have been, `nearest` the likeliest meant.
    """

    def __init__(
        self, key: str, problem: str, allowed: Iterable[str] = (), given: str = ""
    ) -> None:
        self.key = key
        self.allowed = tuple(allowed)
        close = difflib.get_close_matches(given, self.allowed, n=1, cutoff=0.5)
        self.nearest = close[0] if close else None
        text = problem
        if self.nearest:
            text += f"; did you mean {self.nearest!r}?"
        if self.allowed:
            text += f" Allowed: {', '.join(self.allowed)}."
        super().__init__(text)


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Options:
    """What a user can set, by `options={...}` of torch.compile or keywords of `perfopt.compile`.

    Frozen and checked when made: `OptionError` names the option, its allowed values and the
    nearest match.
    """

    mode: str = _option("default", "default: fuse and generate kernels; aten: library calls alone")
    pipeline: str = _option("", "the passes as text, such as 'graph(fuse)'; empty: the mode's")
    precision: str = _option("keep", "keep: every dtype as the model has it (nothing else yet)")
    memory_budget: str | int | float | None = _option(
        None, "for training: '20GiB', a fraction of the usual peak as 0.5, or 'auto' (the device)"
    )
    memory_reserved: str | int = _option(0, "bytes of the budget that others need, as '2GiB'")
    verify: bool = _option(
        False, "run every region beside its eager subgraph, raise if they differ"
    )
    dump: str = _option(
        "", "a folder that graphs, programs and kernels are written to; empty: none"
    )
    donate: bool = _option(False, "let backward overwrite what was saved for it; no retain_graph")
    exact_rounding: bool = _option(
        False, "round 16-bit values after every operation, as eager does"
    )
    limit: int | None = _option(None, "apply at most so many decisions, to find one by bisection")
    disable: tuple[str, ...] = _option((), "modules to leave to ATen, as 'blocks.0' or 'blocks.*'")

    def __post_init__(self) -> None:
        _check(self)

    def budget(self) -> tuple[str, float] | None:
        """The memory budget: ("bytes", how many), ("share", a fraction) or ("auto", 0.0)."""
        value = self.memory_budget
        if value is None:
            return None
        if value == "auto":
            return "auto", 0.0
        if isinstance(value, float) and 0.0 < value <= 1.0:
            return "share", value
        size = _size("memory_budget", value, _BUDGETS)
        if not size:
            raise OptionError("memory_budget", f"memory_budget is {value!r}", _BUDGETS)
        return "bytes", float(size)

    def reserved(self) -> int:
        """Bytes of the budget that are not for the graph."""
        return _size("memory_reserved", self.memory_reserved, _SIZES)

    @classmethod
    def from_user(
        cls, mode: str | None = None, options: Mapping[str, Any] | None = None
    ) -> Options:
        """Options of what torch.compile hands over; raises `OptionError`."""
        given = dict(options or {})
        known = [each.name for each in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                raise OptionError(str(key), f"unknown option {key!r}", known, str(key))
        if mode is not None:
            given.setdefault("mode", mode)
        if isinstance(given.get("disable"), str):
            given["disable"] = tuple(p.strip() for p in given["disable"].split(",") if p.strip())
        elif isinstance(given.get("disable"), list):
            given["disable"] = tuple(given["disable"])
        return cls(**given)


def _size(name: str, value: Any, allowed: tuple[str, ...]) -> int:
    """Bytes, of a number of them or of text as '20GiB'; raises `OptionError`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?) *([A-Za-z]*)", str(value), re.ASCII)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if not isinstance(value, str) or match is None or match[2].lower() not in units:
        raise OptionError(name, f"{name} is {value!r}", allowed)
    return int(float(match[1]) * units[match[2].lower()])


def described() -> list[tuple[str, str, str]]:
    """Every option with its default as text and what it does."""
    return [
        (each.name, repr(each.default), each.metadata["help"])
        for each in dataclasses.fields(Options)
    ]


def switched_off() -> bool:
    """Whether the environment turns perfopt off for the whole process."""
    return os.environ.get("PERFOPT_DISABLE", "") not in ("", "0")


def environment_with(**changes: str) -> dict[str, str]:
    """The environment with some variables set, for another process."""
    return {**os.environ, **changes}


def cache_directory() -> Path | None:
    """The folder that compiled code is kept in; None where none is wanted, or no home is known.

    `PERFOPT_CACHE_DIR`; without it `perfopt` in the user's folder for caches.
    """
    given = os.environ.get("PERFOPT_CACHE_DIR")
    if given == "":
        return None
    try:
        if given is not None:
            return Path(given).expanduser().absolute()
        caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The standard has relative paths ignored.
        return (caches if caches.is_absolute() else Path.home() / ".cache") / "perfopt"
    except RuntimeError:
        return None


def cache_limit() -> int:
    """The bytes that the cache may take: `PERFOPT_CACHE_LIMIT`; raises `OptionError`."""
    given = os.environ.get("PERFOPT_CACHE_LIMIT", "").strip()
    if not given:
        return LIMIT
    return _size("PERFOPT_CACHE_LIMIT", given, _SIZES)


def _check(options: Options) -> None:
    if options.mode not in MODES:
        raise OptionError("mode", f"mode is {options.mode!r}", MODES, str(options.mode))
    if options.precision != "keep":
        problem = f"precision is {options.precision!r}; other precisions are not available yet"
        raise OptionError("precision", problem, ("keep",))
    options.budget()
    options.reserved()
    if options.memory_budget is not None and options.mode == "aten":
        problem = "memory_budget needs passes, which mode 'aten' does without"
        raise OptionError("memory_budget", problem)
    for name in ("verify", "donate", "exact_rounding"):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise OptionError(name, f"{name} is {value!r}, not a bool", ("True", "False"))
    for name in ("pipeline", "dump"):
        value = getattr(options, name)
        if not isinstance(value, str):
            raise OptionError(name, f"{name} is {value!r}, not a string")
    limit = options.limit
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise OptionError("limit", f"limit is {limit!r}", ("None", "an integer from 0"))
    names = options.disable
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise OptionError("disable", f"disable is {names!r}", ("a list of module paths",))
