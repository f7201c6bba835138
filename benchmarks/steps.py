"""Time one training step of the demo GPT: forward, backward and update.

    python -m benchmarks.steps
    python -m benchmarks.steps --threads 2 --samples 201

The ratio is each contender's time over perfopt's: above 1.0, perfopt is faster. The losses of all
contenders must coincide, else nothing is reported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from benchmarks import compare
from benchmarks.compare import EAGER, INDUCTOR
from examples import train_gpt
from perfopt.measuring import measure


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = compare.parser(__doc__, samples=101)
    options.add_argument("--no-inductor", action="store_true", help="leave Inductor out")
    args = options.parse_args(argv)
    torch.set_num_threads(args.threads)
    names = [EAGER, *([] if args.no_inductor else [INDUCTOR]), args.backend]
    demo = train_gpt.parse(["--seed", str(args.seed)])
    model = train_gpt.make_model(demo)
    contenders = {name: train_gpt.contender(name, model, demo.rate) for name in names}
    data, _ = train_gpt.corpus()

    def stepper(each: train_gpt.Contender) -> Callable[[], object]:
        batches = train_gpt.batches(data, demo.batch, demo.context, args.seed)  # the same for all
        return lambda: each.step(*next(batches))

    steps = {name: stepper(each) for name, each in contenders.items()}
    seconds = measure(steps, args.samples)
    apart = train_gpt.parted(list(contenders.values()), demo.tolerance)
    if apart:
        print(f"losses part from eager's by more than {demo.tolerance}: {', '.join(apart)}")
        return 1
    pairs = [(name, args.backend) for name in names[:-1]]
    compare.show([compare.row("GPT step", seconds, pairs, 1.0)], "ms", args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
