"""The benchmarks' harness: what it refuses, how it orders samples, what its interval holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import compare, regions
from perfopt import measuring


def double(x: Tensor) -> Tensor:
    return x * 2


def test_a_wrong_result_is_refused() -> None:
    x = torch.randn(64)
    compare.check({"eager": double, "same": lambda x: x + x}, [x])
    with pytest.raises(compare.WrongResultError, match="other is .* from float64"):
        compare.check({"eager": double, "other": lambda x: x * 2.0001}, [x])


def test_a_result_that_loses_nan_is_refused() -> None:
    with pytest.raises(compare.WrongResultError, match="lossy is inf"):
        compare.check(
            {"eager": double, "lossy": lambda x: (x * 2).nan_to_num(0.0)}, [torch.ones(64)]
        )


def test_every_round_samples_every_contender_once() -> None:
    log: list[str] = []
    contenders = {name: (lambda name=name: log.append(name)) for name in "abc"}
    seconds = measuring.measure(contenders, samples=20, calls=2, warmup=0)
    assert {name: len(each) for name, each in seconds.items()} == dict.fromkeys("abc", 20)
    rounds = [tuple(log[i : i + 6 : 2]) for i in range(0, len(log), 6)]
    assert all(sorted(each) == list("abc") for each in rounds)
    assert len(set(rounds)) > 1


def test_the_ratio_pairs_samples_of_one_round() -> None:
    drift = np.linspace(1.0, 5.0, 101)  # the machine slows down for both alike
    found = measuring.ratio(list(2.0 * drift), list(drift))
    assert found.low == found.value == found.high == pytest.approx(2.0)
    noise = np.random.default_rng(0).normal(1.0, 0.1, 101)
    wide = measuring.ratio(list(2.0 * noise), [1.0] * 101)
    assert wide.low < 2.0 < wide.high and wide.high - wide.low < 0.2


def test_rows_are_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"eager": [2e-3, 2e-3], "ours": [1e-3, 1e-3]}
    row = compare.row("case", seconds, [("eager", "ours")], target=1.5)
    file = tmp_path / "out.json"
    options = compare.parser("A benchmark.", samples=2)
    compare.show([row], "us", options.parse_args(["--json", str(file)]))
    assert "2000.0" in capsys.readouterr().out
    compare.show([row], "us", options.parse_args(["--markdown"]))
    assert "| case | 2000.0 | 1000.0 | 2.00 [2.00, 2.00] | >= 1.5 |" in capsys.readouterr().out
    (written,) = json.loads(file.read_text())["rows"]
    assert written["ratios"]["eager / ours"]["value"] == pytest.approx(2.0)
    assert written["target"] == 1.5


def test_an_unknown_region_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        regions.main(["--only", "softmaxx"])
    assert "nearest is softmax" in capsys.readouterr().err
