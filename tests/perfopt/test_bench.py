"""`perfopt bench`: right before fast, rows that are kept, and runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perfopt import bench_text, benching
from perfopt.benching import Case, Measured, Row, Start
from perfopt.cli import main
from perfopt.measuring import Ratio, change
from tests.perfopt import explained_model

MODEL = f"{explained_model.__file__}:make"
QUICK = ("--vs", "eager", "--samples", "7", "--no-cold", "--threads", "1")


def shown(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(["bench", *args]) == code
    return capsys.readouterr().out


def test_a_row_is_checked_and_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    text = shown(capsys, MODEL, *QUICK, "--train", "--json", str(file))
    assert "eager / perfopt" in text and "geometric mean of eager / perfopt over 1 row" in text
    assert max(len(line) for line in text.splitlines()[1:]) <= 80
    table = json.loads(file.read_text())
    assert table["schema"] == bench_text.SCHEMA and not table["interrupted"]
    (row,) = table["rows"]
    eager, ours = row["contenders"]
    assert (eager["name"], ours["name"]) == ("eager", "perfopt")
    assert len(eager["samples"]) == len(ours["samples"]) == 7
    assert 0 <= ours["error"] < 1e-5 and 0 < ours["gradient_error"] < 1e-5
    (read,) = bench_text.loads(str(file))
    assert read.case.train and read.ratios()["eager"].value == row["ratios"]["eager"]["value"]


def test_dtypes_are_rows_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, MODEL, *QUICK, "--dtype", "float32,bfloat16", "--markdown")
    assert text.count("| explained_model.py:make") == 2 and "bfloat16" in text


def test_first_steps_come_from_fresh_processes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    args = (MODEL, "--vs", "eager", "--samples", "7", "--threads", "1", "--json", str(file))
    text = shown(capsys, *args)
    assert "cold: Dynamo" in text and "compilation" in text
    (row,) = bench_text.loads(str(file))
    ours = row.of("perfopt")
    assert ours is not None and ours.cold is not None and ours.warm is not None
    assert set(ours.cold.stages) >= {"dynamo", "autograd", "passes", "lowering", "kernels"}
    assert ours.peak_bytes and ours.peak_bytes > 0


def test_what_is_wrong_is_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = benching.contender

    def broken(subject: Any, name: str, options: Any) -> Callable[..., Any]:
        call = usual(subject, name, options)
        return (lambda *a, **k: call(*a, **k) * 1.01) if name == "perfopt" else call

    monkeypatch.setattr(benching, "contender", broken)
    text = shown(capsys, MODEL, *QUICK, code=1)
    assert "perfopt wrong: output 0" in text and "geometric mean" not in text


def test_interrupted_runs_keep_what_was_finished(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usual = benching.measure
    count = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return usual(*args, **kwargs)

    monkeypatch.setattr(benching, "measure", interrupted)
    file = tmp_path / "rows.json"
    args = (MODEL, *QUICK, "--dtype", "float32,float64", "--json", str(file))
    text = shown(capsys, *args, code=130)
    assert "interrupted" in text
    table = json.loads(file.read_text())
    assert table["interrupted"] and len(table["rows"]) == 1


def row(ours: float, eager: float = 1.0, title: str = "model") -> Row:
    noise = torch.randn(51, generator=torch.Generator().manual_seed(0)).tolist()
    return Row(
        Case("model.py:make", name=title),
        (
            Measured("eager", samples=tuple(eager * (1 + 0.01 * e) for e in noise)),
            Measured("perfopt", samples=tuple(ours * (1 - 0.01 * e) for e in noise)),
        ),
    )


def test_slower_beyond_noise_is_flagged() -> None:
    text, worse = bench_text.against([row(1.0)], [row(1.2)])
    assert worse and "SLOWER" in text
    text, worse = bench_text.against([row(1.0)], [row(0.8)])
    assert not worse and "faster" in text
    # The whole machine is half as fast: nothing about perfopt.
    text, worse = bench_text.against([row(1.0)], [row(2.0, eager=2.0)])
    assert not worse and "unchanged" in text
    text, worse = bench_text.against([row(1.0, title="a")], [row(1.0, title="b")])
    assert not worse and "b: not in the other run" in text and "a: only in the other run" in text


def test_a_change_is_one_over_time() -> None:
    found = change([2.0] * 9, [1.0] * 9, [1.0] * 9, [1.0] * 9)
    assert found == Ratio(2.0, 2.0, 2.0)


def test_compared_with_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    shown(capsys, MODEL, *QUICK, "--json", str(old))
    (former,) = bench_text.loads(str(old))
    ours = former.of("perfopt")
    assert ours is not None
    fast = replace(ours, samples=tuple(s / 1000 for s in ours.samples))
    faster = Row(former.case, (former.contenders[0], fast))
    old.write_text(bench_text.dumps([faster]))
    text = shown(capsys, MODEL, *QUICK, "--compare", str(old), code=1)
    assert "SLOWER" in text


def test_suites(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text(
        f'[[case]]\nfactory = "{MODEL}"\nname = "small"\ndtype = "float64"\n'
        f'[[case]]\nfactory = "{MODEL}"\ntrain = true\noptions = {{ mode = "aten" }}\n'
    )
    text = shown(capsys, "--suite", str(suite), *QUICK)
    assert "small float64" in text and "explained_model.py:make train" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to measure"),
        ([MODEL, "--vs", "indutor"], "did you mean 'inductor'"),
        ([MODEL, "--dtype", "bf16"], "did you mean 'bfloat16'"),
        ([f"{MODEL}r"], "did you mean 'make'"),
        ([MODEL, "--samples", "0"], "--samples is 0"),
        ([MODEL, "--compare", "/nowhere.json"], "/nowhere.json"),
        (["--suite", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_bad_input_is_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_keys_of_a_case_are_known() -> None:
    with pytest.raises(benching.BenchError, match="did you mean 'dtype'"):
        Case.read({"factory": "a.py:b", "dtyp": "float32"})
    assert Start(1.0, {}) == Start(1.0, {})
