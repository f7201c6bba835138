"""The `perfopt` command: what passes and options there are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from perfopt.options import described


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="perfopt", description="A torch.compile backend that prices every decision."
    )
    parser.add_argument("--version", action="version", version=f"perfopt {version('perfopt')}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("passes", help="list the passes, their level and their options")
    commands.add_parser("options", help="list what `options={...}` of torch.compile takes")
    args = parser.parse_args(argv)
    if args.command == "passes":
        _passes()
    elif args.command == "options":
        _options()
    else:
        parser.print_help()
    return 0


def _options() -> None:
    table = Table("option", "default", "what it does")
    for row in described():
        table.add_row(*row)
    Console().print(table)


def _passes() -> None:
    from perfopt.pipelines import described_passes

    table = Table("pass", "level", "options", "what it does")
    for row in described_passes():
        table.add_row(*row)
    Console().print(table)
