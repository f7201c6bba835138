"""Explanations as text of 80 columns: the whole, one node, or the kernels."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator, Sequence

from perfopt.capacity import Fit
from perfopt.cost_model.cost import Cost
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.cost_model.memory import MemoryReport
from perfopt.explained import Explained, Line, Part, Piece, loses, weight

WIDTH = 80
SMALL = 0.01  # of the whole time: lines below it are summed up
TINY = 0.001  # of the whole time: what a line runs and is below it is left out
MODULES = 4  # that keep most memory, shown
MOST = 4  # decisions of one verdict shown per line
_ROUNDS = 0.9995  # of a unit: what three digits show as one
_NAME = 38  # columns of a row's name
_SIGNS = {
    Verdict.APPLIED: "+", Verdict.REJECTED: "-", Verdict.NOTE: "!", Verdict.FAILED: "!",
}  # fmt: skip
# The number of a node's name: repeated layers differ in nothing else.
_NUMBER = re.compile(r"\b([a-z]\w*?)(?:_\d+)+\b")
_ANY = r"\1_*"
_SHORT = {"forward": "fwd", "backward": "bwd", "inference": "run"}


class UnknownNodeError(ValueError):
    """No operation, region or decision has the name that was asked about."""


def seconds_text(seconds: float) -> str:
    """A time to three digits in the unit that suits it."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= size * _ROUNDS:
            return f"{_digits(seconds / size)} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def count_text(count: float, unit: str) -> str:
    """A count to three digits with a decimal prefix, as "12.3 MB"."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if count >= size * _ROUNDS:
            return f"{_digits(count / size)} {prefix}{unit}"
    return f"{count:.0f} {unit}" if count else "0"


def _digits(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:#.3g}"


def whole(explained: Explained, every: bool = False) -> str:
    """The explanation for reading; with `every`, lines of less than 1% of the time too."""
    blocks = [_head(explained), *_breaks(explained), [*_table(explained, every)]]
    if explained.measured is not None:
        blocks.append([*_beside(explained, every)])
    general = [pair for line in explained.lines if not line.source for pair in line.decisions]
    nowhere = [] if any(not line.source and line.pieces for line in explained.lines) else general
    if nowhere:
        blocks.append(["decisions without a line of their own", *_decisions(nowhere, every)])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _head(explained: Explained) -> list[str]:
    total, before = explained.cost, explained.before
    what = "training step" if explained.train else "inference"
    lines = [f"{explained.function}, {what} on {explained.device.name}", ""]
    kernels = sum(len(piece.kernels) for piece in explained.pieces)
    graphs = [part for part in explained.graphs if part.pieces]
    lines.append(
        f"  graphs     {', '.join(_many(graphs, explained))}"
        if len(graphs) < 4
        else f"  graphs     {len(graphs)}"
    )
    lines.append(
        f"  runs       {_number(len(explained.regions), 'region')} as {_number(kernels, 'kernel')},"
        f" {_number(len(explained.library_calls), 'library call')}"
    )
    gain = f", {seconds_text(before.seconds)} without the passes" if before.seconds else ""
    lines.append(f"  predicted  {seconds_text(total.seconds)}{gain}")
    if explained.workload is not None and explained.rate is not None:
        count, unit = explained.workload.count, explained.workload.unit
        lines.append(f"  rate       {rate_text(explained)}, {count} {unit} a step")
    lines.append(f"  MFU        {_percent(total.mfu, 1.0)}")
    trust = explained.error
    lines.append(
        f"  error      {trust:.0f}% on average, by docs/accuracy.md"
        if trust is not None
        else "  error      unknown: prices like these were not measured on this device"
    )
    if explained.measured is not None:
        factor = explained.measured / total.seconds if total.seconds else 0.0
        lines.append(f"  measured   {seconds_text(explained.measured)}, {_factor(factor)}")
    if "cpu" in explained.device.aliases or explained.device.calibration != "none":
        lines.append(f"  prices     calibration {explained.device.calibration}")
    bounds = ", ".join(
        f"{bound} {_percent(seconds, total.seconds)}" for bound, seconds in explained.bounds.items()
    )
    lines.append(f"  bound by   {bounds or 'nothing'}")
    lines.append(
        f"  work       {count_text(total.flops, 'FLOP')}, {count_text(total.bytes, 'B')} moved"
    )
    lines.append(
        f"  memory     {count_text(explained.peak_bytes, 'B')} at most of "
        f"{count_text(explained.device.memory_bytes, 'B')}: {fit_text(explained.fit)}"
    )
    if explained.memory is not None:
        lines += _held(explained.memory, explained.fit)
    return lines


def rate_text(explained: Explained) -> str:
    """Tokens or samples per second, as "5.48 K samples/s"; "" where not known."""
    if explained.workload is None or explained.rate is None:
        return ""
    return count_text(explained.rate, f" {explained.workload.unit}/s").replace("  ", " ")


def fit_text(fit: Fit) -> str:
    """Whether a step fits, and how much is left or missing."""
    if fit.fits is False:
        return f"does not fit, {count_text(-fit.margin, 'B')} too much"
    if fit.fits is None:
        return f"fits or not, other graphs hold up to {count_text(fit.besides, 'B')}"
    return f"fits, {count_text(fit.margin - fit.besides, 'B')} left"


def _held(memory: MemoryReport, fit: Fit) -> Iterator[str]:
    """What holds the memory at its peak, and which modules keep most for the backward pass."""
    kinds = ", ".join(f"{name} {count_text(size, 'B')}" for name, size in fit.holds.items())
    yield from _wrapped(f"{kinds}, at {memory.at}", "             ", "             ")
    kept = [(name, size) for name, size in memory.modules.items() if size][:MODULES]
    if kept:
        names = ", ".join(f"{name} {count_text(size, 'B')}" for name, size in kept)
        yield from _wrapped(f"kept most by {names}", "             ", "             ")


def _many(graphs: Sequence[Part], explained: Explained) -> Iterator[str]:
    for part in graphs:
        yield f"{part.name} {seconds_text(part.cost.seconds)}"


def _breaks(explained: Explained) -> Iterator[list[str]]:
    if not explained.graph_breaks:
        return
    lines = [_number(len(explained.graph_breaks), "graph break")]
    for each in explained.graph_breaks:
        text = f"{each.source or 'unknown line'}: {each.reason}"
        lines += _wrapped(text, "  ", "    ")
        if each.explanation:
            lines += _wrapped(each.explanation, "    ", "    ")
    yield lines


def _table(explained: Explained, every: bool) -> Iterator[str]:
    total = explained.cost.seconds
    yield _row("by line, most costly first", "time", "share", "bound", "bytes", "FLOP")
    small: list[Line] = []
    for line in explained.lines:
        if not every and line.cost.seconds < SMALL * total:
            small.append(line)
            continue
        yield from _line(line, total, every)
    if small:
        cost = sum((line.cost for line in small), Cost())
        yield ""
        yield _cost_row(f"{_number(len(small), 'line')} below 1% each", cost, total)
    yield ""
    yield _cost_row("all", explained.cost, total)


def _line(line: Line, total: float, every: bool) -> Iterator[str]:
    if not line.pieces and (not line.source or not line.decisions):
        return
    yield ""
    yield _cost_row(line.source or "no line known", line.cost, total)
    groups = _grouped(line.pieces).items()
    for name, pieces in sorted(groups, key=lambda item: -sum(p.cost.seconds for p in item[1])):
        cost = sum((piece.cost for piece in pieces), Cost())
        if not every and cost.seconds < TINY * total:
            continue
        times = f" x{len(pieces)}" if len(pieces) > 1 else ""
        yield _cost_row(f"  {name}{times}", cost, total)
    yield from _decisions(line.decisions, every)


def _beside(explained: Explained, every: bool) -> Iterator[str]:
    """Pieces with what was measured beside what was predicted, the worst factor first."""
    yield f"{'measured beside predicted, worst first':46}{'predicted':>10}{'measured':>10}  factor"
    yield ""
    total = max(explained.cost.seconds, explained.measured or 0.0)
    rows = [
        (part, piece, piece.measured, piece.factor)
        for part in explained.graphs
        for piece in part.pieces
        if piece.measured is not None and piece.factor
        if every or max(piece.measured, piece.cost.seconds) >= SMALL * total
    ]
    for part, piece, seconds, factor in sorted(
        rows, key=lambda row: (-max(row[3] or 0.0, 1 / (row[3] or 1.0)), row[1].name)
    ):
        inside = f"{len(piece.operators)} ops" if len(piece.operators) > 1 else _short(piece)
        name = f"{_SHORT[part.kind]}: {piece.name}: {inside}"
        if piece.kind == "library call":
            name = f"{_SHORT[part.kind]}: {piece.name}"
        name += f"  {piece.source}" if piece.source else ""
        yield (
            f"  {_cut(name, 44):44}{seconds_text(piece.cost.seconds):>10}"
            f"{seconds_text(seconds or 0.0):>10}  {_factor(factor or 0.0)}"
        )


def _factor(factor: float) -> str:
    """A factor with marks from 1.5, 3 and 10 on, whichever way."""
    off = max(factor, 1 / factor) if factor else 0.0
    marks = "!" * sum(off >= limit for limit in (1.5, 3.0, 10.0))
    return f"{factor:.2f}x {marks}".rstrip()


def _grouped(pieces: Sequence[tuple[Part, Piece]]) -> dict[str, list[Piece]]:
    """Pieces that read alike together: the same operators, as repeated layers have them."""
    groups: dict[str, list[Piece]] = {}
    for part, piece in pieces:
        if piece.kind == "region":
            count = len(piece.operators)
            name = _short(piece) if count == 1 else f"{count} ops"
            name += f" in {_number(len(piece.kernels), 'kernel')}"
        else:
            name = _short(piece)
        name = f"{_SHORT[part.kind]}: {name}"
        groups.setdefault(name, []).append(piece)
    return groups


def _short(piece: Piece) -> str:
    return piece.operators[0].removesuffix(".default").removeprefix("aten.")


def _decisions(pairs: Sequence[tuple[Part, Decision]], every: bool) -> Iterator[str]:
    groups: dict[tuple[Verdict, str, str], list[Decision]] = {}
    for _, each in pairs:
        key = (each.verdict, each.pass_name, _NUMBER.sub(_ANY, each.text()))
        groups.setdefault(key, []).append(each)
    for verdict in Verdict:
        found = [(key, group) for key, group in groups.items() if key[0] is verdict]
        found.sort(key=lambda item: -sum(map(weight, item[1])))
        shown = found if every else found[:MOST]
        for key, group in shown:
            yield from _wrapped(_decision(key[1], group), f"    {_SIGNS[verdict]} ", "      ")
        if len(found) > len(shown):
            yield f"      and {len(found) - len(shown)} more {verdict.value}"


def _decision(name: str, group: Sequence[Decision]) -> str:
    """Decisions that say the same, with what they save or would have cost together."""
    first = group[0]
    text = f"{name}: {first.text()}"
    if len(group) > 1:
        alike = len({each.text() for each in group}) == 1
        text = f"{text if alike else _NUMBER.sub(_ANY, text)} (x{len(group)})"
    if first.verdict is Verdict.APPLIED:
        saved = sum(each.seconds_saved for each in group)
        return text + (f"; saves {seconds_text(saved)}" if saved > 0 else "")
    if first.verdict is Verdict.REJECTED:
        text = text.replace(": ", " refused: ", 1)
        priced = [each for each in group if loses(each) is not None]
        if priced:
            now = sum(weight(each) for each in priced)
            other = sum(each.alternative_cost.seconds for each in priced if each.alternative_cost)
            what = first.alternative or "otherwise"
            text += f"; {seconds_text(now)} as it is, {what} would cost {seconds_text(other)}"
    return text


def _row(name: str, *columns: str) -> str:
    time, share, bound, moved, flops = columns
    return f"{_cut(name):{_NAME}}{time:>9}{share:>7}  {bound:7}{moved:>8}{flops:>9}".rstrip()


def _cost_row(name: str, cost: Cost, total: float) -> str:
    return _row(
        name, seconds_text(cost.seconds), _percent(cost.seconds, total), cost.bound,
        count_text(cost.bytes, "B"), count_text(cost.flops, "").rstrip(),
    )  # fmt: skip


def _cut(name: str, width: int = _NAME) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."


def why(explained: Explained, name: str) -> str:
    """Everything about one region or operation: what became of it, its price, the decisions.

    Raises `UnknownNodeError` with the nearest names.
    """
    known = list(dict.fromkeys(explained.nodes()))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise UnknownNodeError(f"no operation or region is called {name!r}{hint}")
    total = explained.cost.seconds
    lines: list[str] = []
    for part in explained.graphs:
        pieces = [each for each in part.pieces if name == each.name or name in each.nodes]
        names = {name}.union(*(p.nodes for p in pieces if p.name == name))
        decisions = [(part, each) for each in part.decisions if names & set(each.nodes)]
        if not pieces and not decisions:
            continue
        lines += ["", f"{name} in {part.name}{f' of {part.function}' if part.function else ''}"]
        for piece in pieces:
            lines += _about(piece, total)
        if not pieces:
            lines.append("  computes nothing of its own: a view, or dropped by a pass")
        lines += _decisions(decisions, every=True)
    return "\n".join(lines[1:]) + "\n"


def _about(piece: Piece, total: float) -> Iterator[str]:
    cost = piece.cost
    where = f" at {piece.source}" if piece.source else ""
    if piece.kind == "region":
        inside = _number(len(piece.operators), "operation")
        yield f"  {piece.name}{where}: {inside} in {_number(len(piece.kernels), 'kernel')}"
        yield from _wrapped(", ".join(piece.nodes), "    ", "    ")
    else:
        yield f"  a call of {piece.operators[0]}{where}"
    yield (
        f"    {seconds_text(cost.seconds)}, {_percent(cost.seconds, total)} of the whole, bound by "
        f"{cost.bound}: {count_text(cost.bytes, 'B')}, {count_text(cost.flops, 'FLOP')}"
    )


def kernels(explained: Explained) -> str:
    """The generated kernels, those of the most expensive region first."""
    lines: list[str] = []
    for part in explained.graphs:
        for piece in sorted(part.pieces, key=lambda each: -each.cost.seconds):
            for number, text in enumerate(piece.kernels):
                title = f"{part.name} {piece.name}"
                title += f", kernel {number}" if len(piece.kernels) > 1 else ""
                lines += [f"# {title}" + (f"  {piece.source}" if piece.source else ""), text]
    return "\n".join(lines)


def passes(explained: Explained) -> str:
    """Every graph after each pass; one word where a pass changed nothing."""
    lines: list[str] = []
    for each in explained.passes:
        title = f"{each.graph_name} after {each.text}"
        lines += [f"# {title}", each.graph] if each.graph else [f"# {title}: unchanged"]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, first: str = "", rest: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0%"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
