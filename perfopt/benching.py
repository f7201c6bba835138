"""Models timed beside rivals: right first, then fast; cold and warm, and in memory.

All contenders of a row run in one process, in random order. A row whose results are further from
float64 than eager's allow is not timed. First steps and memory are measured in processes of their
own, with folders of caches that nobody else uses.
"""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from perfopt.api import compile as compile_model
from perfopt.backends.torch_private import tree_flatten, tree_map
from perfopt.checking import Expected, compared, expected
from perfopt.factory import load_factory
from perfopt.measuring import Ratio, measure, ratio
from perfopt.options import environment_with
from perfopt.running import SEED, Subject, loss_of, run, seeded

OURS = "perfopt"
RIVALS = ("eager", "inductor", "aot_eager")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "float64": torch.float64}  # fmt: skip
LEAST, MOST = 7, 301  # samples
LONG = 3  # rounds that warm up
_CHILD_SECONDS = 1800


class BenchError(ValueError):
    """A rival, dtype or suite that is none; the message names the nearest."""


@dataclass(frozen=True)
class Case:
    """One row: a factory as FILE.py:FACTORY, the dtype ("" for the model's own), and how it runs.

    `options` are those of `perfopt.compile`.
    """

    factory: str
    dtype: str = ""
    train: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def title(self) -> str:
        """What the row is called: equal for the same row of another run."""
        parts = [self.name or self.factory.rpartition("/")[2], self.dtype]
        return " ".join(part for part in (*parts, "train" if self.train else "") if part)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Case:
        """A case of what `asdict` or a suite's file has; raises `BenchError`."""
        known = ("factory", "dtype", "train", "options", "name")
        for key in table:
            if key not in known:
                raise BenchError(_unknown("key of a case", key, known))
        if not isinstance(table.get("factory"), str):
            raise BenchError("a case without a factory, which is FILE.py:FACTORY")
        case = cls(**table)
        if case.dtype and case.dtype not in DTYPES:
            raise BenchError(_unknown("dtype", case.dtype, DTYPES))
        return case


@dataclass(frozen=True)
class Start:
    """The first step in a fresh process: seconds, and of its stages where they are known."""

    seconds: float
    stages: Mapping[str, float]


@dataclass(frozen=True)
class Measured:
    """One contender of a row.

    `error` and `gradient_error` are the greatest distances from float64, over the greatest
    magnitude; `samples` are seconds per step, in the order of the rounds; `problem` says what is
    wrong, and then nothing was timed. `peak_bytes` come beside what is there before a step.
    """

    name: str
    error: float = 0.0
    gradient_error: float | None = None
    samples: tuple[float, ...] = ()
    cold: Start | None = None
    warm: Start | None = None
    peak_bytes: int | None = None
    problem: str = ""

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.samples) if self.samples else float("nan")


@dataclass(frozen=True)
class Row:
    """A case and its contenders, perfopt last."""

    case: Case
    contenders: tuple[Measured, ...]

    def of(self, name: str) -> Measured | None:
        """A contender by its name."""
        return next((each for each in self.contenders if each.name == name), None)

    @property
    def wrong(self) -> str:
        """What is wrong about perfopt's results; "" where nothing is."""
        ours = self.of(OURS)
        return ours.problem if ours else ""

    def ratios(self) -> dict[str, Ratio]:
        """Every rival's time over perfopt's."""
        ours = self.of(OURS)
        if ours is None or not ours.samples:
            return {}
        return {
            each.name: ratio(each.samples, ours.samples)
            for each in self.contenders
            if each is not ours and each.samples
        }


Tell = Callable[[str, float], None]


def cases(
    factories: Sequence[str], dtypes: Sequence[str], train: bool, suite: str | None = None
) -> list[Case]:
    """The rows that the command line asks for; raises `BenchError` and `FactoryError`."""
    found = [Case.read({"factory": f, "train": train}) for f in factories]
    if suite is not None:
        found += [replace(case, train=case.train or train) for case in _suite(Path(suite))]
    if not found:
        raise BenchError("nothing to measure: give FILE.py:FACTORY, or --suite FILE.toml")
    for name in dtypes:
        if name not in DTYPES:
            raise BenchError(_unknown("dtype", name, DTYPES))
    made = [
        replace(case, dtype=name)
        for case in found
        for name in ([case.dtype] if case.dtype or not dtypes else dtypes)
    ]
    for case in made:
        load_factory(case.factory)
    return made


def _suite(path: Path) -> list[Case]:
    import tomllib

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"--suite {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise BenchError(f"--suite {path} is not TOML: {error}") from error
    rows = table.get("case")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BenchError(f"--suite {path} has no [[case]]")
    found = []
    for row in rows:
        case = Case.read(row)
        file, _, name = case.factory.rpartition(":")
        where = path.parent / file
        found.append(replace(case, factory=f"{where}:{name}" if where.is_file() else case.factory))
    return found


