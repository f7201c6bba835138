"""Matching dimensions into axes: joined where equal, split where a reshape cuts across."""

from __future__ import annotations

import pytest

from perfopt.backends.axes import AxisMap
from perfopt.backends.index import Unsupported


def test_a_reshape_splits_the_longer_dimension() -> None:
    axes = AxisMap()
    whole, rows, columns = axes.fresh(12), axes.fresh(3), axes.fresh(4)
    axes.unify(whole, rows + columns)
    assert axes.resolve(whole) == axes.resolve(rows) + axes.resolve(columns)
    assert axes.index(whole).terms[0][1] == 4


def test_two_cuts_of_one_dimension_meet_in_their_common_pieces() -> None:
    axes = AxisMap()
    whole = axes.fresh(24)
    axes.unify(whole, axes.fresh(4) + axes.fresh(6))
    axes.unify(whole, axes.fresh(2) + axes.fresh(12))
    assert [axes.size(atom) for atom in axes.resolve(whole)] == [2, 2, 6]


def test_cuts_that_do_not_align_are_refused() -> None:
    axes = AxisMap()
    whole = axes.fresh(12)
    axes.unify(whole, axes.fresh(3) + axes.fresh(4))
    with pytest.raises(Unsupported, match="do not align"):
        axes.unify(whole, axes.fresh(4) + axes.fresh(3))


def test_dimensions_of_size_one_have_no_axis() -> None:
    assert AxisMap().fresh(1) == []
