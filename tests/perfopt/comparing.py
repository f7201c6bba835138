"""A compiled function beside eager, in the dtype of its inputs and in float64, with gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import perfopt
from perfopt.verify import difference

Function = Callable[..., Any]


def compiled(function: Any, **options: Any) -> Any:
    """`function` through perfopt, whole."""
    return perfopt.compile(function, fullgraph=True, **options)


def same(ours: Any, eager: Any, exact: Any, scale: float = 0.0) -> None:
    """Assert that results differ by rounding alone; `exact` is eager's result in float64.

    `scale` is the size of what a result may have cancelled from.
    """
    flat_ours, spec = tree_flatten(ours)
    flat_eager, eager_spec = tree_flatten(eager)
    flat_exact, _ = tree_flatten(exact)
    assert spec == eager_spec
    for i, (a, b, c) in enumerate(zip(flat_ours, flat_eager, flat_exact, strict=True)):
        if not isinstance(a, Tensor):
            assert a == b, f"result {i}"
            continue
        problem = difference(a.detach(), b.detach(), c.detach(), scale)
        assert not problem, f"result {i} {problem}"
        assert a.requires_grad == b.requires_grad, f"result {i}"


def run(function: Function, inputs: Sequence[Any], weights: Sequence[Tensor] = ()) -> Any:
    """The outputs, and the gradients of a weighted sum of them for inputs and `weights`."""
    inputs = tree_map(_leaf, list(inputs))
    torch.manual_seed(1)
    outputs = function(*inputs)
    leaves = [x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor) and x.requires_grad]
    leaves += [w for w in weights if w.requires_grad]
    ends = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor) and x.grad_fn is not None]
    if not ends or not leaves:
        return outputs, []
    grads = torch.autograd.grad(ends, leaves, [_cotangent(x) for x in ends], allow_unused=True)
    # Gradients are compared by value: their strides may follow those of what came from above.
    return outputs, [torch.zeros(()) if g is None else g.contiguous() for g in grads]


def compare(
    function: Function, inputs: Sequence[Any], ours: Function | None = None, scale: float = 0.0
) -> None:
    """Assert that perfopt and eager agree on `function`, outputs and gradients."""
    eager = run(function, inputs)
    exact = run(function, tree_map(_double, list(inputs)))
    ours = compiled(function) if ours is None else ours
    same(run(ours, inputs), eager, exact, scale)


def compare_module(module: nn.Module, inputs: Sequence[Any], ours: Function | None = None) -> None:
    """The same for a module, with the gradients of its parameters."""
    ours = compiled(module) if ours is None else ours
    result = run(ours, inputs, list(module.parameters()))
    eager, double = copy.deepcopy(module), copy.deepcopy(module).double()
    expected = run(eager, inputs, list(eager.parameters()))
    exact = run(double, tree_map(_double, list(inputs)), list(double.parameters()))
    same(result, expected, exact)


def _leaf(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(x.requires_grad) if not x.requires_grad else _copied(x)


def _copied(x: Tensor) -> Tensor:
    """A leaf with the same values and strides."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return copy.copy_(x.detach()).requires_grad_()


def _double(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().double().requires_grad_(x.requires_grad)
    return x


def _cotangent(x: Tensor) -> Tensor:
    """Numbers that depend on the position alone."""
    count = torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)
    return (torch.sin(count + 1) + 1.5).to(x.dtype)
