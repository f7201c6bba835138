"""`perfopt explain` and `perfopt verify`: their arguments and what they answer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from perfopt import explain_command

Answer = tuple[str, int]
_SPEC = "a function that returns (model, args) or (model, args, kwargs), as model.py:make"


def add_commands(commands: Any) -> None:
    """Add both to an argparse command group; each sets `run`: arguments to text and exit code."""
    explain_command.add(commands)
    _add_verify(commands)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="a model beside eager and float64; a fault is traced to one decision",
        description="Run a model through perfopt, eagerly and in float64. Where they differ by "
        "more than rounding, name the first wrong region, find the decision that brings the fault, "
        "write a file that shows it alone, and exit 1.",
    )
    _common(parser)
    parser.add_argument("--train", action="store_true", help="compare gradients too")
    parser.add_argument("--steps", type=int, metavar="N", help="train N steps, compare the losses")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="perfopt_repro.py",
        help="where a fault is written to; default: perfopt_repro.py",
    )  # fmt: skip
    parser.set_defaults(run=_verify)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("factory", metavar="FILE.py:FACTORY", help=_SPEC)
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")


def _verify(args: argparse.Namespace) -> Answer:
    from perfopt.checked_text import checked, trained
    from perfopt.checking import check, curves
    from perfopt.factory import load_factory
    from perfopt.options import Options
    from perfopt.repro import write
    from perfopt.running import SEED, Subject, seeded

    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps is {args.steps}, not a number from 1")
    make = load_factory(args.factory)
    seeded(SEED)
    model, inputs, keywords = make()
    subject = Subject(model, inputs, keywords, args.train or args.steps is not None)
    options = Options()
    found = check(subject, options)
    written = write(Path(args.output), found, options) if found.wrong else False
    text = checked(args.factory.rpartition("/")[2], found, args.output if written else "")
    wrong = found.wrong
    if args.steps is not None:
        losses = curves(subject, args.steps, options)
        text += "\n" + trained(losses)
        wrong = wrong or losses.wrong
    return text, int(wrong)
