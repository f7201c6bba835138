"""FLOPs of ATen operations.

Products (GEMM, convolution, attention) count two per multiply-add and run at the matrix peak.
Everything else counts simple vector instructions, per element of the result or, for reductions,
of the operand: an exponential is about ten of them, not one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from perfopt.cost_model.device import ONEDNN
from perfopt.cost_model.traffic import (
    elements,
    hint,
    is_view,
    larger,
    read_bytes,
    reads,
    symbolic,
    written_bytes,
)

aten = torch.ops.aten

# Simple vector instructions per element, by ATen name; 1 for names that are not here.
_WEIGHTS = {
    "div": 4, "reciprocal": 4, "sqrt": 4, "rsqrt": 8, "fmod": 20, "remainder": 24,
    "floor_divide": 24, "exp": 10, "exp2": 10, "expm1": 15, "log": 15, "log2": 15, "log10": 15,
    "log1p": 18, "sin": 20, "cos": 20, "tan": 30, "asin": 20, "acos": 20, "atan": 20, "sinh": 20,
    "cosh": 20, "tanh": 18, "asinh": 25, "acosh": 25, "atanh": 25, "erf": 20, "erfc": 25,
    "erfinv": 40, "sigmoid": 14, "pow": 40, "atan2": 30, "hypot": 20, "gelu": 26, "silu": 16,
    "gelu_backward": 40, "silu_backward": 22, "softplus": 28, "elu": 17, "mish": 46, "lgamma": 80,
    "digamma": 80, "tanh_backward": 3, "sigmoid_backward": 3, "_softmax": 14, "_log_softmax": 14,
    "_softmax_backward_data": 4, "_log_softmax_backward_data": 14, "native_layer_norm": 8,
    "native_layer_norm_backward": 14, "native_batch_norm": 8, "native_batch_norm_backward": 14,
    "native_group_norm": 8, "native_group_norm_backward": 14, "var": 3, "var_mean": 3, "std": 3,
    "cumsum": 2, "logsumexp": 14, "_fused_rms_norm": 4, "native_dropout": 12, "rand": 10,
    "randn": 40, "bernoulli": 12, "max": 2, "min": 2, "amax": 2, "amin": 2, "sort": 60, "topk": 20,
    "_safe_softmax": 14, "softplus_backward": 22, "mse_loss": 3, "mse_loss_backward": 3,
    "_native_batch_norm_legit_functional": 8, "_native_batch_norm_legit": 8,
    "_weight_norm_interface": 6, "_weight_norm_interface_backward": 10,
}  # fmt: skip
# One simple instruction per element, though torch does not call them pointwise.
_SIMPLE = {
    "sum", "mean", "any", "all", "prod", "argmax", "argmin", "aminmax", "norm",
    "linalg_vector_norm", "tril", "triu", "masked_fill", "nll_loss_forward", "nll_loss_backward",
    "index_put", "index_add", "scatter", "scatter_add", "embedding_dense_backward", "_to_copy",
    "convert_element_type", "where", "max_pool2d_with_indices", "avg_pool2d",
    "_adaptive_avg_pool2d", "max_pool2d_with_indices_backward", "avg_pool2d_backward",
    "_adaptive_avg_pool2d_backward", "upsample_nearest2d", "upsample_bilinear2d",
    "upsample_nearest2d_backward", "threshold_backward", "lift_fresh_copy", "uniform",
    "exponential", "arange", "iota",
}  # fmt: skip
# Moves data without computing.
_MOVES = {
    "clone", "copy_", "copy", "cat", "stack", "index", "embedding", "gather", "index_select",
    "constant_pad_nd", "slice_scatter", "select_scatter", "full", "zeros", "ones", "empty",
    "full_like", "zeros_like", "ones_like", "empty_like", "scalar_tensor", "arange", "flip",
    "roll", "repeat", "new_zeros", "new_ones", "new_full", "new_empty", "contiguous",
    "_unsafe_index", "slice_backward", "select_backward", "fill",
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """FLOPs of matrix products and of vector code, and the dtypes that they compute in."""

    matrix: float = 0.0
    vector: float = 0.0
    matrix_dtype: str = "float32"
    vector_dtype: str = "float32"

    def __add__(self, other: Work) -> Work:
        """Both; the wider-working side names the dtype."""
        return Work(
            self.matrix + other.matrix,
            self.vector + other.vector,
            self.matrix_dtype if self.matrix >= other.matrix else other.matrix_dtype,
            self.vector_dtype if self.vector >= other.vector else other.vector_dtype,
        )


def _shape(node: Any) -> list[int]:
    return [hint(size) for size in node.meta["val"].shape]


@cache
def _positions(target: Any) -> dict[str, int]:
    return {argument.name: k for k, argument in enumerate(target._schema.arguments)}


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument of an ATen call by its name in the schema."""
    if name in node.kwargs:
        return node.kwargs[name]
    position = _positions(node.target).get(name, len(node.args))
    return node.args[position] if position < len(node.args) else default


