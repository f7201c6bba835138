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
    parser.set_defaults(run=_explain)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("factory", metavar="FILE.py:FACTORY", help=_SPEC)
    parser.add_argument("-o", "--output", metavar="FILE", help="write there, not to the terminal")
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


def _delivered(text: str, output: str | None) -> str:
    """The text, or, where it goes to a file, nothing."""
    if output:
        Path(output).write_text(text, encoding="utf-8")
        return ""
    return text
