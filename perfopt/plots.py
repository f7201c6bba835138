"""Plots of an explanation, as SVG that stands in a page: its colours are the page's own.

Matplotlib draws with colours that stand for the page's variables, so that light and dark need no
second drawing. Equal explanations give equal text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from typing import Any

from perfopt.cost_model.device import Device
from perfopt.explained import Piece
from perfopt.explained_text import count_text, seconds_text

POINTS = 60  # groups of pieces in the roofline, those that take most of the time
_HEAVY = 0.02  # of the time: groups from here on are named in the plot
_ALIKE = 1.2  # factor within which two peaks are one roof
_NEAR = 0.5  # powers of ten within which points share one name
# Colours that no plot uses otherwise, and what stands for them in the page.
_COLOURS = {
    "#010203": "var(--ink)", "#010204": "var(--faint)", "#010205": "var(--region)",
    "#010206": "var(--library)", "#010207": "var(--roof)", "#010208": "var(--area)",
}  # fmt: skip
INK, FAINT, REGION, LIBRARY, ROOF, AREA = _COLOURS
_SALT = "perfopt"  # names inside the SVG do not change from run to run


class PlotError(ImportError):
    """Matplotlib, which draws the plots, is not installed."""


@dataclass(frozen=True)
class Group:
    """Pieces that read alike, as one point: what they take together."""

    name: str
    kind: str
    count: int
    seconds: float
    flops: float
    bytes: float
    share: float
    source: str

    def text(self) -> str:
        """What a reader is told of the point."""
        times = f" x{self.count}" if self.count > 1 else ""
        rate = count_text(self.flops / self.seconds, "FLOP/s") if self.seconds else "0"
        return (
            f"{self.name}{times}{f' at {self.source}' if self.source else ''}: "
            f"{seconds_text(self.seconds)}, {100 * self.share:.1f}% of the time, {rate}"
        )


def grouped(pieces: Sequence[Piece]) -> list[Group]:
    """Pieces by what they compute and the line that they come from, most costly first."""
    total = sum(piece.cost.seconds for piece in pieces)
    groups: dict[tuple[str, str, str], list[Piece]] = {}
    for piece in pieces:
        name = piece.operators[0].removeprefix("aten.").removesuffix(".default")
        if len(piece.operators) > 1:
            name = f"{len(piece.operators)} operations"
        groups.setdefault((name, piece.kind, piece.source), []).append(piece)
    found = []
    for (name, kind, source), members in groups.items():
        seconds = sum(piece.cost.seconds for piece in members)
        found.append(
            Group(
                name, kind, len(members), seconds,
                sum(piece.cost.flops for piece in members),
                sum(piece.cost.bytes for piece in members),
                seconds / total if total else 0.0, source,
            )
        )  # fmt: skip
    return sorted(found, key=lambda group: (-group.seconds, group.name, group.source))


def roofline(device: Device, pieces: Sequence[Piece]) -> str:
    """Regions and library calls as points under the roofs of the device, as SVG.

    Across stands the arithmetic intensity in FLOP per byte, upwards FLOP/s, both by powers of ten.
    Raises `PlotError` without matplotlib.
    """
    shown = [g for g in grouped(pieces) if g.flops and g.bytes and g.seconds][:POINTS]
    figure, axes = _figure(7.2, 4.2)
    intensity = [group.flops / group.bytes for group in shown] or [1.0]
    roofs = _roofs(device)
    left = min(min(intensity), 0.1) / 2
    right = max(max(intensity), max(roofs.values()) / device.memory_bandwidth) * 4
    for name, peak in roofs.items():
        knee = peak / device.memory_bandwidth
        axes.plot([knee, right], [peak, peak], color=ROOF, linewidth=1.2)
        axes.annotate(
            f"{name}  {count_text(peak, 'FLOP/s')}", (knee, peak), textcoords="offset points",
            xytext=(4, 2), fontsize=7, color=ROOF,
        )  # fmt: skip
    top = max(roofs.values())
    knee = top / device.memory_bandwidth
    axes.plot([left, knee], [left * device.memory_bandwidth, top], color=ROOF, linewidth=1.2)
    axes.annotate(
        f"memory  {count_text(device.memory_bandwidth, 'B/s')}",
        (left, left * device.memory_bandwidth), textcoords="offset points", xytext=(6, 16),
        fontsize=8, color=ROOF,
    )  # fmt: skip
    labels: list[tuple[str, float, float]] = []
    for number, (group, x) in enumerate(zip(shown, intensity, strict=True) if shown else ()):
        y = group.flops / group.seconds
        colour = REGION if group.kind == "region" else LIBRARY
        size = 18 + 420 * group.share
        points = axes.scatter([x], [y], s=size, color=colour, alpha=0.75, linewidths=0)
        points.set_gid(f"point-{number}")
        if group.share >= _HEAVY:
            labels.append((group.name, x, y))
    _label(axes, labels)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_xlabel("FLOP per byte of memory traffic")
    axes.set_ylabel("FLOP/s")
    return _svg(figure, "Roofline", {f"point-{n}": g.text() for n, g in enumerate(shown)})


def memory(
    times: Sequence[float],
    alive: Sequence[float],
    capacity: float,
    parts: Sequence[tuple[str, float]],
) -> str:
    """Bytes alive over predicted time, as SVG; `parts` name what begins when, in seconds."""
    figure, axes = _figure(7.2, 2.9)
    unit = 1e3
    x = [1e3 * t for t in times]
    y = [b / 1e9 for b in alive]
    axes.fill_between(x, y, step="post", color=AREA, alpha=0.35, linewidth=0)
    axes.step(x, y, where="post", color=AREA, linewidth=1.3)
    highest = max(y, default=0.0)
    if capacity / 1e9 < 2.5 * highest:
        axes.axhline(capacity / 1e9, color=ROOF, linewidth=1.0, linestyle="--")
        axes.annotate(
            f"capacity {count_text(capacity, 'B')}", (x[-1] if x else 0, capacity / 1e9),
            textcoords="offset points", xytext=(-2, 3), ha="right", fontsize=8, color=ROOF,
        )  # fmt: skip
    for name, start in parts:
        axes.axvline(unit * start, color=FAINT, linewidth=0.8)
        axes.annotate(
            name, (unit * start, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", xytext=(4, 4), fontsize=8, color=FAINT,
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("predicted time, ms")
    axes.set_ylabel("GB alive")
    return _svg(figure, "Memory over time", {})


def _label(axes: Any, labels: Sequence[tuple[str, float, float]]) -> None:
    """Names beside points: of points that lie together, the first, with the number of others."""
    places: list[tuple[float, float, list[str]]] = []
    for name, x, y in labels:
        for px, py, names in places:
            if abs(log10(x / px)) < _NEAR and abs(log10(y / py)) < _NEAR:
                names.append(name)
                break
        else:
            places.append((x, y, [name]))
    for x, y, names in places:
        different = list(dict.fromkeys(names))
        text = different[0] + (f" and {len(different) - 1} more" if len(different) > 1 else "")
        note = axes.annotate(
            text, (x, y), textcoords="offset points", xytext=(-8, -14), ha="right", fontsize=7.5,
            color=INK,
        )  # fmt: skip
        note.set_in_layout(False)


def _roofs(device: Device) -> dict[str, float]:
    """The device's peaks, those that are nearly equal under one name, the highest five."""
    roofs: list[tuple[float, list[str]]] = []
    for dtype, peak in sorted(device.peaks.items(), key=lambda item: -item[1]):
        if "/" in dtype:
            continue
        if roofs and peak > roofs[-1][0] / _ALIKE:
            roofs[-1][1].append(dtype)
        else:
            roofs.append((peak, [dtype]))
    return {", ".join(names[:2]): peak for peak, names in roofs[:5]}


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("plots need matplotlib: pip install perfopt[html]") from error
    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    axes.grid(True, which="major", color=FAINT, alpha=0.35, linewidth=0.5)
    for side, spine in axes.spines.items():
        spine.set_color(FAINT)
        spine.set_visible(side in ("left", "bottom"))
    axes.tick_params(which="both", colors=FAINT, labelcolor=INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    return figure, axes


def _svg(figure: Any, title: str, texts: Mapping[str, str]) -> str:
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": _SALT, "font.size": 9}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]*)"', text)
    assert box is not None
    head = f'<svg viewBox="{box.group(1)}" role="img" aria-label="{escape(title)}" class="plot">'
    text = re.sub(r"<svg[^>]*>", head, text, count=1)
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, variable)
    for name, said in texts.items():
        said = escape(said)
        text = text.replace(
            f'<g id="{name}">',
            f'<g class="point" tabindex="0" role="img" aria-label="{said}"><title>{said}</title>',
        )
    return text
