"""Explanations beside each other: one model on several devices, or under several options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perfopt.cost_model.decision import Decision, Verdict
from perfopt.explained import Explained
from perfopt.explained_text import WIDTH, count_text, rate_text, seconds_text

MOST = 12  # lines of the user's code, and decisions, in which two explanations differ most


def names(explanations: Sequence[Explained]) -> list[str]:
    """What tells the explanations apart: the device, or else the options."""
    devices = [each.device.name for each in explanations]
    if len(set(devices)) == len(devices):
        return devices
    return [_options(each) for each in explanations]


def _options(explained: Explained) -> str:
    options = ",".join(f"{key}={value}" for key, value in explained.options.items())
    return options or "defaults"


def table(explanations: Sequence[Explained]) -> str:
    """The figures that decide between devices or options, one column for each."""
    first = explanations[0]
    what = "training step" if first.train else "inference"
    columns = names(explanations)
    width = max(12, min(20, (WIDTH - 16) // len(columns)))
    lines = [f"{first.function}, {what}", "", _row("", columns, width)]
    for title, values in _figures(explanations):
        lines.append(_row(title, values, width))
    return "\n".join(lines) + "\n"


def _row(title: str, cells: Sequence[str], width: int) -> str:
    return f"{title:16}" + "".join(f"{cell[: width - 1]:>{width}}" for cell in cells).rstrip()


def _figures(explanations: Sequence[Explained]) -> Iterator[tuple[str, list[str]]]:
    yield "predicted", [seconds_text(each.cost.seconds) for each in explanations]
    base = explanations[0].cost.seconds
    yield (
        "of the first",
        [f"{each.cost.seconds / base:.2f}x" if base else "" for each in explanations],
    )
    if all(each.rate is not None for each in explanations):
        yield "rate", [rate_text(each) for each in explanations]
    yield "no passes", [seconds_text(each.before.seconds) for each in explanations]
    yield "MFU", [f"{100 * each.cost.mfu:.1f}%" for each in explanations]
    yield "bound by", [next(iter(each.bounds), "nothing") for each in explanations]
    yield "memory", [count_text(each.peak_bytes, "B") for each in explanations]
    yield "of", [count_text(each.device.memory_bytes, "B") for each in explanations]
    yield (
        "fits",
        [{True: "yes", False: "no", None: "unknown"}[each.fit.fits] for each in explanations],
    )
    yield "moved", [count_text(each.cost.bytes, "B") for each in explanations]
    yield (
        "kernels",
        [str(sum(len(piece.kernels) for piece in each.pieces)) for each in explanations],
    )
    yield "library calls", [str(len(each.library_calls)) for each in explanations]


def diff(before: Explained, after: Explained) -> str:
    """Where two explanations of one model differ: by line of code, and decision by decision."""
    left, right = names((before, after))
    lines = [table((before, after))]
    lines += [f"by line, greatest difference first: {left} -> {right}", ""]
    lines += _lines(before, after)
    for title, found, other in (
        (f"only with {left}", before, after), (f"only with {right}", after, before),
    ):  # fmt: skip
        decisions = _only(found, other)
        if decisions:
            lines += ["", f"decisions {title}", *decisions]
    return "\n".join(lines) + "\n"


def _lines(before: Explained, after: Explained) -> Iterator[str]:
    old = {line.source: line.cost.seconds for line in before.lines}
    new = {line.source: line.cost.seconds for line in after.lines}
    changes = [
        (abs(new.get(source, 0.0) - old.get(source, 0.0)), source) for source in {*old, *new}
    ]
    shown = [pair for pair in sorted(changes, key=lambda pair: (-pair[0], pair[1])) if pair[0]]
    if not shown:
        yield "  no line differs"
    for _, source in shown[:MOST]:
        was, now = old.get(source, 0.0), new.get(source, 0.0)
        factor = f"{now / was:7.2f}x" if was else "    new"
        yield (
            f"  {(source or 'no line known')[:40]:40}{seconds_text(was):>10} -> "
            f"{seconds_text(now):>9}{factor}"
        )
    if len(shown) > MOST:
        yield f"  and {len(shown) - MOST} more lines"


def _only(found: Explained, other: Explained) -> list[str]:
    """Decisions, applied or refused, that the other explanation does not have."""
    known = {_key(each) for each in other.decisions}
    signs = {Verdict.APPLIED: "+", Verdict.REJECTED: "-"}
    mine = [each for each in found.decisions if _key(each) not in known and each.verdict in signs]
    shown = [
        f"  {signs[each.verdict]} {each.pass_name}: {each.text()}"[: WIDTH - 26]
        + (f" ({each.source})" if each.source else "")
        for each in mine[:MOST]
    ]
    if len(mine) > MOST:
        shown.append(f"    and {len(mine) - MOST} more")
    return shown


def _key(decision: Decision) -> tuple[object, ...]:
    return decision.pass_name, decision.verdict, decision.nodes, decision.source, decision.text()
