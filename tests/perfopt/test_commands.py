"""`perfopt explain` and `perfopt verify` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from perfopt.backends import aten_pointwise
from perfopt.cli import main
from tests.perfopt import explained_model

FILE = explained_model.__file__
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_explain(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ("explain", f"{FILE}:make", "--device", "h100")
    code, text, _ = answer(capsys, *command, "--train", "--kernels")
    assert code == 0 and "explained_model.py:make, training step on H100" in text
    assert "@triton.jit" in text
    file = tmp_path / "report.json"
    assert answer(capsys, *command, "--json", "-o", str(file)) == (0, "", "")
    assert json.loads(file.read_text())["device"]["name"] == "H100-SXM5-80GB"
    code, text, _ = answer(capsys, *command, "--why", "region_0")
    assert code == 0 and text.startswith("region_0 in 0 inference")
    code, text, _ = answer(capsys, *command, "--all")
    assert code == 0 and "below 1%" not in text


@pytest.mark.parametrize("command", ["explain", "verify"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([f"{FILE}:nothing"], "no function 'nothing'"),
        ([f"{FILE}:failing"], "ValueError: no data"),
        ([f"{FILE}:mismatched"], "5"),
        (["no.py:make"], "no file 'no.py'"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], command: str, given: list[str], words: str
) -> None:
    code, out, error = answer(capsys, command, *given)
    assert (code, out) == (2, "") and words in error
    assert error.startswith(f"perfopt {command}: ") and error.count("\n") == 1


def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        (["explain", f"{FILE}:make", "--device", "h1oo"], "nearest: H100"),
        (["explain", f"{FILE}:make", "--why", "regio_0"], "nearest: region_0"),
        (["explain", f"{FILE}:reading"], "reads the value of a tensor"),
        (["verify", f"{FILE}:make", "--steps", "0"], "--steps is 0"),
    ):
        code, out, error = answer(capsys, *argv)
        assert (code, out, error.count("\n")) == (2, "", 1) and words in error
    code, _, error = answer(capsys, "explain", f"{FILE}:failing", "--traceback")
    assert code == 2 and "Traceback" in error and "at all" in error


def test_what_models_print_is_not_in_the_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n\n"
        "def make():\n    print('loading')\n    return torch.exp, (torch.ones(3),)\n"
    )
    code, out, error = answer(capsys, "explain", f"{file}:make", "--json")
    assert code == 0 and json.loads(out)["graphs"] and error == "loading\n"


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = answer(capsys, "verify", f"{FILE}:make", "--steps", "12")
    assert code == 0 and "right, 7 of 7 results agree" in text
    assert "gradient of norm.weight" in text and "losses right" in text
    assert max(map(len, text.splitlines())) <= 80
    code, text, _ = answer(capsys, "verify", f"{FILE}:broken")
    assert code == 0 and "1 of 1 results" in text


def test_verify_finds_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = aten_pointwise.POINTWISE[aten.sin.default]
    monkeypatch.setitem(aten_pointwise.POINTWISE, aten.tanh.default, wrong)
    file, repro = tmp_path / "model.py", tmp_path / "repro.py"
    file.write_text(
        "import torch\n\n"
        "def model(x, w):\n    y = x.softmax(-1) @ w\n    return (torch.tanh(y) * 2).sum(-1)\n\n"
        "def make():\n    return model, (torch.randn(4, 8), torch.randn(8, 8) + 1)\n"
    )
    code, text, _ = answer(capsys, "verify", f"{file}:make", "-o", str(repro))
    assert code == 1 and "WRONG, 0 of 1 results agree" in text
    assert "first wrong region: region_1 of inference 0/0" in text and "model.py:5" in text
    assert "decision 2 of 2 brings it" in text and "tanh, mul" in text
    assert f"written to {repro}" in text and "exits 1 while the fault is there" in text
    assert repro.exists()
