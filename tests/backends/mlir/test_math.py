"""The elementary functions of CPU kernels alone: their stated errors and their special values."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
from torch_mlir.execution_engine import ExecutionEngine
from torch_mlir.ir import Context, Module
from torch_mlir.passmanager import PassManager

from perfopt.backends.mlir.compile import host_lanes
from perfopt.backends.mlir.math import BINARY, FUNCTIONS, ULP, definitions, function_name
from perfopt.backends.vocabulary import FUNCTIONS as VOCABULARY
from perfopt.backends.vocabulary import POINTWISE

PASSES = (
    "convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,convert-arith-to-llvm,"
    "convert-cf-to-llvm,convert-func-to-llvm,reconcile-unrealized-casts"
)
F64_ULP = 4.0
VECTORS = sorted({4, 8, host_lanes()})  # the lanes that this machine can run
TYPES = ["f32", *(f"vector<{lanes}xf32>" for lanes in VECTORS), "f64"]
TYPES += [f"vector<{lanes // 2}xf64>" for lanes in VECTORS]
UNIT = 16  # every type's lanes divide it


def _loop(name: str, type: str) -> str:
    """An entry that applies a function to whole buffers."""
    element = "f32" if "f32" in type else "f64"
    lanes = int(type[len("vector<") :].split("x")[0]) if "vector" in type else 1
    size = f"{{alignment = {4 if element == 'f32' else 8} : i64}}"
    names = ["x", "y"][: 2 if name in BINARY else 1]
    lines = []
    for arg in [*names, "out"]:
        lines.append(
            f"%{arg}_at = llvm.getelementptr %{arg}[%i] : (!llvm.ptr, i64) -> !llvm.ptr, {element}"
        )
    for arg in names:
        lines.append(f"%{arg}_v = llvm.load %{arg}_at {size} : !llvm.ptr -> {type}")
    given = ", ".join(f"%{arg}_v" for arg in names)
    types = ", ".join([type] * len(names))
    called = function_name(name, type)
    lines.append(f"%r = func.call @{called}({given}) : ({types}) -> {type}")
    lines.append(f"llvm.store %r, %out_at {size} : {type}, !llvm.ptr")
    body = "\n".join(lines)
    return f"""
    func.func @run_{called}(%x: !llvm.ptr, %y: !llvm.ptr, %out: !llvm.ptr, %count: i64)
        attributes {{llvm.emit_c_interface}} {{
      %zero = arith.constant 0 : i64
      %step = arith.constant {lanes} : i64
      scf.for %i = %zero to %count step %step : i64 {{
        {body}
      }}
      return
    }}"""


@cache
def _engine(type: str) -> Any:
    """The JIT engine that holds every function for one type."""
    wanted = [(name, type) for name in sorted(FUNCTIONS)]
    text = definitions(wanted) + "".join(_loop(name, type) for name in sorted(FUNCTIONS))
    with Context():
        module = Module.parse(text)
        PassManager.parse(f"builtin.module({PASSES})").run(module.operation)
        return ExecutionEngine(module, opt_level=3)


def _run(name: str, type: str, *args: torch.Tensor) -> torch.Tensor:
    count = args[0].numel()
    padded = [torch.cat([arg, arg[:1].expand(-count % UNIT)]) for arg in args]
    out = torch.empty_like(padded[0])
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        _engine(type).raw_lookup(f"run_{function_name(name, type)}")
    )
    values = [ctypes.c_int64(t.data_ptr()) for t in (padded[0], padded[-1], out)]
    values.append(ctypes.c_int64(out.numel()))
    entry(ctypes.cast((ctypes.c_void_p * 4)(*map(ctypes.addressof, values)), ctypes.c_void_p))
    return out[:count]


def _grid(dtype: torch.dtype, each: int, dense: int) -> torch.Tensor:
    """Mantissas of every exponent and sign, and values where functions turn or cancel."""
    generator = torch.Generator().manual_seed(11)
    mantissa, exponents = (23, 256) if dtype is torch.float32 else (52, 2048)
    whole = torch.int32 if dtype is torch.float32 else torch.int64
    low = torch.randint(1 << mantissa, (exponents - 1, each), generator=generator)
    bits = (low + (torch.arange(exponents - 1)[:, None] << mantissa)).flatten()
    every = bits.to(whole).view(dtype)
    unit = torch.rand(dense, generator=generator, dtype=dtype) * 2 - 1
    parts = [every, -every, unit, unit * 12, unit * 120, unit * 1e5]
    for power in (2, 5, 9, 15, 20):  # close to 1, and to multiples of a quarter turn
        parts += [1 + unit * 2.0**-power, -1 + unit * 2.0**-power]
    turns = torch.arange(1, dense // 4, dtype=torch.float64) * (math.pi / 2)
    return torch.cat([*parts, turns.to(dtype), -turns.to(dtype)])


def _pairs(name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if name not in BINARY:
        return (x,)
    generator = torch.Generator().manual_seed(13)
    order = torch.randperm(x.numel(), generator=generator)
    if name != "pow":
        return x, x[order]
    # Exponents that give results over the whole range, denormals among them.
    spread = torch.rand(x.numel(), generator=generator, dtype=x.dtype) * 2 - 1
    reach = 105.0 if x.dtype is torch.float32 else 745.0
    y = spread * reach / x.abs().log().nan_to_num(1.0, 90.0, -90.0)
    whole = torch.rand(x.numel(), generator=generator) < 0.3
    return x, torch.where(whole, y.round(), y)


def _reference(name: str, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The value in f64 of functions of f32."""
    wide = [arg.double() for arg in args]
    if name == "sigmoid":  # eager's own cuts off what f64 could hold
        e = (-wide[0].abs()).exp()
        return torch.where(wide[0] < 0, e, 1.0) / (1 + e)
    if name == "fmod":  # eager's own is NaN for quotients beyond f64
        return torch.tensor(
            [_fmod(x, y) for x, y in zip(*map(torch.Tensor.tolist, wide), strict=True)],
            dtype=torch.float64,
        )
    return POINTWISE[name].reference(*wide)


