"""Time a call so small that what surrounds the kernel is all there is to time.

    python -m benchmarks.overhead

The same functions as `benchmarks.regions`, on float32 (64, 64). Dynamo's guards are part of every
compiled call.
"""

from __future__ import annotations

import sys

import torch

from benchmarks import compare
from benchmarks.compare import EAGER, INDUCTOR
from benchmarks.regions import REGIONS, time_function


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = compare.parser(__doc__, samples=201)
    options.add_argument("--size", type=int, default=64)
    options.add_argument("--calls", type=int, default=100, help="calls in one sample")
    args = options.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    size = args.size
    pairs = [(INDUCTOR, args.backend), (EAGER, args.backend)]
    rows = []
    for name in ("gelu(x+b)*y", "softmax"):
        function = REGIONS[name].function
        inputs = REGIONS[name].inputs(torch.randn, size, size)
        with torch.no_grad():
            seconds = time_function(function, inputs, args.backend, args.samples, args.calls)
        rows.append(compare.row(f"{name} {size}x{size}", seconds, pairs, 1.0))
    compare.show(rows, "us", args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
