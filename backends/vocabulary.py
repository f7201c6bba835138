"""The closed vocabulary of the kernel IR: every operation, its operands and its eager meaning.

Printers and tests read the same table; an operation that is not here does not exist. `reference`
computes the operation on tensors of the operands' types and is what every target is compared to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Entry:
    """One pointwise operation: operand count, whether its result is a truth value, its meaning.

    `weight` is roughly how many simple vector instructions it costs.
    """

    operands: int
    reference: Callable[..., Any]
    weight: int = 1
    truth: bool = False


def _same(function: Callable[..., Any], operands: int, weight: int = 1) -> Entry:
    return Entry(operands, function, weight)


_ARITHMETIC = {
    "add": _same(torch.add, 2),
    "sub": _same(torch.sub, 2),
    "mul": _same(torch.mul, 2),
    "div": _same(torch.div, 2, 4),
    "neg": _same(torch.neg, 1),
    "abs": _same(torch.abs, 1),
    "min": _same(torch.minimum, 2, 2),
    "max": _same(torch.maximum, 2, 2),
    "idiv": _same(lambda a, b: torch.div(a, b, rounding_mode="trunc"), 2, 20),
    "irem": _same(torch.fmod, 2, 20),
    "fmod": _same(torch.fmod, 2, 20),
    "floor": _same(torch.floor, 1),
    "ceil": _same(torch.ceil, 1),
    "trunc": _same(torch.trunc, 1),
    "round_even": _same(torch.round, 1),
    "copysign": _same(torch.copysign, 2),
    "sqrt": _same(torch.sqrt, 1, 4),
    "and": _same(torch.bitwise_and, 2),
    "or": _same(torch.bitwise_or, 2),
    "xor": _same(torch.bitwise_xor, 2),
    "not": _same(torch.bitwise_not, 1),
    "shl": _same(torch.bitwise_left_shift, 2),
    "shr": _same(torch.bitwise_right_shift, 2),
    "select": _same(torch.where, 3),
}
_COMPARE = {
    name: Entry(2, getattr(torch, name), truth=True)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_FUNCTIONS = {
    "exp": _same(torch.exp, 1, 10),
    "exp2": _same(torch.exp2, 1, 10),
    "expm1": _same(torch.expm1, 1, 15),
    "log": _same(torch.log, 1, 15),
    "log2": _same(torch.log2, 1, 15),
    "log10": _same(torch.log10, 1, 15),
    "log1p": _same(torch.log1p, 1, 18),
    "sin": _same(torch.sin, 1, 20),
    "cos": _same(torch.cos, 1, 20),
    "tan": _same(torch.tan, 1, 30),
    "asin": _same(torch.asin, 1, 20),
    "acos": _same(torch.acos, 1, 20),
    "atan": _same(torch.atan, 1, 20),
    "sinh": _same(torch.sinh, 1, 20),
    "cosh": _same(torch.cosh, 1, 20),
    "tanh": _same(torch.tanh, 1, 18),
    "asinh": _same(torch.asinh, 1, 25),
    "acosh": _same(torch.acosh, 1, 25),
    "atanh": _same(torch.atanh, 1, 25),
    "erf": _same(torch.erf, 1, 20),
    "erfc": _same(torch.erfc, 1, 25),
    "sigmoid": _same(torch.sigmoid, 1, 14),
    "rsqrt": _same(torch.rsqrt, 1, 8),
    "pow": _same(torch.pow, 2, 40),
    "atan2": _same(torch.atan2, 2, 30),
    "hypot": _same(torch.hypot, 2, 20),
}
# Rounds to a 16-bit float and back, where the graph says so by a conversion.
_SPECIAL = {"round": Entry(1, lambda a: a, 2), "cast": Entry(1, lambda a: a)}

POINTWISE: dict[str, Entry] = _ARITHMETIC | _COMPARE | _FUNCTIONS | _SPECIAL
FUNCTIONS = frozenset(_FUNCTIONS) | {"fmod"}

# Reductions: the identity by kind; `max` and `min` propagate NaN, as eager does.
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum,
    "prod": torch.prod,
    "max": torch.amax,
    "min": torch.amin,
    "or": torch.any,
    "and": torch.all,
}
# `fold` is a reduction over columns, which `accumulate` carries out block by block.
# Not pointwise: const, iota (an index as i64), size (a kernel argument), load, store, reduce, and
# bounded (an i64 index, checked against a limit: 0 in its place and a fault where it is outside),
# nonzero (an integer divisor: a fault where it is 0).
STRUCTURAL = frozenset(
    {"const", "iota", "size", "load", "load_if", "store", "reduce", "bounded", "nonzero", "fold",
     "accumulate"}
)  # fmt: skip


def weight(name: str) -> int:
    """Roughly how many simple vector instructions an operation costs."""
    entry = POINTWISE.get(name)
    return entry.weight if entry else 1
