"""`verify`: regions beside their eager subgraphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import perfopt
from perfopt import compiler
from perfopt.verify import VerificationError, difference
from tests.perfopt.comparing import compare


def network(x: Tensor) -> Tensor:
    return (F.gelu(x) * 2).softmax(-1) + (x > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_right_kernels_pass(dtype: torch.dtype) -> None:
    compare(
        network, [torch.randn(5, 9).to(dtype).requires_grad_()],
        perfopt.compile(network, verify=True),
    )  # fmt: skip


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., Any] = compiler.compile_regions

    def wrong(*args: Any) -> dict[str, Callable[..., Any]]:
        return {name: lambda *_: None for name in right(*args)}

    monkeypatch.setattr(compiler, "compile_regions", wrong)
    with pytest.raises(VerificationError) as caught:
        perfopt.compile(network, verify=True)(torch.full((5, 9), 2.0))
    text = str(caught.value)
    assert "region_0 of inference 0/0" in text and "test_verify.py:" in text
    assert "off float64" in text or "unlike eager's" in text  # what the memory held before


def tensor(*values: float) -> Tensor:
    return torch.tensor(values)


def test_difference_judges_by_the_distance_to_float64() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    near, far = tensor(1.0, 2.0 + 1e-6), tensor(1.0, 2.1)
    assert difference(near, tensor(1.0, 2.0), exact) == ""
    assert "off float64" in difference(far, tensor(1.0, 2.0), exact)
    assert difference(far, tensor(1.0, 2.1), exact) == ""  # no worse than eager
    assert "NaN" in difference(tensor(1.0, float("nan")), tensor(1.0, 2.0), exact)
    assert "NaN" in difference(tensor(1.0, 2.0), tensor(1.0, float("nan")), exact * float("nan"))
    infinite = tensor(1.0, float("inf"))
    assert difference(infinite, infinite, infinite.double()) == ""
    assert "NaN" in difference(-infinite, infinite, infinite.double())
    assert "strides" in difference(torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 3))
    assert "not torch.float32" in difference(exact, near, exact)
    assert "1 of 2" in difference(torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor([1, 3]))
