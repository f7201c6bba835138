"""`perfopt devices`: what it lists and shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfopt.cli import main
from perfopt.cost_model.device import known_devices
from perfopt.cost_model.specification import FIGURES
from tests.source_tree import ROOT


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["devices", *argv]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 or "--json" in argv
    return text


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys).splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == [device.name for device in known_devices()]


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    table = json.loads(run(capsys, "--json"))
    assert [each["name"] for each in table] == [device.name for device in known_devices()]
    assert table[0]["sources"]["memory_bandwidth"]


@pytest.mark.parametrize("name", ["H100", "mi300", "p4", "i9-10940X", "cpu"])
def test_one(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = run(capsys, name)
    assert "memory_bandwidth" in text and "[1]" in text


def test_one_tells_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "h100")
    assert "peaks.bfloat16" in text and "989.4 TFLOP/s" in text and "3352 GB/s" in text
    assert "[1] glennklockwood.com" in text


def test_one_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run(capsys, "h100", "--json"))["peaks"]["bfloat16"] == 989.4e12


def test_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nlike = "a100"\nmemory_bytes = 1e12\n', encoding="utf-8")
    text = run(capsys, str(path))
    assert text.startswith("mine: NVIDIA gpu, sm_80") and "1000 GB" in text


def test_what_goes_wrong_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "h1000"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nearest: H100" in error


def test_the_documentation_explains_every_figure() -> None:
    text = (ROOT / "docs/devices.md").read_text(encoding="utf-8")
    assert [key for key in FIGURES if f"`{key}`" not in text and key != "vector_bits"] == []
