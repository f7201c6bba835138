"""Programs: the generated text, memory that goes back early, regions with and without kernels."""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from perfopt.backends.program import Program, build_program, restrided
from perfopt.backends.region import Alloc, Call, LoweredRegion

aten = torch.ops.aten


def graph(
    function: Callable[..., Any], *inputs: Any, dynamic: bool = False
) -> tuple[fx.GraphModule, list[Any]]:
    """The ATen graph of a function, and the fake inputs that it was traced with."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=not dynamic)
    fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs]
    return make_fx(function, tracing_mode="real")(*fakes), fakes


def region(gm: fx.GraphModule, first: str, last: str) -> fx.GraphModule:
    """`gm` with the nodes from `first` to `last` in a region whose result is `last`."""
    names = [node.name for node in gm.graph.nodes]
    chosen = list(gm.graph.nodes)[names.index(first) : names.index(last) + 1]
    inner, known = fx.Graph(), {}
    outside: list[fx.Node] = []
    for node in chosen:
        for arg in node.all_input_nodes:
            if arg not in known and arg not in chosen:
                known[arg] = inner.placeholder(arg.name)
                known[arg].meta = dict(arg.meta)
                outside.append(arg)
        known[node] = inner.node_copy(node, lambda n: known[n])
    inner.output((known[chosen[-1]],))
    gm.add_submodule("region_0", fx.GraphModule(gm, inner))
    with gm.graph.inserting_after(chosen[-1]):
        call = gm.graph.call_module("region_0", tuple(outside))
    call.meta = {"region": True, "val": (chosen[-1].meta["val"],)}
    with gm.graph.inserting_after(call):
        item = gm.graph.call_function(operator.getitem, (call, 0))
    item.meta = dict(chosen[-1].meta)
    chosen[-1].replace_all_uses_with(item, lambda user: user not in (call, item))
    for node in reversed(chosen):
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


def floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


def build(gm: fx.GraphModule, **given: Any) -> Program:
    return build_program("test", gm, given.pop("lowered", {}), given.pop("kernels", {}), **given)


def test_text_and_results() -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        z = (x.relu() + y) * 2.5
        return z, torch.full((2,), float("inf"), dtype=torch.float64), z.sum(), [z.size(0)]

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    program = build(graph(function, x, y)[0])
    lines = program.source.splitlines()
    assert lines[:2] == ["# test", "def program(inputs):"]
    assert "    relu = aten_relu(x_1)" in lines and "    del y_1, relu" in lines
    given = [x, y]
    z, full, total, *_ = program.run(given)
    assert given == [] and program.run._boxed_call is True  # type: ignore[attr-defined]
    torch.testing.assert_close((z, full, total), function(x, y)[:3])
    assert program.library_calls["aten.relu.default"] == 1
    assert program.regions == () and program.launches == 0


def test_arguments_of_every_kind() -> None:
    def function(x: Tensor) -> Any:
        y = torch.empty_like(x, dtype=torch.int32, memory_format=torch.contiguous_format)
        y = y.fill_(3).to(torch.bfloat16).clamp(None, 2.0)
        z = aten.index.Tensor(x, [None, torch.tensor([0, 1])])
        return y, z, torch.cat([x, x], -1), x.new_zeros((1,)), x.permute(1, 0)

    x = torch.randn(2, 3)
    program = build(make_fx(function)(x))
    torch.testing.assert_close(program.run([x]), function(x))


def test_names_that_python_or_the_program_takes() -> None:
    g = fx.Graph()
    x, y = g.placeholder("inputs"), g.placeholder("program")
    g.output((g.call_function(aten.sub.Tensor, (x, y)),))
    program = build(fx.GraphModule({}, g))
    assert program.run([torch.tensor(3), torch.tensor(1)])[0].item() == 2


def test_values_are_dropped_after_their_last_use() -> None:
    alive: list[bool] = []
    refs: list[weakref.ref[Tensor]] = []

    def probe(x: Tensor) -> Tensor:
        alive.append(refs[0]() is not None)
        return x

    g = fx.Graph()
    x = g.placeholder("x")
    y = g.call_function(aten.neg.default, (x,))
    g.output((g.call_function(probe, (y,)),))
    program = build(fx.GraphModule({}, g))
    given = [torch.ones(3)]
    refs.append(weakref.ref(given[0]))
    program.run(given)
    assert alive == [False]


def lowered(**changes: Any) -> LoweredRegion:
    n = changes.pop("size", 12)
    given = {
        "name": "region_0",
        "inputs": ("in0",),
        "allocs": (Alloc("out0", torch.float32, (n,), (1,)),),
        "outputs": ("out0",),
        "calls": (Call("region_0", ("in0", "out0", n)),),
    }
    return LoweredRegion(**{**given, **changes})


def twice(x: Tensor) -> Tensor:
    return ((x + 1) * 2).neg()


def doubled(x: int, out: int, count: int, threads: int) -> int:
    for i, value in enumerate(floats(x, count)):
        floats(out, count)[i] = (value + 1) * 2
    assert threads == torch.get_num_threads()
    return 0


def test_a_region_with_a_kernel() -> None:
    x = torch.randn(12)
    gm = region(graph(twice, x)[0], "add", "mul")
    program = build(gm, lowered={"region_0": lowered()}, kernels={"region_0": doubled})
    assert program.regions == ("region_0",) and program.launches == 1
    assert program.library_calls == {"aten.neg.default": 1}
    torch.testing.assert_close(program.run([x]), (twice(x),))
    assert "empty_strided((12,), (1,), float32)" in program.source


def test_a_region_without_a_kernel_is_spelled_out() -> None:
    x = torch.randn(12)
    gm = region(graph(twice, x)[0], "add", "mul")
    program = build(gm)
    assert program.regions == () and "aten.mul.Tensor" in program.library_calls
    torch.testing.assert_close(program.run([x]), (twice(x),))


def test_dynamic_sizes_are_integer_arithmetic() -> None:
    x = torch.randn(12)
    gm, (fake,) = graph(twice, x, dynamic=True)
    symbol = fake.shape[0].node.expr
    assert isinstance(symbol, sympy.Symbol)
    gm = region(gm, "add", "mul")
    size = symbol * 2 // 2
    program = build(
        gm, lowered={"region_0": lowered(size=size)}, kernels={"region_0": doubled}
    )  # fmt: skip
    for count in (12, 5, 3):
        torch.testing.assert_close(program.run([x[:count]]), (twice(x[:count]),))


def test_an_unknown_size_falls_back_to_aten() -> None:
    x = torch.randn(12)
    gm = region(graph(twice, x)[0], "add", "mul")
    unknown = lowered(size=sympy.Symbol("s9", integer=True))
    program = build(gm, lowered={"region_0": unknown}, kernels={"region_0": doubled})
    assert program.launches == 0
    torch.testing.assert_close(program.run([x]), (twice(x),))


def test_empty_results_are_not_computed() -> None:
    x = torch.randn(0)
    gm = region(graph(twice, x)[0], "add", "mul")
    program = build(gm, lowered={"region_0": lowered(size=0)}, kernels={"region_0": doubled})
    assert program.launches == 0 and program.run([x])[0].shape == (0,)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [(1, IndexError, "index out of range"), (2, RuntimeError, "ZeroDivisionError")],
)
def test_checked_kernels_raise(fault: int, error: type[Exception], message: str) -> None:
    x = torch.randn(12)
    gm = region(graph(twice, x)[0], "add", "mul")
    calls = (Call("region_0", ("in0", "out0", 12), checked=True),)
    program = build(
        gm, lowered={"region_0": lowered(calls=calls)}, kernels={"region_0": lambda *_: fault}
    )  # fmt: skip
    with pytest.raises(error, match=message):
        program.run([x])


def test_backward_inputs_are_put_into_their_strides() -> None:
    x = torch.randn(12)
    gm = region(graph(twice, x)[0], "add", "mul")
    program = build(
        gm, lowered={"region_0": lowered()}, kernels={"region_0": doubled}, check_strides=True
    )  # fmt: skip
    for given in (x, torch.randn(24)[::2], torch.ones(()).expand(12)):
        torch.testing.assert_close(program.run([given]), (twice(given),))


def test_restrided() -> None:
    x = torch.randn(3, 1, 4)
    assert restrided(x, (4, 99, 1)) is x
    y = restrided(x.transpose(0, 2), (3, 3, 1))
    assert y.stride() == (3, 3, 1) and torch.equal(y, x.transpose(0, 2))


def test_verify_sees_every_region() -> None:
    seen: list[Any] = []
    x = torch.randn(12)
    gm = region(graph(twice, x)[0], "add", "mul")
    program = build(
        gm, lowered={"region_0": lowered()}, kernels={"region_0": doubled},
        verify=lambda *given: seen.append(given),
    )  # fmt: skip
    program.run([x])
    ((name, module, args, results),) = seen
    assert name == "region_0" and args[0] is x
    torch.testing.assert_close(module(*args), results)


def test_a_clock_hears_of_every_call_and_region() -> None:
    x = torch.randn(12)
    calls = (Call("region_0", ("in0", "out0", 12)),)
    heard: list[str] = []
    for given in (
        {"lowered": {"region_0": lowered(calls=calls)}, "kernels": {"region_0": lambda *_: 0}},
        {},
    ):
        gm = region(graph(lambda x: twice(x).exp(), x)[0], "add", "mul")
        build(gm, clock=heard.append, **given).run([x])
    assert heard == ["", "region_0", "neg", "exp", "", "add", "mul", "neg", "exp"]
