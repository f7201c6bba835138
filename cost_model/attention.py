"""Time of fused attention (flash kernels): tiles of queries, blocks of keys, waves, exponentials.

One core takes a tile of queries of one head and walks over the keys that they see, block by block:
two products on the matrix units, and one exponential per score on the special-function units. Tiles
of causal attention are of different lengths; they are handed out longest first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from perfopt.cost_model.efficiency import Constants, clock, constants
from perfopt.cost_model.estimate import Array, Estimate, array, blend
from perfopt.cost_model.gemm import BYTES
from perfopt.cost_model.specification import Device

_TILE = 128  # queries of a tile
_WIDEST = 256  # head dimension that the accumulators of one core hold
_PAGE_WARPS = 16  # of a block that writes one token to its page
_BACKWARD = 2.5  # five products where the forward pass has two


def attention(
    device: Device,
    batch: ArrayLike,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    queries: ArrayLike,
    keys: ArrayLike,
    head_dim: ArrayLike,
    *,
    value_dim: ArrayLike | None = None,
    causal: bool = True,
    window: ArrayLike = 0,
    dtype: str = "bfloat16",
    backward: bool = False,
    paged: bool = False,
    fit: Constants | None = None,
) -> Estimate:
    """Seconds of attention of `(batch, heads, queries, head_dim)` over `keys` keys.

    With `window` (0: none) a query sees that many keys before it. `paged` adds that the keys and
    values are first written to pages of a cache and read from there. Sizes broadcast.
    """
    fit = fit or constants("attention", device)
    width = head_dim if value_dim is None else (array(head_dim) + array(value_dim)) / 2
    parts = (batch, heads, kv_heads, queries, keys, width, window)
    b, h, kv, q, k, d, w = np.broadcast_arrays(*(array(each) for each in parts))
    longest, total = _blocks(q, k, w, fit["key_block"], causal)
    item = BYTES.get(dtype, 2)
    cycle = 1 / clock(device)
    core_rate = device.matrix_peak(dtype) * fit["peak_share"] / device.cores
    depth = np.ceil(d / 64) * 64
    # Heads too wide for the registers of one core are worked on in pieces.
    depth = np.where(depth > _WIDEST, depth * fit["wide"], depth)
    size = _TILE * fit["key_block"]
    products = 4 * size * depth / core_rate
    exponentials = size / fit["exponentials"] * cycle
    block = blend(products, exponentials, fit["overlap"]) + fit["block_cycles"] * cycle
    if backward:
        block = block * (_BACKWARD / fit["backward_share"])
    tiles = b * h * np.ceil(q / _TILE)
    packed = b * kv * np.ceil(q * h / np.maximum(kv, 1) / _TILE)
    tiles = np.where((q == 1) | (fit["packing"] > 0), np.minimum(tiles, packed), tiles)
    waves = np.maximum(np.ceil(tiles / device.cores), 1)
    walked = (
        blend(
            tiles * total / np.maximum(np.ceil(q / _TILE), 1) / device.cores,
            longest,
            fit["balance"],
        )
        * block
    )
    start = waves * fit["tile_cycles"] * cycle
    rate = device.memory_bandwidth * fit["memory_share"]
    moved = item * b * d * (2 * h * q + 2 * kv * k) * (2 if backward else 1)
    memory = moved / rate
    paging = _paging(device, b * k, kv * d, 4 * item * b * d * kv * k / rate, fit) if paged else 0.0
    launch = np.broadcast_to(device.launch_seconds * fit["launch"], memory.shape)
    seconds = launch + blend(walked + start, memory, fit["sharpness"]) + paging
    return Estimate(seconds, walked, memory + paging, start, launch)


def _paging(device: Device, tokens: Array, row: Array, memory: Array, fit: Constants) -> Array:
    """Seconds to write the keys and values of tokens, `row` elements each, to pages of a cache.

    A block of threads writes one token, by an address that it reads first: many threads per block
    leave few blocks in flight. `memory` are the seconds of the bytes alone.
    """
    warps = np.clip(np.ceil(row / 32), 1, _PAGE_WARPS)
    flying = device.cores * np.floor((device.warps or 48) / warps)
    waiting = tokens / flying * fit["page_cycles"] / clock(device)
    return blend(waiting, memory, fit["sharpness"])


def _blocks(q: Array, k: Array, window: Array, size: float, causal: bool) -> tuple[Array, Array]:
    """Blocks of `size` keys that the longest tile of one head walks over, and all its tiles."""
    tiles, across = np.ceil(q / _TILE), np.ceil(k / size)
    ratio = _TILE / size
    seen = np.ceil(window / size) + ratio
    limit = np.where(window > 0, np.minimum(seen, across), across)
    if not causal:
        return limit, tiles * limit
    # The last tile sees all keys, each one before it a tile less, down to one block.
    whole = np.clip(np.floor((across - limit) / ratio) + 1, 0, tiles)
    falling = np.clip(np.ceil((across - 1) / ratio), whole, tiles) - whole
    first = across - ratio * whole
    total = whole * limit + falling * first - ratio * falling * (falling - 1) / 2
    return limit, total + (tiles - whole - falling)
