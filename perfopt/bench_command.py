"""`perfopt bench`: its arguments and what it answers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

Bar = Callable[[], AbstractContextManager[Callable[[str, float], None]]]
INTERRUPTED = 130


def add_bench_command(commands: Any, bar: Bar) -> None:
    """Add the command to an argparse command group; `bar` opens a progress bar."""
    parser = commands.add_parser(
        "bench",
        help="a model's time beside eager and Inductor, after its results were checked",
        description="Time models through perfopt beside rivals, in one process and random order. "
        "Results are compared with float64 first: what is wrong is not timed, and exits 1.",
    )
    parser.add_argument(
        "factory", metavar="FILE.py:FACTORY", nargs="*",
        help="functions that return (model, args) or (model, args, kwargs)",
    )  # fmt: skip
    parser.add_argument("--suite", metavar="FILE.toml", help="more rows, as [[case]] each")
    parser.add_argument(
        "--vs", default="eager,inductor", metavar="A,B", help="rivals (default eager,inductor)"
    )
    parser.add_argument("--train", action="store_true", help="a step with gradients")
    parser.add_argument("--dtype", default="", metavar="A,B", help="a row for each dtype")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch")
    parser.add_argument("--samples", type=int, metavar="N", help="rounds of a row")
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S",
        help="that the rounds of a row take, about (default 10)",
    )  # fmt: skip
    parser.add_argument(
        "--no-cold", action="store_true", help="without first steps, which take longest"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything there, samples too")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument(
        "--compare", metavar="OLD.json", help="flag what is slower than then, and exit 1"
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    parser.set_defaults(run=lambda args: _bench(args, bar))


def _bench(args: argparse.Namespace, bar: Bar) -> tuple[str, int]:
    import torch

    from perfopt.bench_cases import cases, check_rivals
    from perfopt.bench_text import changed
    from perfopt.benching import Bench, each_row

    _check(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    rivals = check_rivals(args.vs)
    found = cases(args.factory, args.dtype, args.train, args.suite)
    former = Bench.read(args.compare) if args.compare else None
    rows: list[Any] = []
    interrupted = False
    try:
        with bar() as tell:
            for row in each_row(
                found, rivals, seconds=args.seconds, samples=args.samples, cold=not args.no_cold,
                strict=args.traceback or len(found) == 1, tell=tell,
            ):  # fmt: skip
                rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        made = Bench(tuple(rows), interrupted=interrupted)
        if args.json and rows:  # an earlier file stays where nothing was finished
            Path(args.json).write_text(made.to_json(), encoding="utf-8")
    text = made.markdown() if args.markdown else str(made)
    if args.markdown and interrupted:
        text += "\nInterrupted.\n"
    code = 2 if made.failed else int(made.wrong)
    if former is not None:
        since = made.since(former)
        text += changed(since, former.environment, made.environment, args.compare)
        code = code or int(any(each.verdict == "slower" for each in since))
    return text, INTERRUPTED if interrupted else code


def _check(args: argparse.Namespace) -> None:
    for name in ("threads", "samples"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}, not a number from 1")
    if not 0 < args.seconds < float("inf"):
        raise ValueError(f"--seconds is {args.seconds}, not a number above 0")
    if args.json:  # before anything is measured, not after
        path = Path(args.json)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"--json {args.json}: no file can be written there")
