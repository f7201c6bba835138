"""Time fused regions, forward, beside eager and Inductor.

    python -m benchmarks.regions
    python -m benchmarks.regions --only softmax,swiglu --samples 301 --json regions.json
    python -m benchmarks.regions --dtype bfloat16 --threads 2

Float32 on one thread unless told otherwise. The ratio is Inductor's time over perfopt's: above
1.0, perfopt is faster. Freed memory stays with the process, so that page faults do not drown the
kernels. `--rows` and `--columns` are the size of the first six regions; the others
have the sizes that their lines say.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import compare
from benchmarks.compare import EAGER, INDUCTOR
from perfopt.measuring import measure


def gelu_mul(x: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """A biased GELU times a gate."""
    return F.gelu(x + bias) * y


def softmax(x: Tensor) -> Tensor:
    """Softmax over the rows."""
    return torch.softmax(x, -1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm over the rows, with weight and bias."""
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the rows, written out as many models do."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """SiLU times a gate."""
    return F.silu(x) * y


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU by its tanh formula."""
    return F.gelu(x, approximate="tanh")


def layer_norm_backward(
    d: Tensor, x: Tensor, mean: Tensor, scale: Tensor, w: Tensor, b: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of a layer norm to its input, weight and bias."""
    grads = torch.ops.aten.native_layer_norm_backward(
        d, x, x.shape[-1:], mean, scale, w, b, [True, True, True]
    )
    return tuple(grads)


def column_sum(x: Tensor) -> Tensor:
    """The sum of squares of every column."""
    return (x * x).sum(0)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over classes."""
    return F.cross_entropy(x, target)


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    """Scaled softmax of attention scores with a mask."""
    return torch.softmax(x.masked_fill(mask, -1e9) * 0.125, -1)


def softmax_of_short_rows(x: Tensor) -> Tensor:
    """Softmax over rows shorter than a vector."""
    return torch.softmax(x, -1)


def softmax_of_columns(x: Tensor) -> Tensor:
    """Softmax over the first dimension."""
    return torch.softmax(x, 0)


def transposed_gelu(x: Tensor, y: Tensor) -> Tensor:
    """A GELU of a transposed operand plus another that is not."""
    return F.gelu(x.t()) + y


Inputs = Callable[[Callable[..., Tensor], int, int], tuple[Any, ...]]


@dataclass(frozen=True)
class Region:
    """A function, its inputs by (random, rows, columns), and the ratio to Inductor held to."""

    function: Callable[..., Any]
    target: float
    inputs: Inputs


def _mask(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


REGIONS = {
    "gelu(x+b)*y": Region(gelu_mul, 1.2, lambda r, n, m: (r(n, m), r(m), r(n, m))),
    "softmax": Region(softmax, 1.6, lambda r, n, m: (r(n, m),)),
    "layer_norm": Region(layer_norm, 1.2, lambda r, n, m: (r(n, m), r(m), r(m))),
    "rms_norm": Region(rms_norm, 1.0, lambda r, n, m: (r(n, m), r(m))),
    "swiglu": Region(swiglu, 1.1, lambda r, n, m: (r(n, m), r(n, m))),
    "tanh_gelu": Region(tanh_gelu, 3.0, lambda r, n, m: (r(n, m),)),
    "layer_norm_backward": Region(
        layer_norm_backward,
        3.0,
        lambda r, n, m: (r(4096, 1024), r(4096, 1024), r(4096, 1), r(4096, 1), r(1024), r(1024)),
    ),
    "column_sum_4096x1024": Region(column_sum, 5.0, lambda r, n, m: (r(4096, 1024),)),
    "cross_entropy_2048x16000": Region(
        cross_entropy, 1.1, lambda r, n, m: (r(2048, 16000), torch.randint(16000, (2048,)))
    ),
    "masked_softmax_64x256x256": Region(
        masked_softmax, 4.0, lambda r, n, m: (r(64, 256, 256), _mask(64, 256, 256))
    ),
    "softmax_500000x7": Region(softmax_of_short_rows, 2.5, lambda r, n, m: (r(500_000, 7),)),
    "softmax_of_columns_1024x4096": Region(
        softmax_of_columns, 2.0, lambda r, n, m: (r(1024, 4096),)
    ),
    "transposed_gelu_2048x2048": Region(
        transposed_gelu, 2.0, lambda r, n, m: (r(2048, 2048), r(2048, 2048))
    ),
}


def time_function(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    backend: str,
    samples: int,
    calls: int = 1,
) -> dict[str, list[float]]:
    """Check the contenders against float64, then time them: seconds per call by contender."""
    functions = {name: compare.contender(function, name) for name in (EAGER, INDUCTOR, backend)}
    compare.check(functions, inputs)
    bound = {name: partial(each, *inputs) for name, each in functions.items()}
    return measure(bound, samples, calls=calls)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = compare.parser(__doc__, samples=101)
    options.add_argument("--only", default="", metavar="A,B", help="some of: " + ", ".join(REGIONS))
    options.add_argument("--rows", type=int, default=4096)
    options.add_argument("--columns", type=int, default=1024)
    options.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    options.add_argument(
        "--processes", type=int, default=1, metavar="N",
        help="so many fresh processes for each: medians, and ratios from the least to the greatest",
    )  # fmt: skip
    args = options.parse_args(argv)
    names = args.only.split(",") if args.only else list(REGIONS)
    for name in names:
        if name not in REGIONS:
            near = difflib.get_close_matches(name, REGIONS, 1) or ["none is near"]
            options.error(f"--only {name!r}: nearest is {near[0]}; regions: {', '.join(REGIONS)}")
    if len(names) > 1 or args.processes > 1:
        # Each in processes of its own: what earlier ones left in memory and caches is not shared.
        given = ["--rows", args.rows, "--columns", args.columns, "--dtype", args.dtype]
        given += ["--threads", args.threads, "--samples", args.samples, "--seed", args.seed]
        given += ["--backend", args.backend]
        rows = [
            compare.over_processes(
                "benchmarks.regions", [*map(str, given), "--only", name], args.processes
            )
            for name in names
        ]
        compare.show(rows, "us", args)
        return 0
    compare.keep_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    pairs = [(INDUCTOR, args.backend), (EAGER, args.backend)]
    (name,) = names
    region = REGIONS[name]
    with torch.no_grad():
        inputs = region.inputs(partial(torch.randn, dtype=dtype), args.rows, args.columns)
        seconds = time_function(region.function, inputs, args.backend, args.samples)
    compare.show([compare.row(name, seconds, pairs, region.target)], "us", args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
