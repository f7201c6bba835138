"""`Step`: one operation of an eager float32 model, its forward and backward seconds.

Whole models (see `workloads`) and the nodes of published runs are made of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perfopt.cost_model.estimate import Estimate
from perfopt.cost_model.gemm import BYTES, gemm
from perfopt.cost_model.specification import Device
from perfopt.cost_model.streaming import INSTRUCTIONS, gather, normalisation, pointwise, softmax

# Tensors that a pointwise backward pass reads and writes for each input's gradient, by name; where
# a gradient is the incoming one (add, sub, contiguous) there are none.
_GRADIENT = {
    "add": 0.0, "sub": 0.0, "mul": 2.0, "mul2": 6.0, "div": 2.0, "pow": 6.5, "tanh": 3.0,
    "gelu": 3.0, "relu": 3.0, "where": 2.0, "dropout": 6.5, "max": 4.0, "copy": 0.0, "scale": 2.0,
    "to": 0.0, "fill": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One call. `sizes` by `kind`: of "product" batch, m, n, k; of "softmax", "norm" and "pick"
    rows and width; of "pointwise" the elements of the result and the tensors of that size that are
    read and written. `name` is the pointwise operation. `weights` are the elements of parameters
    that take a gradient, `table` those of an embedding's table, `copied` those of operands that a
    product first copies, because their strides do not suit it. "view" and "host" run no kernel.
    """

    kind: str
    sizes: tuple[float, ...] = ()
    name: str = ""
    weights: float = 0.0
    table: float = 0.0
    copied: float = 0.0


def forward(device: Device, step: Step, dtype: str = "float32") -> float:
    """Seconds of the step's kernel, its launch included; 0 for views and host code."""
    return _price(_FORWARD, device, step, dtype)


def backward(device: Device, step: Step, dtype: str = "float32") -> float:
    """Seconds of the kernels that make the step's gradients, without adding them to others."""
    return _price(_BACKWARD, device, step, dtype)


def accumulate(device: Device, step: Step, dtype: str = "float32") -> float:
    """Seconds to add the gradients of the step's parameters to those that are there."""
    if not step.weights:
        return 0.0
    return float(pointwise(device, 3 * step.weights * BYTES[dtype]).seconds)


_Price = Callable[[Device, Step, str], Estimate | float]


def _price(prices: dict[str, _Price], device: Device, step: Step, dtype: str) -> float:
    found = prices[step.kind](device, step, dtype) if step.kind in prices else 0.0
    return float(found.seconds) if isinstance(found, Estimate) else found


def _copies(device: Device, step: Step, dtype: str) -> float:
    return float(pointwise(device, 2 * step.copied * BYTES[dtype]).seconds) if step.copied else 0.0


def _product(device: Device, step: Step, dtype: str) -> float:
    batch, m, n, k = step.sizes
    product = gemm(device, m, n, k, batch=batch, dtype=dtype).seconds
    return float(product) + _copies(device, step, dtype)


def _product_backward(device: Device, step: Step, dtype: str) -> float:
    batch, m, n, k = step.sizes
    first = gemm(device, m, k, n, batch=batch, dtype=dtype)
    second = gemm(device, k, n, m, batch=batch, dtype=dtype)
    bias = pointwise(device, m * n * BYTES[dtype]) if step.name == "bias" else None
    done = float(first.seconds + second.seconds + (bias.seconds if bias else 0.0))
    return done + _copies(device, step, dtype)


def _pointwise(device: Device, step: Step, dtype: str) -> Estimate:
    elements, tensors = step.sizes
    work = elements * INSTRUCTIONS.get(step.name, 1)
    return pointwise(device, elements * tensors * BYTES[dtype], instructions=work)


def _pointwise_backward(device: Device, step: Step, dtype: str) -> Estimate | float:
    tensors = _GRADIENT.get(step.name, 2.0)
    if not tensors:
        return 0.0
    elements = step.sizes[0]
    work = elements * INSTRUCTIONS.get(step.name, 1)
    return pointwise(device, elements * tensors * BYTES[dtype], instructions=work)


def _softmax_backward(device: Device, step: Step, dtype: str) -> Estimate:
    # The incoming gradient, the saved result and the gradient; it streams at half the rate.
    rows, width = step.sizes
    return softmax(device, rows, width * 3, BYTES[dtype])


def _norm_backward(device: Device, step: Step, dtype: str) -> float:
    # One kernel for the operand's gradient, one that sums the weights' over the rows.
    rows, width = step.sizes
    operand = normalisation(device, rows, width * 1.5, BYTES[dtype])
    weights = pointwise(device, 2 * rows * width * BYTES[dtype])
    return float(operand.seconds + weights.seconds)


def _pick(device: Device, step: Step, dtype: str) -> Estimate:
    rows, width = step.sizes
    return gather(device, rows, width * BYTES[dtype])


def _pick_backward(device: Device, step: Step, dtype: str) -> Estimate:
    # A gradient as large as the table is filled with zeros, then rows are added to it.
    rows, width = step.sizes
    return pointwise(device, (step.table + 4 * rows * width) * BYTES[dtype])


_FORWARD: dict[str, _Price] = {
    "product": _product,
    "pointwise": _pointwise,
    "softmax": lambda d, s, t: softmax(d, s.sizes[0], s.sizes[1], BYTES[t]),
    "norm": lambda d, s, t: normalisation(d, s.sizes[0], s.sizes[1], BYTES[t]),
    "pick": _pick,
}
_BACKWARD: dict[str, _Price] = {
    "product": _product_backward,
    "pointwise": _pointwise_backward,
    "softmax": _softmax_backward,
    "norm": _norm_backward,
    "pick": _pick_backward,
}
