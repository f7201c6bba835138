"""The shipped scoreboard: what is known of the error of a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from perfopt.cost_model import errors
from perfopt.cost_model.device import device_named
from perfopt.cost_model.errors import measured_error
from perfopt.cost_model.validation import SIZES


def row(device: str, family: str, size: str, rows: int, source: str = "a") -> Mapping[str, Any]:
    return MappingProxyType(
        {"source": source, "device": device, "family": family, "size_class": size, "rows": rows,
         "mape": float(rows), "median_ape": 1.0}
    )  # fmt: skip


H100 = "H100-SXM5-80GB"
ROWS = (
    row(H100, "gemm", "all", 100), row(H100, "gemm", "tiny", 40), row(H100, "gemm", "all", 9, "b"),
    row("A100-SXM4-80GB", "elementwise", "all", 7), row("no longer known", "gemm", "all", 500),
)  # fmt: skip


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "scoreboard", lambda: ROWS)


@pytest.mark.usefixtures("made_up")
def test_the_nearest_rows_count() -> None:
    own = measured_error(device_named("h100"), "gemm", "tiny")
    assert own is not None and (own.mape, own.exact, own.size_class) == (40.0, True, "tiny")
    other_size = measured_error(device_named("h100"), "gemm", "large")
    assert other_size is not None and (other_size.mape, other_size.exact) == (100.0, False)
    relative = measured_error(device_named("h200"), "gemm", "tiny")
    assert relative is not None and (relative.device, relative.exact) == (H100, False)
    stand_in = measured_error(device_named("h100"), "convolution", "tiny")
    assert stand_in is not None and (stand_in.family, stand_in.exact) == ("gemm", False)
    region = measured_error(device_named("a100"), "region", "small")
    assert region is not None and (region.family, region.rows) == ("elementwise", 7)


@pytest.mark.usefixtures("made_up")
def test_nothing_is_known_of_some() -> None:
    assert measured_error(device_named("mi300x"), "gemm", "tiny") is None
    assert measured_error(device_named("h100"), "sorting", "tiny") is None


def test_the_shipped_scoreboard() -> None:
    rows = errors.scoreboard()
    assert rows and all(each["size_class"] in ("all", *SIZES) for each in rows)
    assert all(each["rows"] > 0 and each["mape"] >= 0 for each in rows)
    known = measured_error(device_named("h100"), "gemm", "all")
    assert known is not None and known.exact and known.mape < 9
