"""Three hundred random graphs, fused by the default passes: every kernel beside its eager graph.

Each kernel runs twice: compiled through MLIR, and as Triton in the interpreter.

Each region's kernel is given what eager computes up to there, and is judged by float64: it may be
four times as far from it as eager is, or as float64 itself gets when every value of the region is
off by a rounding, so that no chaos in the graph is mistaken for a fault of its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.nn import functional as F

from perfopt.backends.index import Unsupported
from perfopt.backends.lower import Lowered, lower_region
from perfopt.backends.mlir.compile import compile_kernels
from perfopt.backends.region import is_region, region_graph
from perfopt.passes.base import Level
from perfopt.passes.pipeline import DEFAULT, parse_pipeline, run_pipeline
from perfopt.pipelines import cost_model
from tests.backends.kernels import generated, launch, symbols_of, traced
from tests.backends.random_graphs import FLOATS, SIZES, random_graph
from tests.backends.triton.interpreted import run_lowered

aten = torch.ops.aten
SUMS = (aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
SAMPLES = 4
ULPS = 8.0


class Planned(fx.Interpreter):
    """Runs a graph, with the strides that tracing foresaw: eager gives some results others."""

    def run_node(self, n: fx.Node) -> Any:
        result, planned = super().run_node(n), n.meta.get("val")
        if n.op != "call_function" or not isinstance(planned, Tensor):
            return result
        if not all(isinstance(k, int) for k in planned.stride()):
            return result
        sizes = zip(result.shape, result.stride(), planned.stride(), strict=True)
        if all(size < 2 or a == b for size, a, b in sizes) or 0 in planned.stride():
            return result
        return torch.empty_strided(result.shape, planned.stride(), dtype=result.dtype).copy_(result)


class Doubled(Planned):
    """Runs a graph in float64; with `unit`, every value is off by up to so much of itself."""

    def __init__(self, graph: fx.GraphModule, unit: float = 0.0, seed: int = 0) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.unit = unit
        self.generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if not self.unit or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        return result * (1 + self.noise(result) * self.unit)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {key: doubled(value) for key, value in kwargs.items()}
        args = tuple(doubled(arg) for arg in args)
        result = super().call_function(target, args, kwargs)
        if isinstance(result, Tensor) and result.dtype in FLOATS and result.dtype != torch.float64:
            args = tuple(a.double() if isinstance(a, Tensor) else a for a in args)
            result = super().call_function(target, args, kwargs)  # of integers
        if target is aten.var_mean.correction and self.unit > 0:
            # Eager's mean of infinities is one or NaN, by the order in which it meets them.
            result = (result[0], args[0].mean(args[1], kwargs.get("keepdim", False)))
        if target in SUMS and self.unit > 0 and args[0].is_floating_point():
            # The terms may be taken in any order, and cancel.
            terms = super().call_function(target, (args[0].abs(), *args[1:]), kwargs)
            result = result + self.unit * self.noise(terms) * terms.nan_to_num(0, 0, 0)
        if target is aten.gelu.default and self.unit > 0:
            # Eager adds 1 to what is nearly -1 where x is negative.
            result = result + self.unit * self.noise(result) * args[0].nan_to_num(0, 0, 0)
        return result

    def noise(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self.generator, dtype=torch.float64) * 2 - 1


def doubled(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, (list, tuple)):
        return type(value)(doubled(each) for each in value)
    return value


def references(graph: fx.GraphModule, args: Sequence[Any]) -> list[tuple[Tensor, ...]]:
    """The graph in float64, and the same shaken by the roundings of its coarsest dtype."""
    units = [
        torch.finfo(value.dtype).eps
        for node in graph.graph.nodes
        for value in [node.meta.get("val")]
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    unit = max(units, default=0.0)
    given = [doubled(arg) for arg in args]
    return [Doubled(graph).run(*given)] + [
        Doubled(graph, unit, seed).run(*given) for seed in range(SAMPLES if units else 0)
    ]


def problem(ours: Tensor, eager: Tensor, exact: Tensor, shaken: Sequence[Tensor]) -> str:
    """How `ours` differs from eager by more than rounding; "" if it does not."""
    if (ours.dtype, ours.shape) != (eager.dtype, eager.shape):
        return f"is {ours.dtype} {tuple(ours.shape)}, not {eager.dtype} {tuple(eager.shape)}"
    others = [x.to(eager.dtype) for x in (exact, *shaken)]
    if not eager.is_floating_point():
        good = torch.stack([ours == x for x in (eager, *others)]).any(0)
        return _said(good, ours, eager, exact)
    same = torch.stack([_same(ours, x) for x in (eager, *others)]).any(0)
    mine, true = ours.double(), exact.double()
    off = torch.stack([(x.double() - true).abs().nan_to_num(0) for x in (eager, *shaken)]).amax(0)
    info = torch.finfo(ours.dtype)
    largest = true.abs()[true.isfinite()].amax() if bool(true.isfinite().any()) else 0.0
    allowed = 4 * off + ULPS * info.eps * (true.abs() + info.eps * largest) + info.tiny
    near = ((mine - true).abs() <= allowed) & mine.isfinite()
    # Where rounding decides whether there is a value, as that of acos(1), either is right.
    nowhere = torch.stack([x.isnan() for x in (eager, *others)])
    return _said(same | near | (nowhere.any(0) & ~nowhere.all(0)), ours, eager, exact)


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Where two values are one: NaN equals NaN, and zeros have signs."""
    return ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())


