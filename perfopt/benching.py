"""Models timed beside rivals: right first, then fast; cold and warm, and in memory.

All contenders of a row run in one process, in random order. A row whose results are further from
float64 than eager's allow is not timed. First steps are measured in processes of their own, with
folders of caches that nobody else uses.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from perfopt import bench_text
from perfopt.api import compile as compile_model
from perfopt.backends.torch_private import allocated_peak, tree_flatten, tree_map
from perfopt.bench_cases import cases, check_rivals
from perfopt.bench_rows import (
    OURS,
    BenchError,
    Case,
    Change,
    Mean,
    Measured,
    Row,
    changes,
    geometric_means,
)
from perfopt.checking import Expected, compared, expected
from perfopt.factory import FactoryError, load_factory
from perfopt.first_start import first_starts
from perfopt.measuring import measure
from perfopt.running import SEED, Results, Subject, run, seeded, training_loss

LEAST, MOST = 7, 301  # samples
LONG = 3  # rounds that warm up
_ASTRAY = 0.1  # of the greatest magnitude: where eager is further off, float64 tells nothing
_SMALL = 1e-3  # of the greatest magnitude of all: a gradient below it may be nothing but rounding
Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class Bench:
    """The rows of one run, in their order, and what its figures depend on."""

    rows: tuple[Row, ...]
    environment: Mapping[str, Any] = field(default_factory=bench_text.environment)
    interrupted: bool = False

    def __str__(self) -> str:
        return bench_text.whole(self.rows, self.environment, self.interrupted)

    @property
    def wrong(self) -> bool:
        """Whether perfopt failed or was further from float64 than rounding allows."""
        return any(row.wrong for row in self.rows)

    @property
    def failed(self) -> bool:
        """Whether a case could not be run at all, even eagerly."""
        return any(row.problem for row in self.rows)

    @property
    def means(self) -> dict[str, Mean]:
        """Geometric means of every rival's time over perfopt's."""
        return geometric_means(self.rows)

    def markdown(self) -> str:
        """A table in Markdown with one line for every row."""
        return bench_text.markdown(self.rows)

    def to_json(self) -> str:
        """Everything, all samples too, as text that `read` takes."""
        return bench_text.dumps(self.rows, self.environment, self.interrupted)

    @classmethod
    def read(cls, path: str) -> Bench:
        """The run that `to_json` wrote to a file; raises `BenchError`."""
        return cls(*bench_text.loads(path))

    def since(self, old: Bench) -> list[Change]:
        """What became faster or slower since another run, beyond noise."""
        return changes(old.rows, self.rows)


def bench(
    factories: str | Sequence[str] = (),
    vs: str | Sequence[str] = ("eager", "inductor"),
    *,
    train: bool = False,
    dtypes: str | Sequence[str] = (),
    suite: str | None = None,
    seconds: float = 10.0,
    samples: int | None = None,
    cold: bool = True,
) -> Bench:
    """Time factories, given as FILE.py:FACTORY, and those of a suite's file beside rivals.

    `seconds` is what the samples of a row may take about; `samples` is their number instead. With
    `cold`, first steps in fresh processes are measured too. Raises `BenchError` and `FactoryError`
    for what cannot be run, even eagerly.
    """
    given = [factories] if isinstance(factories, str) else factories
    found = cases(given, dtypes, train, suite)
    rivals = check_rivals(vs)
    return Bench(tuple(each_row(found, rivals, seconds=seconds, samples=samples, cold=cold)))


def each_row(
    found: Sequence[Case],
    rivals: Sequence[str],
    *,
    seconds: float = 10.0,
    samples: int | None = None,
    cold: bool = True,
    strict: bool = True,
    tell: Tell = lambda what, done: None,
) -> Iterator[Row]:
    """One row after the other, as they are finished.

    What cannot be run, even eagerly, raises `BenchError` or `FactoryError`; if not `strict`, it is
    a row with a problem instead. `tell` hears what is being done, and which part of all is behind.
    """
    for number, case in enumerate(found):

        def step(what: str, part: float, number: int = number, case: Case = case) -> None:
            tell(f"{case.title}: {what}", (number + part) / len(found))

        try:
            row = _row(case, rivals, seconds, samples, cold, step)
        except (BenchError, FactoryError) as error:
            if strict:
                raise
            row = Row(case, problem=str(error))
        yield row


def loaded(case: Case) -> Subject:
    """The model and inputs of a case, in its dtype, from a fixed seed."""
    seeded(SEED)
    model, args, kwargs = load_factory(case.factory)()
    if case.dtype:
        dtype = getattr(torch, case.dtype)

        def converted(x: Any) -> Any:
            if isinstance(x, Tensor) and x.is_floating_point():
                return x.detach().to(dtype).requires_grad_(x.requires_grad)
            return x

        if isinstance(model, nn.Module):
            model = model.to(dtype)
        args, kwargs = tree_map(converted, (args, dict(kwargs)))
    if isinstance(model, nn.Module):
        model.train(case.train)
    return Subject(model, args, kwargs, case.train)


def contender(subject: Subject, name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The subject's model as the contender runs it.

    Each gets a code object of its own: Dynamo keeps what it compiled per code object, and would
    try the guards of one contender on every call of another.
    """
    model = subject.model

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = call.__code__.replace(co_name=f"call_{name}")
    own = types.FunctionType(code, globals(), code.co_name, None, call.__closure__)
    if name == "eager":
        return own
    if name == OURS:
        return compile_model(own, **options)
    return torch.compile(own, backend=name)


