"""What this machine's CPU does in a second: copies, products, vector code, calls, threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import torch

from perfopt import api
from perfopt.backends.torch_private import onednn_linear
from perfopt.calibrations import cores
from perfopt.cost_model.calibration import Rates
from perfopt.cost_model.device import ONEDNN

Progress = Callable[[str, float], None]  # what is measured now, and the part that is done
KIB, MIB = 1 << 10, 1 << 20
# Working sets: in the first cache, in the second, in the last, in memory.
_SETS = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_GRAIN = 32768  # elements that ATen gives one thread at least
_SAMPLE = 2e-4  # seconds that one sample takes at least
_PRODUCT = 0.01  # seconds that one product takes, about
# Chains in the kernels that are timed: how many rounds, and the simple instructions of one, as the
# prices count them. In float64 exponentials are calls of the C library, which say little of lanes.
_EXPONENTIALS, _SQUARES = (2, 11), (8, 3)
_SIMPLE = 2  # a peak counts a multiply-add as two, a simple instruction is half of one
aten = torch.ops.aten


def measure_cpu(seconds: float, progress: Progress) -> Iterator[Rates]:
    """Rates with one thread, with two, four and so on, and with all cores; torch's own are back
    afterwards.
    """
    counts = thread_counts(cores())
    steps = len(_SETS) + len(_DTYPES) + 1 + 2 + 2
    budget = seconds / (steps * len(counts))
    before, done = torch.get_num_threads(), 0

    def tell(what: str) -> None:
        nonlocal done
        progress(what, done / (steps * len(counts)))
        done += 1

    try:
        for threads in counts:
            torch.set_num_threads(threads)
            yield _measure(threads, budget, tell)
    finally:
        torch.set_num_threads(before)


def thread_counts(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]


def _measure(threads: int, budget: float, tell: Callable[[str], None]) -> Rates:
    label = f"{threads} thread{'s' if threads > 1 else ''}"
    tell(f"{label}: calls")
    tiny = torch.ones(8)
    launch = typical(lambda: aten.add.Tensor(tiny, tiny), budget)
    copies = []
    for size in _SETS:
        tell(f"{label}: copying {size // KIB} KiB")
        copies.append((float(size), _copied(size, launch, budget)))
    matrix = {}
    for dtype in _DTYPES:
        tell(f"{label}: products in {dtype}")
        matrix[dtype] = _product(getattr(torch, dtype), torch.mm, budget)
    tell(f"{label}: products in float32 by oneDNN")
    linear = onednn_linear()
    if linear is not None:
        matrix[ONEDNN] = _product(
            torch.float32, lambda a, b: linear(a, b, None, "none", [], ""), budget
        )
    vector = {}
    for dtype in ("float32", "float64"):
        tell(f"{label}: vector code in {dtype}")
        vector[dtype] = _generated(threads, getattr(torch, dtype), budget)
    tell(f"{label}: starting threads")
    start = _start(threads, budget) if threads > 1 else 0.0
    return Rates(
        threads, MappingProxyType(matrix), MappingProxyType(vector), tuple(copies), launch,
        thread_seconds=start,
    )  # fmt: skip


def typical(call: Callable[[], Any], budget: float, least: int = 5) -> float:
    """Seconds of one call: the lowest tenth of samples that take `budget` seconds together."""
    call()
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    repeats = max(1, round(_SAMPLE / max(once, 1e-9)))
    samples: list[float] = []
    ends = time.perf_counter() + budget
    while len(samples) < least or time.perf_counter() < ends:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        samples.append((time.perf_counter() - start) / repeats)
    return sorted(samples)[len(samples) // 10]


def _copied(size: int, launch: float, budget: float) -> float:
    """Bytes/s, read and written, of a pointwise operation whose operands take `size` bytes."""
    source = torch.ones(size // 8)
    target = torch.empty_like(source)
    seconds = typical(lambda: torch.mul(source, 2.0, out=target), budget)
    return size / max(seconds - launch, seconds / 4)


def _product(dtype: torch.dtype, multiply: Callable[..., Any], budget: float) -> float:
    """FLOP/s of a product that takes about `_PRODUCT` seconds."""

    def rate(size: int, budget: float, least: int) -> float:
        left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        return 2.0 * size**3 / typical(lambda: multiply(left, right), budget, least)

    first = rate(256, budget / 4, 1)
    size = round((first * _PRODUCT / 2) ** (1 / 3) / 64) * 64
    return rate(min(max(size, 128), 2048), budget * 3 / 4, 3)


def _exponentials(x: torch.Tensor) -> torch.Tensor:
    for _ in range(_EXPONENTIALS[0]):
        x = torch.exp(-x)
    return x


def _squares(x: torch.Tensor) -> torch.Tensor:
    for _ in range(_SQUARES[0]):
        x = x * x * 0.5 + 0.25
    return x


def _generated(threads: int, dtype: torch.dtype, budget: float) -> float:
    """FLOP/s of vector code in a generated kernel whose operands stay in the cache."""
    wide = dtype is torch.float64
    rounds, each = _SQUARES if wide else _EXPONENTIALS
    source = torch.ones(16 * _GRAIN * threads, dtype=dtype)
    kernel = api.compile(_squares if wide else _exponentials)
    with torch.no_grad():
        seconds = typical(lambda: kernel(source), budget)
    return _SIMPLE * each * rounds * source.numel() / seconds


def _start(threads: int, budget: float) -> float:
    """Seconds by which threads are later with their share than one alone would be with it."""
    source = torch.ones(_GRAIN * threads)
    target = torch.empty_like(source)

    def work() -> None:
        torch.mul(source, 2.0, out=target)

    together = typical(work, budget / 2)
    torch.set_num_threads(1)
    alone = typical(work, budget / 2)
    torch.set_num_threads(threads)
    return max(together - alone / threads, 0.0)
