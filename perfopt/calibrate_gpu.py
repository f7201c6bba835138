"""What the GPU that torch sees does in a second: copies, products, and how long a start takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from perfopt.calibrate_cpu import Progress
from perfopt.cost_model.calibration import Rates

MIB = 1 << 20
_SETS = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
_DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64")
_CALLS = 200  # small kernels in a row
_PRODUCT = 0.01  # seconds that one product takes, about


def measure_gpu(seconds: float, progress: Progress) -> Rates:
    """The rates of the present GPU, in about so many seconds."""
    steps = [f"copying {size // MIB} MiB" for size in _SETS]
    steps += [f"products in {dtype}" for dtype in _DTYPES] + ["launches"]
    budget = seconds / len(steps)
    copies, matrix = [], {}
    for k, size in enumerate(_SETS):
        progress(f"GPU: {steps[k]}", k / len(steps))
        source = torch.ones(size // 8, device="cuda")
        target = torch.empty_like(source)
        taken = _typical(partial(torch.mul, source, 2.0, out=target), budget)
        copies.append((float(size), size / taken))
    for k, dtype in enumerate(_DTYPES, len(_SETS)):
        progress(f"GPU: {steps[k]}", k / len(steps))
        matrix[dtype] = _product(dtype, budget)
    progress("GPU: launches", 1 - 1 / len(steps))
    launch, dispatch = _launches(budget)
    return Rates(0, MappingProxyType(matrix), MappingProxyType({}), tuple(copies), launch, dispatch)


def _typical(call: Callable[[], Any], budget: float) -> float:
    """Seconds of one call on the device, by events: the lower quartile."""
    call()
    torch.cuda.synchronize()
    samples: list[float] = []
    ends = time.perf_counter() + budget
    while len(samples) < 5 or time.perf_counter() < ends:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            call()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e-3 / 4)
    return sorted(samples)[len(samples) // 4]


def _product(name: str, budget: float) -> float:
    """FLOP/s of a product that takes about `_PRODUCT` seconds; tf32 is float32 so rounded."""
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        size, rate = 1024, 0.0
        for part in (0.25, 0.75):
            left, right = (torch.ones(size, size, dtype=dtype, device="cuda") for _ in range(2))
            rate = 2.0 * size**3 / _typical(partial(torch.mm, left, right), budget * part)
            size = min(max(round((rate * _PRODUCT / 2) ** (1 / 3) / 256) * 256, 1024), 16384)
        return rate
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _launches(budget: float) -> tuple[float, float]:
    """Seconds of a small kernel, one after the other in a graph; and of the host to start one."""
    tiny = torch.ones(8, device="cuda")
    for _ in range(_CALLS):
        tiny.add_(1.0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        tiny.add_(1.0)
    dispatch = (time.perf_counter() - start) / _CALLS
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            tiny.add_(1.0)
    return _typical(graph.replay, budget) / _CALLS, dispatch
