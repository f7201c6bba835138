"""`perfopt explain`: its arguments and what it answers."""

from __future__ import annotations

import argparse
import ast
import difflib
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from perfopt.factory import FactoryError, Made

Answer = tuple[str, int]
_DESCRIPTION = (
    "Capture a model without its weights and without the device, and say what runs, what bounds "
    "it, and what the compiler decided and refused, at which price."
)


def add(commands: Any) -> None:
    """Add the command to an argparse command group; `run` answers with text and exit code."""
    parser = commands.add_parser(
        "explain",
        help="what a model costs on a device, what was decided and what was refused",
        description=_DESCRIPTION,
    )
    model = parser.add_argument_group("the model")
    model.add_argument(
        "factory", metavar="FILE.py:FACTORY", nargs="?",
        help="a function that returns (model, args) or (model, args, kwargs), as model.py:make",
    )  # fmt: skip
    model.add_argument("--hf", metavar="CONFIG", help="a config.json of transformers instead")
    model.add_argument("--batch", type=int, default=1, help="samples, with --hf (default 1)")
    model.add_argument("--seq", type=int, metavar="N", help="tokens of a sample, with --hf")
    model.add_argument("--dtype", default="bf16", help="of weights, with --hf: bf16, fp16 or fp32")
    model.add_argument("--train", action="store_true", help="explain the backward pass too")
    model.add_argument(
        "--optimizer", default="none", metavar="NAME",
        help="whose state and step count as memory: sgd, momentum or adamw (default none)",
    )  # fmt: skip
    model.add_argument("--tokens", type=int, metavar="N", help="that one step works through")
    model.add_argument("--samples", type=int, metavar="N", help="the same, in samples")
    what = parser.add_argument_group("what for")
    what.add_argument(
        "--device", action="append", metavar="NAME",
        help="any known device, several to compare; default: this CPU",
    )  # fmt: skip
    what.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the backend"
    )
    what.add_argument(
        "--against", action="append", default=[], metavar="KEY=VALUE",
        help="an option of the second side of --diff",
    )  # fmt: skip
    shown = parser.add_argument_group("what to show")
    shown.add_argument("--all", action="store_true", help="what takes less than 1%% too")
    shown.add_argument("--why", metavar="NODE", help="what became of one operation or region")
    shown.add_argument("--diff", action="store_true", help="two devices, or two sets of options")
    shown.add_argument(
        "--measure", action="store_true", help="run it here: measured beside predicted"
    )
    shown.add_argument("--passes", action="store_true", help="the graph after each pass")
    shown.add_argument("--kernels", action="store_true", help="the generated kernels as well")
    shown.add_argument("--json", action="store_true", help="JSON, as docs/explain.md describes it")
    shown.add_argument("--html", metavar="FILE", help="write a page with plots there as well")
    shown.add_argument("-o", "--output", metavar="FILE", help="write there, not to the terminal")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    parser.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> Answer:
    from perfopt.cost_model.memory import OPTIMIZERS
    from perfopt.explanation import Explanation, explain_made_each
    from perfopt.workload import given

    if args.optimizer not in OPTIMIZERS:
        near = difflib.get_close_matches(args.optimizer, OPTIMIZERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown optimizer {args.optimizer!r}{hint} Allowed: {', '.join(OPTIMIZERS)}"
        )
    workload = given(args.tokens, args.samples)
    make, name = _model(args)
    options = _options(args.set)
    sides = [(device, options) for device in args.device or ["cpu"]]
    if args.against:
        if len(sides) > 1:
            raise ValueError("--against compares options on one device; --device names several")
        sides.append((sides[0][0], _options(args.against)))
    if args.diff and len(sides) != 2:
        raise ValueError("--diff compares two: two of --device, or one and --against KEY=VALUE")
    _refuse(args, len(sides))
    found: list[Explanation] = []
    for chosen, group in groupby(sides, key=lambda side: side[1]):
        devices = [device for device, _ in group]
        found += explain_made_each(
            make,
            name,
            args.train,
            devices,
            chosen,
            args.passes,
            args.measure,
            args.optimizer,
            workload,
        )
    text = _text(args, found)
    if args.html:
        Path(args.html).write_text(found[0].to_html(args.kernels), encoding="utf-8")
    if args.output:
        Path(args.output).write_text(text, encoding="utf-8")
        text = ""
    return text, 0


def _model(args: argparse.Namespace) -> tuple[Callable[[], Made], str]:
    from perfopt.factory import load_factory
    from perfopt.huggingface import from_config

    if (args.factory is None) == (args.hf is None):
        raise FactoryError("give either FILE.py:FACTORY or --hf config.json")
    if args.factory is not None:
        return load_factory(args.factory), args.factory.rpartition("/")[2]
    make = from_config(args.hf, args.batch, args.seq, args.dtype, args.train)
    path = Path(args.hf)
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return make, name


def _options(given: Sequence[str]) -> dict[str, Any]:
    """Options as `KEY=VALUE` each; values are Python's literals, or else text."""
    options: dict[str, Any] = {}
    for each in given:
        key, sign, value = each.partition("=")
        if not sign or not key:
            raise ValueError(f"{each!r} is not of the form KEY=VALUE")
        try:
            options[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key.strip()] = value
    return options


def _refuse(args: argparse.Namespace, sides: int) -> None:
    """What is about one explanation cannot be asked of several."""
    single = {"--why": args.why, "--passes": args.passes, "--html": args.html,
              "--kernels": args.kernels}  # fmt: skip
    for name, asked in single.items():
        if asked and sides > 1:
            raise ValueError(f"{name} is about one device and one set of options, not {sides}")


def _text(args: argparse.Namespace, found: Sequence[Any]) -> str:
    from perfopt.compared import diff, table

    first = found[0]
    if args.json:
        if len(found) == 1:
            return str(first.to_json())
        return "[\n" + ",\n".join(each.to_json().rstrip() for each in found) + "\n]\n"
    if args.diff:
        return diff(first, found[1])
    if len(found) > 1:
        return table(found)
    if args.why:
        return str(first.why(args.why))
    text = str(first.after_passes() if args.passes else first.text(every=args.all))
    return text + ("\n" + first.kernels() if args.kernels else "")
