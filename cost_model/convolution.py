"""Time of convolutions: implicit matrix products, or streams where each channel is on its own.

A convolution of `(batch, channels, *size)` by `outputs` filters is a product with a row for every
position of the result, a column for every filter and a sum over the filter's elements. The operand
is read once: its overlapping windows come from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from perfopt.cost_model.efficiency import Constants, constants
from perfopt.cost_model.estimate import Estimate
from perfopt.cost_model.gemm import BYTES, gemm
from perfopt.cost_model.specification import Device
from perfopt.cost_model.streaming import pointwise


def convolution(
    device: Device,
    batch: float,
    channels: float,
    outputs: float,
    result: Sequence[float],
    kernel: Sequence[float],
    *,
    operand: Sequence[float] | None = None,
    groups: float = 1,
    dtype: str = "float32",
    channels_last: bool = False,
    direction: str = "forward",
    fit: Constants | None = None,
) -> Estimate:
    """Seconds of one convolution.

    `result` and `operand` (default: the same) are the sizes behind the channels, `kernel` those of
    a filter. `direction` is "forward", "operand" or "weight": which gradient is made. Matrix units
    want channels last: otherwise the operand and the result are copied into that order.
    """
    fit = fit or constants("convolution", device)
    item = BYTES.get(dtype.partition("/")[0], 4)
    here, there = float(prod(result)), float(prod(operand or result))
    window = float(prod(kernel))
    inputs = batch * channels * there * item
    written = batch * outputs * here * item
    if groups >= channels:  # depthwise: every filter sees one channel
        work = batch * outputs * here * window
        moved = (inputs + written + outputs * window * item) / fit["depthwise_share"]
        return pointwise(device, moved, instructions=work, dtype=dtype)
    rows, columns, depth = batch * here, outputs / groups, channels / groups * window
    sizes = {
        "forward": (rows, columns, depth),
        "operand": (batch * there, channels / groups, columns * window),
        "weight": (depth, columns, rows),
    }
    if direction not in sizes:
        raise ValueError(f"direction {direction!r}; allowed: {', '.join(sizes)}")
    if device.kind == "cpu" and f"{dtype}/onednn" in device.peaks:
        dtype = f"{dtype}/onednn"
    product = gemm(device, *sizes[direction], batch=groups, dtype=dtype)
    # The product above counts the unrolled operand's traffic; the kernel reads the operand itself.
    filters = outputs * channels / groups * window * item
    streamed = pointwise(device, inputs + written + filters, launch=0.0).seconds
    busy = (product.compute + product.latency) / fit["product_share"]
    copies = 0.0
    if not channels_last and dtype in ("bfloat16", "float16") and device.kind == "gpu":
        copies = float(pointwise(device, 2 * (inputs + written)).seconds)
    launch = product.launch
    seconds = launch + np.maximum(busy, streamed) + copies
    return Estimate(seconds, busy, streamed + copies, product.latency, launch)
