"""Fair timing: one process, random order, paired ratios with bootstrap intervals.

Seconds are medians, a ratio is the median of the ratios of samples taken in the same round, and
its interval is a 95% bootstrap interval of that median.
"""

from __future__ import annotations

import gc
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from perfopt.calibrations import cpu_model

RESAMPLES = 2000
_LEVEL = (0.025, 0.975)


def machine() -> dict[str, Any]:
    """What timings on this machine's CPU depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": cpu_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


@dataclass(frozen=True)
class Ratio:
    """One contender's time over another's: the median of paired ratios and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Ratio:
    """Seconds `above` over seconds `below`, both in the order of the rounds that they come from."""
    pairs = np.asarray(above) / np.asarray(below)
    picks = np.random.default_rng(seed).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    low, high = np.quantile(np.median(pairs[picks], axis=1), _LEVEL)
    return Ratio(float(np.median(pairs)), float(low), float(high))


def change(
    old: Sequence[float],
    new: Sequence[float],
    old_base: Sequence[float] = (),
    new_base: Sequence[float] = (),
) -> Ratio:
    """How many times as fast `new` is as `old`: samples of two runs, which are drawn apart.

    With bases, each is taken over a contender of its own run, by rounds: what became faster or
    slower about the machine, between the two runs, cancels.
    """
    draw = np.random.default_rng(0)

    def medians(own: Sequence[float], base: Sequence[float]) -> np.ndarray:
        pairs = np.asarray(own) / np.asarray(base if len(base) else 1.0)
        picks = draw.integers(len(pairs), size=(RESAMPLES, len(pairs)))
        return np.asarray(np.median(pairs[picks], axis=1))

    factors = medians(old, old_base) / medians(new, new_base)
    low, high = np.quantile(factors, _LEVEL)
    return Ratio(float(np.median(factors)), float(low), float(high))


def measure(
    contenders: Mapping[str, Callable[[], object]],
    samples: int,
    *,
    calls: int = 1,
    warmup: int = 5,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Seconds per call of each contender, one sample of each in every round, in random order.

    A sample is the mean of `calls` calls in a row: above 1 only where one call is too short for
    the clock. The garbage collector rests meanwhile.
    """
    order = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for _ in range(warmup):
        for name in names:
            contenders[name]()
    gc.collect()
    gc.disable()
    try:
        for _ in range(samples):
            for name in order.sample(names, len(names)):
                seconds[name].append(_sample(contenders[name], calls))
    finally:
        gc.enable()
    return seconds


def _sample(call: Callable[[], object], calls: int) -> float:
    repeats = range(calls)
    start = time.perf_counter()
    for _ in repeats:
        call()
    return (time.perf_counter() - start) / calls
