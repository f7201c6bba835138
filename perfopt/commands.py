"""`perfopt explain` and `perfopt verify`: their arguments and what they answer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

Answer = tuple[str, int]
_SPEC = "a function that returns (model, args) or (model, args, kwargs), as model.py:make"


def add_commands(commands: Any) -> None:
    """Add both to an argparse command group; each sets `run`: arguments to text and exit code."""
    _add_explain(commands)
    _add_verify(commands)


def _add_explain(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="what a model costs on a device, what was decided and what was refused",
        description="Capture a model without its weights and without the device, and say what "
        "runs, what bounds it, and what the compiler decided and refused, at which price.",
    )
    _common(parser)
    parser.add_argument("--device", default="cpu", help="any known device; default: this CPU")
    parser.add_argument("--train", action="store_true", help="explain the backward pass too")
    parser.add_argument("--all", action="store_true", help="show what takes less than 1%% too")
    parser.add_argument("--json", action="store_true", help="JSON, as docs/explain.md describes it")
    parser.add_argument("--why", metavar="NODE", help="what became of one operation or region")
    parser.add_argument("--kernels", action="store_true", help="show the generated kernels as well")
    parser.add_argument("-o", "--output", metavar="FILE", help="write there, not to the terminal")
    parser.set_defaults(run=_explain)


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


def _explain(args: argparse.Namespace) -> Answer:
    from perfopt.explanation import explain_made
    from perfopt.factory import load_factory

    make = load_factory(args.factory)
    name = args.factory.rpartition("/")[2]
    explanation = explain_made(make, name, train=args.train, device=args.device)
    if args.why:
        text = explanation.why(args.why)
    elif args.json:
        text = explanation.to_json()
    else:
        text = explanation.text(every=args.all)
    if args.kernels and not args.json:
        text += "\n" + explanation.kernels()
    return _delivered(text, args.output), 0


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


def _delivered(text: str, output: str | None) -> str:
    """The text, or, where it goes to a file, nothing."""
    if output:
        Path(output).write_text(text, encoding="utf-8")
        return ""
    return text
