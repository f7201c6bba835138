"""What a step works through, by its inputs."""

from __future__ import annotations

import pytest
import torch

from perfopt.workload import Workload, given, workload_of


@pytest.mark.parametrize(
    ("inputs", "count", "unit"),
    [
        ([torch.zeros(3, 5, dtype=torch.int64)], 15, "tokens"),
        ([torch.zeros(7, dtype=torch.int32)], 7, "tokens"),
        ([torch.zeros(3, 5)], 3, "samples"),
        ([None, 2, torch.zeros(()), torch.zeros(4, 3, 8, 8, dtype=torch.uint8)], 4, "samples"),
        ([torch.zeros(0, 5)], 0, "samples"),
        ([torch.zeros(3, 5, dtype=torch.bool)], 3, "samples"),
        ([torch.zeros(2, 2, dtype=torch.complex64)], 2, "samples"),
    ],
)
def test_the_first_tensor_says_it(inputs: list[object], count: int, unit: str) -> None:
    found = workload_of(inputs)
    assert found is not None and (found.count, found.unit) == (count, unit)


def test_without_a_tensor_nobody_knows() -> None:
    assert workload_of([3, "text"]) is None and workload_of([]) is None
    assert given() is None and given(samples=3) == Workload(3, "samples", "as given")
