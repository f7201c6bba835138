"""What one step works through: so many tokens or samples, and so many of them per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

UNITS = ("tokens", "samples")


@dataclass(frozen=True)
class Workload:
    """`count` tokens or samples in one step; `source` says where the count comes from."""

    count: int
    unit: str
    source: str


def workload_of(inputs: Sequence[object]) -> Workload | None:
    """What a step works through by the first tensor among a model's inputs; None without one.

    Integers in one or two dimensions are tokens. Of anything else the first dimension counts
    samples, which is wrong where the batch is another dimension: `given` is for that.
    """
    for value in inputs:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            continue
        shape = [int(size) for size in value.shape]
        whole = not (value.dtype.is_floating_point or value.dtype.is_complex)
        if whole and value.dtype is not torch.bool and len(shape) <= 2:
            return Workload(value.numel(), "tokens", f"all of the first input, {shape}")
        return Workload(shape[0], "samples", f"the first dimension of the first input, {shape}")
    return None


def given(tokens: int | None = None, samples: int | None = None) -> Workload | None:
    """What the user says that a step works through; None where nothing is said.

    Raises `ValueError` for both at once, or for a count below 1.
    """
    if tokens is not None and samples is not None:
        raise ValueError("--tokens and --samples both say what a step works through: give one")
    for unit, count in zip(UNITS, (tokens, samples), strict=True):
        if count is not None and count < 1:
            raise ValueError(f"--{unit} is {count}, not a number from 1")
        if count is not None:
            return Workload(count, unit, "as given")
    return None
