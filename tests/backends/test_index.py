"""Index expressions: arithmetic, quotients that must be provable, and round trips of shapes."""

from __future__ import annotations

import pytest
import sympy

from perfopt.backends.index import Index, Unsupported, flatten, quotient, unflatten


def test_terms_that_cancel_vanish() -> None:
    index = Index.term("a") + Index.of({"b": 3}, 5) + Index.term("a").times(-1)
    assert index == Index.of({"b": 3}, 5)
    assert index.axes() == {"b"}
    assert index.coefficient("a") == 0


def test_a_flat_position_unflattens_to_itself() -> None:
    shape, sizes = (4, 5, 7), {"a": 4, "b": 5, "c": 7}
    at = (Index.term("a"), Index.term("b"), Index.term("c"))
    assert unflatten(flatten(at, shape), shape, sizes) == at


def test_symbolic_shapes_unflatten() -> None:
    n, m = sympy.symbols("n m", positive=True, integer=True)
    at = (Index.term("a"), Index.term("b"))
    assert unflatten(flatten(at, (n, m)), (n, m), {"a": n, "b": m}) == at


def test_a_quotient_that_cannot_be_proven_is_refused() -> None:
    with pytest.raises(Unsupported, match="no provable quotient"):
        Index.of({"a": 3}).divided(5, {"a": 4})


@pytest.mark.parametrize(("size", "by", "want"), [(12, 4, 3), (12, 5, None), (0, 5, 0)])
def test_quotients_of_numbers(size: int, by: int, want: int | None) -> None:
    assert quotient(size, by) == want


def test_quotients_of_symbols() -> None:
    n = sympy.Symbol("n", positive=True, integer=True)
    assert quotient(6 * n, n) == 6
    assert quotient(6 * n, 2) == 3 * n
    assert quotient(n, 2) is None
