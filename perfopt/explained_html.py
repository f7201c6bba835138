"""Explanations as one HTML file that needs nothing else: plots, a sortable table, decisions.

Its figures are those of the JSON, which is in the file as well, under the id `perfopt`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from perfopt import explained_json, plots
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.explained import Explained, Part, Piece, loses, weight
from perfopt.explained_text import count_text, fit_text, rate_text, seconds_text

MOST_ROWS = 400  # of the table, the most costly ones
MOST_DECISIONS = 40  # of one line
MOST_KERNELS = 60
_COLUMNS = (
    ("what", False), ("line", False), ("graph", False), ("time", True), ("share", True),
    ("bound", False), ("of the roof", True), ("bytes", True), ("FLOP", True),
)  # fmt: skip


def page(explained: Explained, kernels: bool = False) -> str:
    """The page; with `kernels`, the generated kernels as well. Equal explanations give equal pages.

    Raises `PlotError` without matplotlib.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files("perfopt").joinpath("templates", "report.html.j2").read_text(encoding="utf-8")
    what = "Training step" if explained.train else "Inference"
    options = ", ".join(f"{name}={value!r}" for name, value in explained.options.items())
    return environment.from_string(source).render(
        title=f"{explained.function} on {explained.device.name}",
        what=what,
        explained=explained,
        options=options,
        cards=list(_cards(explained)),
        bounds=list(_bounds(explained)),
        roofline=plots.roofline(explained.device, explained.pieces),
        memory=_memory_plot(explained),
        columns=[
            {"name": name, "number": number, "first": name == "time"} for name, number in _COLUMNS
        ],
        rows=list(_rows(explained)),
        passes=list(_passes(explained)),
        decisions=list(_decisions(explained)),
        kernels=list(_kernels(explained)) if kernels else [],
        # A closing tag inside of a text would end the script.
        json=explained_json.dumps(explained).replace("</", "<\\/"),
    )


def _memory_plot(explained: Explained) -> str:
    """Bytes alive over predicted time: every node takes what its piece does, or nothing."""
    if explained.memory is None or not explained.memory.timeline:
        return ""
    seconds: dict[str, float] = {}
    for piece in explained.pieces:
        seconds[piece.name] = seconds.get(piece.name, 0.0) + piece.cost.seconds
    times, alive, now = [], [], 0.0
    for name, size in explained.memory.timeline:
        times.append(now)
        alive.append(float(size))
        now += seconds.pop(name, 0.0)
    return plots.memory([*times, now], [*alive, alive[-1]], explained.device.memory_bytes, [])


@dataclass(frozen=True)
class Card:
    """One of the figures on top."""

    name: str
    value: str
    note: str
    number: float  # the figure itself, as the JSON has it


def _cards(explained: Explained) -> Iterator[Card]:
    total, before = explained.cost, explained.before
    gain = f"{seconds_text(before.seconds)} without the passes" if before.seconds else ""
    yield Card("predicted time", seconds_text(total.seconds), gain, total.seconds)
    if explained.workload is not None and explained.rate is not None:
        step = f"{explained.workload.count} {explained.workload.unit} a step"
        yield Card("rate", rate_text(explained), step, explained.rate)
    yield Card(
        "memory at most", count_text(explained.peak_bytes, "B"),
        f"of {count_text(explained.device.memory_bytes, 'B')}: {fit_text(explained.fit)}",
        explained.peak_bytes,
    )  # fmt: skip
    held = [f"{name} {count_text(size, 'B')}" for name, size in explained.fit.holds.items()]
    if held:
        yield Card("held most by", held[0], ", ".join(held[1:]), max(explained.fit.holds.values()))
    rate = total.flops / total.seconds if total.seconds else 0.0
    mfu = f"{count_text(rate, 'FLOP/s')}, MFU {100 * total.mfu:.1f}%"
    yield Card("work", count_text(total.flops, "FLOP"), mfu, total.flops)
    moved = total.bytes / total.seconds if total.seconds else 0.0
    yield Card(
        "memory traffic", count_text(total.bytes, "B"), count_text(moved, "B/s"), total.bytes
    )
    kernels = sum(len(piece.kernels) for piece in explained.pieces)
    yield Card(
        "runs as", f"{kernels} kernels",
        f"of {len(explained.regions)} regions, and {len(explained.library_calls)} library calls",
        kernels,
    )  # fmt: skip


