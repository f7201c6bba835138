"""Generated kernels beside eager: every kind of loop, dtype, tail and view."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from perfopt.backends.index import Unsupported
from perfopt.backends.lower import lower_region
from tests.backends.kernels import Function, generated, traced

r = torch.randn


def _ints(*shape: int) -> torch.Tensor:
    return torch.randint(-50, 50, shape)


def _rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def _rotary(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x * c + x.flip(-1) * s


CASES: dict[str, tuple[Function, Any]] = {
    "add": (lambda x, y: x + y * 2, lambda: (r(37, 53), r(37, 53))),
    "broadcast row": (lambda x, y: (x + y).abs(), lambda: (r(37, 53), r(53))),
    "broadcast middle": (lambda x, y: (x * y).neg(), lambda: (r(5, 37, 53), r(5, 1, 53))),
    "broadcast column": (lambda x, y: x - y, lambda: (r(37, 53), r(37, 1))),
    "zero-dim operand": (lambda x, y: x - y, lambda: (r(37, 53), r(()))),
    "zero-dim result": (lambda x, y: x * y, lambda: (r(()), r(()))),
    "long rows": (lambda x, y: x + y, lambda: (r(3, 20053), r(20053))),
    "heads": (lambda x: x.permute(0, 2, 1, 3).contiguous().relu(), lambda: (r(5, 37, 4, 32),)),
    "transposed heads": (lambda x, y: x.permute(0, 2, 1) * y, lambda: (r(3, 70, 33), r(3, 33, 70))),
    "transposed large": (lambda x, y: x.t().relu() + y, lambda: (r(131, 150), r(150, 131))),
    "transposed": (lambda x, y: x.t() + y, lambda: (r(37, 53), r(53, 37))),
    "transposed operand": (lambda x: x * 2, lambda: (r(37, 53).t(),)),
    "strided operand": (lambda x: x * 2, lambda: (r(37, 106)[:, ::2],)),
    "sliced": (lambda x: x[1:5, ::2] * 2, lambda: (r(40, 77),)),
    "expanded": (lambda x: x[:, None].expand(9, 7, 5) + 1, lambda: (r(9, 5),)),
    "reshaped": (lambda x: (x.reshape(6, 4, 35) * 2).reshape(24, 5, 7) + 1, lambda: (r(24, 35),)),
    "row sum": (lambda x: x.sum(-1), lambda: (r(37, 53),)),
    "row sum of short rows": (lambda x: x.sum(-1), lambda: (r(1001, 3),)),
    "column sum": (lambda x: x.sum(0), lambda: (r(37, 53),)),
    "column sum of many": (lambda x: x.sum(0), lambda: (r(3000, 20),)),
    "whole sum": (lambda x: x.sum(), lambda: (r(37, 53),)),
    "middle sum": (lambda x: x.sum(1), lambda: (r(7, 37, 53),)),
    "outer and inner sum": (lambda x: x.sum((0, 2)), lambda: (r(7, 37, 53),)),
    "keepdim": (lambda x: x - x.amax(-1, keepdim=True), lambda: (r(40, 77),)),
    "keepdim of columns": (lambda x: x - x.amax(0, keepdim=True), lambda: (r(40, 77),)),
    "extremes": (lambda x: (x.amax(-1), x.amin(-1)), lambda: (r(37, 530),)),
    "integer extremes": (lambda x: (x.amax(-1), x.amin(-1)), lambda: (_ints(37, 53),)),
    "mean and variance": (lambda x: torch.var_mean(x, -1), lambda: (r(37, 53),)),
    "product": (lambda x: x.prod(-1), lambda: (r(37, 5),)),
    "any and all": (lambda x: ((x > 2).any(-1), (x > -2).all(-1)), lambda: (r(37, 53),)),
    "softmax": (lambda x: torch.softmax(x, -1), lambda: (r(40, 77),)),
    "softmax of columns": (lambda x: torch.softmax(x, 0), lambda: (r(40, 77),)),
    "softmax of short rows": (lambda x: torch.softmax(x, -1), lambda: (r(999, 7),)),
    "log softmax": (lambda x: torch.log_softmax(x, -1), lambda: (r(40, 770),)),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (131,), w, b), lambda: (r(45, 131), r(131), r(131)),
    ),
    "layer norm of 3d": (
        lambda x, w, b: F.layer_norm(x, (131,), w, b), lambda: (r(3, 15, 131), r(131), r(131)),
    ),
    "group norm": (lambda x: F.group_norm(x, 4), lambda: (r(3, 8, 5, 5),)),
    "RMS norm": (_rms, lambda: (r(45, 131), r(131))),
    "gelu": (lambda x, b, y: F.gelu(x + b) * y, lambda: (r(40, 77), r(77), r(40, 77))),
    "tanh gelu": (lambda x: F.gelu(x, approximate="tanh"), lambda: (r(40, 77),)),
    "silu": (lambda x, y: F.silu(x) * y, lambda: (r(40, 77), r(40, 77))),
    "gather": (
        lambda x, i: torch.gather(x, 1, i) * 2, lambda: (r(20, 30), torch.randint(30, (20, 1))),
    ),
    "gather of rows": (
        lambda x, i: torch.gather(x, 1, i) + 1, lambda: (r(20, 30), torch.randint(30, (20, 30))),
    ),
    "joined": (lambda x, y: torch.cat([x, y * 2, x], 1) + 1, lambda: (r(9, 20), r(9, 7))),
    "joined rows": (lambda x, y: torch.cat([x, y], 0), lambda: (r(9, 20), r(4, 20))),
    "rotated halves": (
        lambda x, c: x * c + torch.cat([-x[..., 16:], x[..., :16]], -1) * c,
        lambda: (r(3, 5, 32), r(5, 32)),
    ),
    "joined heads": (
        lambda q, k: torch.cat(
            [v.transpose(1, 2).reshape(3, 7, 32) for v in (q * 2, k, q)], -1
        ) + 1,
        lambda: (r(3, 4, 7, 8), r(3, 4, 7, 8)),
    ),
    "joined and cut": (
        lambda x, y: torch.cat([x, y], 1)[:, 3:17] + 1, lambda: (r(9, 10), r(9, 10)),
    ),
    "stacked": (lambda x, y: torch.stack([x, y], 1), lambda: (r(9, 20), r(9, 20))),
    "padded": (lambda x: F.pad(x, (1, 2, 3, 0), value=7.0) * 2, lambda: (r(9, 20),)),
    "cropped": (lambda x: F.pad(x, (-1, 2)) * 2, lambda: (r(9, 20),)),
    "flipped": (lambda x: x.flip(-1) + x.flip(0), lambda: (r(9, 20),)),
    "slice replaced": (
        lambda x, y: torch.slice_scatter(x, y, 1, 3, 8) * 2, lambda: (r(9, 20), r(9, 5)),
    ),
    "row replaced": (
        lambda x, y: torch.select_scatter(x, y, 0, 4) * 2, lambda: (r(9, 20), r(20)),
    ),
    "embedding": (
        lambda w, i, p: F.embedding(i, w) + p,
        lambda: (r(50, 36), torch.randint(50, (4, 7)), r(7, 36)),
    ),
    "index_select": (
        lambda x, i: x.index_select(1, i) * 2, lambda: (r(9, 20), torch.randint(20, (31,))),
    ),
    "index": (lambda x, i: x[i] * 2, lambda: (r(9, 20), torch.randint(-9, 9, (31,)))),
    "index of two": (
        lambda x, i, j: x[:, i, j] * 2,
        lambda: (r(5, 9, 20), torch.randint(9, (31, 1)), torch.randint(20, (6,))),
    ),
    "index apart": (
        lambda x, i, j: x[i, :, j] * 2,
        lambda: (r(5, 9, 20), torch.randint(5, (31,)), torch.randint(20, (31,))),
    ),
    "argmax": (lambda x: (x.argmax(-1), x.argmin(-1)), lambda: (_ints(37, 53).float(),)),
    "argmax of columns": (lambda x: x.argmax(0, keepdim=True), lambda: (_ints(37, 53).float(),)),
    "argmax of all": (lambda x: x.argmax(), lambda: (_ints(37, 53).float(),)),
    "largest with its place": (lambda x: torch.max(x, 1), lambda: (r(37, 53),)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), lambda: (r(37, 53),)),
    "vector norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), lambda: (r(37, 53),)),
    "where": (lambda x: torch.where(x > 0, x, -x * 3), lambda: (r(201),)),
    "truth values": (lambda x: (x > 0) & ~(x < 1), lambda: (r(20, 30),)),
    "masked": (lambda x, m: x.masked_fill(m, -1e9), lambda: (r(20, 30), r(20, 30) > 0)),
    "integers": (lambda x: (x * 3) // 2 + x % 5, lambda: (_ints(100),)),
    "integer mean": (lambda x: x.float().mean(-1), lambda: (_ints(10, 33),)),
    "iota": (lambda x: x + torch.arange(30), lambda: (r(20, 30),)),
    "f64": (lambda x: x.double().mean(-1), lambda: (r(40, 77),)),
    "layer norm backward": (
        lambda dy, x, m, s, w: (
            (dy * w - (dy * w).mean(-1, keepdim=True)
             - (x - m) * s * (dy * w * (x - m) * s).mean(-1, keepdim=True)) * s,
            (dy * (x - m) * s).sum(0), dy.sum(0),
        ),
        lambda: (r(301, 77), r(301, 77), r(301, 1), r(301, 1), r(77)),
    ),
    "column sum behind a row sum": (
        lambda x, y: (x * x.mean(-1, keepdim=True) * y).sum((0, 1)), lambda: (r(7, 30, 40), r(40)),
    ),
    "row and column sums": (lambda x: (x.sum(-1), x.sum(0) * 2), lambda: (r(150, 40),)),
    "column extremes behind a softmax": (
        lambda x: (torch.softmax(x, -1), torch.softmax(x, -1).amax(0)), lambda: (r(150, 40),),
    ),
    "sums of which one has no columns": (
        lambda x, y: (x * y[:, None]).sum(0) * y.sum(), lambda: (r(50, 40), r(50)),
    ),
    "bias gradient": (
        lambda d, x: ((d * x).relu(), (d * x).sum(0)), lambda: (r(99, 40), r(99, 40)),
    ),
    "two results": (lambda x, y: (x + y, (x + y).relu()), lambda: (r(40, 77), r(40, 77))),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_kernel_gives_what_eager_gives(name: str, dynamic: bool) -> None:
    function, inputs = CASES[name]
    args = inputs()
    if dynamic and name in ("reshaped", "group norm", "rotated halves", "joined heads"):
        pytest.skip("fixed sizes are written into the function")
    _compare(function, args, generated(function, *args, dynamic=dynamic))


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("name", ["add", "row sum", "column sum", "softmax", "integers"])
def test_narrow_vectors_give_the_same(name: str, lanes: int) -> None:
    function, inputs = CASES[name]
    args = inputs()
    _compare(function, args, generated(function, *args, lanes=lanes))


def _compare(
    function: Function, args: tuple[torch.Tensor, ...], got: tuple[torch.Tensor, ...]
) -> None:
    want = function(*args)
    want = want if isinstance(want, tuple) else (want,)
    exact = function(*(a.double() if a.is_floating_point() else a for a in args))
    exact = exact if isinstance(exact, tuple) else (exact,)
    for ours, eager, true in zip(got, want, exact, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (eager.dtype, eager.shape, eager.stride())
        if not eager.is_floating_point():
            assert torch.equal(ours, eager)
            continue
        error, allowed = _error(ours, true), _error(eager, true)
        assert error <= 2 * allowed + 4 * torch.finfo(eager.dtype).eps, (error, allowed)


def _error(value: torch.Tensor, true: torch.Tensor) -> float:
    """The largest difference, relative to the largest magnitude of the true result."""
    value, true = value.double(), true.double()
    scale = true.abs().nan_to_num(0, 0, 0).max().clamp_min(1e-30)
    return float(((value - true).abs() / scale).nan_to_num(0.0).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["add", "softmax", "layer norm", "gelu", "column sum", "where"])
def test_other_floats_are_no_further_from_the_truth(name: str, dtype: torch.dtype) -> None:
    function, inputs = CASES[name]
    args = tuple(a.to(dtype) for a in inputs())
    _compare(function, args, generated(function, *args))


@pytest.mark.parametrize("size", [0, 1, 2, 15, 16, 17, 31, 64, 65, 8193])
def test_every_tail(size: int) -> None:
    x, y = r(3, size), r(3, size)
    got = generated(lambda a, b: (a * b + 1, a - b), x, y)
    torch.testing.assert_close(got, (x * y + 1, x - y), rtol=0, atol=0)
    (total,) = generated(lambda a: a.sum(-1), x)
    torch.testing.assert_close(total, x.sum(-1))
    (columns,) = generated(lambda a: a.sum(0), x)
    torch.testing.assert_close(columns, x.sum(0))


def test_nan_and_infinity_pass_through() -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42, 3e38])
    x = special.repeat(7, 3)
    for function in (
        lambda v: (v.amax(-1), v.amin(-1), v.relu(), v.abs()),
        lambda v: (torch.softmax(v, -1), torch.softmax(v, 0)),
        lambda v: (v.clamp(-1, 1), torch.maximum(v, v.flip(1))),
        lambda v: (v.amax(0), v.amin(0), v > 0, v == v),
        lambda v: (torch.sigmoid(v), torch.tanh(v), torch.exp(v)),
    ):
        try:
            got = generated(function, x)
        except Unsupported:
            continue
        for ours, eager in zip(got, function(x), strict=True):
            torch.testing.assert_close(ours, eager, equal_nan=True)


def test_long_sums_stay_within_the_error_of_pairwise_sums() -> None:
    x = torch.rand(3_000_000)
    (total,) = generated(lambda v: v.sum(), x)
    assert abs(total.double() - x.double().sum()) / x.double().sum() < 2e-6
    (columns,) = generated(lambda v: v.sum(0), x.reshape(-1, 2))
    true = x.double().reshape(-1, 2).sum(0)
    assert float(((columns.double() - true) / true).abs().max()) < 2e-6


@pytest.mark.parametrize("bad", [30, -1])
def test_an_index_out_of_range_is_an_error(bad: int) -> None:
    x, index = r(20, 30), torch.zeros(20, 1, dtype=torch.int64)
    index[7] = bad
    with pytest.raises(IndexError):
        generated(lambda a, i: torch.gather(a, 1, i), x, index)
    with pytest.raises(IndexError):
        generated(lambda a, i: F.embedding(i, a), x, index.view(-1))


def test_the_place_of_nan_is_found_first() -> None:
    x = r(5, 40)
    x[1, 17] = x[1, 30] = float("nan")
    got = generated(lambda a: (a.argmax(-1), a.argmin(-1)), x)
    assert torch.equal(got[0], x.argmax(-1)) and torch.equal(got[1], x.argmin(-1))


def test_column_sums_that_meet_rows_again_are_refused() -> None:
    gm = traced(lambda x: (x.sum(1), x * x.sum(0)), r(9, 5))
    with pytest.raises(Unsupported, match="meets the rows again"):
        lower_region("region", gm)


def test_results_that_share_elements_are_refused() -> None:
    gm = traced(lambda x: (x + 1)[:, None].expand(9, 7, 5), r(9, 5))
    with pytest.raises(Unsupported, match="share memory"):
        lower_region("region", gm)


def test_exact_rounding_rounds_where_eager_does() -> None:
    x, y = r(501).bfloat16(), r(501).bfloat16()

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b + b) * a - b

    gm = traced(function, x, y)
    from perfopt.backends.mlir.compile import compile_kernels
    from tests.backends.kernels import launch

    lowered = lower_region("region", gm, exact_rounding=True)
    (got,) = launch(lowered, compile_kernels(lowered.kernels), (x, y), {})
    assert torch.equal(got, function(x, y))