def _said(good: Tensor, ours: Tensor, eager: Tensor, exact: Tensor) -> str:
    if bool(good.all()):
        return ""
    at = tuple((~good).nonzero()[0].tolist())
    values = f"{ours[at].item()}, eager {eager[at].item()}, float64 {exact[at].item()}"
    return f"differs in {int((~good).sum())} of {good.numel()} values; at {at} it is {values}"


class Beside(Planned):
    """Runs a fused graph by eager, and the kernel of every region beside it."""

    def __init__(
        self,
        graph: fx.GraphModule,
        lowered: dict[str, Lowered],
        entries: dict[str, Callable[..., Any]],
        symbols: dict[Any, int],
    ) -> None:
        super().__init__(graph)
        self.lowered, self.entries, self.symbols = lowered, entries, symbols

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        graph = self.fetch_attr(target)
        eager = Planned(graph).run(*args)
        planned = [node.meta["val"] for node in graph.graph.output_node().args[0]]
        region = self.lowered[target]
        engines = {
            "MLIR": launch(region, self.entries, args, self.symbols),
            "Triton": run_lowered(region, args, self.symbols),
        }
        exact, *shaken = references(graph, args)
        for engine, results in engines.items():
            for k, (mine, theirs) in enumerate(zip(results, eager, strict=True)):
                found = problem(mine, theirs, exact[k], [each[k] for each in shaken])
                strides = zip(mine.shape, mine.stride(), planned[k].stride(), strict=True)
                if not found and any(n > 1 and a != b for n, a, b in strides) and not self.symbols:
                    found = f"has strides {mine.stride()}, not {planned[k].stride()}"
                assert not found, f"{engine}: result {k} of {target} {found}\n{graph.graph}"
        return eager


def fused(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph after the default passes."""
    pipeline = parse_pipeline(DEFAULT)
    for level in (Level.JOINT, Level.GRAPH):
        graph = run_pipeline(
            graph, pipeline.at(level), cost_model(1), level=level, strict=True
        ).graph
    return graph


def check(function: Callable[..., Any], inputs: Sequence[Tensor], dynamic: bool = False) -> int:
    """Compare every region of the function, and what they come to; the number of regions."""
    before = traced(function, *inputs, dynamic=dynamic)
    graph = fused(before)
    regions = [node for node in graph.graph.nodes if is_region(node)]
    lowered = {str(n.target): lower_region(str(n.target), region_graph(n)) for n in regions}
    kernels = [kernel for each in lowered.values() for kernel in each.kernels]
    entries = compile_kernels(kernels) if kernels else {}
    with torch.no_grad():
        got = Beside(graph, lowered, entries, symbols_of(before, tuple(inputs))).run(*inputs)
        exact, *shaken = references(before, inputs)
        for k, (ours, eager) in enumerate(zip(got, Planned(before).run(*inputs), strict=True)):
            found = problem(ours, eager, exact[k], [each[k] for each in shaken])
            assert not found, f"the passes change result {k}: it {found}"
    return len(regions)


randoms = st.randoms(use_true_random=True, note_method_calls=False)


@settings(max_examples=300)
@given(random=randoms)
def test_random_graph(random: Random) -> None:
    check(*random_graph(random))


@settings(max_examples=60)
@given(random=randoms)
def test_random_graph_of_any_size(random: Random) -> None:
    check(*random_graph(random, [s for s in SIZES if s > 1]), dynamic=True)


def _normal(x: Tensor) -> Tensor:
    joined = torch.cat([x.reciprocal(), x])
    return F.layer_norm(joined, joined.shape)


def _masked(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """A mask that one kernel reads twice and another once."""
    masked = x.tril()
    first = masked.reshape(-1)[:1]
    return torch.where(y > x, y, x).argmax() + 3 * first, masked.max(1).values.exp()


def _resized(x: Tensor) -> Tensor:
    joined = torch.cat([x.pow(-2).flip(1), x], 1)
    return joined.float().abs().view(1, x.shape[0], joined.shape[1]).bfloat16()


# What random graphs have found, each in the smallest form known.
FOUND: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "rows kept that end within a vector": (_normal, lambda: (torch.rand(15) + 1,)),
    "one number": (lambda x: x.transpose(0, -1).sum(0) * x.mean(-1), lambda: (torch.randn(()),)),
    "truth values added no times": (
        lambda x, y: torch.add(x > 0, y > 0, alpha=0), lambda: (torch.randn(9), torch.randn(9)),
    ),
    "nothing looked up in a tensor of another rank": (
        lambda x, i: x.gather(-1, i) * 2, lambda: (torch.randn(2, 3), torch.empty(0).long()),
    ),
    "rows of nothing": (
        lambda x, y: (x - y).exp() / (x - y).exp().sum(1, keepdim=True),
        lambda: (torch.randn(2, 0), torch.randn(2, 1)),
    ),
    "a place looked up in what is padded": (
        lambda x, i: F.pad(x, (1, 2))[i % 8] * 2,
        lambda: (torch.randn(7), torch.arange(10)),
    ),
    "a producer copied into one of two readers": (
        _masked, lambda: (torch.randn(8, 17, 1), torch.randn(8, 17, 1)),
    ),
    "a view by the size of what its operand is made of": (_resized, lambda: (torch.rand(5, 17),)),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str, dynamic: bool) -> None:
    function, inputs = FOUND[name]
    given = inputs()
    check(function, given, dynamic)
    try:
        whole = generated(function, *given, dynamic=dynamic)
    except Unsupported:  # as one kernel
        return
    eager = function(*given)
    for ours, theirs in zip(whole, eager if isinstance(eager, tuple) else (eager,), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
