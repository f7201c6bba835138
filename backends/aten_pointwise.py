"""Pointwise ATen operations as vocabulary operations, with eager's type promotion.

`POINTWISE` maps an overload to a function of the lowering context, the node and its operands. The
operands are IR values already converted to the type that eager computes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from typing import cast as typed

import torch
from torch import fx

from perfopt.backends.index import Unsupported
from perfopt.backends.ir import FLOATS, TYPES, Builder, Op, compute_type

aten = torch.ops.aten
Rule = Callable[[Builder, fx.Node, "list[Any]"], Op]


def result_dtype(node: fx.Node) -> torch.dtype:
    """The dtype of the node's (first) result."""
    value = node.meta["val"]
    return value.dtype if isinstance(value, torch.Tensor) else value[0].dtype


def common_dtype(node: fx.Node) -> torch.dtype:
    """The dtype that eager promotes the two operands to before it compares them."""
    left, right = (
        typed(torch.Tensor, a.meta["val"] if isinstance(a, fx.Node) else a) for a in node.args[:2]
    )
    return torch.result_type(left, right)


def is_float(value: Op) -> bool:
    """Whether an IR value is a floating-point one."""
    return value.type in FLOATS


def maximum(b: Builder, x: Op, y: Op) -> Op:
    """The larger operand; NaN where either is."""
    return b.op("max", (x, y), x.type)


def minimum(b: Builder, x: Op, y: Op) -> Op:
    """The smaller operand; NaN where either is."""
    return b.op("min", (x, y), x.type)


def unary(name: str) -> Rule:
    """One operand, one operation of the same type."""
    return lambda b, node, a: b.op(name, (a[0],), a[0].type)


def binary(name: str) -> Rule:
    """Two operands of one type, a result of the same."""
    return lambda b, node, a: b.op(name, (a[0], a[1]), a[0].type)


def compare(name: str) -> Rule:
    """Two operands of one type, a truth value."""
    return lambda b, node, a: b.op(name, (a[0], a[1]), "i1")


def rounding(name: str) -> Rule:
    """floor, ceil, trunc and round: nothing to do for integers."""
    return lambda b, node, a: b.op(name, (a[0],), a[0].type) if is_float(a[0]) else a[0]


