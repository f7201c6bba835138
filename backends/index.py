"""Affine index expressions: where in a buffer one point of the iteration domain reads or writes.

An index is `const + sum(coefficient * term)`, a term being an axis (by name) or a value loaded at
run time (an indirect index, as in gather). Coefficients are `int` or `sympy` expressions in the
graph's size symbols, so that one kernel serves every size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from perfopt.backends.region import Size

Term = Any  # an axis name (str), or an ir.Op whose value is the index


class Unsupported(Exception):
    """A generated kernel cannot hold this; the message says why."""


def as_size(value: Any) -> Size:
    """A size or stride of a fake tensor as `int` or `sympy` expression, adding no guard."""
    if isinstance(value, int):
        return value
    node = getattr(value, "node", None)
    if node is None:
        raise Unsupported(f"size {value!r} is neither an integer nor symbolic")
    expression = node.expr
    return int(expression) if expression.is_Integer else expression


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return simplified(result)


def simplified(size: Size) -> Size:
    """`size` as `int` where it is a number."""
    if isinstance(size, int):
        return size
    return int(size) if size.is_Integer else size


def quotient(size: Size, by: Size) -> Size | None:
    """`size / by` where that divides evenly, provably; else None."""
    if isinstance(size, int) and isinstance(by, int):
        return size // by if by and size % by == 0 else None
    ratio = sympy.sympify(size) / sympy.sympify(by)
    numerator, denominator = ratio.as_numer_denom()
    if denominator != 1:
        return None
    return simplified(numerator)


def provably_less(low: Size, high: Size) -> bool:
    """Whether `low < high` holds for all positive sizes, as far as expansion shows."""
    if isinstance(low, int) and isinstance(high, int):
        return low < high
    difference = sympy.expand(high - low)
    return bool(difference.is_positive)


def _order(item: tuple[Term, Size]) -> tuple[int, Any]:
    term = item[0]
    return (0, term) if isinstance(term, str) else (1, term.uid)


@dataclass(frozen=True)
class Index:
    """An affine expression over axes and loaded values; hashable, no zero coefficients."""

    terms: tuple[tuple[Term, Size], ...] = ()
    const: Size = 0

    @staticmethod
    def of(terms: Mapping[Term, Size], const: Size = 0) -> Index:
        """The index with these coefficients, in canonical order."""
        kept = [(term, simplified(value)) for term, value in terms.items() if value != 0]
        kept.sort(key=_order)
        return Index(tuple(kept), simplified(const))

    @staticmethod
    def term(term: Term) -> Index:
        """The value of one axis or of one loaded index."""
        return Index(((term, 1),))

    def __add__(self, other: Index) -> Index:
        if not other.terms:
            return Index(self.terms, simplified(self.const + other.const))
        terms = dict(self.terms)
        for term, value in other.terms:
            terms[term] = terms.get(term, 0) + value
        return Index.of(terms, self.const + other.const)

    def times(self, factor: Size) -> Index:
        """Every coefficient multiplied by `factor`."""
        if factor == 1:
            return self
        return Index.of({t: v * factor for t, v in self.terms}, self.const * factor)

    def coefficient(self, term: Term) -> Size:
        """The coefficient of a term; 0 where it does not occur."""
        for key, value in self.terms:
            if key is term or key == term:
                return value
        return 0

    def axes(self) -> frozenset[str]:
        """The axes that the index varies with, those of loaded values included."""
        found: set[str] = set()
        for term, _ in self.terms:
            found |= {term} if isinstance(term, str) else term.space
        return frozenset(found)

    def loaded(self) -> tuple[Any, ...]:
        """The values loaded at run time that the index depends on."""
        return tuple(term for term, _ in self.terms if not isinstance(term, str))

    def divided(self, by: Size, sizes: Mapping[str, Size]) -> tuple[Index, Index]:
        """Floor quotient and remainder by `by`, given the sizes of the axes.

        Raises `Unsupported` where the remainder is not provably within `[0, by)`.
        """
        high: dict[Term, Size] = {}
        low: dict[Term, Size] = {}
        largest: Size = 0
        for term, value in self.terms:
            ratio = quotient(value, by)
            if ratio is not None:
                high[term] = ratio
                continue
            if not isinstance(term, str):
                raise Unsupported("a loaded index would have to be divided")
            low[term] = value
            largest = largest + value * (sizes[term] - 1)
        const_high: Size = 0
        const_low = self.const
        if isinstance(const_low, int) and isinstance(by, int) and by > 0:
            const_high, const_low = divmod(const_low, by)
        negative = isinstance(const_low, int) and const_low < 0
        if negative or not provably_less(largest + const_low, by):
            raise Unsupported(f"{self} has no provable quotient by {by}")
        return Index.of(high, const_high), Index.of(low, const_low)


def unflatten(flat: Index, shape: tuple[Size, ...], sizes: Mapping[str, Size]) -> tuple[Index, ...]:
    """The position in a contiguous `shape` of a flat index; raises `Unsupported`."""
    result: list[Index] = []
    for dim in range(len(shape)):
        stride = product(shape[dim + 1 :])
        if shape[dim] == 1:
            result.append(Index())
            continue
        high, flat = flat.divided(stride, sizes)
        result.append(high)
    return tuple(result)


def flatten(position: tuple[Index, ...], shape: tuple[Size, ...]) -> Index:
    """The flat index of a position in a contiguous `shape`."""
    flat = Index()
    for dim, index in enumerate(position):
        flat = flat + index.times(product(shape[dim + 1 :]))
    return flat
