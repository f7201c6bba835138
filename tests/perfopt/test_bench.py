"""`perfopt bench`: right before fast, rows that are kept, and runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import perfopt
from perfopt import bench_cases, bench_text, benching, first_start
from perfopt.backends import torch_private
from perfopt.bench_cases import cases
from perfopt.bench_rows import Case, Mean, Measured, Row, Start, changes, geometric_means
from perfopt.benching import Bench
from perfopt.cli import main
from perfopt.measuring import Ratio, change
from tests.perfopt import benched_models, explained_model
from tests.source_tree import ROOT

MODEL = f"{explained_model.__file__}:make"
OTHERS = benched_models.__file__
QUICK = ("--vs", "eager", "--samples", "7", "--no-cold")
WIDTH = 80


def shown(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(["bench", *args]) == code
    return capsys.readouterr().out


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_a_row_is_checked_and_timed(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert main(["bench", MODEL, *QUICK, "--threads", "1", "--train", "--json", str(file)]) == 0
    text, errors = capfd.readouterr()
    assert errors == ""  # no bar, nothing of the profiler
    assert "eager / perfopt" in text and "geometric mean of eager / perfopt over 1 row" in text
    assert widest(text) <= WIDTH
    table = json.loads(file.read_text())
    assert table["schema"] == bench_text.SCHEMA and not table["interrupted"]
    assert table["environment"]["threads"] == 1 and table["means"]["eager"]["rows"] == 1
    (row,) = table["rows"]
    eager, ours = row["contenders"]
    assert (eager["name"], ours["name"]) == ("eager", "perfopt")
    assert len(eager["samples"]) == len(ours["samples"]) == 7
    assert 0 <= ours["error"] < 1e-5 and 0 < ours["gradient_error"] < 1e-5
    assert eager["peak_bytes"] > 32 * 128 * 4 and ours["peak_bytes"] > 32 * 128 * 4
    (read,) = Bench.read(str(file)).rows
    assert read.case.train and read.ratios["eager"].value == row["ratios"]["eager"]["value"]


def test_dtypes_are_rows_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, MODEL, *QUICK, "--dtype", "float32,bfloat16", "--markdown")
    assert text.count("| explained_model.py:make") == 2 and "bfloat16" in text
    assert "Geometric mean of eager / perfopt" in text


def test_first_steps_come_from_fresh_processes(capsys: pytest.CaptureFixture[str]) -> None:
    result = perfopt.bench(MODEL, ["aot_eager"], samples=7)
    text = str(result)
    assert "perfopt cold: Dynamo" in text and "compilation" in text and widest(text) <= WIDTH
    (row,) = result.rows
    ours = row.of("perfopt")
    assert ours is not None and ours.cold is not None and ours.warm is not None
    assert set(ours.cold.stages) >= {"dynamo", "autograd", "passes", "lowering", "kernels"}
    rival = row.of("aot_eager")
    assert rival is not None and rival.warm is not None
    assert set(rival.warm.stages) == {"dynamo", "autograd"}
    assert capsys.readouterr().out == ""  # only the command prints


def test_a_process_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.py"
    file.write_text("import os\n\ndef make():\n    os.abort()\n")
    with pytest.raises(perfopt.BenchError, match="ended by signal 6|Aborted"):
        first_start.first_starts(Case(f"{file}:make"), "eager")
    file.write_text("def make():\n    raise RuntimeError('no disk')\n")
    with pytest.raises(perfopt.BenchError, match="in a fresh process: .*no disk"):
        first_start.first_starts(Case(f"{file}:make"), "eager")
    monkeypatch.setattr(first_start, "_PATIENCE", 0.01)
    with pytest.raises(perfopt.BenchError, match="not finished after"):
        first_start.first_starts(Case(f"{file}:make"), "eager")


def test_first_steps_know_the_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "own" / "calibrations" / "cpu.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    seen = []

    def started(folder: Path, request: Path) -> Start:
        seen.append((folder / "perfopt" / "calibrations" / "cpu.json").read_text())
        return Start(1.0, {})

    monkeypatch.setattr(first_start, "calibration_path", lambda kind: kept)
    monkeypatch.setattr(first_start, "_start", started)
    first_start.first_starts(Case(MODEL), "perfopt")
    assert seen == ["{}", "{}"]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """perfopt, and aot_eager as a rival, give wrong results."""
    usual = benching.contender

    def contender(subject: Any, name: str, options: Any) -> Callable[..., Any]:
        call = usual(subject, name, options)
        return call if name == "eager" else lambda *a, **k: call(*a, **k) * 1.01

    monkeypatch.setattr(benching, "contender", contender)


@pytest.mark.usefixtures("broken")
def test_what_is_wrong_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, MODEL, *QUICK, code=1)
    assert "perfopt wrong: output 0" in text and "geometric mean" not in text
    assert "| wrong |" in shown(capsys, MODEL, *QUICK, "--markdown", code=1)


def test_a_rival_that_is_wrong_is_told_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = benching.contender

    def contender(subject: Any, name: str, options: Any) -> Callable[..., Any]:
        call = usual(subject, "eager" if name == "aot_eager" else name, options)
        return (lambda *a, **k: call(*a, **k) * 1.01) if name == "aot_eager" else call

    monkeypatch.setattr(benching, "contender", contender)
    (row,) = perfopt.bench(MODEL, ["aot_eager"], samples=7, cold=False).rows
    rival, eager = row.of("aot_eager"), row.of("eager")
    assert rival is not None and rival.note.startswith("differs: output 0") and rival.samples
    assert not row.wrong
    # Eager is no rival, but its error is what the others' are judged by.
    assert eager is not None and eager.error is not None and not eager.samples


@pytest.mark.parametrize("name", ["normalised", "writing", "expanded", "dropping", "counting"])
def test_contenders_do_not_hear_of_each_other(name: str) -> None:
    (row,) = perfopt.bench(
        f"{OTHERS}:{name}", ["eager"], train=name != "counting", samples=7, cold=False
    ).rows
    assert not row.wrong
    ours = row.of("perfopt")
    assert ours is not None and ours.error is not None and ours.error < 1e-5
    # The gradient of a bias before a batch norm is zero but for rounding.
    assert (ours.gradient_error or 0.0) < 1e-2


def test_errors_that_tell_nothing_are_told() -> None:
    (row,) = perfopt.bench(f"{OTHERS}:drawing", "eager", samples=7, cold=False).rows
    assert "random numbers" in row.note
    (row,) = perfopt.bench(f"{OTHERS}:single", ["eager"], samples=7, cold=False).rows
    assert "distances from eager" in row.note and "float64" in row.note


def test_a_suite_goes_on_after_a_case_that_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    args = (f"{explained_model.__file__}:mismatched", MODEL, *QUICK, "--json", str(file))
    text = shown(capsys, *args, code=2)
    assert "the model fails eagerly: RuntimeError" in text and "over 1 row" in text
    first, second = Bench.read(str(file)).rows
    assert first.problem and not first.contenders and second.ratios
    markdown = Bench((first, second)).markdown()
    assert "| explained_model.py:mismatched | fails | fails |" in markdown


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


def test_ctrl_c_before_any_row_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_cases, "cases", interrupted)
    assert main(["bench", MODEL]) == 130
    assert capsys.readouterr().err == "perfopt bench: interrupted\n"


def test_stages_of_rivals_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SimpleNamespace(
        entire_frame_compile_time_s=5.0, backend_compile_time_s=4.0, inductor_compile_time_s=3.0
    )
    backward = SimpleNamespace(inductor_compile_time_s=2.0, backend_compile_time_s=None)
    monkeypatch.setattr(torch_private, "get_compilation_metrics", lambda: [forward, backward])
    found = torch_private.compile_seconds()
    assert found == {"dynamo": 1.0, "autograd": 1.0, "inductor": 5.0}


def row(ours: float, eager: float = 1.0, title: str = "model", base: str = "eager") -> Row:
    noise = torch.randn(51, generator=torch.Generator().manual_seed(0)).tolist()
    return Row(
        Case("model.py:make", name=title),
        (
            Measured(base, samples=tuple(eager * (1 + 0.01 * e) for e in noise)),
            Measured("perfopt", samples=tuple(ours * (1 - 0.01 * e) for e in noise)),
        ),
    )


def test_slower_beyond_noise_is_flagged() -> None:
    def verdict(old: Row, new: Row) -> str:
        (found,) = changes([old], [new])
        return found.verdict

    assert verdict(row(1.0), row(1.2)) == "slower"
    assert verdict(row(1.0), row(0.8)) == "faster"
    assert verdict(row(1.0), row(1.01)) == "unchanged"  # less than counts
    # The whole machine is half as fast: nothing about perfopt.
    assert verdict(row(1.0), row(2.0, eager=2.0)) == "unchanged"
    # Without a rival of both runs there are only seconds.
    (found,) = changes([row(1.0)], [row(2.0, base="inductor")])
    assert found.verdict == "slower" and found.beside == "" and found.after > found.before
    wrong = replace(row(1.0), contenders=(Measured("perfopt", problem="wrong: output 0"),))
    assert verdict(row(1.0), wrong) == "not comparable"


def test_rows_of_one_run_alone_are_named() -> None:
    found = changes([row(1.0, title="a")], [row(1.0, title="b")])
    assert [(each.title, each.verdict) for each in found] == [("b", "added"), ("a", "missing")]
    text = bench_text.changed(found, {"torch": "2.11.0"}, {"torch": "2.13.0"}, "old.json")
    assert "b: added" in text and "a: missing" in text
    assert "torch was '2.11.0' and is '2.13.0'" in text


def test_a_change_is_one_over_time() -> None:
    assert change([2.0] * 9, [1.0] * 9, [1.0] * 9, [1.0] * 9) == Ratio(2.0, 2.0, 2.0)
    assert change([2.0] * 9, [4.0] * 5) == Ratio(0.5, 0.5, 0.5)


def test_means_are_geometric_and_clipped() -> None:
    def timed(eager: float) -> Row:
        samples = Measured("eager", samples=(eager,) * 7), Measured("perfopt", samples=(1.0,) * 7)
        return Row(Case("model.py:make"), samples)

    failed = Row(Case("model.py:make"), problem="fails")
    (mean,) = geometric_means([timed(4.0), timed(0.25), failed]).values()
    assert mean == Mean(pytest.approx(1.0), pytest.approx(2.0), 2)


def test_compared_with_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    shown(capsys, MODEL, *QUICK, "--json", str(old))
    former = Bench.read(str(old))
    eager, ours = former.rows[0].contenders
    fast = replace(ours, samples=tuple(s / 1000 for s in ours.samples))
    rows = (replace(former.rows[0], contenders=(eager, fast)),)
    old.write_text(replace(former, rows=rows).to_json())
    text = shown(capsys, MODEL, *QUICK, "--compare", str(old), code=1)
    assert "SLOWER" in text and "beside eager" in text and widest(text) <= WIDTH
    slow = replace(ours, samples=tuple(s * 1000 for s in ours.samples))
    rows = (replace(former.rows[0], contenders=(eager, slow)),)
    old.write_text(replace(former, rows=rows).to_json())
    assert ": faster" in shown(capsys, MODEL, *QUICK, "--compare", str(old))


def test_infinite_errors_are_json(tmp_path: Path) -> None:
    found = Bench((Row(Case("a.py:b"), (Measured("perfopt", float("inf"), float("nan")),)),))
    file = tmp_path / "rows.json"
    file.write_text(found.to_json())

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(file.read_text(), parse_constant=refuse)
    (ours,) = Bench.read(str(file)).rows[0].contenders
    assert ours.error == float("inf") and ours.gradient_error != ours.gradient_error


def test_suites(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text(
        f'[[case]]\nfactory = "{MODEL}"\nname = "small"\ndtype = "float64"\n'
        f'[[case]]\nfactory = "{MODEL}"\ntrain = true\noptions = {{ mode = "aten" }}\n'
    )
    text = shown(capsys, "--suite", str(suite), *QUICK)
    assert "small float64" in text and "explained_model.py:make train mode=aten" in text


def test_the_suite_of_the_examples_is_one() -> None:
    found = cases([], ["float32"], False, str(ROOT / "examples" / "suite.toml"))
    assert [(case.dtype, case.train) for case in found] == [
        ("float32", True), ("float32", False), ("bfloat16", False), ("float32", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to measure"),
        ([MODEL, "--vs", "indutor"], "did you mean 'inductor'"),
        ([MODEL, "--vs", "tvm"], "Allowed: eager, inductor, aot_eager"),
        ([MODEL, "--dtype", "bflot16"], "did you mean 'bfloat16'"),
        ([f"{MODEL}r"], "did you mean 'make'"),
        ([MODEL.partition(":")[0]], "not of the form FILE.py:FACTORY"),
        ([MODEL, MODEL], "2 rows are called 'explained_model.py:make'"),
        ([f"{explained_model.__file__}:failing"], "failing failed: explained_model.py:"),
        ([f"{explained_model.__file__}:mismatched"], "the model fails eagerly: RuntimeError"),
        ([f"{OTHERS}:writing_nothing", "--train"], "nothing to train"),
        ([MODEL, "--samples", "0"], "--samples is 0"),
        ([MODEL, "--seconds", "nan"], "--seconds is nan"),
        ([MODEL, "--threads", "-1"], "--threads is -1"),
        ([MODEL, "--compare", "/nowhere.json"], "/nowhere.json"),
        ([MODEL, "--json", "/nowhere/rows.json"], "no file can be written there"),
        (["--suite", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_bad_input_is_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *args, "--no-cold"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no"),
        ("case = 3", "has no"),
        ("[[case]", "is not TOML"),
        ("[[case]]\ntrain = true", "without a factory"),
        ("[[case]]\nfactory = 'a.py:b'\ndtyp = 'float32'", "did you mean 'dtype'"),
        ("[[case]]\nfactory = 'a.py:b'\ndtype = ['float32']", "not a str"),
        ("[[case]]\nfactory = 'a.py:b'\ntrain = 'yes'", "not a bool"),
        ("[[case]]\nfactory = 'a.py:b'\noptions = 'aten'", "not a table"),
        (f"[[case]]\nfactory = '{MODEL}'\noptions = {{ mod = 'aten' }}", "did you mean 'mode'"),
    ],
)
def test_bad_suites_are_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text(text)
    assert main(["bench", "--suite", str(suite)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and message in captured.err


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "perfopt.bench/9", "environment": {}, "interrupted": 0}']
)
def test_files_of_something_else_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(text)
    with pytest.raises(perfopt.BenchError, match=r"old.json"):
        Bench.read(str(file))


def test_switched_off_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFOPT_DISABLE", "1")
    with pytest.raises(perfopt.BenchError, match="PERFOPT_DISABLE"):
        perfopt.bench(MODEL)


def test_traceback_shows_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    broken = f"{explained_model.__file__}:mismatched"
    assert main(["bench", broken, *QUICK, "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err
