"""What the pieces of a model take on this machine, to stand beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from torch import fx

from perfopt.backends.torch_private import calling_backend, compile_alone, compile_id
from perfopt.capture import Made
from perfopt.compiler import run_stages
from perfopt.disabling import is_disabled
from perfopt.options import Options
from perfopt.records import Compilation
from perfopt.running import SEED, Subject, run, seeded

WARMUP = 3
RUNS = 21


def measure(
    make: Callable[[], Made], train: bool, options: Options, runs: int = RUNS
) -> Mapping[tuple[str, str], float]:
    """Median seconds of each piece, by the names of its graph and its own.

    The model runs for real, with its backward pass where `train`. A piece's time is that from the
    end of the one before it to its own, as the program runs; it includes what Python takes.
    Graphs are numbered in the order of their capture, those left out that the first run alone took:
    a model that sets a value of its own in its first run is captured again in the second.
    """
    jobs: list[Compilation] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        owner, code, root = calling_backend()
        job = Compilation(compile_id(), options, owner, code, clocks={})
        jobs.append(job)
        return run_stages(job, gm, inputs, options.mode != "aten" and not is_disabled(root))

    seeded(SEED)
    model, args, kwargs = make()
    subject = Subject(model, tuple(args), dict(kwargs), train)
    compiled = compile_alone(model, backend)
    for _ in range(WARMUP):
        run(subject, compiled)
    for job in jobs:
        for clock in (job.clocks or {}).values():
            clock.seconds.clear()
    for _ in range(runs):
        run(subject, compiled)
    ran = [job for job in jobs if any(c.seconds for c in (job.clocks or {}).values())]
    return {
        (f"{number} {kind}", name): median(seconds)
        for number, job in enumerate(ran)
        for kind, clock in (job.clocks or {}).items()
        for name, seconds in clock.seconds.items()
    }