def _mm(node: fx.Node, left: Any, right: Any) -> float:
    return 2.0 * prod(_shape(left)) * _shape(right)[-1]


def _first(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return value if isinstance(value, torch.Tensor) else value[0]


def _convolution(node: fx.Node) -> float:
    """2 * batch * output positions * weight elements; transposed: input positions."""
    positions = node.args[0] if argument(node, "transposed", False) else node
    shape = [hint(size) for size in _first(positions).shape]  # type: ignore[arg-type]
    return 2.0 * shape[0] * prod(shape[2:]) * prod(_shape(node.args[1]))


def _convolution_backward(node: fx.Node) -> float:
    transposed = argument(node, "transposed", False)
    shape = _shape(argument(node, "input") if transposed else argument(node, "grad_output"))
    once = 2.0 * shape[0] * prod(shape[2:]) * prod(_shape(argument(node, "weight")))
    return once * sum(bool(wanted) for wanted in argument(node, "output_mask")[:2])


def _attention(products: int) -> Callable[[fx.Node], float]:
    """`products` GEMMs of queries by keys by head size; half of them where causal."""

    def flops(node: fx.Node) -> float:
        query, key = _shape(argument(node, "query")), _shape(argument(node, "key"))
        share = 0.5 if argument(node, "is_causal", False) else 1.0
        return 2.0 * products * prod(query) * key[-2] * share

    return flops


_PRODUCTS: dict[str, Callable[[fx.Node], float]] = {
    "_linear_pointwise": lambda n: 2.0 * prod(_shape(n)) * _shape(n.args[0])[-1],
    "mm": lambda n: _mm(n, n.args[0], n.args[1]),
    "bmm": lambda n: _mm(n, n.args[0], n.args[1]),
    "addmm": lambda n: _mm(n, n.args[1], n.args[2]),
    "baddbmm": lambda n: _mm(n, n.args[1], n.args[2]),
    "_scaled_mm": lambda n: _mm(n, n.args[0], n.args[1]),
    "mv": lambda n: 2.0 * prod(_shape(n.args[0])),
    "dot": lambda n: 2.0 * prod(_shape(n.args[0])),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
for _kind in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention",
              "flash_attention_for_cpu", "fused_attention_overrideable"):  # fmt: skip
    _PRODUCTS[f"_scaled_dot_product_{_kind}"] = _attention(2)
    _PRODUCTS[f"_scaled_dot_product_{_kind}_backward"] = _attention(5)


@cache
def operator_name(target: Any) -> str:
    """An ATen operator's name without its overload, as \"mm\"."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet.__name__ if packet is not None else getattr(target, "__name__", target))


def _dtype(node: fx.Node) -> str:
    try:
        return str(_first(node).dtype).removeprefix("torch.")
    except (AttributeError, IndexError, KeyError, TypeError):
        return "float32"


def _largest(node: fx.Node) -> int:
    """Elements of the largest tensor among the results and operands."""
    values = [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]
    flat = [v for each in values for v in (each if isinstance(each, (tuple, list)) else [each])]
    return larger(elements(v) for v in flat if isinstance(v, torch.Tensor))


def _vector_dtype(dtype: str) -> str:
    return dtype if dtype in ("float64", "int64") else "float32"


def work(node: fx.Node) -> Work:
    """The FLOPs of one node: 0 for views and copies; the name alone decides for the rest."""
    if node.op != "call_function" or is_view(node):
        return Work()
    name, dtype = operator_name(node.target), _dtype(node)
    if name in _PRODUCTS:
        # 8-bit products give wider results: the operands say which units they run on.
        operand = next(iter(node.all_input_nodes), node)
        source = _dtype(operand)
        matrix = "float8" if source.startswith("float8") else dtype
        if name == "_linear_pointwise":
            matrix = ONEDNN
        return Work(matrix=_PRODUCTS[name](node), matrix_dtype=matrix)
    if name in _MOVES or not is_listed(node):
        return Work()
    return Work(vector=_WEIGHTS.get(name, 1) * _largest(node), vector_dtype=_vector_dtype(dtype))


def is_listed(node: fx.Node) -> bool:
    """Whether the FLOPs of the node's operator are known; others count by their bytes alone."""
    if node.op != "call_function" or is_view(node):
        return True
    name = operator_name(node.target)
    if name in _PRODUCTS or name in _MOVES or name in _WEIGHTS or name in _SIMPLE:
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def formulas(node: fx.Node) -> tuple[Any, Any]:
    """FLOPs and bytes of one node as `sympy` expressions of its symbolic sizes, or as numbers."""
    with symbolic():
        done = work(node)
        moved = 0 if is_view(node) else read_bytes(reads(node)) + written_bytes(node)
        return done.matrix + done.vector, moved
