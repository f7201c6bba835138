"""`perfopt.report`: what became of a compiled function, from the records of its compilation."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from perfopt.backends.torch_private import backend_of, frame_seconds, is_compiled
from perfopt.calibrations import calibration_hash
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.explanation import Explanation, explain_compiled
from perfopt.records import COMPILATIONS_CACHE, STAGES, Compilation

WIDTH = 80
_CAME = {"compiled": "compiled", "disk": "from the cache", "memory": "from this process"}


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph.

    `number` is Dynamo's, `function` the user's, `kind` "forward", "backward" or "inference".
    `operations` counts ATen calls before fusion, `regions` names those that run as generated
    kernels, `launches` counts kernel calls, `library_calls` the others by operator. `source` is
    the program that runs. `cached` counts different kernels by where their code came from:
    "memory" (compiled before in this process), "disk" (the cache) or "compiled" (a miss).
    """

    number: str
    function: str
    kind: str
    operations: int
    regions: tuple[str, ...]
    launches: int
    library_calls: Mapping[str, int]
    decisions: tuple[Decision, ...]
    source: str
    cached: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.function or 'graph'} {self.number} {self.kind}: {self.operations} operations "
            f"as {_many(self.launches, 'kernel')} and "
            f"{_many(sum(self.library_calls.values()), 'library call')}"
        )


@dataclass(frozen=True, repr=False, eq=False)
class Report:
    """What became of a compiled function; `text()` reads at 80 columns.

    `graphs` come in the order of compilation, `decisions` with the greatest predicted saving
    first; `seconds` tells the compilation's stages apart ("dynamo" is 0.0 where torch no longer
    knows). `jobs` are the compilations that it tells of.
    """

    graphs: tuple[GraphReport, ...]
    decisions: tuple[Decision, ...]
    seconds: Mapping[str, float]
    jobs: tuple[Compilation, ...] = ()

    @cached_property
    def explanation(self) -> Explanation:
        """What it costs here by the cost model, piece by piece, as `perfopt.explain` has it."""
        name = next((graph.function for graph in self.graphs if graph.function), "compiled")
        return explain_compiled(self.jobs, name)

    def to_json(self) -> str:
        """The explanation as JSON."""
        return self.explanation.to_json()

    def to_html(self) -> str:
        """The explanation as a page; raises `PlotError` without matplotlib."""
        return self.explanation.to_html()

    @property
    def calibration(self) -> str:
        """The hash of the measurements that its prices are of (`perfopt calibrate`), or "none"."""
        hashes = dict.fromkeys(job.calibration for job in self.jobs)
        return ", ".join(hashes) or calibration_hash()

    @property
    def regions(self) -> tuple[str, ...]:
        """Regions that run as generated kernels, as "0/0 forward region_0"."""
        return tuple(f"{g.number} {g.kind} {name}" for g in self.graphs for name in g.regions)

    @property
    def kernels(self) -> int:
        """How many kernel launches one call of every graph makes."""
        return sum(graph.launches for graph in self.graphs)

    @property
    def library_calls(self) -> dict[str, int]:
        """How many calls of each ATen operator one call of every graph makes, views left out."""
        total: Counter[str] = Counter()
        for graph in self.graphs:
            total.update(graph.library_calls)
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))

    @property
    def sources(self) -> tuple[str, ...]:
        """The programs that run, as Python text."""
        return tuple(graph.source for graph in self.graphs)

    def __repr__(self) -> str:
        calls = sum(self.library_calls.values())
        return (
            f"<perfopt report: {_many(len(self.graphs), 'graph')}, "
            f"{_many(self.kernels, 'kernel')}, {_many(calls, 'library call')}>"
        )

    def __str__(self) -> str:
        return self.text()

    def text(self, decisions: int = 10) -> str:
        """The report for reading, with at most so many decisions of each verdict."""
        return "\n".join(self._lines(decisions))

    def _lines(self, most: int) -> Iterator[str]:
        calls = sum(self.library_calls.values())
        yield (
            f"{_many(len(self.graphs), 'graph')}, {_many(self.kernels, 'kernel')}, "
            f"{_many(calls, 'library call')}, compiled in {sum(self.seconds.values()):.2f} s"
        )
        stages = ", ".join(f"{stage} {self.seconds[stage]:.2f}" for stage in STAGES)
        yield from _wrapped(f"seconds: {stages}", "  ")
        yield f"  prices: calibration {self.calibration}"
        for graph in self.graphs:
            yield ""
            yield from _wrapped(str(graph))
            names = ", ".join(f"{name} x{count}" for name, count in graph.library_calls.items())
            yield from _wrapped(names, "  ", "  ")
            if sum(graph.cached.values()):
                came = ", ".join(
                    f"{many} {_CAME[way]}" for way, many in graph.cached.items() if many
                )
                yield f"  different kernels: {came}"
        for verdict in Verdict:
            found = [each for each in self.decisions if each.verdict is verdict]
            if found:
                yield ""
                yield f"{verdict.value}, {_many(len(found), 'decision')}:"
            for each in found[:most]:
                yield from _wrapped(_line(each), "  ", "    ")
            if len(found) > most:
                yield f"  and {len(found) - most} more"


def report(compiled: Any) -> Report:
    """What became of `compiled`, which `perfopt.compile` or `torch.compile` returned.

    Empty before the first call. Raises `TypeError` for anything that was not compiled.
    """
    if not is_compiled(compiled):
        raise TypeError(
            f"{type(compiled).__name__} is not compiled; pass what perfopt.compile or "
            'torch.compile(..., backend="perfopt") returned'
        )
    jobs = sorted(_compilations(compiled), key=lambda job: job.order)
    seconds = dict.fromkeys(STAGES, 0.0)
    for job in jobs:
        for stage, taken in job.seconds.items():
            seconds[stage] += taken
        whole = frame_seconds(job.number)
        seconds["dynamo"] += max(0.0, whole - job.backend_seconds) if whole else 0.0
    decisions = [each for job in jobs for each in job.every_decision()]
    decisions.sort(key=lambda decision: -decision.seconds_saved)
    return Report(tuple(_graphs(jobs)), tuple(decisions), seconds, tuple(jobs))


def _compilations(compiled: Any) -> list[Compilation]:
    owner = backend_of(compiled)
    every = list(COMPILATIONS_CACHE)
    own = [job for job in every if job.owner is owner is not None]
    if own:
        return own
    # Compiled before by an equal torch.compile of the same function, whose code is used again.
    target = getattr(compiled, "_orig_mod", compiled)
    target = getattr(target, "forward", getattr(target, "_torchdynamo_orig_callable", target))
    code = getattr(target, "__code__", None)
    return [job for job in every if job.owner == owner and job.code is code is not None]


def _graphs(jobs: list[Compilation]) -> Iterator[GraphReport]:
    for job in jobs:
        for graph in job.graphs:
            program = graph.program
            yield GraphReport(
                job.number,
                job.function,
                graph.kind,
                graph.nodes,
                program.regions,
                program.launches,
                program.library_calls,
                graph.decisions,
                program.source,
                graph.sources,
            )


def _line(decision: Decision) -> str:
    saved = f"{decision.seconds_saved * 1e6:.1f} us: " if decision.seconds_saved else ""
    where = f" ({decision.source})" if decision.source else ""
    return f"{saved}{decision.pass_name}: {decision.text()}{where}"


def _wrapped(text: str, first: str = "", rest: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
