"""The fit of the time model's constants: it finds what made-up measurements were made with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy")

from benchmarks.fit_cost_model import PLANS, TABLES, fitted, half, mape, mean_of_others, tables_of
from perfopt.cost_model.device import device_named
from perfopt.cost_model.efficiency import constants
from perfopt.cost_model.tables import Table
from perfopt.cost_model.validation import predicted


def made_up(peak_share: float, memory_share: float) -> Table:
    """Products on an H100 that reaches these shares, without noise."""
    device, count = device_named("h100"), 60
    rng = np.random.default_rng(0)
    sizes = {name: 64.0 * rng.integers(1, 128, count) for name in ("m", "n", "k")}
    blank = Table("aiconfigurator", device, "gemm", "gemm", sizes, np.ones(count),
                  {"dtype": "bfloat16"})  # fmt: skip
    given = {**constants("gemm.matrix", device), "peak_share": peak_share,
             "memory_share": memory_share}  # fmt: skip
    return Table("aiconfigurator", device, "gemm", "gemm", sizes, predicted(blank, given),
                 {"dtype": "bfloat16"})  # fmt: skip


def test_known_constants_are_found() -> None:
    table = made_up(0.6, 0.7)
    bounds = {"peak_share": (0.3, 1.0), "memory_share": (0.5, 0.95)}
    found = fitted("gemm.matrix", bounds, [half(table, odd=False)])
    assert found == pytest.approx({"peak_share": 0.6, "memory_share": 0.7}, rel=0.02)
    (line,) = mape([table], found, "gemm.matrix")
    assert float(line.split()[-2]) < 1


def test_halves_do_not_meet() -> None:
    table = made_up(0.6, 0.7)
    even, odd = half(table, odd=False), half(table, odd=True)
    assert len(even.seconds) + len(odd.seconds) == len(table.seconds)
    assert len(half(table, odd=False, most=7).seconds) == 7
    assert np.array_equal(odd.seconds, table.seconds[1::2])


def test_plans_read_their_tables(tmp_path: Path) -> None:
    path = tmp_path / "aiconfigurator" / "gemm_bf16_a100_sxm.csv"
    path.parent.mkdir()
    path.write_text("m,n,k,latency_ms\n64,64,64,0.003\n64,64,64,0.003\n", encoding="utf-8")
    plan = PLANS[0]
    found = tables_of(plan, tmp_path)
    assert found[0].device.arch == plan.name
    with pytest.raises(SystemExit, match="no rows for gemm.matrix.sm_90"):
        tables_of(PLANS[1], tmp_path)


def test_those_left_out_take_the_mean_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    a100, h100, b200 = PLANS[:3]
    named = {a100: "a100", h100: "h100", b200: "b200"}
    for plan, name in named.items():
        table = made_up(0.6, 0.7)
        other = Table(table.source, device_named(name), "gemm", "gemm", {}, table.seconds)
        monkeypatch.setitem(TABLES, plan, [other])
    mean = mean_of_others(a100, TABLES[a100], PLANS[:3])
    assert mean is not None
    shares = [constants("gemm.matrix", device_named(n))["peak_share"] for n in ("h100", "b200")]
    assert mean["peak_share"] == pytest.approx(np.sqrt(shares[0] * shares[1]))
    assert 30 < mean["feed"] < 40  # of the L2's own rate
    hopper = mean_of_others(h100, TABLES[h100], PLANS[:3])
    assert hopper is not None and hopper["feed"] > 100
