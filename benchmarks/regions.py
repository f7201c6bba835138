"""Time fused regions, forward, beside eager and Inductor.

    python -m benchmarks.regions
    python -m benchmarks.regions --only softmax,swiglu --samples 301 --json regions.json

Float32 (4096, 1024) on one thread unless told otherwise. The ratio is Inductor's time over
perfopt's: above 1.0, perfopt is faster.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import compare
from benchmarks.compare import EAGER, INDUCTOR


def gelu_mul(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A biased GELU times a gate."""
    return F.gelu(x + bias) * y


def softmax(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Softmax over the rows."""
    return torch.softmax(x, -1)


def layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm over the rows, with weight and bias."""
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """RMS norm over the rows, written out as many models do."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def swiglu(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """SiLU times a gate."""
    return F.silu(x) * y


def tanh_gelu(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU by its tanh formula."""
    return F.gelu(x, approximate="tanh")


@dataclass(frozen=True)
class Region:
    """A function of (x, y, weight, bias) and the least ratio to Inductor that it is held to."""

    function: Callable[..., Tensor]
    target: float


REGIONS = {
    "gelu(x+b)*y": Region(gelu_mul, 1.2),
    "softmax": Region(softmax, 1.6),
    "layer_norm": Region(layer_norm, 1.2),
    "rms_norm": Region(rms_norm, 1.0),
    "swiglu": Region(swiglu, 1.1),
    "tanh_gelu": Region(tanh_gelu, 3.0),
}


def time_function(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    backend: str,
    samples: int,
    calls: int = 1,
) -> dict[str, list[float]]:
    """Check the contenders against float64, then time them: seconds per call by contender."""
    functions = {name: compare.contender(function, name) for name in (EAGER, INDUCTOR, backend)}
    compare.check(functions, inputs)
    bound = {name: partial(each, *inputs) for name, each in functions.items()}
    return compare.measure(bound, samples, calls=calls)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = compare.parser(__doc__, samples=101)
    options.add_argument("--only", default="", metavar="A,B", help="some of: " + ", ".join(REGIONS))
    options.add_argument("--rows", type=int, default=4096)
    options.add_argument("--columns", type=int, default=1024)
    options.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    args = options.parse_args(argv)
    names = args.only.split(",") if args.only else list(REGIONS)
    for name in names:
        if name not in REGIONS:
            near = difflib.get_close_matches(name, REGIONS, 1) or ["none is near"]
            options.error(f"--only {name!r}: nearest is {near[0]}; regions: {', '.join(REGIONS)}")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    x, y = torch.randn(2, args.rows, args.columns, dtype=dtype)
    weight, bias = torch.randn(2, args.columns, dtype=dtype)
    pairs = [(INDUCTOR, args.backend), (EAGER, args.backend)]
    rows = []
    for name in names:
        region = REGIONS[name]
        with torch.no_grad():
            inputs = (x, y, weight, bias)
            seconds = time_function(region.function, inputs, args.backend, args.samples)
        rows.append(compare.row(name, seconds, pairs, region.target))
    compare.show(rows, "us", args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