def _tensors(subject: Subject) -> list[Tensor]:
    inputs = tree_flatten((subject.args, dict(subject.kwargs)))[0]
    return [x for x in inputs if isinstance(x, Tensor)]


def on_gpu(subject: Subject) -> bool:
    """Whether any of its tensors is on a GPU."""
    held = _tensors(subject)
    if isinstance(subject.model, nn.Module):
        held += [*subject.model.parameters(), *subject.model.buffers()]
    return any(x.is_cuda for x in held)


def step_of(subject: Subject, call: Callable[..., Any]) -> Callable[[], None]:
    """One step: the forward pass, and where the subject trains, gradients, which are dropped.

    It ends when the GPU, if the subject is on one, has finished.
    """
    leaves = [x for x in _tensors(subject) if x.requires_grad]
    if isinstance(subject.model, nn.Module):
        leaves += [p for p in subject.model.parameters() if p.requires_grad]
    finish = torch.cuda.synchronize if on_gpu(subject) else lambda: None

    def train() -> None:
        training_loss(call(*subject.args, **subject.kwargs)).backward()
        for leaf in leaves:
            leaf.grad = None
        finish()

    def infer() -> None:
        with torch.no_grad():
            call(*subject.args, **subject.kwargs)
        finish()

    return train if subject.train else infer


def _restoring(subject: Subject) -> Callable[[], None]:
    """What puts buffers and inputs back as they are now: a model may write to them."""
    held = _tensors(subject)
    if isinstance(subject.model, nn.Module):
        held += subject.model.buffers()
    kept = [
        (x.detach(), x.detach().clone())
        for x in held
        # A tensor with several places in one is written to by nobody.
        if x.layout is torch.strided and not any(s == 0 for s in x.stride())
    ]

    def restore() -> None:
        for x, copy in kept:
            x.copy_(copy)

    return restore