def _fmod(x: float, y: float) -> float:
    # Python's raises where C's is NaN.
    return math.fmod(x, y) if y and math.isfinite(x) and y == y else math.nan


def _errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distances of f32 from f64 values, in units in the last place of the true value."""
    exact = want.float()
    unit = 2.0 ** (want.abs().log2().floor().clamp(-126, 127) - 23)
    error = (got.double() - want).abs() / unit
    return torch.where((got == exact) | (got.isnan() & exact.isnan()), 0.0, error)


@pytest.mark.parametrize("type", [type for type in TYPES if "f32" in type])
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_f32_keeps_the_stated_error(name: str, type: str) -> None:
    args = _pairs(name, _grid(torch.float32, 48, 4000))
    got, want = _run(name, type, *args), _reference(name, args)
    error = _errors(got, want)
    worst = int(error.nan_to_num(math.inf).argmax())
    told = f"{[arg[worst].item() for arg in args]}: {got[worst]} for {want[worst]}"
    assert error[worst] <= ULP[name], f"{error[worst]} ulp at {told}"


_EXACT: dict[str, Callable[..., Any]] = {
    "exp2": lambda x: mpmath.mpf(2) ** x,
    "log2": lambda x: mpmath.log(x, 2),
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "pow": mpmath.power,
    "fmod": lambda x, y: mpmath.mpf(math.fmod(x, y)),  # exact, as Python does it itself
    "erfc": lambda x: mpmath.erfc(min(x, mpmath.mpf(40))),  # mpmath fails far beyond
}


def _exact(name: str, values: list[float]) -> Any:
    """The true value for finite arguments, or None where there is none (NaN, a pole)."""
    function = _EXACT.get(name) or getattr(mpmath, name)
    try:
        with mpmath.workdps(60 if name not in ("sin", "cos", "tan") else 360):
            result = function(*map(mpmath.mpf, values))
    except (ValueError, ZeroDivisionError):
        return None
    return None if isinstance(result, mpmath.mpc) or not mpmath.isfinite(result) else result


@pytest.mark.parametrize("type", [type for type in TYPES if "f64" in type])
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_f64_is_close_to_the_true_value(name: str, type: str) -> None:
    grid = _grid(torch.float64, 1, 500)
    order = torch.randperm(grid.numel(), generator=torch.Generator().manual_seed(5))
    grid = grid[order[:128]]
    args = _pairs(name, grid)
    got = _run(name, type, *args)
    for place, value in enumerate(got.tolist()):
        values = [arg[place].item() for arg in args]
        want = _exact(name, values)
        if want is None:
            continue
        if abs(want) > mpmath.mpf(2) ** 1024 * (1 - mpmath.mpf(2) ** -54):
            assert value == math.copysign(math.inf, want), values
            continue
        unit = math.ulp(float(want)) if abs(want) > 2.0**-1000 else math.ulp(0.0)
        assert abs((mpmath.mpf(value) - want) / unit) <= F64_ULP, (values, value, want)


def _special(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    values = [0.0, 1.0, math.inf, 0.5, 2.0, 2.5, 3.0, 4.0, 1e9 + 1, 1e20, 2**24 - 1, 2**24 + 2]
    values += [info.tiny, info.tiny / 8, info.max, info.smallest_normal, 1 - info.eps, 1 + info.eps]
    values += [88.72, 89.5, 103.9, 104.5, 710.5, 746.0]
    one = torch.tensor(values, dtype=dtype)
    return torch.cat([one, -one, torch.tensor([math.nan], dtype=dtype)])


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_special_values(name: str, type: str) -> None:
    x = _special(torch.float32 if "f32" in type else torch.float64)
    args: tuple[torch.Tensor, ...] = (x,)
    if name in BINARY:
        args = tuple(part.flatten() for part in torch.meshgrid(x, x, indexing="ij"))
    got, want = _run(name, type, *args), _reference(name, args).to(x.dtype)
    special = want.isnan() | want.isinf() | (want == 0) | got.isnan() | got.isinf() | (got == 0)
    same = (got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())
    tiny = (got.abs() < 2e-45) & (want.abs() < 2e-45)  # half a smallest denormal to one
    wrong = (special & ~same & ~(tiny & (got.signbit() == want.signbit()))).nonzero().flatten()
    told = [([a[k].item() for a in args], got[k].item(), want[k].item()) for k in wrong[:6]]
    assert not told


def test_every_function_is_there() -> None:
    assert FUNCTIONS == VOCABULARY
    assert set(ULP) == FUNCTIONS
    assert function_name("exp", "vector<16xf32>") == "exp_v16f32"
    assert function_name("exp", "f64") == "exp_f64"


def test_the_documented_errors_are_the_stated_ones() -> None:
    page = (Path(__file__).parents[3] / "docs" / "numerics.md").read_text(encoding="utf-8")
    found = {}
    for names, units in re.findall(r"^\| (`.*`) \| ([\d.]+) \|$", page, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), float(units))
    assert found == ULP
