"""A model through perfopt beside eager and float64: what differs, and which decision brings it.

The fault is looked for from outside inwards: the results, the first region whose kernel differs
from its eager subgraph, and, by halving the number of decisions that may be applied, the one
decision without which everything is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from perfopt.backends.torch_private import compile_alone, compile_id
from perfopt.compiler import compile_graph
from perfopt.cost_model.decision import Decision
from perfopt.options import Options
from perfopt.running import SEED, Results, Subject, float64, named_leaves, run, training_loss
from perfopt.verify import SLACK, VerificationError, difference, distance

TIMES = 4.0  # how much further than eager's a model's results may be from float64


@dataclass(frozen=True)
class Row:
    """One result beside eager's and float64's: greatest distances to float64, and what is wrong."""

    name: str
    ours: float
    eager: float
    problem: str


@dataclass(eq=False)
class Recorded:
    """One of Dynamo's graphs as it was compiled: its number, the graph, its first inputs."""

    number: str
    graph: fx.GraphModule
    inputs: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Trial:
    """One compilation and one run of it.

    `region` is the first wrong region's error, `error` anything else that was raised; `applied`
    are the decisions that were made up to then.
    """

    rows: tuple[Row, ...] = ()
    region: VerificationError | None = None
    error: Exception | None = None
    applied: tuple[Decision, ...] = ()
    recorded: tuple[Recorded, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether anything differs by more than rounding."""
        failed = self.region is not None or self.error is not None
        return failed or any(row.problem for row in self.rows)


@dataclass(frozen=True)
class Culprit:
    """The decision, by its number of all that were applied, that brings a fault.

    `number` is 0, and `decision` None, where the fault is there without any decision.
    """

    number: int
    of: int
    decision: Decision | None
    trial: Trial


@dataclass(frozen=True)
class Check:
    """The outcome: the results without region checks, the trial with them, and the culprit.

    `exact` says whether the model ran in float64; if not, `note` says why, and eager's results
    stand for float64's.
    """

    rows: tuple[Row, ...]
    trial: Trial
    culprit: Culprit | None = None
    exact: bool = True
    note: str = ""

    @property
    def wrong(self) -> bool:
        """Whether anything differs by more than rounding."""
        return self.trial.wrong or any(row.problem for row in self.rows)


@dataclass(frozen=True)
class Expected:
    """Eager's results and float64's, which all trials are compared with."""

    eager: Results
    exact: Results
    note: str = ""


def expected(subject: Subject) -> Expected:
    """Run eagerly in the model's own dtype and in float64."""
    eager = run(subject.copied())
    try:
        with float64():
            exact = run(subject.doubled())
        for name, value in eager.items():
            if exact[name].shape != value.shape:
                raise RuntimeError(f"{name} has another shape")
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        return Expected(eager, eager, f"it does not run in float64 ({text})")
    return Expected(eager, exact)


def compared(results: Results, known: Expected) -> tuple[Row, ...]:
    """Every result beside eager's and float64's."""
    rows = []
    for name, eager in known.eager.items():
        exact = known.exact[name]
        if name not in results:
            rows.append(Row(name, 0.0, 0.0, "is missing"))
            continue
        ours = results[name]
        problem = difference(ours, eager, exact, times=TIMES)
        same = ours.shape == exact.shape
        off = distance(ours, exact) if same else float("inf")
        rows.append(Row(name, off, distance(eager, exact), problem))
    return tuple(rows)


def attempt(subject: Subject, known: Expected, options: Options) -> Trial:
    """Compile a copy of the subject afresh, run it once and compare."""
    torch.compiler.reset()
    applied: list[Decision] = []
    recorded: list[Recorded] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        record = Recorded(compile_id(), gm)
        recorded.append(record)
        compiled = compile_graph(gm, inputs, options, applied)

        def keeping(*given: Any) -> Any:
            record.inputs = given if record.inputs is None else record.inputs
            return compiled(*given)

        return keeping

    own = subject.copied()
    rows: tuple[Row, ...] = ()
    region, error = None, None
    try:
        rows = compared(run(own, compile_alone(own.model, backend)), known)
    except VerificationError as found:
        region = found
    except Exception as found:
        region = _cause(found)
        error = found if region is None else None
    return Trial(rows, region, error, tuple(applied), tuple(recorded))


def _cause(error: BaseException) -> VerificationError | None:
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, VerificationError):
        inner = inner.__cause__ or inner.__context__
    return inner


