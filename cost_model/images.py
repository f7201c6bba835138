"""Time of whole vision models from three numbers: multiply-adds, activations, and the batch.

A model that is known by no more than its published counts is priced as one product at the matrix
units' rate and one stream of its activations: each is written, and read and written again by what
follows, so many times for a framework's mode. Backward passes come on top.
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from perfopt.cost_model.efficiency import Constants, constants, tables
from perfopt.cost_model.estimate import Array, array
from perfopt.cost_model.gemm import BYTES
from perfopt.cost_model.specification import Device

MODES = ("eager", "compiled", "training", "cpu")


def images(
    device: Device,
    products: ArrayLike,
    activations: ArrayLike,
    batch: ArrayLike,
    *,
    mode: str = "eager",
    dtype: str = "float16",
    fit: Constants | None = None,
) -> Array:
    """Seconds of one batch of images, of `products` multiply-adds and `activations` elements each.

    `mode` is one of `MODES`.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}; allowed: {', '.join(MODES)}")
    of = fit or tables()["images"][mode]
    share = constants("streaming", device)["memory_share"]
    compute = 2 * array(products) / (device.matrix_peak(dtype) * of["product_share"])
    moved = array(activations) * BYTES[dtype] * of["touches"]
    each = compute + moved / (device.memory_bandwidth * share)
    return array(batch) * each + of["call_seconds"]
