"""Time the first training step of the demo GPT in a fresh process with empty or full caches.

    python -m benchmarks.first_step
    python -m benchmarks.first_step --warm
    python -m benchmarks.first_step --samples 5 --json first_step.json

The clock runs from before the call of `torch.compile`, which imports Dynamo, to the end of the
first update; importing torch and making the model come before it. "aot_eager" is the floor: Dynamo
and AOTAutograd with no compiler behind them. The ratio is each contender's time over perfopt's.
With `--warm` the compilers find what an earlier process, which is not measured, has kept on disk.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import compare
from benchmarks.compare import EAGER, INDUCTOR
from examples import train_gpt

FLOOR = "aot_eager"
ROOT = Path(__file__).resolve().parents[1]
# Where the compilers keep what they made.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PERFOPT_CACHE_DIR", "XDG_CACHE_HOME")


def first_step(backend: str, threads: int, seed: int) -> float:
    """Seconds of the first step in this process."""
    torch.set_num_threads(threads)
    demo = train_gpt.parse(["--seed", str(seed)])
    data, _ = train_gpt.corpus()
    batch = next(train_gpt.batches(data, demo.batch, demo.context, seed))
    model = train_gpt.make_model(demo)
    start = time.perf_counter()
    train_gpt.contender(backend, model, demo.rate).step(*batch)
    return time.perf_counter() - start


def in_fresh_process(backend: str, threads: int, seed: int, kept: Path) -> float:
    """Seconds of the first step in a process of its own, with its caches in the folder `kept`."""
    caches = {name: str(kept / name) for name in CACHES}
    command = [sys.executable, "-m", "benchmarks.first_step", "--measure", backend]
    command += ["--threads", str(threads), "--seed", str(seed)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | caches, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the first step of {backend} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = compare.parser(__doc__, samples=3)
    options.add_argument("--measure", metavar="BACKEND", help="measure one in this process alone")
    options.add_argument("--warm", action="store_true", help="with what a run before has kept")
    args = options.parse_args(argv)
    if args.measure:
        print(first_step(args.measure, args.threads, args.seed))
        return 0
    names = list(dict.fromkeys((INDUCTOR, FLOOR, EAGER, args.backend)))
    order = random.Random(args.seed)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(-1 if args.warm else 0, args.samples):
            for name in order.sample(names, len(names)):
                kept = Path(folder, name if args.warm else f"{name}_{turn}")
                taken = in_fresh_process(name, args.threads, args.seed, kept)
                if turn >= 0:
                    seconds[name].append(taken)
    torch.set_num_threads(args.threads)
    pairs = [(INDUCTOR, args.backend), (FLOOR, args.backend)]
    case = "GPT first step, warm" if args.warm else "GPT first step"
    target = None if args.warm else 4.0
    compare.show([compare.row(case, seconds, pairs, target)], "s", args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
