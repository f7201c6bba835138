"""Time of matrix products: tiles, waves of tiles, split-K, the K loop, feeding and memory.

A library cuts the result into tiles, one per core and wave. A tile waits for its first operands,
steps along K in slabs, each as long as the slowest of multiplying, fetching and the latency of one
step, and writes out. Split-K gives the slabs of one tile to several cores and adds up. The library
knows its tiles well: of those that it has, the one with the least predicted time is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from perfopt.cost_model.efficiency import Constants, clock, constants
from perfopt.cost_model.estimate import Array, Estimate, array, bandwidth, blend
from perfopt.cost_model.specification import Device

BYTES = {
    "float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1,
    "float6": 0.75, "float4": 0.5, "int4": 0.5,
}  # fmt: skip
_MATRIX_TILES = (
    (16, 64), (16, 128), (32, 32), (32, 64), (32, 128), (64, 32), (64, 64), (64, 128), (128, 32),
    (128, 64), (128, 128), (64, 256), (256, 64), (128, 256), (256, 128), (256, 256),
)  # fmt: skip
_VECTOR_TILES = (
    (32, 32), (32, 64), (64, 32), (64, 64), (32, 128), (128, 32), (64, 128), (128, 64), (128, 128),
    (128, 256), (256, 128),
)  # fmt: skip
_CPU_TILES = ((1, 64), (4, 64), (12, 64), (48, 64), (48, 256))
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SLAB = {"matrix": 128, "vector": 32, "cpu": 32}  # bytes of K that one step takes
_THROTTLE = 1e-4  # seconds of full load after which a device draws all the power that it may
_LANES = 128  # operations per cycle of a core with 64 lanes
_ROW = 131072  # bytes of a row past which it gets no slower to walk
_PART = 512  # shapes that are priced at once
_WIDEST = 16  # bytes of one load


def unit(device: Device, dtype: str) -> str:
    """Which constants hold: "matrix" for matrix units, "vector" for a GPU's lanes, "cpu"."""
    if device.kind == "cpu":
        return "cpu"
    narrow = dtype not in ("float32", "float64") and dtype in device.peaks
    return "matrix" if narrow else "vector"


def gemm(
    device: Device,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    batch: ArrayLike = 1,
    dtype: str = "bfloat16",
    result_bytes: float | None = None,
    alignment: ArrayLike = _WIDEST,
    launch: float | None = None,
    fit: Constants | None = None,
) -> Estimate:
    """Seconds of `batch` products of `(m, k)` by `(k, n)`; sizes broadcast.

    `alignment` is the largest power of two, up to 16, that divides the bytes of every row;
    `result_bytes` are those of one element of the result (default: the operands'). `launch`
    replaces the fixed seconds of a call, `fit` the constants.
    """
    fit = fit or constants(f"gemm.{unit(device, dtype)}", device)
    sizes = np.broadcast_arrays(array(m), array(n), array(k), array(batch), array(alignment))
    shape = sizes[0].shape
    flat = [each.reshape(-1) for each in sizes]
    # In parts, so that every plan for every shape of one stays in the cache.
    parts = [
        _Product(device, fit, dtype, [each[at : at + _PART] for each in flat], result_bytes).best()
        for at in range(0, max(len(flat[0]), 1), _PART)
    ]
    best, compute, memory, latency = (
        np.concatenate(each).reshape(shape) for each in zip(*parts, strict=True)
    )
    fixed = np.asarray(device.launch_seconds * fit["launch"] if launch is None else launch)
    return Estimate(fixed + best, compute, memory, latency, np.broadcast_to(fixed, shape))


def linear(
    device: Device, rows: ArrayLike, inner: ArrayLike, out: ArrayLike, **options: Any
) -> Estimate:
    """Seconds of a linear layer: `(rows, inner)` by `(inner, out)`; options as `gemm`'s."""
    return gemm(device, rows, out, inner, **options)


