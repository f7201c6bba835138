"""`perfopt validate`: predictions beside published tables, and the scoreboard that ships."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from perfopt.cost_model.estimate import Array
    from perfopt.cost_model.tables import Skipped, Table
    from perfopt.cost_model.validation import Predictor, Score

Answer = tuple[str, int]
_MARK = "<!-- scoreboard: written by perfopt validate --update -->"


def add_validate_command(commands: Any) -> None:
    """Add the command to an argparse command group, as `add_commands` does."""
    parser = commands.add_parser(
        "validate",
        help="the cost model beside published measurements: its errors, by source and device",
        description="Read tables of measured times, predict each row, and show the mean and "
        "median absolute percentage error by source, device, operation and size. Exits 2 where "
        "no table can be read.",
    )
    parser.add_argument(
        "--tables", metavar="DIR", required=True,
        help="a directory of tables, or 'aiconfigurator' for the installed package",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the rows there too, '-' for stdout")
    parser.add_argument("--source", metavar="NAME", help="only tables of this source")
    parser.add_argument("--device", metavar="NAME", help="only tables of this device")
    parser.add_argument(
        "--update", action="store_true", help="write the package's scoreboard and docs/accuracy.md"
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    parser.set_defaults(run=_validate)


def _validate(args: argparse.Namespace) -> Answer:
    from perfopt.cost_model.device import device_named
    from perfopt.cost_model.tables import TableError
    from perfopt.cost_model.validation import as_rows, scores

    skipped: list[Skipped] = []
    found = measured(args.tables, skipped)
    if args.device is not None:
        wanted = device_named(args.device).name
        found = [table for table in found if table.device.name == wanted]
    if args.source is not None:
        known = sorted({table.source for table in found})
        found = [table for table in found if table.source == args.source]
        if not found:
            raise TableError(f"no source {args.source!r}; there are: {', '.join(known) or 'none'}")
    results = scores(found, {"memory": _peaks(skipped)})
    text = json.dumps(as_rows(results), indent=1) + "\n"
    if args.update and results:
        _update(results)
    if args.json == "-":
        return text, 0 if results else 2
    if args.json is not None:
        Path(args.json).write_text(text, encoding="utf-8")
    lines = [*_shown(results), "", *_summary(found, results, skipped)]
    return "\n".join(lines) + "\n", 0 if results else 2


def _peaks(skipped: list[Skipped]) -> Predictor:
    """The predictor of peak memory; it enters the programs that it does not know as skipped."""
    from perfopt.cost_model.tables import Skipped
    from perfopt.liger_memory import peaks

    def predict(table: Table, fit: object) -> Array:
        found = peaks(table)
        if left := int(np.isnan(found).sum()):
            reason = f"{table.device.name}: programs whose memory is not known"
            skipped.append(Skipped("liger/all_benchmark_data.csv", reason, left))
        return found

    return predict


def measured(where: str, skipped: list[Skipped]) -> list[Table]:
    """The tables of a directory, or of the installed package that `where` names.

    Raises `TableError` where the directory is missing or the package not installed.
    """
    from perfopt.cost_model.aiconfigurator import package_tables
    from perfopt.cost_model.model_tables import ALL_READERS
    from perfopt.cost_model.tables import Skipped, TableError, read_file, reader_of

    if where == "aiconfigurator" and not Path(where).is_dir():
        return package_tables(skipped)
    folder = Path(where).expanduser()
    if not folder.is_dir():
        raise TableError(f"{where} is no directory; 'aiconfigurator' reads the installed package")
    found: list[Table] = []
    for path in sorted(folder.rglob("*.csv")):
        name = path.relative_to(folder).as_posix()
        reader = reader_of(name, ALL_READERS)
        if reader is None:
            skipped.append(Skipped(name, "is no kind of table that is known"))
        else:
            found += read_file(path, name, reader, skipped)
    return found


def _shown(results: Sequence[Score]) -> list[str]:
    """One line per source, device and family: the errors of all sizes, then of each."""
    from perfopt.cost_model.validation import SIZES

    lines = ["mean and median absolute percentage error, and the mean by predicted time", ""]
    header = f"{'':44}{'rows':>8}{'mean':>8}{'median':>8}" + "".join(f"{s:>8}" for s in SIZES)
    by_size = {(r.source, r.device, r.family, r.size_class): r for r in results}
    last = ("", "")
    for result in results:
        if result.size_class != "all":
            continue
        if (result.source, result.device) != last:
            last = (result.source, result.device)
            lines += [f"{result.source}, {result.device}", header] if len(lines) == 2 else [
                "", f"{result.source}, {result.device}", header,
            ]  # fmt: skip
        cells = []
        for size in SIZES:
            part = by_size.get((result.source, result.device, result.family, size))
            cells.append(f"{part.mape:8.1f}" if part else f"{'-':>8}")
        lines.append(
            f"  {result.family:42}{result.rows:8,}{result.mape:8.1f}{result.median_ape:8.1f}"
            + "".join(cells)
        )
    return lines


def _summary(
    found: Sequence[Table], results: Sequence[Score], skipped: Sequence[Skipped]
) -> list[str]:
    rows = sum(len(table.seconds) for table in found)
    devices = len({table.device.name for table in found})
    lines = [f"{rows:,} rows of {devices} devices; {len(skipped)} skipped"]
    for each, times in Counter(skipped).items():
        count = f", {each.rows:,} rows" if each.rows else ""
        again = f" ({times} times)" if times > 1 else ""
        lines.append(f"  skipped {each.file}{count}: {each.reason}{again}")
    if not results:
        lines.append("nothing could be read")
    return lines


def _update(results: Sequence[Score]) -> None:
    """Write the scoreboard of the package, and its table in the documentation of a checkout."""
    from perfopt.cost_model import errors
    from perfopt.cost_model.validation import as_rows

    package = Path(errors.__file__).parent
    rows = ",\n".join(json.dumps(row) for row in as_rows(results))
    text = f'{{"rows": [\n{rows}\n]}}\n'
    (package / errors.SCOREBOARD).write_text(text, encoding="utf-8")
    errors.scoreboard.cache_clear()
    page = package.parent / "docs" / "accuracy.md"
    if page.is_file():
        before, mark, _ = page.read_text(encoding="utf-8").partition(_MARK)
        if mark:
            page.write_text(f"{before}{_MARK}\n\n{_markdown(results)}", encoding="utf-8")


def _markdown(results: Sequence[Score]) -> str:
    lines = [
        "| source | device | operation | rows | mean | median |",
        "|---|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {r.source} | {r.device} | {r.family} | {r.rows:,} | {r.mape:.1f} | {r.median_ape:.1f} |"
        for r in results
        if r.size_class == "all"
    ]
    return "\n".join(lines) + "\n"
