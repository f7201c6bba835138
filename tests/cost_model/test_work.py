"""FLOPs and bytes as formulas: they give the concrete figures, and torch's own FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from perfopt.cost_model.ops import formulas, is_listed, work
from perfopt.cost_model.traffic import read_bytes, reads, written_bytes

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda x, y: x @ y.t(),
    "pointwise": lambda x, y: F.gelu(x * y + 1),
    "softmax": lambda x, y: torch.softmax(x, -1) * y,
    "row sum": lambda x, y: (x * y).sum(-1),
    "column mean": lambda x, y: x.mean(0) + y.amax(0),
    "joined": lambda x, y: torch.cat([x, y], 1).relu(),
    "picked": lambda x, y: x[torch.arange(x.shape[0])] + y,
    "batched": lambda x, y: torch.bmm(x[None], y.t()[None]),
    "layer norm": lambda x, y: torch.var_mean(x, -1)[0] + y.sum(-1),
}


def nodes(function: Callable[..., Any], mode: str, *args: Tensor) -> list[fx.Node]:
    gm = make_fx(function, tracing_mode=mode)(*args)
    return [node for node in gm.graph.nodes if node.op == "call_function"]


@settings(max_examples=40)
@given(st.sampled_from(sorted(FUNCTIONS)), st.integers(2, 40), st.integers(2, 40))
def test_formulas_give_the_concrete_figures(name: str, rows: int, columns: int) -> None:
    x, y = torch.ones(rows, columns), torch.ones(rows, columns)
    concrete = nodes(FUNCTIONS[name], "fake", x, y)
    dynamic = [
        n for n in nodes(FUNCTIONS[name], "symbolic", x, y)
        if isinstance(n.meta.get("val"), (Tensor, tuple))
    ]  # fmt: skip
    assert [n.target for n in concrete] == [n.target for n in dynamic]
    for fixed, open_ in zip(concrete, dynamic, strict=True):
        flops, moved = formulas(open_)
        done = work(fixed)
        expected = (
            done.matrix + done.vector,
            read_bytes(reads(fixed)) + written_bytes(fixed),
        )
        assert (_at(flops, open_), _at(moved, open_)) == expected


def _at(formula: Any, node: fx.Node) -> float:
    """The formula where every symbol has the size that it was traced with."""
    if not isinstance(formula, sympy.Basic):
        return float(formula)
    graph = node.graph
    known: dict[sympy.Symbol, int] = {}
    for each in graph.nodes:
        value = each.meta.get("val")
        for size in (*value.shape, *value.stride()) if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                known[size.node.expr] = size.node.hint
    return float(formula.subs(known))


def test_formulas_hold_symbols() -> None:
    x = torch.ones(5, 7)
    (product,) = [n for n in nodes(lambda x: x @ x.t(), "symbolic", x) if "mm" in str(n.target)]
    flops, moved = formulas(product)
    assert len(flops.free_symbols) == 2 and len(moved.free_symbols) == 2
    (operand, *_) = product.all_input_nodes
    rows, inner = (size.node.expr for size in operand.meta["val"].shape)
    assert sympy.simplify(flops - 2 * rows * rows * inner) == 0


@pytest.mark.parametrize("name", ["product", "convolution", "linear"])
def test_products_count_what_torch_counts(name: str) -> None:
    x, w = torch.randn(4, 6, 10, 10), torch.randn(8, 6, 3, 3)
    cases: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "product": (torch.bmm, (torch.randn(3, 5, 7), torch.randn(3, 7, 4))),
        "convolution": (lambda x, w: F.conv2d(x, w, padding=1), (x, w)),
        "linear": (F.linear, (torch.randn(9, 5), torch.randn(4, 5), torch.randn(4))),
    }  # fmt: skip
    function, args = cases[name]
    with FlopCounterMode(display=False) as counter:
        function(*args)
    found = sum(work(node).matrix for node in nodes(function, "fake", *args))
    assert found == counter.get_total_flops()


def test_attention_counts_what_torch_counts_on_gpus() -> None:
    q, k = torch.randn(2, 3, 16, 8), torch.randn(2, 3, 24, 8)
    found = nodes(lambda q, k: F.scaled_dot_product_attention(q, k, k), "fake", q, k)
    assert sum(work(node).matrix for node in found) == sdpa_flop_count(q.shape, k.shape, k.shape)


def test_what_is_not_listed_counts_by_its_bytes() -> None:
    library = torch.library.Library("perfopt_test_work", "FRAGMENT")
    library.define("odd(Tensor x) -> Tensor")
    library.impl("odd", lambda x: x + 1, "CompositeExplicitAutograd")
    library.impl("odd", lambda x: torch.empty_like(x), "Meta")
    (node,) = nodes(torch.ops.perfopt_test_work.odd, "fake", torch.ones(10))
    assert not is_listed(node)
    assert work(node).vector == 0 and formulas(node) == (0, 80)
