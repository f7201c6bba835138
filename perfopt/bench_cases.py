"""What rows `perfopt bench` is asked for, by arguments and suites; checked before any runs."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perfopt.bench_rows import RIVALS, BenchError, Case, check_dtype, unknown
from perfopt.factory import load_factory
from perfopt.options import Options, switched_off
from perfopt.pipelines import check_pipeline


def cases(
    factories: Sequence[str], dtypes: str | Sequence[str], train: bool, suite: str | None = None
) -> list[Case]:
    """One case for every factory and dtype; a case's own dtype and `train` of a suite stay.

    Raises `BenchError`, `FactoryError` and `OptionError`.
    """
    if switched_off():
        raise BenchError("PERFOPT_DISABLE switches perfopt off: there is nothing to measure")
    found = [Case.read({"factory": factory, "train": train}) for factory in factories]
    if suite is not None:
        found += [replace(case, train=case.train or train) for case in _suite(Path(suite))]
    if not found:
        raise BenchError("nothing to measure: give FILE.py:FACTORY, or --suite FILE.toml")
    dtypes = list(dict.fromkeys(listed(dtypes)))
    for name in dtypes:
        check_dtype(name)
    made = [
        replace(case, dtype=name)
        for case in found
        for name in ([case.dtype] if case.dtype or not dtypes else dtypes)
    ]
    title, count = Counter(case.title for case in made).most_common(1)[0]
    if count > 1:
        raise BenchError(f"{count} rows are called {title!r}: give each a name in a suite's file")
    for case in made:
        check_pipeline(Options.from_user(None, case.options))
        load_factory(case.factory)
    return made


def _suite(path: Path) -> list[Case]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"--suite {path}: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not even text
        raise BenchError(f"--suite {path} is not TOML: {error}") from error
    rows = table.get("case")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise BenchError(f"--suite {path} has no [[case]]")
    found = []
    for row in rows:
        case = Case.read(row)
        file, _, name = case.factory.rpartition(":")
        where = path.parent / file  # a suite names files from where it is
        found.append(replace(case, factory=f"{where}:{name}" if where.is_file() else case.factory))
    return found


def check_rivals(names: str | Sequence[str]) -> tuple[str, ...]:
    """The names, each once, of text as "eager,inductor" too; raises `BenchError`."""
    found = listed(names)
    for name in found:
        if name not in RIVALS:
            raise unknown("rival", name, RIVALS)
    return tuple(dict.fromkeys(found))


def listed(names: str | Sequence[str]) -> Sequence[str]:
    """Names that may be given as one text with commas between them."""
    if not isinstance(names, str):
        return names
    return [each.strip() for each in names.split(",") if each.strip()]
