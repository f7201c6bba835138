"""What a node takes on a GPU, by the kind of work that it is.

Products, attention and convolutions have models of their own, with the tiles and waves of the
libraries that run them; everything else is a stream of bytes with some arithmetic. Prices are kept
by shape: repeated layers are priced once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

from torch import fx

from perfopt.cost_model.attention import attention
from perfopt.cost_model.convolution import convolution
from perfopt.cost_model.estimate import Estimate
from perfopt.cost_model.gemm import BYTES, gemm
from perfopt.cost_model.ops import Work, argument, operator_name
from perfopt.cost_model.specification import Device
from perfopt.cost_model.streaming import gather, normalisation, pointwise, scatter, softmax
from perfopt.cost_model.traffic import hint, value_bytes

_PRICES = 16384  # kept at most
_WIDEST = 16  # bytes of the widest load
_NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm")
_SOFTMAXES = ("_softmax", "_log_softmax")
_PICKING = ("embedding", "gather", "index", "index_select", "_unsafe_index")
_PUTTING = ("embedding_dense_backward", "index_put", "scatter", "scatter_add", "index_add")


def estimated(device: Device, node: fx.Node, done: Work, moved: float) -> Estimate:
    """Seconds of one node as the library runs it; `done` and `moved` are its work and its bytes."""
    found = _special(device, node, done)
    return streamed(device, moved, done) if found is None else found


def streamed(device: Device, moved: float, done: Work) -> Estimate:
    """Seconds of one kernel that moves `moved` bytes and does `done`, products left out."""
    return _streamed(device, float(moved), float(done.vector), done.vector_dtype)


@lru_cache(maxsize=_PRICES)
def _streamed(device: Device, moved: float, instructions: float, dtype: str) -> Estimate:
    return pointwise(device, moved, instructions=instructions, dtype=dtype)


def _special(device: Device, node: fx.Node, done: Work) -> Estimate | None:
    name = operator_name(node.target)
    if name in ("mm", "addmm", "_scaled_mm", "bmm", "baddbmm"):
        left, right = node.args[-2:] if name in ("mm", "bmm") else node.args[1:3]
        if name == "_scaled_mm":
            left, right = node.args[:2]
        return _product(device, tuple(_shape(left)), _shape(right)[-1], done.matrix_dtype)
    if name.startswith("_scaled_dot_product"):
        query, key = _shape(argument(node, "query")), _shape(argument(node, "key"))
        causal = bool(argument(node, "is_causal", False))
        backward = name.endswith("backward")
        return _attention(device, tuple(query), tuple(key), causal, done.matrix_dtype, backward)
    if name in ("convolution", "convolution_backward"):
        return _convolution(device, node, done.matrix_dtype)
    return _rows(device, node, name)


def _rows(device: Device, node: fx.Node, name: str) -> Estimate | None:
    """Rows that are normalised, picked or written."""
    first = next(iter(node.all_input_nodes), None)
    if first is None or not hasattr(first.meta.get("val"), "shape"):
        return None
    shape, item = _shape(first), first.meta["val"].element_size()
    if name in _NORMS and shape:
        return _of_rows(normalisation, device, prod(shape[:-1]), shape[-1], item)
    if name in _SOFTMAXES and shape and argument(node, "dim", -1) in (-1, len(shape) - 1):
        return _of_rows(softmax, device, prod(shape[:-1]), shape[-1], item)
    whole = value_bytes(node.meta.get("val"))
    if name in _PICKING and whole:
        row = shape[-1] * item if name == "embedding" and len(shape) > 1 else item
        return _of_rows(gather, device, whole / max(row, 1), row)
    if name in _PUTTING and whole:
        return _of_rows(scatter, device, prod(shape) if shape else 1, item)
    return None


@lru_cache(maxsize=_PRICES)
def _of_rows(price: Callable[..., Estimate], device: Device, *sizes: float) -> Estimate:
    return price(device, *sizes)


@lru_cache(maxsize=_PRICES)
def _product(device: Device, left: tuple[int, ...], n: int, dtype: str) -> Estimate:
    *batch, m, k = left
    item = BYTES.get(dtype, 4)
    alignment = _WIDEST
    while alignment > item and (k * item) % alignment:
        alignment //= 2
    return gemm(device, m, n, k, batch=prod(batch), dtype=dtype, alignment=alignment)


@lru_cache(maxsize=_PRICES)
def _attention(
    device: Device, query: tuple[int, ...], key: tuple[int, ...], causal: bool, dtype: str,
    backward: bool,
) -> Estimate:  # fmt: skip
    *batch, heads, queries, width = query
    return attention(
        device, prod(batch), heads, key[-3], queries, key[-2], width, causal=causal, dtype=dtype,
        backward=backward,
    )  # fmt: skip


def _convolution(device: Device, node: fx.Node, dtype: str) -> Estimate:
    backward = operator_name(node.target) == "convolution_backward"
    operand = _shape(argument(node, "input"))
    weight = _shape(argument(node, "weight"))
    result = _shape(argument(node, "grad_output")) if backward else _shape(node)
    last = _channels_last(argument(node, "input").meta["val"])
    groups = int(argument(node, "groups", 1))
    directions = ["forward"]
    if backward:
        wanted = argument(node, "output_mask")[:2]
        directions = [d for d, asked in zip(("operand", "weight"), wanted, strict=True) if asked]
    found = [
        _one_convolution(
            device, tuple(operand), tuple(result), tuple(weight), groups, dtype, last, direction
        )
        for direction in directions or ["operand"]
    ]
    return found[0] if len(found) == 1 else _together(found)


@lru_cache(maxsize=_PRICES)
def _one_convolution(
    device: Device, operand: tuple[int, ...], result: tuple[int, ...], weight: tuple[int, ...],
    groups: int, dtype: str, last: bool, direction: str,
) -> Estimate:  # fmt: skip
    return convolution(
        device, operand[0], operand[1], result[1], result[2:], weight[2:], operand=operand[2:],
        groups=groups, dtype=dtype, channels_last=last, direction=direction,
    )  # fmt: skip


def _together(found: list[Estimate]) -> Estimate:
    """One after the other."""
    parts = ("seconds", "compute", "memory", "latency", "launch")
    return Estimate(*(sum(getattr(each, part) for each in found) for part in parts))


def _channels_last(value: Any) -> bool:
    strides = value.stride()
    return len(strides) > 2 and hint(strides[1]) == 1 and hint(value.shape[1]) > 1


def _shape(node: Any) -> list[int]:
    value = node.meta["val"]
    value = value[0] if isinstance(value, (tuple, list)) else value
    return [hint(size) for size in value.shape]
