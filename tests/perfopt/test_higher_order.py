"""Operators that hold graphs, recomputation, operators of the user's own, and tensor subclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import perfopt
from tests.perfopt.comparing import compare, compare_module, compiled, same


def _branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: F.gelu(x) * 2, lambda x: x.softmax(-1), (x,)) + 1


def _loop(x: Tensor) -> Any:
    def goes_on(step: Tensor, x: Tensor) -> Tensor:
        return step < 3

    def turn(step: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return step + 1, F.gelu(x) + x * 0.5

    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(goes_on, turn, (torch.zeros((), dtype=torch.int64), x))[1] * 2


def _scanned(x: Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    def turn(held: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        held = torch.tanh(held * 0.5 + row)
        return held, held * 2

    last, rows = scan(turn, torch.zeros_like(x[0]), x)
    return last + 1, F.gelu(rows)


def _associative(x: Tensor) -> Any:
    from torch._higher_order_ops.associative_scan import associative_scan

    sums = associative_scan(lambda a, b: a + b, x * 2, 0, combine_mode="generic")
    return F.gelu(sums)


def _mapped(x: Tensor) -> Any:
    from torch._higher_order_ops.map import map as each

    return each(lambda row, y: F.gelu(row) * y.exp(), x, x[0] * 2) + 1


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "cond": _branches, "while_loop": _loop, "scan": _scanned, "map": _mapped,
    "associative_scan": _associative,
}  # fmt: skip


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", HOLDERS)
def test_operators_that_hold_graphs(name: str, sign: float) -> None:
    with torch.no_grad():
        compare(HOLDERS[name], [torch.rand(4, 6) * sign])


@pytest.mark.parametrize("name", ["cond", "scan", "map"])
def test_gradients_through_operators_that_hold_graphs(name: str) -> None:
    compare(HOLDERS[name], [torch.rand(4, 6).requires_grad_()])


def test_a_region_that_is_compiled_once_and_called_often() -> None:
    @torch.compiler.nested_compile_region
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(x @ w).softmax(-1) + x

    def deep(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = layer(x, w) * 2
        return x

    compare(deep, [torch.randn(4, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)])


def test_attention_with_a_score_of_the_users_own() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score = flex_attention(
            q * 2, k, v, score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j), block_mask=blocks
        )
        assert isinstance(score, Tensor)
        return F.gelu(score)

    q, k, v = torch.randn(3, 1, 2, 32, 16).unbind()
    with torch.no_grad():
        ours, eager = perfopt.compile(attend)(q, k, v), attend(q, k, v)
    torch.testing.assert_close(ours, eager)


def test_functional_transforms_of_what_is_compiled() -> None:
    def network(x: Tensor) -> Tensor:
        return (F.gelu(x) * x.softmax(-1)).sum()

    def transforms(x: Tensor) -> Any:
        value, pull = torch.func.vjp(network, x)
        _, forward = torch.func.jvp(network, (x,), (torch.ones_like(x),))
        jacobian = torch.func.jacrev(lambda y: F.gelu(y) * 2)(x[0])
        hessian = torch.func.hessian(lambda y: (y.sin() * y).sum())(x[0])
        return value, pull(torch.ones(()).to(x.dtype))[0], forward, jacobian, hessian

    with torch.no_grad():
        compare(transforms, [torch.randn(3, 5)])


# ---- recomputation ------------------------------------------------------------------------------


class Layer(nn.Module):
    """A norm and a small network, with dropout."""

    def __init__(self, drop: float = 0.2) -> None:
        super().__init__()
        self.drop = drop
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.second(F.gelu(self.first(self.norm(x)))), self.drop)


def _kept(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    return keep if op in products else again


class Deep(nn.Module):
    """Three layers, each computed again for its gradients."""

    def __init__(self, drop: float = 0.2, **how: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(drop) for _ in range(3))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, **self.how)
        return x.softmax(-1)


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "plain": {"use_reentrant": False},
    "without random state": {"use_reentrant": False, "preserve_rng_state": False, "drop": 0.0},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _kept),
    },
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(name: str) -> None:
    model = Deep(**CHECKPOINTS[name])
    compare_module(model, [torch.randn(4, 8, requires_grad=True)], perfopt.compile(model))


def test_reentrant_checkpoints() -> None:
    model = Deep(use_reentrant=True)
    other = copy.deepcopy(model)
    x = torch.randn(4, 8, requires_grad=True)
    for run in (perfopt.compile(model), other):
        torch.manual_seed(1)
        run(x).pow(2).sum().backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-4)


# ---- operators of the user's own ----------------------------------------------------------------


def test_an_operator_with_several_results_and_an_option() -> None:
    @torch.library.custom_op("perfopt_tests::parts", mutates_args=())
    def parts(x: Tensor, by: float, times: int = 2) -> tuple[Tensor, list[Tensor]]:
        return x * by, [x + k for k in range(times)]

    @parts.register_fake
    def _(x: Tensor, by: float, times: int = 2) -> tuple[Tensor, list[Tensor]]:
        return torch.empty_like(x), [torch.empty_like(x) for _ in range(times)]

    def function(x: Tensor) -> Any:
        scaled, more = parts(F.gelu(x), 0.5, 3)
        return scaled.softmax(-1), more[2] * more[0]

    with torch.no_grad():
        compare(function, [torch.randn(3, 5)])


def test_an_operator_whose_result_has_a_size_of_its_own() -> None:
    @torch.library.custom_op("perfopt_tests::positive", mutates_args=())
    def positive(x: Tensor) -> Tensor:
        return x[x > 0].clone()

    @positive.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    def function(x: Tensor) -> Tensor:
        return F.gelu(positive(x * 2)) + 1

    ours = compiled(function)
    with torch.no_grad():
        for seed in range(3):
            x = torch.randn(20, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(ours(x), function(x))


def test_an_operator_that_lies_about_its_strides() -> None:
    @torch.library.custom_op("perfopt_tests::turned", mutates_args=())
    def turned(x: Tensor) -> Tensor:
        return x.t().contiguous().t()

    turned.register_fake(torch.empty_like)

    def function(x: Tensor) -> Tensor:
        return F.gelu(turned(x)) * 2 + 1

    with torch.no_grad():
        x = torch.arange(12.0).view(3, 4)
        torch.testing.assert_close(compiled(function)(x), function(x))


def test_an_operator_without_a_shape_function_breaks_the_graph_and_no_more() -> None:
    library = torch.library.Library("perfopt_tests", "FRAGMENT")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x * 3, "CPU")

    def function(x: Tensor) -> Tensor:
        y = torch.ops.perfopt_tests.opaque(F.gelu(x))
        return y.softmax(-1)

    with torch.no_grad():
        x = torch.randn(3, 5)
        torch.testing.assert_close(perfopt.compile(function)(x), function(x))


def test_an_autograd_function_of_the_users_own() -> None:
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return (grad * x.exp()).clamp(-1, 1)

    compare(lambda x: Clipped.apply(F.gelu(x)) * 2, [torch.randn(3, 5, requires_grad=True)])


# ---- tensor subclasses --------------------------------------------------------------------------


class Scaled(torch.Tensor):
    """A tensor kept as another and a number that it is to be multiplied by."""

    inner: Tensor
    by: float

    @staticmethod
    def __new__(cls, inner: Tensor, by: float) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device,
            requires_grad=inner.requires_grad,
        )  # fmt: skip

    def __init__(self, inner: Tensor, by: float) -> None:
        self.inner, self.by = inner, by

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["inner"], self.by

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], by: float, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["inner"], by)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(cls, lambda x: x.inner * x.by, args)
        result = func(*plain, **(kwargs or {}))
        same_kind = func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default)
        return cls(args[0].inner, args[0].by) if same_kind else result


def test_a_wrapper_subclass_as_an_argument_and_a_parameter() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(x @ w).softmax(-1)

    x, w = torch.randn(4, 6), torch.randn(6, 6)
    with torch.no_grad():
        ours = perfopt.compile(function)(x, Scaled(w, 0.5))
        torch.testing.assert_close(ours, function(x, w * 0.5))


def test_two_tensors_as_one() -> None:
    two = pytest.importorskip("torch.testing._internal.two_tensor")

    def function(x: Tensor) -> Tensor:
        return F.gelu(x) * x.softmax(-1)

    a, b = torch.randn(3, 5), torch.randn(3, 5)
    x = two.TwoTensor(a.clone(), b.clone()).requires_grad_()
    ours = perfopt.compile(function)(x)
    torch.testing.assert_close((ours.a, ours.b), (function(a), function(b)))
    ours.sum().backward()
    leaf = a.clone().requires_grad_()
    function(leaf).sum().backward()
    torch.testing.assert_close(x.grad.a, leaf.grad)


def test_a_subclass_that_overrides_functions() -> None:
    class Counted(torch.Tensor):
        pass

    def function(x: Tensor) -> Tensor:
        return F.gelu(x) * 2 + x.exp()

    x = torch.randn(3, 5)
    ours = perfopt.compile(function)(x.as_subclass(Counted))
    assert type(ours) is Counted
    torch.testing.assert_close(ours.as_subclass(torch.Tensor), function(x))


def test_masked_tensors() -> None:
    def function(x: Tensor, keep: Tensor) -> Tensor:
        return torch.masked.softmax(F.gelu(x), -1, mask=keep)

    x, keep = torch.randn(3, 5), torch.rand(3, 5) > 0.3
    same(compiled(function)(x, keep), function(x, keep), function(x.double(), keep))