def check(subject: Subject, options: Options) -> Check:
    """Compare, and, where something is wrong, find the first region and the decision behind it."""
    known = expected(subject)
    trial = attempt(subject, known, replace(options, verify=True))
    rows = trial.rows
    if trial.region is not None or trial.error is not None:
        rows = attempt(subject, known, options).rows  # what the fault does to the results
    found = Check(rows, trial, None, not known.note, known.note)
    return replace(found, culprit=bisect(subject, known, options, trial)) if found.wrong else found


def bisect(subject: Subject, known: Expected, options: Options, whole: Trial) -> Culprit:
    """The first decision with which the subject is wrong, by halving how many are allowed.

    One compilation and run for each halving.
    """
    count = len(whole.applied)

    def tried(limit: int) -> Trial:
        return attempt(subject, known, replace(options, verify=True, limit=limit))

    without = tried(0)
    if without.wrong:
        return Culprit(0, count, None, without)
    right, wrong, found = 0, count, whole
    while wrong - right > 1:
        middle = (right + wrong) // 2
        trial = tried(middle)
        if trial.wrong:
            wrong, found = middle, trial
        else:
            right = middle
    decision = found.applied[wrong - 1] if 0 < wrong <= len(found.applied) else None
    return Culprit(wrong, count, decision, found)


@dataclass(frozen=True)
class Curves:
    """Losses of the same steps by eager, by perfopt and in float64 (empty where it cannot run)."""

    eager: tuple[float, ...]
    ours: tuple[float, ...]
    exact: tuple[float, ...]
    slack: float = 0.0

    @property
    def distances(self) -> tuple[float, float]:
        """The greatest distance to float64, or to eager without it, of perfopt and of eager."""
        truth = self.exact or self.eager
        return _apart(self.ours, truth), _apart(self.eager, truth)

    @property
    def wrong(self) -> bool:
        """Whether perfopt's losses part from float64's by much more than eager's do."""
        ours, eager = self.distances
        return not ours <= TIMES * eager + self.slack


def _apart(losses: Sequence[float], truth: Sequence[float]) -> float:
    """The greatest distance; two NaNs are equal, one is infinitely far from any number."""
    apart = (abs(a - b) for a, b in zip(losses, truth, strict=True) if a == a or b == b)
    return max((math.inf if x != x else x for x in apart), default=0.0)


def curves(subject: Subject, steps: int, options: Options, rate: float = 0.01) -> Curves:
    """Train so many steps of gradient descent three times from one seed, on the same inputs."""
    torch.compiler.reset()
    eager = _losses(subject.copied(), steps, rate)
    own = subject.copied()
    ours = _losses(own, steps, rate, compile_alone(own.model, partial(_backend, options)))
    try:
        with float64():
            exact = _losses(subject.doubled(), steps, rate)
    except Exception:
        exact = ()
    size = max(map(abs, eager), default=0.0)
    return Curves(eager, ours, exact, SLACK * _unit(subject) * size)


def _backend(options: Options, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return compile_graph(gm, inputs, options)


def _losses(
    subject: Subject, steps: int, rate: float, model: Callable[..., Any] | None = None
) -> tuple[float, ...]:
    leaves = [x for x in named_leaves(subject).values() if isinstance(x, nn.Parameter)]
    if not leaves:
        raise ValueError("there is nothing to train: the model has no parameters with gradients")
    optimizer = torch.optim.SGD(leaves, rate)
    losses = []
    for step in range(steps):
        torch.manual_seed(SEED + step)
        call = subject.model if model is None else model
        outputs = call(*subject.args, **subject.kwargs)
        loss = training_loss(outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return tuple(losses)


def _unit(subject: Subject) -> float:
    """The rounding unit of the coarsest floating-point parameter or input."""
    held = [*named_leaves(subject).values()]
    held += [x for x in (*subject.args, *subject.kwargs.values()) if isinstance(x, Tensor)]
    return max((torch.finfo(x.dtype).eps for x in held if x.is_floating_point()), default=2**-23)
