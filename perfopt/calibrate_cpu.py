"""What this machine's CPU does in a second: copies, products, vector code, calls, threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MappingProxyType
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
_FRESH = 64 * MIB  # more than the C library keeps for itself when it is freed
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_GRAIN = 32768  # elements that ATen gives one thread at least
_SAMPLE = 2e-4  # seconds that one sample takes at least
_PRODUCT = 0.01  # seconds that one product takes, about
# Chains in the kernels that are timed: how many rounds, and the simple instructions of one, as the
# prices count them. In float64 exponentials are calls of the C library, which say little of lanes.
_EXPONENTIALS, _SQUARES = (2, 11), (8, 3)
_SIMPLE = 2  # a peak counts a multiply-add as two, a simple instruction is half of one
_STEADY = 0.7  # of what fewer threads reach: below it something else ran on the cores
_TRIES = 4
aten = torch.ops.aten


class BusyError(RuntimeError):
    """Measurements that contradict each other, since other processes held the cores."""


def measure_cpu(seconds: float, progress: Progress) -> Iterator[Rates]:
    """Rates with one thread, with two, four and so on, and with all cores.

    torch's own number of threads is back afterwards. Raises `BusyError` where more threads are
    slower than fewer, again and again.
    """
    counts = thread_counts(cores())
    steps = len(_SETS) + len(_DTYPES) + 1 + 2 + 3
    budget = seconds / (steps * len(counts))
    before, done = torch.get_num_threads(), 0

    def tell(what: str) -> None:
        nonlocal done
        progress(what, done / (steps * len(counts)))
        done += 1

    try:
        fewer: Rates | None = None
        for threads in counts:
            torch.set_num_threads(threads)
            fewer = _measure(threads, budget, tell, fewer)
            yield fewer
    finally:
        torch.set_num_threads(before)


def thread_counts(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]


def _measure(
    threads: int, budget: float, tell: Callable[[str], None], fewer: Rates | None
) -> Rates:
    label = f"{threads} thread{'s' if threads > 1 else ''}"

    def measured(what: str, least: float, measure: Callable[[], float]) -> float:
        tell(f"{label}: {what}")
        return _steady(f"{label}: {what}", least, measure)

    tell(f"{label}: calls")
    tiny = torch.ones(8)
    launch = typical(lambda: aten.add.Tensor(tiny, tiny), budget)
    before = dict(fewer.copies) if fewer else {}
    copies = tuple(
        (float(size), measured(f"copies of {size // KIB} KiB", before.get(float(size), 0.0),
                               partial(_copied, size, launch, budget)))
        for size in _SETS
    )  # fmt: skip
    table = fewer.matrix if fewer else {}
    matrix = {
        # Where float16 has no units of its own, its rate says nothing of the cores.
        name: measured(f"products in {name}", 0.0 if name == "float16" else table.get(name, 0.0),
                       partial(_product, dtype, multiply, budget))
        for name, (dtype, multiply) in _products().items()
    }  # fmt: skip
    table = fewer.vector if fewer else {}
    vector = {
        name: measured(f"vector code in {name}", table.get(name, 0.0),
                       partial(_generated, threads, getattr(torch, name), budget))
        for name in ("float32", "float64")
    }  # fmt: skip
    tell(f"{label}: starting threads")
    start = min((_start(threads, budget / 2) for _ in range(2)), default=0.0)
    tell(f"{label}: new memory")
    return Rates(
        threads, MappingProxyType(matrix), MappingProxyType(vector), copies, launch,
        thread_seconds=start if threads > 1 else 0.0, page_seconds=_paged(budget),
    )  # fmt: skip


def _products() -> dict[str, tuple[torch.dtype, Callable[..., Any]]]:
    """The products to time, by the name that their rate is kept under."""
    found: dict[str, tuple[torch.dtype, Callable[..., Any]]] = {
        name: (getattr(torch, name), torch.mm) for name in _DTYPES
    }
    linear = onednn_linear()
    if linear is not None:
        found[ONEDNN] = (torch.float32, lambda a, b: linear(a, b, None, "none", [], ""))
    return found


def _steady(what: str, least: float, measure: Callable[[], float]) -> float:
    """A rate that is not far below `least`, the one with fewer threads; raises `BusyError`."""
    best = 0.0
    for _ in range(_TRIES):
        best = max(best, measure())
        if best >= _STEADY * least:
            return best
    raise BusyError(
        f"{what}: {best / 1e9:.1f} G/s, with fewer threads {least / 1e9:.1f}. Other processes hold "
        f"the cores: measure again when the machine is idle"
    )


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


def _twin(function: Any, threads: int) -> Any:
    """The same function as another one to Dynamo, which compiles one only so many times."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{threads}")
    return FunctionType(code, function.__globals__)


def _generated(threads: int, dtype: torch.dtype, budget: float) -> float:
    """FLOP/s of vector code in a generated kernel whose operands stay in the cache."""
    wide = dtype is torch.float64
    rounds, each = _SQUARES if wide else _EXPONENTIALS
    source = torch.ones(16 * _GRAIN * threads, dtype=dtype)
    kernel = api.compile(_twin(_squares if wide else _exponentials, threads), dynamic=False)
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


def _paged(budget: float) -> float:
    """Seconds per byte by which a result in new memory is later than one in old memory."""
    source = torch.ones(_FRESH // 4)
    target = torch.empty_like(source)
    old = typical(lambda: torch.mul(source, 2.0, out=target), budget / 2)
    new = typical(lambda: torch.mul(source, 2.0), budget / 2)
    return max(new - old, 0.0) / _FRESH
