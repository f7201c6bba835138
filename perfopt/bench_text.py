"""What `perfopt bench` found: as text of 80 columns, Markdown, JSON, and beside another run."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from perfopt.benching import OURS, BenchError, Case, Measured, Row, Start
from perfopt.explained_text import count_text, seconds_text
from perfopt.measuring import Ratio, change

SCHEMA = "perfopt.bench/1"
NOISE = 0.02  # of the speed: a smaller change is none, however narrow its interval
_STAGES = {"dynamo": "Dynamo", "autograd": "AOTAutograd", "passes": "passes",
           "lowering": "generation", "kernels": "compilation", "program": "program"}  # fmt: skip


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "perfopt": version("perfopt"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": gpu or _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    for line in listing.read_text().splitlines() if listing.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def whole(rows: Sequence[Row], interrupted: bool = False) -> str:
    """Every row, then the geometric means."""
    about = ", ".join(f"{key} {value}" for key, value in environment().items() if value)
    blocks = [[about], *([*_row(row)] for row in rows)]
    means = [*_means(rows)]
    if means:
        blocks.append(means)
    if interrupted:
        blocks.append(["interrupted: what was finished by then is above"])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _row(row: Row) -> Iterator[str]:
    yield row.case.title
    heads = ("median", "perfopt is", "error", "grad error", "memory", "cold", "warm")
    yield f"  {'':10}" + "".join(
        f"{head:>{width}}" for head, width in zip(heads, _WIDTHS, strict=True)
    )
    ratios = row.ratios()
    for each in row.contenders:
        cells = [
            seconds_text(each.seconds) if each.samples else "-",
            f"{ratios[each.name].value:.2f}x" if each.name in ratios else "",
            f"{each.error:.1e}" if not each.problem or each.error else "-",
            "-" if each.gradient_error is None else f"{each.gradient_error:.1e}",
            "-" if each.peak_bytes is None else count_text(each.peak_bytes, "B"),
            "-" if each.cold is None else seconds_text(each.cold.seconds),
            "-" if each.warm is None else seconds_text(each.warm.seconds),
        ]
        yield (
            f"  {each.name:10}"
            + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
        ).rstrip()
    for name, found in ratios.items():
        count = len(next(each.samples for each in row.contenders if each.name == name))
        yield f"  {name} / perfopt {found}, {count} rounds"
    for each in row.contenders:
        if each.problem:
            yield f"  {each.name} {each.problem}"
        for what, start in (("cold", each.cold), ("warm", each.warm)):
            if start is not None and start.stages:
                parts = [f"{_STAGES.get(k, k)} {seconds_text(v)}" for k, v in start.stages.items()]
                yield f"  {what}: {', '.join(parts)}"


_WIDTHS = (9, 11, 9, 11, 10, 9, 9)


def _means(rows: Sequence[Row]) -> Iterator[str]:
    """Geometric means of the ratios; clipped, a row where perfopt is slower counts as 1.0."""
    every: dict[str, list[float]] = {}
    for row in rows:
        for name, found in row.ratios().items():
            every.setdefault(name, []).append(found.value)
    for name, values in every.items():
        plain = math.exp(sum(map(math.log, values)) / len(values))
        clipped = math.exp(sum(math.log(max(v, 1.0)) for v in values) / len(values))
        yield (
            f"geometric mean of {name} / perfopt over {len(values)} "
            f"row{'s' * (len(values) != 1)}: {plain:.2f}, clipped at 1.0: {clipped:.2f}"
        )


def markdown(rows: Sequence[Row]) -> str:
    """A table with one line for every row."""
    rivals = list(dict.fromkeys(n for row in rows for n in (c.name for c in row.contenders)))
    heads = ["", *(f"{name} ms" for name in rivals)]
    heads += [f"{name} / perfopt" for name in rivals if name != OURS]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for row in rows:
        cells = [row.case.title]
        for name in rivals:
            found = row.of(name)
            cells.append(f"{found.seconds * 1e3:.2f}" if found and found.samples else "-")
        ratios = row.ratios()
        cells += [str(ratios.get(name, "-")) for name in rivals if name != OURS]
        lines.append(cells)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def dumps(rows: Sequence[Row], interrupted: bool = False) -> str:
    """The rows with all their samples, as JSON that `loads` reads."""
    table = {
        "schema": SCHEMA,
        "environment": environment(),
        "interrupted": interrupted,
        "rows": [
            {
                "title": row.case.title,
                "case": asdict(row.case),
                "contenders": [
                    {**asdict(each), "median": each.seconds if each.samples else None}
                    for each in row.contenders
                ],
                "ratios": {name: asdict(found) for name, found in row.ratios().items()},
            }
            for row in rows
        ],
    }
    return json.dumps(table, indent=1) + "\n"


def loads(path: str) -> list[Row]:
    """The rows of a file that `dumps` wrote; raises `BenchError`."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        if table["schema"] != SCHEMA:
            raise BenchError(f"{path}: schema is {table['schema']!r}, not {SCHEMA!r}")
        return [
            Row(Case(**row["case"]), tuple(map(_measured, row["contenders"])))
            for row in table["rows"]
        ]
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, BenchError):
            raise
        raise BenchError(f"{path} is not what `perfopt bench --json` writes: {error}") from error


def _measured(table: Mapping[str, Any]) -> Measured:
    given = {key: value for key, value in table.items() if key != "median"}
    for what in ("cold", "warm"):
        given[what] = Start(**given[what]) if given[what] else None
    return Measured(**{**given, "samples": tuple(given["samples"])})


def against(old: Sequence[Row], new: Sequence[Row]) -> tuple[str, bool]:
    """What became faster or slower beyond noise, and whether anything became slower.

    perfopt's time over that of a contender that both runs have is compared, so that what changed
    about the machine cancels.
    """
    before = {row.case.title: row for row in old}
    lines, worse = ["beside the other run"], False
    for row in new:
        former = before.pop(row.case.title, None)
        if former is None:
            lines.append(f"  {row.case.title}: not in the other run")
            continue
        found = _change(former, row)
        if found is None:
            lines.append(f"  {row.case.title}: nothing to compare")
            continue
        base, factor = found
        verdict = "unchanged"
        if factor.high < 1 - NOISE:
            verdict, worse = "SLOWER", True
        elif factor.low > 1 + NOISE:
            verdict = "faster"
        lines.append(f"  {row.case.title}: {verdict}, {factor} times as fast, beside {base}")
    lines += [f"  {title}: only in the other run" for title in before]
    return "\n".join(lines) + "\n", worse


def _change(old: Row, new: Row) -> tuple[str, Ratio] | None:
    ours_before, ours = old.of(OURS), new.of(OURS)
    if not (ours_before and ours and ours_before.samples and ours.samples):
        return None
    for each in new.contenders:
        base = old.of(each.name)
        if each.name != OURS and base is not None and base.samples and each.samples:
            factor = change(ours_before.samples, base.samples, ours.samples, each.samples)
            return each.name, factor
    return None
