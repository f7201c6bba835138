"""The command line of `explain`: several devices, two sides, passes, pages, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfopt.cli import main
from tests.perfopt import explained_model

MODEL = f"{explained_model.__file__}:make"


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["explain", MODEL, *args]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["explain", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert captured.err.count("\n") == 1
    return captured.err


def test_several_devices_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--device", "h100", "--device", "a100", "--device", "mi300x", "--train")
    assert "H100-SXM5-80GB" in text and "MI300X" in text
    assert max(map(len, text.splitlines())) <= 80
    for row in ("predicted", "MFU", "fits", "library calls"):
        (line,) = [each for each in text.splitlines() if each.startswith(row)]
        assert len(line.split()) >= 4
    tables = json.loads(shown(capsys, "--device", "h100", "--device", "a100", "--json"))
    assert [table["device"]["name"] for table in tables] == ["H100-SXM5-80GB", "A100-SXM4-80GB"]


def test_two_sets_of_options_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--device", "h100", "--against", "mode=aten", "--diff")
    assert "defaults -> mode=aten" in text
    assert "decisions only with defaults" in text and "+ fuse" in text
    same = shown(capsys, "--device", "h100", "--device", "h100", "--diff")
    assert "no line differs" in same and "decisions only" not in same


def test_graphs_are_shown_after_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--passes")
    assert "# 0 inference after canonicalize: unchanged" in text
    assert "# 0 inference after fuse\n" in text
    assert "region_0: (" in text and "aten." in text
    assert "# 0 forward after fuse" in shown(capsys, "--passes", "--train")


def test_measured_times_stand_beside_predicted_ones(capsys: pytest.CaptureFixture[str]) -> None:
    table = json.loads(shown(capsys, "--train", "--measure", "--json"))
    pieces = [piece for graph in table["graphs"] for piece in graph["pieces"]]
    assert pieces and all(piece["measured"] > 0 for piece in pieces)
    text = shown(capsys, "--measure", "--all")
    assert "measured beside predicted" in text and "  measured   " in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_model_that_is_captured_twice_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{explained_model.__file__}:learning"
    assert main(["explain", model, "--train", "--measure", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    pieces = [piece for graph in table["graphs"] for piece in graph["pieces"]]
    assert pieces and all(piece["measured"] > 0 for piece in pieces)


def test_what_a_step_works_through_can_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    table = json.loads(shown(capsys, "--device", "h100", "--tokens", "1000", "--json"))
    assert table["workload"] == {"count": 1000, "unit": "tokens", "source": "as given"}
    assert table["total"]["rate"] == 1000 / table["total"]["cost"]["seconds"]
    assert "tokens/s, 1000 tokens a step" in shown(capsys, "--device", "h100", "--tokens", "1000")


def test_options_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    table = json.loads(
        shown(capsys, "--set", "mode=aten", "--set", "exact_rounding=True", "--json")
    )
    assert table["options"] == {"mode": "aten", "exact_rounding": True}


def test_a_page_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "page.html"
    assert "predicted" in shown(capsys, "--device", "h100", "--html", str(file))
    assert file.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either FILE.py:FACTORY or --hf"),
        ([MODEL, "--hf", "config.json"], "give either"),
        ([MODEL, "--diff"], "--diff compares two"),
        ([MODEL, "--optimizer", "adam"], "unknown optimizer 'adam'; did you mean 'adamw'"),
        ([MODEL, "--tokens", "4", "--samples", "4"], "--tokens and --samples both"),
        ([MODEL, "--tokens", "0"], "--tokens is 0, not a number from 1"),
        ([MODEL, "--set", "mode"], "'mode' is not of the form KEY=VALUE"),
        ([MODEL, "--set", "pipelin=x"], "did you mean 'pipeline'"),
        ([MODEL, "--device", "h1000"], "h100"),
        ([MODEL, "--device", "h100", "--measure"], "this machine is 'cpu', not 'H100"),
        ([MODEL, "--device", "h100", "--device", "a100", "--why", "x"], "--why is about one"),
        ([MODEL, "--html", "/nowhere/page.html"], "/nowhere/page.html"),
        ([MODEL, "--why", "gelo"], "no operation or region is called 'gelo'"),
    ],
)
def test_bad_input_is_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *args)
