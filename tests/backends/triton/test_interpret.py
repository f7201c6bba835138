"""Generated Triton kernels in the interpreter: what eager gives, and no memory touched amiss.

Every access outside of a tensor, every write to an operand and every two programs that touch one
element in an order that is not defined are errors; see `interpreter`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from perfopt.backends.lower import lower_region
from perfopt.backends.triton.printer import print_kernel
from tests.backends.kernels import Function, traced
from tests.backends.test_lower import CASES
from tests.backends.triton.interpreted import function_of, interpreted
from tests.backends.triton.interpreter import MemoryFault, interpret

FIXED = ("reshaped", "group norm", "rotated halves", "joined heads")


def compare(
    function: Function, args: tuple[torch.Tensor, ...], found: tuple[Any, ...], loose: float = 1e-5
) -> None:
    expected = function(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert ours.stride() == theirs.stride() or theirs.numel() < 2
        torch.testing.assert_close(ours, theirs, rtol=loose, atol=loose, equal_nan=True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_kernel_gives_what_eager_gives(name: str, dynamic: bool) -> None:
    function, inputs = CASES[name]
    args = inputs()
    if dynamic and name in FIXED:
        pytest.skip("fixed sizes are written into the function")
    compare(function, args, interpreted(function, *args, dynamic=dynamic))


NARROW: dict[str, Function] = {
    "gelu": lambda x: F.gelu(x + 1) * x,
    "softmax": lambda x: torch.softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "column sum": lambda x: (x * x).sum(0),
    "chain": lambda x: ((x * 1.7 + 0.3).relu() - 0.1).tanh(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_floats_are_no_further_from_float64_than_eager(
    name: str, dtype: torch.dtype
) -> None:
    function, x = NARROW[name], torch.randn(37, 90).to(dtype)
    (ours,) = interpreted(function, x)
    exact, eager = function(x.double()), function(x)
    assert ours.dtype == dtype
    off, usual = ((v.double() - exact).abs().max() for v in (ours, eager))
    assert off <= usual + torch.finfo(dtype).eps * exact.abs().max()


def test_exact_rounding_rounds_where_eager_does() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return ((x * 1.7 + 0.3) * x - 0.1) * 3

    x = torch.randn(37, 90).bfloat16()
    (ours,) = interpreted(function, x, exact=True)
    assert torch.equal(ours, function(x))


def test_special_values() -> None:
    x = torch.randn(9, 40)
    x[0, 3], x[1, 4], x[2, 5], x[3] = float("nan"), float("inf"), -float("inf"), 0.0
    x[4, :3] = torch.tensor([-0.0, 0.0, 1e-40])

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.softmax(x, -1), x.amax(-1), x.relu(), x.clamp(-1, 1), x > 0, x.sign(), x.sqrt(),
            x.argmax(-1), x.abs().log(), torch.maximum(x, -x), x.isnan(), x.trunc(), x / x,
        )  # fmt: skip

    compare(function, (x,), interpreted(function, x))
    for ours, theirs in zip(interpreted(function, x), function(x), strict=True):
        if theirs.is_floating_point():
            known = ~theirs.isnan()
            assert torch.equal(ours.signbit()[known], theirs.signbit()[known])


@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (5, 1), (1, 129), (3, 0)])
def test_sizes_of_nothing_and_one(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    for function in (lambda x: x * 2 + 1, lambda x: x.sum(-1), lambda x: x.sum(0)):
        compare(function, (x,), interpreted(function, x))


@pytest.mark.parametrize("bad", [30, -1])
def test_an_index_out_of_range_is_an_error(bad: int) -> None:
    x, index = torch.randn(20, 30), torch.zeros(20, 1, dtype=torch.int64)
    index[7] = bad
    with pytest.raises(IndexError):
        interpreted(lambda a, i: torch.gather(a, 1, i), x, index)


def _launched(given: list[torch.Tensor], writes: bool = True) -> None:
    """`x * 2` of 5000 elements on tensors that need not be as long."""
    (kernel,) = lower_region("region", traced(lambda x: x * 2, torch.randn(5000))).kernels
    printed = print_kernel(kernel)
    grid = int(eval(printed.grid, {"min": min, "max": max}))
    written = [buffer.written and writes for buffer in kernel.buffers]
    interpret(function_of(printed), grid, given, written, [], printed.constants)


def test_planted_faults_are_found() -> None:
    """The checks themselves: tensors that are too short, a write where none is allowed."""
    long = torch.randn(100_000)
    _launched([torch.randn(5000), torch.empty(5000)])
    with pytest.raises(MemoryFault, match="out of bounds"):
        _launched([long[:4000], torch.empty(5000)])
    with pytest.raises(MemoryFault, match="out of bounds"):
        _launched([torch.randn(5000), long[:4999]])
    with pytest.raises(MemoryFault, match="only read was written"):
        _launched([torch.randn(5000), torch.empty(5000)], writes=False)


def test_two_programs_that_write_one_element_are_found() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def same(x, out, XBLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        here = tl.arange(0, XBLOCK)
        tl.store(out + here, tl.load(x + here))

    with pytest.raises(MemoryFault, match="write the same element"):
        interpret(same, 2, [torch.randn(64), torch.empty(64)], [False, True], [], {"XBLOCK": 64})
