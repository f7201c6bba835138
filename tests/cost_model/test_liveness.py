"""Peak memory of graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from perfopt.cost_model.liveness import peak_bytes

KILO = torch.ones(256)  # 1024 bytes


def peak(fn: Any, *args: Any) -> int:
    return peak_bytes(make_fx(fn, tracing_mode="fake")(*args))


def test_a_chain_keeps_two_links() -> None:
    assert peak(lambda x: x.sin().cos().tan().exp(), KILO) == 3 * 1024


def test_what_is_used_later_stays() -> None:
    assert peak(lambda x: (a := x.sin(), a.cos().tan().exp() + a)[1], KILO) == 4 * 1024


def test_views_take_nothing_and_keep_their_root() -> None:
    assert peak(lambda x: x.sin().view(16, 16).t().cos(), KILO) == 3 * 1024
    assert peak(lambda x: (v := x.sin().view(16, 16), v.cos().exp() + v)[1], KILO) == 4 * 1024


def test_inputs_and_results_stay() -> None:
    assert peak(lambda x, y: x + 1, KILO, KILO) == 3 * 1024
    assert peak(lambda x: (x.sin(), x.cos(), x.exp()), KILO) == 4 * 1024


def test_an_unused_result_goes_at_once() -> None:
    assert peak(lambda x: (x.sin(), x.cos())[1], KILO) == 2 * 1024
