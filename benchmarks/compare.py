"""Fair timing of several ways to run one function: one process, random order, paired ratios.

Every benchmark here times by `measure`, compares by `ratio` and checks by `check`, so that all of
their figures mean the same: seconds are medians, a ratio is the median of the ratios of samples
taken in the same round, and its interval is a 95% bootstrap interval of that median.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from perfopt.measuring import Ratio, machine, ratio

EAGER, INDUCTOR = "eager", "inductor"
WIDTH = 140


class WrongResultError(AssertionError):
    """A contender's result is further from float64 than rounding explains."""


def contender(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    """`function` compiled by `backend`, or as it is for "eager".

    Each gets a code object of its own: Dynamo keeps what it compiled per code object, and would
    else try the guards of one contender on every call of another.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{backend}")
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__)
    return own if backend == EAGER else torch.compile(own, backend=backend, fullgraph=True)


def error(result: Any, exact: Any) -> float:
    """The greatest distance from `exact` (float64), over the greatest finite magnitude in it.

    Infinite where the two do not hold NaN at the same places. Of tuples, the worst.
    """
    if isinstance(result, tuple):
        return max(error(one, other) for one, other in zip(result, exact, strict=True))
    if not torch.equal(result.isnan(), exact.isnan()):
        return float("inf")
    scale = exact.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1e-30)
    return float((result.double() - exact).nan_to_num(0.0).abs().max() / scale)


def check(functions: Mapping[str, Callable[..., Tensor]], inputs: Sequence[Tensor]) -> None:
    """Raise `WrongResultError` where a result is over 4 times as far from float64 as eager's.

    Inductor is not held to it: some of its long sums are plain ones. Done twice, the second time
    with NaN at a few places of the first input.
    """
    spoilt = inputs[0].clone()
    spoilt.view(-1)[:: spoilt.numel() // 7] = float("nan")
    for each in (tuple(inputs), (spoilt, *inputs[1:])):
        exact = functions[EAGER](*(x.double() if x.is_floating_point() else x for x in each))
        errors = {name: error(function(*each), exact) for name, function in functions.items()}
        allowed = max(4 * errors[EAGER], 4 * torch.finfo(inputs[0].dtype).eps)
        for name, found in errors.items():
            if name not in (EAGER, INDUCTOR) and not found <= allowed:
                raise WrongResultError(
                    f"{name} is {found:.1e} from float64; eager is {errors[EAGER]:.1e}, "
                    f"{allowed:.1e} is allowed"
                )


def parser(description: str | None, samples: int) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--samples", type=int, default=samples, help="rounds (default %(default)s)")
    made.add_argument("--threads", type=int, default=1, help="of torch (default %(default)s)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--backend", default="perfopt", help="beside eager and Inductor")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    made.add_argument("--markdown", action="store_true", help="print a Markdown table")
    return made


def keep_memory() -> None:
    """Let the C library keep what is freed (glibc's mallopt; nothing elsewhere).

    Else it gives large buffers back to the system at every call, and the page faults of the next
    one, which hit every contender alike, outweigh the kernels to be compared.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((-3, 1 << 30), (-1, 2**31 - 1)):  # mmap and trim thresholds
            mallopt(parameter, value)


@dataclass(frozen=True)
class Row:
    """The figures of one case: median seconds by contender, ratios by "a / b", and a target.

    `target` is the least value of the first ratio that the project holds itself to, or None.
    """

    case: str
    seconds: dict[str, float]
    ratios: dict[str, Ratio]
    target: float | None = None


def row(
    case: str,
    seconds: Mapping[str, Sequence[float]],
    ratios: Sequence[tuple[str, str]],
    target: float | None = None,
) -> Row:
    """The `Row` of one `measure`; `ratios` names the pairs (above, below) to compare."""
    return Row(
        case,
        {name: median(each) for name, each in seconds.items()},
        {f"{a} / {b}": ratio(seconds[a], seconds[b]) for a, b in ratios},
        target,
    )


def over_processes(module: str, given: Sequence[str], count: int) -> Row:
    """A benchmark of one row over `count` fresh processes: medians of their medians.

    Of several, a ratio has the least and the greatest in place of the interval.
    """
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        for _ in range(count):
            command = [sys.executable, "-m", module, *given, "--json", str(file)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (row,) = json.loads(file.read_text())["rows"]
            runs.append(row)
    first = runs[0]
    if count == 1:
        ratios = {name: Ratio(**value) for name, value in first["ratios"].items()}
        return Row(first["case"], first["seconds"], ratios, first["target"])
    ratios = {}
    for name in first["ratios"]:
        values = [each["ratios"][name]["value"] for each in runs]
        ratios[name] = Ratio(median(values), min(values), max(values))
    seconds = {name: median(each["seconds"][name] for each in runs) for name in first["seconds"]}
    return Row(first["case"], seconds, ratios, first["target"])


def show(rows: Sequence[Row], unit: str, args: argparse.Namespace) -> None:
    """Print rows in `unit` ("us", "ms" or "s") as the options of `parser` ask; write the JSON."""
    scale = {"us": 1e6, "ms": 1e3, "s": 1.0}[unit]
    digits = 2 if unit == "s" else 1
    names, ratios = list(rows[0].seconds), list(rows[0].ratios)
    headings = ["", *(f"{name} {unit}" for name in names), *ratios, "target"]
    lines = [
        [
            each.case,
            *(f"{each.seconds[name] * scale:.{digits}f}" for name in names),
            *(str(each.ratios[name]) for name in ratios),
            "" if each.target is None else f">= {each.target}",
        ]
        for each in rows
    ]
    about = machine()
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)  # a file or a pipe has no width of its own
    described = ", ".join(f"{key} {value}" for key, value in about.items())
    console.print(described, highlight=False)
    if args.markdown:
        for line in (headings, ["---", *["---:"] * (len(headings) - 1)], *lines):
            console.out(f"| {' | '.join(line)} |", highlight=False)
    else:
        table = Table(headings[0])
        for heading in headings[1:]:
            table.add_column(heading, justify="right")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    if args.json:
        content = {"machine": about, "rows": [asdict(each) for each in rows]}
        args.json.write_text(json.dumps(content, indent=2) + "\n")
