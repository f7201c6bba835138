"""What `perfopt bench` found: as text of 80 columns, Markdown, JSON, and beside another run."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from perfopt.bench_rows import (
    OURS,
    BenchError,
    Case,
    Change,
    Measured,
    Row,
    Start,
    geometric_means,
)
from perfopt.explained_text import count_text, seconds_text
from perfopt.measuring import machine

SCHEMA = "perfopt.bench/1"
WIDTH = 80
_WIDTHS = (9, 11, 9, 11, 10, 9, 9)
_HEADS = ("median", "perfopt is", "error", "grad error", "memory", "cold", "warm")
_STAGES = {"dynamo": "Dynamo", "autograd": "AOTAutograd", "passes": "passes",
           "lowering": "generation", "kernels": "compilation", "program": "program",
           "inductor": "generation and compilation"}  # fmt: skip
Loaded = tuple[tuple[Row, ...], Mapping[str, Any], bool]


def environment() -> dict[str, Any]:
    """What the figures depend on; "gpu" is "" where torch sees none."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {"perfopt": version("perfopt"), **machine(), "gpu": gpu}


def whole(rows: Sequence[Row], about: Mapping[str, Any], interrupted: bool = False) -> str:
    """Every row, then the geometric means."""
    head = ", ".join(f"{key} {value}" for key, value in about.items() if value)
    blocks = [_wrapped(head), *([*_row(row)] for row in rows)]
    means = [
        f"geometric mean of {name} / perfopt over {mean.rows} row{'s' * (mean.rows != 1)}: "
        f"{mean.plain:.2f}, clipped at 1.0: {mean.clipped:.2f}"
        for name, mean in geometric_means(rows).items()
    ]
    if means:
        blocks.append([line for mean in means for line in _wrapped(mean)])
    if interrupted:
        blocks.append(["interrupted: what was finished by then is above"])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _wrapped(text: str, first: str = "", rest: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _row(row: Row) -> Iterator[str]:
    yield from _wrapped(row.case.title)
    if row.problem:
        yield from _wrapped(row.problem, "  ", "    ")
        return
    yield _cells("", _HEADS)
    for each in row.contenders:
        ratio = row.ratios.get(each.name)
        yield _cells(
            each.name,
            (
                seconds_text(each.seconds) if each.samples else "-",
                f"{ratio.value:.2f}x" if ratio else "",
                _error(each.error),
                _error(each.gradient_error),
                "-" if each.peak_bytes is None else count_text(each.peak_bytes, "B"),
                "-" if each.cold is None else seconds_text(each.cold.seconds),
                "-" if each.warm is None else seconds_text(each.warm.seconds),
            ),
        )
    for name, found in row.ratios.items():
        count = len(next(each.samples for each in row.contenders if each.name == name))
        yield f"  {name} / perfopt {found}, {count} rounds"
    for line in _remarks(row):
        yield from _wrapped(line, "  ", "    ")


def _cells(name: str, cells: Sequence[str]) -> str:
    aligned = (f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    return f"  {name:10}{''.join(aligned)}".rstrip()


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


def _remarks(row: Row) -> Iterator[str]:
    for each in row.contenders:
        for text in (each.problem, each.note):
            if text:
                yield f"{each.name} {text}"
        for what, start in (("cold", each.cold), ("warm", each.warm)):
            if start is not None and start.stages:
                parts = [f"{_STAGES.get(k, k)} {seconds_text(v)}" for k, v in start.stages.items()]
                yield f"{each.name} {what}: {', '.join(parts)}"
    if row.note:
        yield row.note


def markdown(rows: Sequence[Row]) -> str:
    """A table with one line for every row."""
    every = (c.name for row in rows for c in row.contenders if c.samples or c.problem)
    names = list(dict.fromkeys(every))
    heads = ["", *(f"{name} ms" for name in names)]
    heads += [f"{name} / perfopt" for name in names if name != OURS]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for row in rows:
        cells = [row.case.title]
        for name in names:
            found = row.of(name)
            timed = found is not None and found.samples
            cells.append(f"{found.seconds * 1e3:#.4g}" if found and timed else _failed(row, found))
        cells += [str(row.ratios.get(name, "-")) for name in names if name != OURS]
        lines.append(cells)
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    for name, mean in geometric_means(rows).items():
        table += f"\nGeometric mean of {name} / perfopt: {mean.plain:.2f}, "
        table += f"clipped at 1.0: {mean.clipped:.2f} ({mean.rows} rows)\n"
    return table


def _failed(row: Row, found: Measured | None) -> str:
    problem = row.problem or (found.problem if found else "")
    return "wrong" if problem.startswith("wrong") else "fails" if problem else "-"


def dumps(rows: Sequence[Row], about: Mapping[str, Any], interrupted: bool = False) -> str:
    """The rows with all their samples, as JSON that `loads` reads."""
    table = {
        "schema": SCHEMA,
        "environment": dict(about),
        "interrupted": interrupted,
        "rows": [
            {
                "title": row.case.title,
                "case": asdict(row.case),
                "problem": row.problem,
                "note": row.note,
                "contenders": [_dumped(each) for each in row.contenders],
                "ratios": {name: asdict(found) for name, found in row.ratios.items()},
            }
            for row in rows
        ],
        "means": {name: asdict(mean) for name, mean in geometric_means(rows).items()},
    }
    return json.dumps(table, indent=1, allow_nan=False) + "\n"


def _dumped(each: Measured) -> dict[str, Any]:
    table = {**asdict(each), "median": each.seconds if each.samples else None}
    for key in ("error", "gradient_error"):
        if table[key] is not None and not math.isfinite(table[key]):
            table[key] = str(table[key])  # JSON has no infinity
    return table


def loads(path: str) -> Loaded:
    """Rows, environment and whether the run was interrupted, of a file that `dumps` wrote.

    Raises `BenchError`.
    """
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        schema = table["schema"]
        rows = tuple(map(_read, table["rows"])) if schema == SCHEMA else ()
        loaded = rows, dict(table["environment"]), bool(table["interrupted"])
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{path} is not what `perfopt bench --json` writes: {error}") from error
    if schema != SCHEMA:
        raise BenchError(f"{path}: schema is {schema!r}, not {SCHEMA!r}")
    return loaded


def _read(table: Mapping[str, Any]) -> Row:
    contenders = tuple(map(_measured, table["contenders"]))
    return Row(Case.read(table["case"]), contenders, table["problem"], table["note"])


def _measured(table: Mapping[str, Any]) -> Measured:
    given = {key: value for key, value in table.items() if key != "median"}
    for what in ("cold", "warm"):
        given[what] = Start(**given[what]) if given[what] else None
    for what in ("error", "gradient_error"):
        given[what] = None if given[what] is None else float(given[what])
    return Measured(**{**given, "samples": tuple(map(float, given["samples"]))})


def changed(
    found: Sequence[Change], old: Mapping[str, Any], new: Mapping[str, Any], path: str
) -> str:
    """What changed since the run of `path`, and where the two environments differ."""
    lines = ["", *_wrapped(f"since {path}")]
    for key in (key for key in new if old.get(key) != new[key]):
        lines += _wrapped(f"{key} was {old.get(key, '')!r} and is {new[key]!r}", "  ", "    ")
    for each in found:
        verdict = each.verdict.upper() if each.verdict == "slower" else each.verdict
        text = f"{each.title}: {verdict}"
        if each.factor is not None:
            text += f", {each.factor} times as fast"
            text += f" beside {each.beside}" if each.beside else ""
            text += f" ({seconds_text(each.before)}, now {seconds_text(each.after)})"
        lines += _wrapped(text, "  ", "    ")
    return "\n".join(lines) + "\n"
