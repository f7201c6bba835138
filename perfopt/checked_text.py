"""What `perfopt verify` found, as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from perfopt.checking import Check, Culprit, Curves, Row

WIDTH = 80
MOST = 10  # results shown
_NAME = 44  # columns of a result's name


def checked(name: str, found: Check, written: str = "") -> str:
    """The comparison, and, where something is wrong, where the fault is and what brings it."""
    return "\n".join(_checked(name, found, written)) + "\n"


def _checked(name: str, found: Check, written: str) -> Iterator[str]:
    bad = [row for row in found.rows if row.problem]
    state = "WRONG" if found.wrong else "right"
    yield f"{name}: {state}, {len(found.rows) - len(bad)} of {len(found.rows)} results agree"
    if found.note:
        yield from _wrapped(f"  compared with eager alone: {found.note}")
    if found.rows:
        yield ""
        yield from _table(found)
    if not found.wrong:
        return
    yield ""
    trial = found.trial
    if trial.region is not None:
        error = trial.region
        yield f"first wrong region: {error.region} of {error.program}"
        yield from _wrapped(f"  {error.node} at {error.source or 'no known line'}")
        yield from _wrapped(f"  {error.problem}")
    elif trial.error is not None:
        yield from _wrapped(f"raised: {type(trial.error).__name__}: {_first(trial.error)}")
    else:
        yield "no region differs from its eager subgraph: the fault is outside of kernels"
    if found.culprit is not None:
        yield from _culprit(found.culprit)
    if written:
        yield f"written to {written}: `python {written}` exits 1 while the fault is there"
    else:
        yield "the fault does not appear in a graph or region alone: no file written"


def _table(found: Check) -> Iterator[str]:
    yield f"{'greatest distance to float64' if found.exact else 'distance to eager':{_NAME}}" + (
        f"{'perfopt':>12}{'eager':>12}"
    )
    rows = sorted(found.rows, key=_badness)
    for row in rows[:MOST]:
        mark = "  WRONG" if row.problem else ""
        name = row.name if len(row.name) <= _NAME else "..." + row.name[3 - _NAME :]
        yield f"{name:{_NAME}}{row.ours:>12.3g}{row.eager:>12.3g}{mark}"
    if len(rows) > MOST:
        yield f"and {len(rows) - MOST} more, nearer to eager's"
    for row in rows:
        if row.problem:
            yield from _wrapped(f"{row.name} {row.problem}")
            break


def _badness(row: Row) -> tuple[bool, float]:
    return not row.problem, -(row.ours / row.eager if row.eager else row.ours * 1e30)


def _culprit(culprit: Culprit) -> Iterator[str]:
    if culprit.decision is None:
        yield "the fault is there without any decision: in capture, lowering or the program"
        return
    decision = culprit.decision
    where = f" ({decision.source})" if decision.source else ""
    yield f"decision {culprit.number} of {culprit.of} brings it:"
    yield from _wrapped(f"  {decision.pass_name}: {decision.text()}{where}")
    yield from _wrapped(f"  at {', '.join(decision.nodes)}" if decision.nodes else "")


def trained(curves: Curves) -> str:
    """The losses side by side and their distances."""
    lines = [f"{'step':>4}{'eager':>14}{'perfopt':>14}" + (f"{'float64':>14}" * bool(curves.exact))]
    shown = list(range(len(curves.eager)))
    if len(shown) > MOST:
        stride = (len(shown) - 1) / (MOST - 1)
        shown = sorted({round(number * stride) for number in range(MOST)})
    for step in shown:
        losses = [curves.eager[step], curves.ours[step], *curves.exact[step : step + 1]]
        lines.append(f"{step:>4}" + "".join(f"{loss:>14.7g}" for loss in losses))
    ours, eager = curves.distances
    truth = "float64" if curves.exact else "eager"
    state = "WRONG" if curves.wrong else "right"
    lines.append("")
    lines.append(f"losses {state}: perfopt's are {ours:.3g} off {truth}'s, eager's {eager:.3g}")
    return "\n".join(lines) + "\n"


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _wrapped(text: str) -> list[str]:
    rest = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, WIDTH, subsequent_indent=rest, break_on_hyphens=False)
