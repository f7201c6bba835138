"""The `perfopt` command."""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from perfopt.bench_command import INTERRUPTED, add_bench_command
from perfopt.cache_commands import add_cache_command
from perfopt.commands import add_commands
from perfopt.device_commands import add_device_commands
from perfopt.options import described
from perfopt.validate import add_validate_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="perfopt", description="A torch.compile backend that prices every decision."
    )
    parser.add_argument("--version", action="version", version=f"perfopt {version('perfopt')}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("passes", help="list the passes, their level and their options")
    commands.add_parser("options", help="list what `options={...}` of torch.compile takes")
    add_commands(commands)
    add_bench_command(commands, _bar)
    add_cache_command(commands)
    add_device_commands(commands, _bar)
    add_validate_command(commands)
    args = parser.parse_args(argv)
    if args.command == "passes":
        _passes()
    elif args.command == "options":
        _options()
    elif args.command is not None:
        return _answer(args)
    else:
        parser.print_help()
    return 0


def _answer(args: argparse.Namespace) -> int:
    """Run a command that answers with text; whatever goes wrong is one line and exit code 2.

    Ctrl-C is one line and exit code 130.
    """
    if not args.traceback:
        logging.disable(logging.ERROR)  # torch's, about what the answer says in a line
    try:
        # What the user's model prints is no part of the answer.
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            if not args.traceback:
                warnings.simplefilter("ignore")
            text, code = args.run(args)
    except Exception as error:
        if args.traceback:
            traceback.print_exc()
        else:
            message = str(error).strip().partition("\n")[0] or type(error).__name__
            print(f"perfopt {args.command}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"perfopt {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        logging.disable(logging.NOTSET)
    sys.stdout.write(text)
    return int(code)


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on the error stream; gives what sets its text and the part that is done.

    There is none where the error stream is no terminal.
    """
    columns = (TextColumn("{task.description:36}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda what, done: progress.update(task, description=what, completed=done)


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
