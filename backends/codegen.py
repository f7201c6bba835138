"""The text of a program: statements, the names they define and use, the objects they name."""

from __future__ import annotations

import keyword
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from perfopt.backends.region import Size
from perfopt.backends.torch_private import python_expression

_WIDTH = 96
_TORCH = str(Path(torch.__file__).parent)
_NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.device)


@dataclass(frozen=True)
class Statement:
    """One line: its text, the locals it makes, those it reads, and the user's line behind it.

    `lasting` keeps the locals that it makes until the end.
    """

    text: str
    defines: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    source: str = ""
    lasting: bool = False


class Names:
    """Python names that are not yet taken."""

    def __init__(self) -> None:
        self._taken: set[str] = set(keyword.kwlist)

    def fresh(self, wanted: str) -> str:
        """`wanted`, made an identifier and numbered if it is taken."""
        base = re.sub(r"\W", "_", wanted) or "x"
        base = f"_{base}" if base[0].isdigit() else base
        name, number = base, 1
        while name in self._taken:
            name, number = f"{base}_{number}", number + 1
        self._taken.add(name)
        return name


class Writer:
    """Statements in order, and the objects that they name as globals of the program."""

    def __init__(self) -> None:
        self.names = Names()
        self.bound: dict[str, Any] = {}
        self.statements: list[Statement] = []
        self.symbols: dict[sympy.Symbol, str] = {}
        self._by_identity: dict[int, str] = {}

    def bind(self, wanted: str, value: object) -> str:
        """The global name of `value`, which is kept alive by it."""
        key = id(value)
        if key not in self._by_identity:
            name = self.names.fresh(wanted)
            self._by_identity[key], self.bound[name] = name, value
        return self._by_identity[key]

    def size(self, size: Size) -> tuple[str, tuple[str, ...]]:
        """A size as Python text, with the locals that it reads; `KeyError` names what is unknown.

        A symbol is known once a statement has defined the local that `symbols` gives for it.
        """
        if isinstance(size, int):
            return str(size), ()
        local = {symbol: self.symbols[symbol] for symbol in free_symbols(size)}
        renamed = {s: sympy.Symbol(n, integer=True) for s, n in local.items() if s.name != n}
        expression = size.xreplace(renamed) if renamed else size
        return python_expression(expression), tuple(sorted(local.values()))

    def sizes(self, sizes: tuple[Size, ...]) -> tuple[str, tuple[str, ...]]:
        """Sizes as the text of a tuple, with the locals that it reads."""
        parts = [self.size(size) for size in sizes]
        text = ", ".join(part for part, _ in parts)
        return f"({text}{',' * (len(parts) == 1)})", tuple(n for _, used in parts for n in used)

    def add(
        self,
        text: str,
        defines: tuple[str, ...] = (),
        uses: tuple[str, ...] = (),
        source: str = "",
        lasting: bool = False,
    ) -> None:
        """Append a statement."""
        self.statements.append(Statement(text, defines, uses, source, lasting))

    def text(self, header: str) -> str:
        """The function: each local is deleted after the statement that reads it last."""
        lines, shown = [header], ""
        last = self._last_uses()
        for number, statement in enumerate(self.statements):
            if statement.source and statement.source != shown:
                shown = statement.source
                lines.append(f"    # {shown}")
            lines += _indented(statement.text)
            dead = last.get(number)
            if dead and number + 1 < len(self.statements):
                lines.append(f"    del {', '.join(dead)}")
        return "\n".join(lines) + "\n"

    def _last_uses(self) -> dict[int, list[str]]:
        last: dict[str, int] = {}
        lasting = set(self.bound)  # globals
        for number, statement in enumerate(self.statements):
            lasting.update(statement.defines if statement.lasting else ())
            for name in (*statement.defines, *statement.uses):
                last[name] = number
        dead: dict[int, list[str]] = {}
        for name, number in last.items():
            if name not in lasting:
                dead.setdefault(number, []).append(name)
        return dead


def _indented(text: str) -> list[str]:
    """A statement inside of the function; what is between its parentheses may take more lines."""
    opening, closing = text.find("("), text.rfind(")")
    if len(text) <= _WIDTH or text.startswith("if ") or closing < 0 or "'" in text:
        return [f"    {text}"]
    head, body, tail = text[: opening + 1], text[opening + 1 : closing], text[closing:]
    # No line breaks outside of the parentheses.
    head, tail = head.replace(" ", "\xa0"), tail.replace(" ", "\xa0")
    lines = textwrap.wrap(
        head + body + tail, _WIDTH, initial_indent="    ", subsequent_indent="        ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace("\xa0", " ") for line in lines]


def free_symbols(size: Size) -> set[sympy.Symbol]:
    """The symbols in a size."""
    if isinstance(size, int):
        return set()
    return {each for each in size.free_symbols if isinstance(each, sympy.Symbol)}


def argument(writer: Writer, value: Any, local: Mapping[fx.Node, str], used: set[str]) -> str:
    """An argument of a call as text; the locals it reads are added to `used`."""
    if isinstance(value, fx.Node):
        name = local[value]
        used.add(name)
        return name
    if isinstance(value, (list, tuple)):
        parts = [argument(writer, each, local, used) for each in value]
        text = ", ".join(parts)
        return f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(parts) == 1)})"
    if isinstance(value, dict):
        pairs = (f"{key!r}: {argument(writer, each, local, used)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, slice):
        parts = [argument(writer, x, local, used) for x in (value.start, value.stop, value.step)]
        return f"slice({', '.join(parts)})"
    if value is None or value is Ellipsis or isinstance(value, (bool, int, str)):
        return "..." if value is Ellipsis else repr(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        text, names = writer.size(value.node.expr)
        used.update(names)
        return text
    wanted = str(value).removeprefix("torch.") if isinstance(value, (*_NAMED, float)) else "const"
    return writer.bind(wanted, value)


def source_line(node: fx.Node) -> str:
    """The user's line behind a node, as `file.py:12  code`; "" where torch kept none.

    Frames inside of torch, such as those of its modules, are passed over where there are others.
    """
    trace = node.stack_trace
    if not trace:
        return ""
    found = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n?([^\n]*)', trace)
    if not found:
        return ""
    own = [frame for frame in found if not frame[0].startswith(_TORCH)]
    file, number, code = (own or found)[-1]
    text = f"{file.rsplit('/', 1)[-1]}:{number}  {code.strip()}".strip()
    return text if len(text) <= 90 else text[:87] + "..."
