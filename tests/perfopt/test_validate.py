"""`perfopt validate`: its text, its JSON, its exit codes, and the scoreboard that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfopt.cli import main
from perfopt.cost_model import errors

GEMM = "m,n,k,latency_ms\n1,32,32,0.0026\n4096,4096,4096,0.18\n"
ELEMENTS = "OPName,Latency,Device,B,H\nadd,0.46,NVIDIA A100-PCIE-40GB,32768,1600\n"


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    for name, text in {
        "aiconfigurator/gemm_bf16_h200_sxm.csv": GEMM,
        "aiconfigurator/gemm_bf16_abacus.csv": GEMM,
        "neusight/elem.csv": ELEMENTS + "add,1,Abacus,1,1\n",
        "notes/readme.csv": "a\n1\n",
    }.items():
        path = tmp_path / "tables" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "tables"


def test_text(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--tables", str(tables)]) == 0
    text = capsys.readouterr().out
    assert "aiconfigurator, H200-SXM-141GB\n" in text and "neusight, A100-PCIE-40GB\n" in text
    assert "3 rows of 2 devices; 3 skipped\n" in text
    assert "skipped aiconfigurator/gemm_bf16_abacus.csv: unknown device 'abacus'" in text
    assert "skipped neusight/elem.csv, 1 rows: unknown device 'Abacus'" in text
    assert "skipped notes/readme.csv: is no kind of table that is known" in text
    assert max(map(len, text.splitlines())) <= 110


def test_json(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "out.json"
    assert main(["validate", "--tables", str(tables), "--json", str(written)]) == 0
    rows = json.loads(written.read_text(encoding="utf-8"))
    assert {tuple(row) for row in rows} == {
        ("source", "device", "family", "size_class", "rows", "mape", "median_ape")
    }
    whole = [row for row in rows if row["size_class"] == "all"]
    assert [(row["source"], row["family"], row["rows"]) for row in whole] == [
        ("aiconfigurator", "gemm", 2), ("neusight", "elementwise", 1),
    ]  # fmt: skip
    capsys.readouterr()
    assert main(["validate", "--tables", str(tables), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == rows


def test_choosing(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--tables", str(tables), "--source", "neusight"]) == 0
    assert "H200" not in capsys.readouterr().out.partition("skipped")[0]
    assert main(["validate", "--tables", str(tables), "--device", "h200"]) == 0
    assert "A100" not in capsys.readouterr().out.partition("skipped")[0]
    assert main(["validate", "--tables", str(tables), "--source", "gossip"]) == 2
    assert "no source 'gossip'; there are: aiconfigurator, neusight" in capsys.readouterr().err
    assert main(["validate", "--tables", str(tables), "--device", "abacus"]) == 2


def test_nothing_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--tables", str(tmp_path)]) == 2
    assert "nothing could be read" in capsys.readouterr().out
    assert main(["validate", "--tables", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no directory" in capsys.readouterr().err


def test_the_package_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from perfopt.cost_model import aiconfigurator

    monkeypatch.setattr(aiconfigurator, "PACKAGE", "no_such_package_at_all")
    assert main(["validate", "--tables", "aiconfigurator"]) == 2
    assert "pip install aiconfigurator-core" in capsys.readouterr().err


def test_update(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    package, page = tmp_path / "cost_model", tmp_path / "docs" / "accuracy.md"
    package.mkdir()
    page.parent.mkdir()
    mark = "<!-- scoreboard: written by perfopt validate --update -->"
    page.write_text(f"# Accuracy\n\n{mark}\n\nold\n", encoding="utf-8")
    monkeypatch.setattr(errors, "__file__", str(package / "errors.py"))
    assert main(["validate", "--tables", str(tables), "--update"]) == 0
    errors.scoreboard.cache_clear()
    rows = json.loads((package / "scoreboard.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 5
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Accuracy\n\n{mark}\n\n| source |") and "old" not in text
    assert "| aiconfigurator | H200-SXM-141GB | gemm | 2 |" in text
    capsys.readouterr()
