"""What `perfopt bench` is asked for and what it finds: cases, contenders and rows, as data."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import geometric_mean, median
from typing import Any

from perfopt.measuring import Ratio, change, ratio

OURS = "perfopt"
RIVALS = ("eager", "inductor", "aot_eager")
DTYPES = ("float32", "bfloat16", "float16", "float64")
NOISE = 0.02  # of the speed: a smaller change is none, however narrow its interval
_KEYS = {"factory": str, "dtype": str, "train": bool, "options": Mapping, "name": str}


class BenchError(ValueError):
    """A rival, dtype, suite or file that is none, or a model that fails; one line of text."""


def unknown(what: str, name: str, known: Iterable[str]) -> BenchError:
    """The error that names the nearest match and all that is allowed."""
    allowed = tuple(known)
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return BenchError(f"unknown {what} {name!r}{hint} Allowed: {', '.join(allowed)}")


@dataclass(frozen=True)
class Case:
    """One row: a factory as FILE.py:FACTORY, the dtype ("" for the model's own), and how it runs.

    `options` are those of `perfopt.compile`.
    """

    factory: str
    dtype: str = ""
    train: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def title(self) -> str:
        """What the row is called: equal for the same row of another run."""
        parts = [self.name or self.factory.rpartition("/")[2], self.dtype]
        parts += ["train" * self.train, *(f"{k}={v}" for k, v in self.options.items())]
        return " ".join(part for part in parts if part)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Case:
        """A case of what `asdict` or a suite's file has; raises `BenchError`."""
        for key, value in table.items():
            if key not in _KEYS:
                raise unknown("key of a case", str(key), _KEYS)
            if not isinstance(value, _KEYS[key]):
                wanted = _KEYS[key].__name__.lower().replace("mapping", "table")
                raise BenchError(f"{key} of a case is {value!r}, not a {wanted}")
        if not table.get("factory"):
            raise BenchError("a case without a factory, which is FILE.py:FACTORY")
        case = cls(**table)
        if case.dtype:
            check_dtype(case.dtype)
        return case


def check_dtype(name: str) -> None:
    """Raise `BenchError` for a dtype that a row cannot have."""
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)


@dataclass(frozen=True)
class Start:
    """The first step in a fresh process: seconds, and of its stages where they are known."""

    seconds: float
    stages: Mapping[str, float]


@dataclass(frozen=True)
class Measured:
    """One contender of a row.

    `error` and `gradient_error` are the greatest distances from float64, over the greatest
    magnitude, None where nothing was computed; `samples` are seconds per step, in the order of the
    rounds. `problem` says what is wrong, and then nothing was timed; `note` is to be known beside
    the figures. `peak_bytes` come beside what is there before a step.
    """

    name: str
    error: float | None = None
    gradient_error: float | None = None
    samples: tuple[float, ...] = ()
    cold: Start | None = None
    warm: Start | None = None
    peak_bytes: int | None = None
    problem: str = ""
    note: str = ""

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.samples) if self.samples else float("nan")


@dataclass(frozen=True)
class Row:
    """A case and its contenders, perfopt last.

    `problem` says why a case could not be run at all, `note` what its errors do not tell.
    """

    case: Case
    contenders: tuple[Measured, ...] = ()
    problem: str = ""
    note: str = ""

    def of(self, name: str) -> Measured | None:
        """A contender by its name."""
        return next((each for each in self.contenders if each.name == name), None)

    @property
    def wrong(self) -> str:
        """What is wrong about perfopt's results; "" where nothing is."""
        ours = self.of(OURS)
        return ours.problem if ours else ""

    @cached_property
    def ratios(self) -> dict[str, Ratio]:
        """Every rival's time over perfopt's."""
        ours = self.of(OURS)
        if ours is None or not ours.samples:
            return {}
        return {
            each.name: ratio(each.samples, ours.samples)
            for each in self.contenders
            if each is not ours and each.samples
        }


@dataclass(frozen=True)
class Mean:
    """Geometric means of a rival's time over perfopt's, over so many rows.

    In `clipped` a row where perfopt is slower counts as 1.0, as if it were left to the rival.
    """

    plain: float
    clipped: float
    rows: int


def geometric_means(rows: Iterable[Row]) -> dict[str, Mean]:
    """The means by rival, of the rows that have both."""
    every: dict[str, list[float]] = {}
    for row in rows:
        for name, found in row.ratios.items():
            every.setdefault(name, []).append(found.value)
    return {
        name: Mean(geometric_mean(values), geometric_mean(max(v, 1.0) for v in values), len(values))
        for name, values in every.items()
    }


@dataclass(frozen=True)
class Change:
    """A row beside the same row of an earlier run.

    `verdict` is "slower", "faster", "unchanged", "not comparable", or "added" and "missing" for
    rows of one run alone. `factor` says how many times as fast perfopt became, measured by the
    contender `beside` of both runs, or in plain seconds where there is none (""). `before` and
    `after` are median seconds.
    """

    title: str
    verdict: str
    factor: Ratio | None = None
    beside: str = ""
    before: float = float("nan")
    after: float = float("nan")


def changes(old: Iterable[Row], new: Iterable[Row]) -> list[Change]:
    """What became of every row; slower or faster is what lies beyond noise.

    perfopt's time over that of a rival that both runs have is compared, so that what changed about
    the machine cancels.
    """
    former = {row.case.title: row for row in old}
    found = []
    for row in new:
        title = row.case.title
        found.append(_change(former.pop(title), row) if title in former else Change(title, "added"))
    return found + [Change(title, "missing") for title in former]


def _change(old: Row, new: Row) -> Change:
    title, before, after = new.case.title, old.of(OURS), new.of(OURS)
    if not (before and after and before.samples and after.samples):
        return Change(title, "not comparable")
    factor, beside = change(before.samples, after.samples), ""
    for each in new.contenders:
        base = old.of(each.name)
        if each is not after and base is not None and base.samples and each.samples:
            factor = change(before.samples, after.samples, base.samples, each.samples)
            beside = each.name
            break
    verdict = "unchanged"
    if factor.high < 1 - NOISE:
        verdict = "slower"
    elif factor.low > 1 + NOISE:
        verdict = "faster"
    return Change(title, verdict, factor, beside, before.seconds, after.seconds)
