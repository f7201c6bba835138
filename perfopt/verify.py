"""Regions beside their eager subgraphs: what the option `verify` does after every launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from perfopt.backends.codegen import source_line

# Units in the last place of the output's largest value that a region may be off beside what
# eager itself is off: sums are taken in another order.
SLACK = 16.0


class VerificationError(AssertionError):
    """A region's kernel differs from its eager subgraph by more than rounding.

    `region` is a region of `program`, `node` the result that is wrong, `source` the user's line,
    `problem` how it differs. `graph` and `inputs` are the region's subgraph and what it was given.
    """

    def __init__(
        self,
        program: str,
        region: str,
        node: fx.Node,
        problem: str,
        graph: fx.GraphModule,
        inputs: tuple[Any, ...],
    ) -> None:
        self.program, self.region, self.node = program, region, node.name
        self.source = source_line(node)
        self.problem, self.graph, self.inputs = problem, graph, inputs
        where = self.source or "an unknown line"
        super().__init__(f"{region} of {program}: {node.name} ({where}) {problem}")


def verify_region(
    program: str,
    name: str,
    graph: fx.GraphModule,
    args: tuple[Any, ...],
    outputs: tuple[Tensor, ...],
) -> None:
    """Run `graph` on `args` in their own dtypes and in float64, and compare with `outputs`.

    Raises `VerificationError` with the region, the user's line and both distances to float64.
    """
    with torch.no_grad():
        eager = graph(*args)
        double = _Double(graph, garbage_collect_values=False)
        exact = double.run(*(_double(arg) for arg in args))
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    for node, ours, theirs, true in zip(output.args[0], outputs, eager, exact, strict=True):
        scale = max((_size(double.env.get(arg)) for arg in node.all_input_nodes), default=0.0)
        problem = difference(ours, theirs, true, scale)
        if problem:
            raise VerificationError(program, name, node, problem, graph, args)


def difference(
    ours: Tensor, eager: Tensor, exact: Tensor, scale: float = 0.0, times: float = 2.0
) -> str:
    """How `ours` differs from `eager` by more than rounding, judged by `exact`; "" if it does not.

    Floating-point values may be `times` as far from float64 as eager's, and some units in the last
    place of the largest value, or of `scale` (what the values were computed from, where a sum
    cancels); NaN and infinities must be where eager has them. Others must equal
    eager's or float64's: a comparison may fall to either side where rounding decides it.
    """
    if (ours.dtype, ours.shape) != (eager.dtype, eager.shape):
        return f"is {ours.dtype} {tuple(ours.shape)}, not {eager.dtype} {tuple(eager.shape)}"
    if ours.stride() != eager.stride() and ours.numel() > 1:
        shape = zip(ours.shape, ours.stride(), eager.stride(), strict=True)
        if any(size > 1 and a != b for size, a, b in shape):
            return f"has strides {ours.stride()}, not {eager.stride()}"
    if not ours.is_floating_point():
        wrong = int(((ours != eager) & (ours != exact.to(ours.dtype))).sum())
        return f"differs from eager in {wrong} of {ours.numel()} values" if wrong else ""
    mine, theirs, true = ours.double(), eager.double(), exact.double()
    finite = theirs.isfinite()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    odd = int((~finite & ~same & ~_overflow(mine, true, ours.dtype)).sum())
    odd += int((finite & ~mine.isfinite()).sum())
    if odd:
        return f"has NaN or infinities unlike eager's in {odd} of {ours.numel()} values"
    if not bool(finite.any()):
        return ""
    true = torch.where(true.isfinite(), true, theirs)
    off = _greatest((mine - true).abs()[finite])
    eager_off = _greatest((theirs - true).abs()[finite])
    unit = torch.finfo(ours.dtype).eps * max(_greatest(true.abs()[finite]), scale, 1e-30)
    if off <= times * eager_off + SLACK * unit:
        return ""
    return f"is {off:.3g} off float64, eager is {eager_off:.3g} off"


def distance(result: Tensor, exact: Tensor) -> float:
    """The greatest distance of a tensor's finite values to those of `exact`."""
    mine, true = result.double(), exact.double()
    both = mine.isfinite() & true.isfinite()
    return _greatest((mine - true).abs()[both])


def _overflow(mine: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Where eager overflowed between two operations and float64 did not."""
    return mine.isfinite() & exact.isfinite() & (exact.abs() <= torch.finfo(dtype).max)


def _size(value: Any) -> float:
    """The largest finite absolute value of a floating-point tensor; 0.0 for anything else."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return 0.0
    return _greatest(value.abs()[value.isfinite()])


def _greatest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, (list, tuple)):
        return type(value)(_double(each) for each in value)
    return value


class _Double(fx.Interpreter):
    """Runs a graph with float64 wherever it names a floating-point dtype."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call with float64 for every floating-point dtype among the arguments."""
        kwargs = {key: _double(value) for key, value in kwargs.items()}
        return super().call_function(target, tuple(_double(arg) for arg in args), kwargs)
