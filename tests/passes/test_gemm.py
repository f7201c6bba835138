"""Matrix products by the faster library: when it is taken, and that the products stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from perfopt.backends.torch_private import onednn_linear
from perfopt.cost_model.decision import Verdict
from perfopt.cost_model.device import ONEDNN, host_device
from perfopt.cost_model.roofline import CostModel
from perfopt.passes.base import Gate, PassResult
from perfopt.passes.gemm import Gemm

pytestmark = pytest.mark.skipif(onednn_linear() is None, reason="torch has no oneDNN")
aten = torch.ops.aten
# A device whose oneDNN is twice as fast as the default, and one where there is no difference.
FASTER = CostModel(replace(host_device(), peaks={"float64": 5e10, "float32": 1e11, ONEDNN: 2e11}))
SAME = CostModel(replace(host_device(), peaks={"float64": 5e10, "float32": 1e11}))
r = torch.randn


def run(
    function: Callable[..., Any], *args: torch.Tensor, cost: CostModel = FASTER,
    dynamic: bool = False, gate: Gate | None = None,
) -> PassResult:  # fmt: skip
    gm = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*args)
    return Gemm().run(gm, cost, gate)


def targets(result: PassResult) -> list[Any]:
    return [n.target for n in result.graph.graph.nodes if n.op == "call_function"]


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "mm": (lambda a, b: a @ b, lambda: (r(256, 200), r(200, 300))),
    "transposed right": (lambda a, b: a @ b.t(), lambda: (r(256, 200), r(300, 200))),
    "transposed left": (lambda a, b: a.t() @ b, lambda: (r(200, 256), r(200, 300))),
    "bias": (
        lambda x, w, b: torch.addmm(b, x, w.t()), lambda: (r(256, 200), r(300, 200), r(300)),
    ),
    "strided": (lambda a, b: a[:, ::2] @ b, lambda: (r(256, 400), r(200, 300))),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_large_products_go_to_onednn(name: str, dynamic: bool) -> None:
    function, inputs = CASES[name]
    args = inputs()
    result = run(function, *args, dynamic=dynamic)
    assert onednn_linear() in targets(result)
    assert not {aten.mm.default, aten.addmm.default} & set(targets(result))
    (decision,) = result.decisions
    assert decision.verdict is Verdict.APPLIED and decision.seconds_saved > 0
    got, eager = result.graph(*args), function(*args)
    exact = function(*(arg.double() for arg in args))
    assert got.stride() == eager.stride()
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max()


def test_infinities_and_nan_stay() -> None:
    a, b = r(256, 200), r(200, 300)
    a[0, 0], a[1, 1], b[2, 2] = float("nan"), float("inf"), -float("inf")
    result = run(lambda x, y: x @ y, a, b)
    torch.testing.assert_close(result.graph(a, b), a @ b, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda a, b: a @ b, (r(8, 8), r(8, 8))),  # too small for the longer call
        (lambda a, b: a @ b, (r(256, 200).double(), r(200, 300).double())),
        (lambda a, b: a @ b, (r(256, 200).bfloat16(), r(200, 300).bfloat16())),
        (lambda a, b: a @ b, (r(256, 0), r(0, 300))),
        (lambda c, a, b: torch.addmm(c, a, b, beta=2), (r(300), r(256, 200), r(200, 300))),
        (lambda c, a, b: torch.addmm(c, a, b), (r(256, 300), r(256, 200), r(200, 300))),
    ],
)
def test_others_stay(function: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> None:
    result = run(function, *args)
    assert not result.changed
    assert onednn_linear() not in targets(result)


def test_a_product_too_small_is_refused_with_its_price() -> None:
    (decision,) = run(lambda a, b: a @ b, r(8, 8), r(8, 8)).decisions
    assert decision.verdict is Verdict.REJECTED
    assert decision.alternative_cost is not None and decision.before is not None
    assert decision.alternative_cost.seconds > decision.before.seconds


def test_nothing_happens_where_there_is_no_difference() -> None:
    assert run(lambda a, b: a @ b, r(256, 200), r(200, 300), cost=SAME).decisions == ()


def test_the_gate_is_asked() -> None:
    result = run(lambda a, b: (a @ b) @ b.t(), r(256, 200), r(200, 300), gate=Gate(1))
    assert [d.verdict for d in result.decisions] == [Verdict.APPLIED, Verdict.REJECTED]
