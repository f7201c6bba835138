"""Every pointwise operation of the vocabulary as generated code beside its eager reference."""

from __future__ import annotations

import pytest
import torch

from perfopt.backends.domain import make_kernel
from perfopt.backends.index import Index
from perfopt.backends.ir import TYPES, Buffer, Builder, Op
from perfopt.backends.mlir.compile import compile_kernels
from perfopt.backends.vocabulary import FUNCTIONS, POINTWISE

COUNT = 37  # two vectors and a tail
_NOT_FLOAT = {"idiv", "irem", "and", "or", "xor", "not", "shl", "shr", "cast", "round", "select"}
_INTEGER = ["add", "sub", "mul", "neg", "abs", "min", "max", "idiv", "irem", "and", "or", "xor"]
_INTEGER += ["not", "eq", "ne", "lt", "le", "gt", "ge", "shl", "shr"]
_DTYPE = {name: dtype for dtype, name in TYPES.items()}


def _run(name: str, type: str, operands: list[torch.Tensor]) -> torch.Tensor:
    entry = POINTWISE[name]
    b, at = Builder(), Index.term("a0")
    loads = tuple(b.load(f"in{k}", at, type) for k in range(len(operands)))
    result = "i1" if entry.truth else type
    value = b.op(name, loads, result)
    store = b.op("store", (value,), result, at, "out0")
    buffers = [Buffer(f"in{k}", type, False) for k in range(len(operands))]
    buffers.append(Buffer("out0", result, True))
    kernel = make_kernel("op", buffers, [store], {"a0": COUNT}, frozenset())
    out = torch.empty(COUNT, dtype=_DTYPE[result])
    compile_kernels([kernel])["op"](*(t.data_ptr() for t in operands), out.data_ptr(), 1)
    return out


def _special(dtype: torch.dtype) -> torch.Tensor:
    tiny = torch.finfo(dtype).tiny
    values = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, 2.5, float("inf"), -float("inf"), float("nan")]
    values += [tiny / 4, -tiny / 4, 1e30, -1e30, 3.0, 7.25, -7.75]
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("type", ["f32", "f64"])
@pytest.mark.parametrize("name", sorted(set(POINTWISE) - _NOT_FLOAT - set(FUNCTIONS)))
def test_float_operations_are_exact(name: str, type: str) -> None:
    special = _special(_DTYPE[type])
    operands = [
        torch.cat([special.roll(5 * k), torch.randn(COUNT - len(special), dtype=_DTYPE[type])])
        for k in range(POINTWISE[name].operands)
    ]
    got, want = _run(name, type, operands), POINTWISE[name].reference(*operands)
    if name == "sqrt":  # eager's own is an ulp off in f32
        want = torch.sqrt(operands[0].double()).to(_DTYPE[type])
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if got.is_floating_point():
        held = ~want.isnan()
        assert torch.equal(got[held].signbit(), want[held].signbit())


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_are_close_where_they_are_finite(name: str) -> None:
    operands = [torch.rand(COUNT) * 0.9 + 0.05 for _ in range(POINTWISE[name].operands)]
    if name == "acosh":
        operands = [x + 1 for x in operands]
    want = POINTWISE[name].reference(*(x.double() for x in operands))
    torch.testing.assert_close(_run(name, "f32", operands).double(), want, rtol=3e-7, atol=0)


@pytest.mark.parametrize("type", ["i64", "i32", "i16", "i8", "u8"])
@pytest.mark.parametrize("name", _INTEGER)
def test_integer_operations_wrap_as_eager_does(name: str, type: str) -> None:
    dtype = _DTYPE[type]
    info = torch.iinfo(dtype)
    edges = torch.tensor([info.min, info.max, 0, 1, info.max - 1], dtype=dtype)
    rest = torch.randint(-9 if info.min else 0, 90, (COUNT - 5,)).to(dtype)
    operands = [torch.cat([edges, rest]), torch.cat([rest, edges])]
    if name in ("idiv", "irem"):
        operands[1] = torch.where(operands[1] == 0, 3, operands[1]).where(operands[1] != -1, 7)
        operands[1] = operands[1].clamp_min(1)
    if name in ("shl", "shr"):
        operands[1] = (operands[1] % 7).abs()
    operands = operands[: POINTWISE[name].operands]
    assert torch.equal(_run(name, type, operands), POINTWISE[name].reference(*operands))


@pytest.mark.parametrize("source", ["f64", "f32", "i64", "i32", "i16", "i8", "u8", "i1"])
@pytest.mark.parametrize("target", ["f64", "f32", "i64", "i32", "i16", "i8", "u8"])
def test_casts_follow_eager(source: str, target: str) -> None:
    values = torch.tensor([0.0, 1.0, -1.0, 2.5, -2.5, 100.7, 126.0, -127.0, 3.99] * 5)[:COUNT]
    if target == "u8" and source in ("f32", "f64"):
        values = values.abs()  # a negative float as an unsigned integer is undefined
    x = values.to(_DTYPE[source])
    b, at = Builder(), Index.term("a0")
    value: Op = b.cast(b.load("in0", at, source), target)
    store = b.op("store", (value,), target, at, "out0")
    buffers = [Buffer("in0", source, False), Buffer("out0", target, True)]
    kernel = make_kernel("op", buffers, [store], {"a0": COUNT}, frozenset())
    out = torch.empty(COUNT, dtype=_DTYPE[target])
    compile_kernels([kernel])["op"](x.data_ptr(), out.data_ptr(), 1)
    assert torch.equal(out, x.to(_DTYPE[target]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_floats_round_to_nearest_even(dtype: torch.dtype) -> None:
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (4096,)).to(torch.int32)
    x = torch.cat([bits.view(torch.float32), _special(torch.float32), torch.tensor([65519.99])])
    b, at = Builder(), Index.term("a0")
    store = b.op("store", (b.load("in0", at, "f32"),), "f32", at, "out0")
    buffers = [Buffer("in0", "f32", False), Buffer("out0", TYPES[dtype], True)]
    kernel = make_kernel("op", buffers, [store], {"a0": len(x)}, frozenset())
    out = torch.empty(len(x), dtype=dtype)
    compile_kernels([kernel])["op"](x.data_ptr(), out.data_ptr(), 1)
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)