class _Product:
    """The shapes of one call of `gemm`, and what does not depend on the tile."""

    def __init__(
        self, device: Device, fit: Constants, dtype: str, sizes: Sequence[Array],
        result_bytes: float | None,
    ) -> None:  # fmt: skip
        self.m, self.n, self.k, self.batch, alignment = sizes
        self.device, self.fit = device, fit
        self.kind = unit(device, dtype)
        self.item = BYTES.get(dtype.partition("/")[0], 4)
        self.cycle = 1 / clock(device)
        share = fit["peak_share"] * fit.get(f"{dtype}_share", 1.0)
        self.core_rate = device.matrix_peak(dtype) * share / device.cores
        self.core_feed = fit["feed"] * clock(device)
        if self.kind == "vector":
            # Small tiles lose by shared memory, which grows with the lanes.
            self.core_feed *= device.matrix_peak(dtype) / device.cores / clock(device) / _LANES
        # Rows that are not aligned are fetched by narrower loads.
        self.narrow = np.clip(_WIDEST / alignment, 1, 4)
        self.depth = _SLAB[self.kind] / self.item
        # Long rows lie in more pages than the translation caches of early devices reach.
        self.walking = 1 + fit["row_slowing"] * np.minimum(self.k * self.item / _ROW, 1) ** 2
        written = self.item if result_bytes is None else result_bytes
        moved = self.item * (self.m * self.k + self.k * self.n) + written * self.m * self.n
        moved = self.batch * moved
        self.memory = moved / (bandwidth(device, moved) * fit["memory_share"])
        self.reduced = self.batch * self.m * self.n * 8 / (device.cores * self.core_feed)

    def best(self) -> tuple[Array, Array, Array, Array]:
        """Seconds without the launch by the best tile, and its compute, memory and latency."""
        total, busy, waiting = self._by(*_plans(self.kind))
        chosen = np.argmin(total, axis=0)[None]
        best, compute, latency = (
            np.take_along_axis(each, chosen, axis=0)[0] for each in (total, busy, waiting)
        )
        return best, compute, self.memory, latency

    def _by(self, rows: Array, columns: Array, split: Array) -> tuple[Array, Array, Array]:
        """Seconds, compute and latency of each plan (the first axis) for each shape."""
        fit, depth, device = self.fit, self.depth, self.device
        least = 1 if self.kind == "cpu" else 16  # rows that one instruction multiplies
        multiply = 2 * np.maximum(rows, least) * columns * depth / self.core_rate
        fetch = (rows + columns) * depth * self.item * self.narrow / self.core_feed
        step = np.maximum(np.maximum(multiply, fetch), fit["step_cycles"] * self.cycle)
        step = step * self.walking
        slabs = np.ceil(np.ceil(self.k / depth) / split)
        tiles = self.batch * np.ceil(self.m / rows) * np.ceil(self.n / columns) * split
        waves = np.ceil(tiles / device.cores)
        busy = waves * slabs * multiply
        # Under full load the clock falls to what the power limit allows.
        slowing = fit["throttle"] * busy * busy / (busy + _THROTTLE)
        start = fit["tile_cycles"] * self.cycle
        inside = waves * (start + slabs * step) + slowing
        added = fit["split_cycles"] * self.cycle + split * self.reduced
        inside = inside + np.where(split > 1, added, 0.0)
        total = blend(inside, self.memory, fit["sharpness"])
        if "batched_tiles" in fit:
            # For batches, the early libraries consider few tiles.
            pairs = zip(rows.flat, columns.flat, strict=True)
            few = [[r, c] in fit["batched_tiles"] for r, c in pairs]
            allowed = np.reshape(few, rows.shape) | (self.batch <= 1)
            total = np.where(allowed, total, np.inf)
        return total, busy + slowing, inside - busy - slowing


@cache
def _plans(kind: str) -> tuple[Array, Array, Array]:
    """Rows, columns and splits of every plan that a library may choose, along the first axis."""
    tiles = {"matrix": _MATRIX_TILES, "vector": _VECTOR_TILES, "cpu": _CPU_TILES}[kind]
    splits = (1,) if kind == "cpu" else _SPLITS
    plans = [(rows, columns, split) for rows, columns in tiles for split in splits]
    rows, columns, split = np.array(plans, dtype=np.float64).T[:, :, None]
    return rows, columns, split