def check_rivals(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once; raises `BenchError`."""
    for name in names:
        if name not in RIVALS:
            raise BenchError(_unknown("rival", name, RIVALS))
    return tuple(dict.fromkeys(names))


def _unknown(what: str, name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}{hint} Allowed: {', '.join(known)}"


def loaded(case: Case) -> Subject:
    """The model and inputs of a case, in its dtype, from a fixed seed."""
    seeded(SEED)
    model, args, kwargs = load_factory(case.factory)()
    if case.dtype:
        dtype = DTYPES[case.dtype]

        def converted(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

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


def step_of(subject: Subject, call: Callable[..., Any]) -> Callable[[], None]:
    """One step: the forward pass, and where the subject trains, gradients, which are dropped."""
    leaves = [x for x in tree_flatten((subject.args, dict(subject.kwargs)))[0]
              if isinstance(x, Tensor) and x.requires_grad]  # fmt: skip
    if isinstance(subject.model, nn.Module):
        leaves += [p for p in subject.model.parameters() if p.requires_grad]

    def train() -> None:
        outputs = call(*subject.args, **subject.kwargs)
        loss = loss_of(outputs)
        if loss is None:
            ends = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor) and x.grad_fn]
            loss = sum((x.float().square().mean() for x in ends), torch.zeros(()))
        loss.backward()
        for leaf in leaves:
            leaf.grad = None

    def infer() -> None:
        with torch.no_grad():
            call(*subject.args, **subject.kwargs)

    return train if subject.train else infer


def bench(
    found: Sequence[Case],
    rivals: Sequence[str],
    *,
    seconds: float = 10.0,
    samples: int | None = None,
    cold: bool = True,
    tell: Tell = lambda what, done: None,
) -> Iterator[Row]:
    """One row after the other, as they are finished.

    `seconds` is what the samples of a row may take about; `samples` is their number instead. With
    `cold`, first steps and memory are measured too, in fresh processes. `tell` hears what is being
    done, and which part of all is behind.
    """
    for number, case in enumerate(found):

        def step(what: str, part: float, number: int = number, case: Case = case) -> None:
            tell(f"{case.title}: {what}", (number + part) / len(found))

        yield _row(case, rivals, seconds, samples, cold, step)


def _row(
    case: Case, rivals: Sequence[str], seconds: float, samples: int | None, cold: bool, tell: Tell
) -> Row:
    torch.compiler.reset()
    names = [*rivals, OURS]
    subject = loaded(case)
    tell("float64", 0.0)
    known = expected(subject)
    calls = {name: contender(subject, name, case.options) for name in names}
    measured: dict[str, Measured] = {}
    for count, name in enumerate(names):
        tell(f"{name} is checked", 0.1 + 0.3 * count / len(names))
        measured[name] = _checked(name, subject, calls[name], known)
    if not measured[OURS].problem:
        steps = {
            name: step_of(subject, calls[name]) for name in names if not measured[name].problem
        }
        tell("timed", 0.4)
        taken = measure(steps, samples or _samples(steps, seconds), warmup=LONG)
        for name, each in taken.items():
            measured[name] = replace(measured[name], samples=tuple(each))
        for count, name in enumerate(steps if cold else ()):
            tell(f"first steps of {name}", 0.7 + 0.3 * count / len(steps))
            measured[name] = _started(case, measured[name])
    return Row(case, tuple(measured.values()))


def _checked(name: str, subject: Subject, call: Callable[..., Any], known: Expected) -> Measured:
    try:
        rows = compared(run(subject, call), known)
    except Exception as error:
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        return Measured(name, problem=f"fails: {text}")
    outputs = [_relative(row.name, row.ours, known) for row in rows if "gradient" not in row.name]
    gradients = [_relative(row.name, row.ours, known) for row in rows if "gradient" in row.name]
    wrong = next((f"{row.name} {row.problem}" for row in rows if row.problem), "")
    return Measured(
        name,
        max(outputs, default=0.0),
        max(gradients) if gradients else None,
        # Rivals are shown as they are: some of their long sums are plain ones.
        problem=f"wrong: {wrong}" if wrong and name == OURS else "",
    )


def _relative(name: str, distance: float, known: Expected) -> float:
    exact = known.exact[name].double()
    scale = exact[exact.isfinite()].abs()
    return distance / max(float(scale.max()) if scale.numel() else 0.0, 1e-30)


def _samples(steps: Mapping[str, Callable[[], None]], seconds: float) -> int:
    for step in steps.values():
        step()
    start = time.perf_counter()
    for step in steps.values():
        step()
    return max(LEAST, min(MOST, int(seconds / max(time.perf_counter() - start, 1e-6))))


def _started(case: Case, measured: Measured) -> Measured:
    """The first step with empty caches, then in another process with those that it left."""
    with tempfile.TemporaryDirectory(prefix="perfopt_bench_") as folder:
        request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        table = {"case": asdict(case), "contender": measured.name,
                 "threads": torch.get_num_threads()}  # fmt: skip
        request.write_text(json.dumps(table))
        starts: list[Start] = []
        peak: int | None = None
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-m", f"{__package__}.first_call", str(request), str(answer)],
                env=environment_with(
                    PERFOPT_CACHE_DIR=f"{folder}/perfopt",
                    TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor",
                    TRITON_CACHE_DIR=f"{folder}/triton",
                ),
                capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False,
            )  # fmt: skip
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                return replace(measured, problem=f"in a fresh process: {last}")
            found = json.loads(answer.read_text())
            starts.append(Start(found["seconds"], found["stages"]))
            peak = found["peak_bytes"]
    return replace(measured, cold=starts[0], warm=starts[1], peak_bytes=peak)