def _bounds(explained: Explained) -> Iterator[dict[str, Any]]:
    total = explained.cost.seconds or 1.0
    for name, seconds in explained.bounds.items():
        percent = 100 * seconds / total
        text = f"{percent:.1f}%, {seconds_text(seconds)}"
        yield {"name": name, "percent": f"{percent:.3f}", "text": text}


def _rows(explained: Explained) -> Iterator[dict[str, Any]]:
    total = explained.cost.seconds
    pairs = [(part, piece) for part in explained.graphs for piece in part.pieces]
    pairs.sort(key=lambda pair: -pair[1].cost.seconds)
    for part, piece in pairs[:MOST_ROWS]:
        cost = piece.cost
        share = cost.seconds / total if total else 0.0
        yield {
            "name": _name(piece),
            "kind": "region" if piece.kind == "region" else "library",
            "source": piece.source,
            "graph": part.name,
            "seconds": repr(cost.seconds),
            "time": seconds_text(cost.seconds),
            "share": repr(share),
            "width": f"{60 * share:.1f}",
            "percent": f"{100 * share:.1f}%",
            "bound": cost.bound,
            "roof": repr(cost.achieved),
            "achieved": f"{100 * cost.achieved:.0f}%",
            "bytes": repr(cost.bytes),
            "moved": count_text(cost.bytes, "B"),
            "flops": repr(cost.flops),
            "work": count_text(cost.flops, "").strip(),
        }


def _name(piece: Piece) -> str:
    first = piece.operators[0].removeprefix("aten.").removesuffix(".default")
    if piece.kind == "region":
        inside = first if len(piece.operators) == 1 else f"{len(piece.operators)} operations"
        return f"{piece.name}: {inside}"
    return piece.name if piece.name.startswith(first) else f"{piece.name}: {first}"


def _passes(explained: Explained) -> Iterator[dict[str, Any]]:
    groups: dict[str, list[Decision]] = {}
    for part in explained.graphs:
        for each in part.decisions:
            groups.setdefault(each.pass_name, []).append(each)
    for name, found in groups.items():
        applied = [each for each in found if each.verdict is Verdict.APPLIED]
        before = sum(each.before.seconds for each in applied if each.before)
        after = sum(each.after.seconds for each in applied if each.after)
        saved = sum(each.seconds_saved for each in applied)
        yield {
            "name": name,
            "applied": len(applied),
            "refused": sum(each.verdict is Verdict.REJECTED for each in found),
            "before": seconds_text(before),
            "after": seconds_text(after),
            "seconds": repr(saved),
            "saved": seconds_text(saved),
        }


def _decisions(explained: Explained) -> Iterator[dict[str, Any]]:
    for line in explained.lines:
        if not line.decisions:
            continue
        shown = line.decisions[:MOST_DECISIONS]
        applied = sum(each.verdict is Verdict.APPLIED for _, each in line.decisions)
        refused = sum(each.verdict is Verdict.REJECTED for _, each in line.decisions)
        yield {
            "source": line.source,
            "note": f"{seconds_text(line.cost.seconds)}, {applied} applied, {refused} refused",
            "decisions": [_decision(part, each) for part, each in shown],
            "more": len(line.decisions) - len(shown),
        }


def _decision(part: Part, decision: Decision) -> dict[str, str]:
    price = ""
    if decision.verdict is Verdict.APPLIED and decision.before and decision.after:
        price = (
            f"{seconds_text(decision.before.seconds)} before, "
            f"{seconds_text(decision.after.seconds)} after"
        )
    elif loses(decision) is not None and decision.before and decision.alternative_cost:
        price = (
            f"{seconds_text(weight(decision))} as it is, {decision.alternative or 'otherwise'} "
            f"would cost {seconds_text(decision.alternative_cost.seconds)}"
        )
    return {
        "verdict": decision.verdict.value,
        "text": f"{part.name}: {decision.pass_name}: {decision.text()}",
        "price": price,
    }


def _kernels(explained: Explained) -> Iterator[dict[str, str]]:
    pairs = [(part, piece) for part in explained.graphs for piece in part.pieces if piece.kernels]
    pairs.sort(key=lambda pair: -pair[1].cost.seconds)
    found: list[tuple[Part, Piece, str]] = []
    seen: set[str] = set()
    for part, piece in pairs:
        for text in piece.kernels:
            body = text.partition("\n")[2]
            if body not in seen:  # repeated layers have the same kernels
                seen.add(body)
                found.append((part, piece, text))
    for part, piece, text in found[:MOST_KERNELS]:
        where = f" at {piece.source}" if piece.source else ""
        yield {"title": f"{part.name} {piece.name}{where}", "text": text}