def _add(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    return _scaled(b, node, a, "add")


def _sub(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    return _scaled(b, node, a, "sub")


def _scaled(b: Builder, node: fx.Node, a: list[Any], name: str) -> Op:
    x, y = a[0], a[1]
    alpha = node.kwargs.get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        raise Unsupported("alpha is not a constant")
    if x.type == "i1":
        name = {"add": "or"}.get(name) or _refuse("subtraction of booleans")
        y = y if alpha else b.const(False, "i1")
    elif alpha != 1:
        y = b.op("mul", (y, b.const(alpha, y.type)), y.type)
    return b.op(name, (x, y), x.type)


def _mul(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    return b.op("and" if a[0].type == "i1" else "mul", (a[0], a[1]), a[0].type)


def _refuse(what: str) -> Any:
    raise Unsupported(what)


def _abs(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    return a[0] if a[0].type in ("u8", "i1") else b.op("abs", (a[0],), a[0].type)


def _sign(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    x = a[0]
    if x.type == "i1":
        return x
    zero, one = b.const(0, x.type), b.const(1, x.type)
    up = b.op("select", (b.op("gt", (x, zero), "i1"), one, zero), x.type)
    if x.type == "u8":
        return up
    down = b.op("select", (b.op("lt", (x, zero), "i1"), one, zero), x.type)
    # A NaN compares false both ways and gives 0, as eager does.
    return b.op("sub", (up, down), x.type)


def _relu(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    return a[0] if a[0].type == "u8" else _bounded(b, a[0], b.const(0, a[0].type), "lt")


def _square(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    return b.op("mul", (a[0], a[0]), a[0].type)


def _reciprocal(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    return b.op("div", (b.const(1, a[0].type), a[0]), a[0].type)


def _silu(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    x = a[0]
    # x / (1 + exp(-x)), which is nan at -inf, as eager's.
    one = b.const(1.0, x.type)
    negative = b.op("exp", (b.op("neg", (x,), x.type),), x.type)
    return b.op("div", (x, b.op("add", (one, negative), x.type)), x.type)


def _gelu(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    x = a[0]
    half, one = b.const(0.5, x.type), b.const(1.0, x.type)
    if node.kwargs.get("approximate", "none") == "tanh":
        inner = b.op("mul", (b.op("mul", (x, x), x.type), b.const(0.044715, x.type)), x.type)
        inner = b.op("mul", (x, b.op("add", (inner, one), x.type)), x.type)
        # 0.5 * (1 + tanh(u)) is sigmoid(2u), which is cheaper.
        u = b.op("mul", (inner, b.const(2 * math.sqrt(2 / math.pi), x.type)), x.type)
        return b.op("mul", (x, b.op("sigmoid", (u,), x.type)), x.type)
    scaled = b.op("mul", (x, b.const(math.sqrt(0.5), x.type)), x.type)
    inner = b.op("add", (b.op("erf", (scaled,), x.type), one), x.type)
    return b.op("mul", (b.op("mul", (x, half), x.type), inner), x.type)


def _pow(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    exponent = node.args[1]
    if isinstance(exponent, fx.Node) or isinstance(node.args[0], (int, float)):
        if not is_float(a[0]):
            raise Unsupported("an integer power with a tensor exponent")
        return b.op("pow", (a[0], a[1]), a[0].type)
    return _constant_power(b, a[0], exponent, a[1])


def _constant_power(b: Builder, x: Op, exponent: Any, value: Op) -> Op:
    if exponent == 0.5 and is_float(x):
        return b.op("sqrt", (x,), x.type)
    if exponent in (2, 3, 4) and x.type != "i1":
        square = b.op("mul", (x, x), x.type)
        last = {2: None, 3: x, 4: square}[int(exponent)]
        return square if last is None else b.op("mul", (square, last), x.type)
    if exponent == 1:
        return x
    if not is_float(x):
        raise Unsupported(f"an integer to the power of {exponent}")
    if exponent == -0.5:
        return b.op("rsqrt", (x,), x.type)
    if exponent == -1:
        return b.op("div", (b.const(1.0, x.type), x), x.type)
    if exponent == -2:
        return b.op("div", (b.const(1.0, x.type), b.op("mul", (x, x), x.type)), x.type)
    return b.op("pow", (x, value), x.type)


def _divisor(b: Builder, divisor: Op) -> Op:
    """An integer divisor, checked as eager does."""
    if divisor.name == "const":
        if not divisor.attr:
            raise Unsupported("an integer division by zero")
        return divisor
    return b.nonzero(divisor)


def _floor_quotient(b: Builder, x: Op, y: Op) -> Op:
    """Integer division that rounds down."""
    quotient = b.op("idiv", (x, y), x.type)
    if x.type == "u8":
        return quotient
    zero = b.const(0, x.type)
    rest = b.op("sub", (x, b.op("mul", (quotient, y), x.type)), x.type)
    signs = b.op("lt", (b.op("xor", (rest, y), x.type), zero), "i1")
    inexact = b.op("and", (b.op("ne", (rest, zero), "i1"), signs), "i1")
    return b.op("sub", (quotient, b.cast(inexact, x.type)), x.type)


def _float_remainder(b: Builder, x: Op, y: Op) -> Op:
    """The remainder with the sign of the divisor."""
    rest = b.op("fmod", (x, y), x.type)
    zero = b.const(0.0, x.type)
    unequal = b.op("ne", (b.op("lt", (rest, zero), "i1"), b.op("lt", (y, zero), "i1")), "i1")
    wrong = b.op("and", (b.op("ne", (rest, zero), "i1"), unequal), "i1")
    return b.op("select", (wrong, b.op("add", (rest, y), x.type), rest), x.type)


def _float_floor_divide(b: Builder, x: Op, y: Op) -> Op:
    """Division that rounds down, by eager's formula."""
    rest = b.op("fmod", (x, y), x.type)
    zero = b.const(0.0, x.type)
    plain = b.op("div", (x, y), x.type)
    quotient = b.op("div", (b.op("sub", (x, rest), x.type), y), x.type)
    unequal = b.op("ne", (b.op("lt", (rest, zero), "i1"), b.op("lt", (y, zero), "i1")), "i1")
    lower = b.op("and", (b.op("ne", (rest, zero), "i1"), unequal), "i1")
    one = b.const(1.0, x.type)
    quotient = b.op("select", (lower, b.op("sub", (quotient, one), x.type), quotient), x.type)
    floored = b.op("floor", (quotient,), x.type)
    above = b.op("gt", (b.op("sub", (quotient, floored), x.type), b.const(0.5, x.type)), "i1")
    floored = b.op("select", (above, b.op("add", (floored, one), x.type), floored), x.type)
    signed_zero = b.op("copysign", (zero, plain), x.type)
    is_zero = b.op("eq", (quotient, zero), "i1")
    result = b.op("select", (is_zero, signed_zero, floored), x.type)
    return b.op("select", (b.op("eq", (y, zero), "i1"), plain, result), x.type)


def _div(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    mode = node.kwargs.get("rounding_mode")
    x, y = a[0], a[1]
    if is_float(x):
        if mode == "floor":
            return _float_floor_divide(b, x, y)
        quotient = b.op("div", (x, y), x.type)
        return b.op("trunc", (quotient,), x.type) if mode == "trunc" else quotient
    y = _divisor(b, y)
    return b.op("idiv", (x, y), x.type) if mode == "trunc" else _floor_quotient(b, x, y)


def _floor_divide(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    if is_float(a[0]):
        return _float_floor_divide(b, a[0], a[1])
    return _floor_quotient(b, a[0], _divisor(b, a[1]))


def _remainder(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    x, y = a[0], a[1]
    if is_float(x):
        return _float_remainder(b, x, y)
    y = _divisor(b, y)
    quotient = _floor_quotient(b, x, y)
    return b.op("sub", (x, b.op("mul", (quotient, y), x.type)), x.type)


def _fmod(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    if is_float(a[0]):
        return b.op("fmod", (a[0], a[1]), a[0].type)
    return b.op("irem", (a[0], _divisor(b, a[1])), a[0].type)


def _clamp(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    x = a[0]
    low = a[1] if len(a) > 1 else None
    high = a[2] if len(a) > 2 else None
    if low is not None:
        x = _bounded(b, x, low, "lt")
    return x if high is None else _bounded(b, x, high, "gt")


def _bounded(b: Builder, x: Op, bound: Op, beyond: str) -> Op:
    """`x` unless it lies beyond the bound: -0.0 and NaN stay as they are, as in eager."""
    if bound.name == "const" and bound.attr == bound.attr:
        return b.op("select", (b.op(beyond, (x, bound), "i1"), bound, x), x.type)
    return maximum(b, x, bound) if beyond == "lt" else minimum(b, x, bound)


def _where(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    condition = truth(b, a[0])
    return b.op("select", (condition, a[1], a[2]), a[1].type)


def truth(b: Builder, x: Op) -> Op:
    """Whether a value is not zero; NaN is true."""
    return x if x.type == "i1" else b.op("ne", (x, b.const(0, x.type)), "i1")


def logical(name: str) -> Rule:
    """Logical and, or, xor, not over values of any type."""

    def rule(b: Builder, node: fx.Node, a: list[Any]) -> Op:
        return b.op(name, tuple(truth(b, x) for x in a), "i1")

    return rule


def _isnan(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    return b.op("ne", (a[0], a[0]), "i1") if is_float(a[0]) else b.const(False, "i1")


def _isinf(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    x = a[0]
    if not is_float(x):
        return b.const(False, "i1")
    return b.op("eq", (b.op("abs", (x,), x.type), b.const(math.inf, x.type)), "i1")


def _shift(name: str) -> Rule:
    def rule(b: Builder, node: fx.Node, a: list[Any]) -> Op:
        bits = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "u8": 8}[a[0].type]
        count = node.args[1]
        if not isinstance(count, int) or not 0 <= count < bits:
            raise Unsupported("a shift whose count is not a constant within the type's width")
        return b.op(name, (a[0], a[1]), a[0].type)

    return rule


def _leaky_relu(b: Builder, node: fx.Node, a: list[Any]) -> Op:
    x = a[0]
    slope = typed(float, node.args[1] if len(node.args) > 1 else 0.01)
    scaled = b.op("mul", (x, b.const(slope, x.type)), x.type)
    return b.op("select", (b.op("gt", (x, b.const(0, x.type)), "i1"), x, scaled), x.type)


# How the operands are converted before a rule sees them.
PROMOTE = "promote"  # to eager's common dtype
RESULT = "result"  # to the dtype of the result
KEEP = "keep"  # each in its own type
CONDITION = "condition"  # all but the first to the dtype of the result

_FLOAT_UNARY = [
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid",
    "rsqrt", "sqrt",
]  # fmt: skip


def _table() -> dict[Any, tuple[str, Rule]]:
    table: dict[Any, tuple[str, Rule]] = {}
    for name in _FLOAT_UNARY:
        table[getattr(aten, name).default] = (RESULT, unary(name))
    for name in ("floor", "ceil", "trunc"):
        table[getattr(aten, name).default] = (RESULT, rounding(name))
    table[aten.round.default] = (RESULT, rounding("round_even"))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        for overload in ("Tensor", "Scalar"):
            table[getattr(getattr(aten, name), overload)] = (PROMOTE, compare(name))
    both: dict[str, Rule] = {
        "add": _add, "sub": _sub, "mul": _mul, "remainder": _remainder, "fmod": _fmod,
    }  # fmt: skip
    for name, rule in both.items():
        table[getattr(aten, name).Tensor] = (RESULT, rule)
        table[getattr(aten, name).Scalar] = (RESULT, rule)
    for overload in ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode"):
        table[getattr(aten.div, overload)] = (RESULT, _div)
    table[aten.floor_divide.default] = (RESULT, _floor_divide)
    for name in ("Tensor_Tensor", "Tensor_Scalar", "Scalar"):
        table[getattr(aten.pow, name)] = (RESULT, _pow)
    single: dict[Any, Rule] = {
        aten.neg.default: unary("neg"), aten.abs.default: _abs, aten.sign.default: _sign,
        aten.relu.default: _relu, aten.square.default: _square, aten.silu.default: _silu,
        aten.reciprocal.default: _reciprocal, aten.gelu.default: _gelu,
        aten.leaky_relu.default: _leaky_relu, aten.maximum.default: binary("max"),
        aten.minimum.default: binary("min"), aten.atan2.default: binary("atan2"),
        aten.hypot.default: binary("hypot"), aten.copysign.Tensor: binary("copysign"),
        aten.clamp.default: _clamp, aten.clamp.Tensor: _clamp,
        aten.clamp_min.default: _clamp,
    }  # fmt: skip
    table |= {op: (RESULT, rule) for op, rule in single.items()}
    table[aten.clamp_max.default] = (
        RESULT, lambda b, node, a: minimum(b, a[0], a[1]),
    )  # fmt: skip
    table[aten.where.self] = (CONDITION, _where)
    table[torch.ops.prims.where.default] = (CONDITION, _where)
    for name in ("and", "or", "xor", "not"):
        table[getattr(aten, f"logical_{name}").default] = (KEEP, logical(name))
        bitwise = getattr(aten, f"bitwise_{name}")
        if name == "not":
            table[bitwise.default] = (RESULT, unary("not"))
            continue
        table[bitwise.Tensor] = (RESULT, binary(name))
        table[bitwise.Scalar] = (RESULT, binary(name))
    for name, op in (("shl", aten.__lshift__), ("shr", aten.__rshift__)):
        table[op.Scalar] = (RESULT, _shift(name))
    for name, op in (("shl", aten.bitwise_left_shift), ("shr", aten.bitwise_right_shift)):
        table[op.Tensor_Scalar] = (RESULT, _shift(name))
    table[aten.isnan.default] = (KEEP, _isnan)
    table[aten.isinf.default] = (KEEP, _isinf)
    return table


POINTWISE = _table()

# Eager rounds their numbers to the dtype of the tensor beside them; all others compute with more.
_ROUNDING = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("add", "sub", "eq", "ne", "lt", "le", "gt", "ge", "fmod", "remainder", "pow",
                 "floor_divide")
    for overload in ("default", "Tensor", "Scalar", "Tensor_Scalar")
    if hasattr(getattr(aten, name), overload)
)  # fmt: skip


def as_eager_has_it(target: Any, number: Any, dtype: torch.dtype) -> Any:
    """A number among the operands as eager computes with it; other values as they are."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    if not narrow or isinstance(number, bool) or not isinstance(number, (int, float)):
        return number
    return float(torch.tensor(number, dtype=dtype)) if target in _ROUNDING else number


def convert(b: Builder, value: Any, dtype: torch.dtype) -> Any:
    """An operand (IR value or Python number) as an IR value of the dtype's computing type."""
    if value is None:
        return None
    type = compute_type(dtype)
    if isinstance(value, Op):
        return cast(b, value, type)
    if isinstance(value, (bool, int, float)):
        return b.const(_as_type(value, type), type)
    raise Unsupported(f"an operand {value!r}")


def cast(b: Builder, value: Op, type: str) -> Op:
    """`value` in another computing type, by eager's conversion rules."""
    return truth(b, value) if type == "i1" else b.cast(value, type)


def _as_type(value: bool | int | float, type: str) -> bool | int | float:
    if type in FLOATS:
        return float(value)
    return bool(value) if type == "i1" else int(value)


def memory_type(dtype: torch.dtype) -> str:
    """The type of one element in memory."""
    if dtype not in TYPES:
        raise Unsupported(f"dtype {dtype}")
    return TYPES[dtype]