def _row(
    case: Case, rivals: Sequence[str], seconds: float, samples: int | None, cold: bool, tell: Tell
) -> Row:
    torch.compiler.reset()
    names = [*rivals, OURS]
    subject = loaded(case)
    tell("eager and float64", 0.0)
    known = _known(case, subject)
    restore = _restoring(subject)
    calls = {name: contender(subject, name, case.options) for name in names}
    measured: dict[str, Measured] = {}
    if "eager" not in rivals:  # what the others' errors are judged by
        measured["eager"] = _judged("eager", known.eager, known)
    for count, name in enumerate(names):
        tell(f"{name} is checked", 0.1 + 0.3 * count / len(names))
        measured[name] = _checked(name, subject, calls[name], known)
        restore()
    note = _note(known, measured.get("eager"))
    del known
    if not measured[OURS].problem:
        steps = {
            name: step_of(subject, calls[name]) for name in names if not measured[name].problem
        }
        tell("timed", 0.4)
        try:
            taken = measure(steps, samples or _samples(steps, seconds), warmup=LONG)
            peaks = {name: allocated_peak(step, on_gpu(subject)) for name, step in steps.items()}
        except Exception as error:
            raise BenchError(f"{case.title}: a step fails: {_line(error)}") from error
        for name, each in taken.items():
            measured[name] = replace(measured[name], samples=tuple(each), peak_bytes=peaks[name])
        for count, name in enumerate(steps if cold else ()):
            tell(f"first steps of {name}", 0.7 + 0.3 * count / len(steps))
            measured[name] = _started(case, measured[name])
    return Row(case, tuple(measured.values()), note=note)


def _known(case: Case, subject: Subject) -> Expected:
    try:
        known = expected(subject)
    except Exception as error:
        raise BenchError(f"{case.title}: the model fails eagerly: {_line(error)}") from error
    if subject.train and not any("gradient" in name for name in known.eager):
        raise BenchError(f"{case.title}: nothing to train: no output depends on what has gradients")
    return known


def _line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _note(known: Expected, eager: Measured | None) -> str:
    if known.note:
        return f"errors are distances from eager: {known.note}"
    if eager is not None and max(eager.error or 0.0, eager.gradient_error or 0.0) > _ASTRAY:
        return "eager is as far from float64: the errors tell nothing (are there random numbers?)"
    return ""


def _checked(name: str, subject: Subject, call: Callable[..., Any], known: Expected) -> Measured:
    try:
        results = run(subject, call)
    except Exception as error:
        return Measured(name, problem=f"fails: {_line(error)}")
    return _judged(name, results, known)


def _judged(name: str, results: Results, known: Expected) -> Measured:
    rows = compared(results, known)
    outputs = {row.name: row.ours for row in rows if "gradient" not in row.name}
    gradients = {row.name: row.ours for row in rows if "gradient" in row.name}
    wrong = next((f"{row.name} {row.problem}" for row in rows if row.problem), "")
    return Measured(
        name,
        _relative(outputs, known),
        _relative(gradients, known) if gradients else None,
        problem=f"wrong: {wrong}" if wrong and name == OURS else "",
        # Rivals are timed all the same: some of their long sums are plain ones.
        note=f"differs: {wrong}" if wrong and name != OURS else "",
    )


def _relative(distances: Mapping[str, float], known: Expected) -> float:
    """The greatest of the distances, each over the greatest magnitude of what it is of."""
    scales = {}
    for name in distances:
        exact = known.exact[name].double()
        finite = exact[exact.isfinite()].abs()
        scales[name] = float(finite.max()) if finite.numel() else 0.0
    floor = max(_SMALL * max(scales.values(), default=0.0), 1e-30)
    return max((far / max(scales[name], floor) for name, far in distances.items()), default=0.0)


def _samples(steps: Mapping[str, Callable[[], None]], seconds: float) -> int:
    for step in steps.values():
        step()
    start = time.perf_counter()
    for step in steps.values():
        step()
    return max(LEAST, min(MOST, int(seconds / max(time.perf_counter() - start, 1e-6))))


def _started(case: Case, measured: Measured) -> Measured:
    try:
        cold, warm = first_starts(case, measured.name)
    except BenchError as error:
        return replace(measured, problem=str(error))
    return replace(measured, cold=cold, warm=warm)
