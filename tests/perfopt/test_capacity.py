"""Whether a step fits: what is known, what is not, and parts that add up."""

from __future__ import annotations

from types import MappingProxyType

import pytest

import perfopt
from perfopt.capacity import HOLDERS, fit_of
from perfopt.cost_model.memory import KINDS, MemoryReport
from perfopt.explained_text import fit_text
from tests.perfopt import explained_model


def report(**kinds: int) -> MemoryReport:
    peak = sum(kinds.values())
    return MemoryReport(peak, "add", MappingProxyType(kinds), MappingProxyType({}), ())


@pytest.mark.parametrize(
    ("capacity", "besides", "fits", "text"),
    [
        (3_000, 0, True, "fits, 0 left"),
        (5_000, 1_000, True, "fits, 1.00 KB left"),
        (3_500, 1_000, None, "fits or not, other graphs hold up to 1.00 KB"),
        (2_000, 0, False, "does not fit, 1.00 KB too much"),
    ],
)
def test_fits(capacity: float, besides: int, fits: bool | None, text: str) -> None:
    found = fit_of(report(parameters=1_000, kept=2_000), 3_000, capacity, besides)
    assert found.fits is fits and fit_text(found) == text
    assert found.margin == capacity - 3_000
    assert dict(found.holds) == {"activations": 2_000, "parameters": 1_000}


def test_every_kind_has_a_holder_of_its_own() -> None:
    assert set(HOLDERS) == set(KINDS) and len(set(HOLDERS.values())) == len(KINDS)
    assert fit_of(None, 5, 9.0, 0).holds == {}


def test_graphs_of_one_model_may_hold_memory_together() -> None:
    model, args, kwargs = explained_model.broken()
    found = perfopt.explain(model, *args, device="a100", **kwargs)
    assert found.fit.besides > 0 and found.fit.fits is True
    assert found.fit.peak == found.peak_bytes > found.fit.besides
