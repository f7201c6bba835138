"""The vocabulary of the kernel IR as Triton expressions.

Values are computed as eager does on a GPU: no fast division or square root, NaN passes through
`max` and `min`, `-0.0` survives a change of sign, integers divide as C does, and elementary
functions are those of the vendor's library (`libdevice`), not Triton's approximations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfopt.backends.ir import BYTES, FLOATS, Op
from perfopt.backends.vocabulary import FUNCTIONS

TYPES = {
    "f64": "tl.float64", "f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16",
    "i64": "tl.int64", "i32": "tl.int32", "i16": "tl.int16", "i8": "tl.int8", "u8": "tl.uint8",
    "i1": "tl.int1",
}  # fmt: skip
_BITS = {"i64": 63, "i32": 31, "i16": 15, "i8": 7}
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "idiv": "//", "irem": "%", "and": "&", "or": "|",
    "xor": "^", "shl": "<<", "shr": ">>", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=",
}  # fmt: skip
_LIBRARY = {"trunc": "trunc", "round_even": "rint", "copysign": "copysign", "fmod": "fmod"}
_LIBRARY |= {name: name for name in FUNCTIONS - {"sigmoid"}}
_INLINE = frozenset({"f32", "i32", "i64"})  # whose literals take the type of the other operand
_NAN = "propagate_nan=tl.PropagateNan.ALL"

COMBINE = {
    "largest": f"tl.maximum(a, b, {_NAN})",
    "smallest": f"tl.minimum(a, b, {_NAN})",
    "product": "a * b",
}
"""Functions of `a` and `b` that reductions need beside Triton's own, by name."""


def literal(value: float | int | bool, type: str) -> str:
    """A constant as Python text, not yet of its type."""
    if type == "i1":
        return str(bool(value))
    if type not in FLOATS:
        bits = 8 * BYTES[type]
        wrapped = int(value) & (1 << bits) - 1  # as eager has a number that does not fit
        negative = type != "u8" and wrapped >> (bits - 1)
        return str(wrapped - (1 << bits) if negative else wrapped)
    number = float(value)
    if type == "f32" and math.isfinite(number) and abs(number) > 3.4028235677973366e38:
        number = math.copysign(math.inf, number)
    return repr(number) if math.isfinite(number) else f'float("{number}")'


def constant(value: float | int | bool, type: str) -> str:
    """A scalar of a type."""
    if type in FLOATS and value == 0 and math.copysign(1, float(value)) < 0:
        # Triton takes every zero for the positive one.
        return f"(tl.full([], 0.0, {TYPES[type]}) * -1.0)"
    return f"tl.full([], {literal(value, type)}, {TYPES[type]})"


def inlined(value: float | int | bool, type: str) -> str | None:
    """A constant as a literal beside an operand of its type; None where that would not do."""
    if type not in _INLINE or (type == "f32" and not math.isfinite(float(value))):
        return None
    if type == "f32" and (abs(float(value)) > 3.4e38 or (value == 0 and str(value)[0] == "-")):
        return None
    text = literal(value, type)
    return f"({text})" if text.startswith("-") else text


def operation(op: Op, args: Sequence[str]) -> str:
    """A pointwise operation of the vocabulary on operands in parentheses where they need them."""
    name, type = op.name, op.type
    if name == "cast":
        return cast(args[0], op.args[0].type, type)
    if name == "round":
        return f"{args[0]}.to({TYPES[op.attr]}).to({TYPES[type]})"
    if name == "select":
        return f"tl.where({', '.join(args)})"
    if name in ("max", "min"):
        return extreme(name, args[0], args[1], type)
    if name == "div":
        return f"tl.div_rn({args[0]}, {args[1]})" if type == "f32" else f"{args[0]} / {args[1]}"
    if name in _INFIX:
        return f"{args[0]} {_INFIX[name]} {args[1]}"
    if name == "sigmoid":
        whole = f"1.0 + libdevice.exp({args[0]} * -1.0)"
        return f"tl.div_rn(1.0, {whole})" if type == "f32" else f"1.0 / ({whole})"
    if name in _LIBRARY:
        return f"libdevice.{_LIBRARY[name]}({', '.join(args)})"
    return _unary(name, args[0], type)


def _unary(name: str, x: str, type: str) -> str:
    if name == "neg":
        return f"{x} * -1.0" if type in FLOATS else f"-{x}"
    if name == "not":
        return f"~{x}"
    if name == "abs":
        return x if type in ("u8", "i1") else f"tl.abs({x})"
    if name == "sqrt":
        return f"tl.sqrt_rn({x})" if type == "f32" else f"tl.sqrt({x})"
    return f"tl.{name}({x})"  # floor, ceil


def cast(x: str, source: str, type: str) -> str:
    """A conversion between types that are computed in."""
    if type == "i1":
        return f"{x} != 0"
    if source in FLOATS and type in ("i16", "i8", "u8"):
        return f"{x}.to(tl.int32).to({TYPES[type]})"
    return f"{x}.to({TYPES[type]})"


def extreme(name: str, x: str, y: str, type: str) -> str:
    """`max` or `min` of two values."""
    if type == "i1":
        return f"{x} {'|' if name == 'max' else '&'} {y}"
    nan = f", {_NAN}" if type in FLOATS else ""
    return f"tl.{name}imum({x}, {y}{nan})"


def identity(kind: str, type: str) -> float | int | bool:
    """The value that a reduction starts from."""
    if kind in ("sum", "prod"):
        one = kind == "prod"
        return float(one) if type in FLOATS else int(one)
    if kind in ("or", "and"):
        return kind == "and"
    if type in FLOATS:
        return -math.inf if kind == "max" else math.inf
    if type in ("u8", "i1"):
        return 0 if kind == "max" else {"u8": 255, "i1": 1}[type]
    return -(1 << _BITS[type]) if kind == "max" else (1 << _BITS[type]) - 1


def combined(kind: str, x: str, y: str, type: str) -> str:
    """One step of a reduction."""
    if kind in ("max", "min"):
        return extreme(kind, x, y, type)
    return f"{x} {({'sum': '+', 'prod': '*', 'or': '|', 'and': '&'})[kind]} {y}"


def folded(kind: str, x: str, type: str, axis: int) -> tuple[str, str]:
    """The reduction of a tile along one side, which stays with size 1.

    Also the name of the function in `COMBINE` that it needs, or "".
    """
    if kind in ("or", "and") or type == "i1":
        how = "max" if kind in ("or", "max") else "min"
        return f"tl.{how}({x}.to(tl.int32), {axis}, keep_dims=True) != 0", ""
    if kind == "sum":
        keep = "" if type in ("f64", "f32", "i64", "i32") else f".to({TYPES[type]})"
        return f"tl.sum({x}, {axis}, keep_dims=True){keep}", ""
    if kind == "prod" or type in FLOATS:
        name = {"prod": "product", "max": "largest", "min": "smallest"}[kind]
        return f"tl.reduce({x}, {axis}, {name}, keep_dims=True)", name
    keep = "" if type in ("i64", "i32") else f".to({TYPES[type]})"
    return f"tl.{kind}({x}, {axis}, keep_dims=True){keep}", ""
