"""Which ATen operators are taken apart before the passes see the graph, and which stay whole.

An operator is taken apart when the pieces are what generated kernels hold: pointwise arithmetic,
row reductions, views. Matrix products, convolutions, attention, pooling, embeddings, dropout (its
random numbers must be eager's) and batch norm stay library calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from perfopt.backends.torch_private import get_decompositions

aten = torch.ops.aten

_POINTWISE = [
    "addcdiv", "addcmul", "celu", "deg2rad", "elu", "elu_backward", "frac", "gelu_backward",
    "glu", "glu_backward", "hardshrink", "hardsigmoid", "hardsigmoid_backward", "hardswish",
    "hardswish_backward", "hardtanh", "hardtanh_backward", "heaviside", "isneginf", "isposinf",
    "leaky_relu_backward", "lerp", "log_sigmoid_backward", "log_sigmoid_forward", "logaddexp",
    "logit", "logit_backward", "masked_fill", "mish", "mish_backward", "nan_to_num",
    "native_dropout_backward", "new_full", "new_ones", "new_zeros", "ones", "ones_like",
    "_prelu_kernel", "_prelu_kernel_backward", "rad2deg", "rsub", "sigmoid_backward",
    "silu_backward", "softplus", "softplus_backward", "softshrink", "special_entr",
    "special_log_ndtr", "square", "tanh_backward", "threshold", "threshold_backward", "tril",
    "triu", "where", "xlogy", "zeros",
]  # fmt: skip

_REDUCTIONS = [
    "_fused_rms_norm", "_fused_rms_norm_backward", "_log_softmax", "_log_softmax_backward_data",
    "_safe_softmax", "_softmax", "_softmax_backward_data", "binary_cross_entropy",
    "binary_cross_entropy_backward", "binary_cross_entropy_with_logits", "huber_loss",
    "huber_loss_backward", "l1_loss", "linalg_vector_norm", "logsumexp", "mse_loss",
    "mse_loss_backward", "nansum", "native_group_norm", "native_group_norm_backward",
    "native_layer_norm", "native_layer_norm_backward", "nll_loss_forward", "norm",
    "smooth_l1_loss", "smooth_l1_loss_backward", "soft_margin_loss",
    "soft_margin_loss_backward", "std", "std_mean",
]  # fmt: skip

_VIEWS = [
    "_unsafe_view", "select_backward", "slice_backward", "split", "stack", "unbind", "unsafe_split",
    "unsafe_split_with_sizes",
]  # fmt: skip


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The operators that are taken apart, each with the function that does it."""
    names = [*_POINTWISE, *_REDUCTIONS, *_VIEWS]
    packets = [getattr(aten, name) for name in names if hasattr(aten, name)]
    table = get_decompositions(packets)
    table[aten.nll_loss_backward.default] = _nll_loss_backward
    table[aten.split_with_sizes.default] = _split_with_sizes
    return dict(table)


def _nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """One comparison per class instead of a scatter, so that it fuses with what follows.

    `x` is (batch, classes) or (classes,). `reduction` is 0 for none, 1 for mean, 2 for sum.
    """
    classes = torch.arange(x.shape[-1], device=x.device)
    chosen = target.unsqueeze(-1)
    scale = grad / total_weight if reduction == 1 else grad
    hit = (classes == chosen) & (chosen != ignore_index)
    if weight is not None:
        scale = (scale.unsqueeze(-1) if scale.ndim else scale) * weight
    elif scale.ndim:
        scale = scale.unsqueeze(-1)
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(hit, -scale, zero).to(x.dtype)


def _split_with_sizes(x: Tensor, sizes: list[int], dim: int = 0) -> list[Tensor]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(aten.slice.Tensor(x, dim, start, start + size))
        start = start + size
    return pieces
