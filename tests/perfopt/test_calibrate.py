"""`perfopt calibrate`, and what its measurements are used for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import perfopt
from perfopt import calibrate_cpu
from perfopt.caching import key_parts
from perfopt.calibrate import calibrate
from perfopt.calibrate_cpu import BusyError, measure_cpu, thread_counts, typical
from perfopt.calibrations import (
    calibration_hash,
    calibration_path,
    cpu_name,
    current,
    named,
    present_device,
)
from perfopt.cli import main
from perfopt.cost_model.calibration import Calibration, Rates, write
from perfopt.cost_model.device import UnknownDeviceError, device_named
from perfopt.options import Options
from perfopt.pipelines import cost_model


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory that no other test shares."""
    monkeypatch.setenv("PERFOPT_CACHE_DIR", str(tmp_path))
    return tmp_path


def kept(rate: float = 1e11) -> Calibration:
    """A calibration in place of one that was measured."""
    copies = ((1e6, 1e11), (1e8, 3e10))
    rates = Rates(1, {"float32": rate}, {"float32": rate}, copies, 2e-6)
    made = Calibration(cpu_name(), "cpu", torch.__version__, (rates,))
    path = calibration_path()
    assert path is not None
    write(path, made)
    return made


def test_without_one_nothing_changes(own: Path) -> None:
    assert current() is None and calibration_hash() == "none"
    assert present_device() == device_named("cpu")
    assert present_device().calibration == "none"


def test_it_is_used_as_soon_as_it_is_there(own: Path) -> None:
    before = cost_model(1)
    made = kept()
    assert calibration_hash() == made.hash
    assert cost_model(1).device.launch_seconds == 2e-6 != before.device.launch_seconds
    assert cost_model(1) is cost_model(1)
    assert named("cpu").calibration == named(" HOST").calibration == made.hash
    assert key_parts(Options())["calibration"] == made.hash
    path = calibration_path()
    assert path is not None
    other = kept(2e11)
    os.utime(path, ns=(1, 1))
    assert calibration_hash() == other.hash != made.hash
    path.write_text("spoilt", encoding="utf-8")
    assert calibration_hash() == "none"


def test_another_torch_is_another_file(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert current() is None


def test_reports_and_explanations_tell_it(own: Path) -> None:
    made = kept()
    compiled = perfopt.compile(lambda x: (x * 2 + 1).exp())
    x = torch.randn(64, 64)
    compiled(x)
    report = perfopt.report(compiled)
    assert report.calibration == made.hash and made.hash in report.text()
    explanation = perfopt.explain(lambda x: x * 2 + 1, x)
    assert f"prices     calibration {made.hash}" in explanation.text()
    table = json.loads(explanation.to_json())
    assert table["device"]["calibration"] == made.hash
    assert perfopt.Explanation.from_json(explanation.to_json()) == explanation
    assert made.hash not in perfopt.explain(lambda x: x * 2 + 1, x, device="h100").text()


def test_reports_tell_that_there_is_none(own: Path) -> None:
    compiled = perfopt.compile(lambda x: (x * 3 + 1).exp())
    compiled(torch.randn(64, 64))
    assert "prices: calibration none" in perfopt.report(compiled).text()


def test_measured(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With more threads than one, whatever else runs on the machine would decide the test.
    monkeypatch.setattr(calibrate_cpu, "cores", lambda: 1)
    threads = torch.get_num_threads()
    assert main(["calibrate", "--seconds", "1"]) == 0
    text = capsys.readouterr().out
    assert torch.get_num_threads() == threads
    found = current()
    assert found is not None and found.hash in text and str(own) in text
    assert [each.threads for each in found.runs] == [1]
    for each in found.runs:
        assert set(each.matrix) >= {"float32", "bfloat16", "float16", "float64"}
        assert min(each.matrix.values()) > 1e6 and min(each.vector.values()) > 1e6
        assert 1e-8 < each.launch_seconds < 1e-3 and each.thread_seconds >= 0
        assert [size for size, _ in each.copies] == sorted(size for size, _ in each.copies)
    assert "products bfloat16" in text and "1 thread" in text
    assert main(["devices", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert f"calibration {found.hash}" in shown and "copy of 64 KiB" in shown


def test_nothing_is_kept_without_a_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERFOPT_CACHE_DIR", "")
    told: list[float] = []
    monkeypatch.setattr("perfopt.calibrate.measure_cpu", lambda *_: [kept_rates()])
    made = calibrate(1, lambda what, done: told.append(done))
    assert len(made) == 1 + torch.cuda.is_available()
    assert current() is None and calibration_path() is None
    assert main(["calibrate", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table[0]["path"] == "" and table[0]["hash"] == made[0].calibration.hash


def kept_rates() -> Rates:
    return Rates(1, {"float32": 1e11}, {"float32": 1e11}, ((1e6, 1e10),), 1e-6)


def busy_after(runs: int) -> Callable[..., Iterator[Rates]]:
    def measure(seconds: float, progress: object) -> Iterator[Rates]:
        yield from [kept_rates()] * runs
        raise BusyError("2 threads: products in float32: 1.0 G/s, with fewer threads 100.0")

    return measure


def test_what_is_trusted_of_a_busy_machine_is_kept(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfopt.calibrate.measure_cpu", busy_after(1))
    assert main(["calibrate"]) == 0
    found = current()
    assert found is not None and [each.threads for each in found.runs] == [1]
    text = capsys.readouterr().out
    assert "Not kept: 2 threads: products in float32: 1.0 G/s" in text


def test_nothing_of_a_busy_machine_is_kept(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfopt.calibrate.measure_cpu", busy_after(0))
    assert main(["calibrate"]) == 2
    assert current() is None and "1.0 G/s" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-3", "601", "nan"])
def test_how_long_is_checked(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    assert main(["calibrate", "--seconds", seconds]) == 2
    assert "1 to 600 are allowed" in capsys.readouterr().err


def test_a_busy_machine_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([1e11] * 100)
    monkeypatch.setattr(calibrate_cpu, "cores", lambda: 2)
    monkeypatch.setattr(calibrate_cpu, "_SETS", ())
    monkeypatch.setattr(calibrate_cpu, "_generated", lambda *_: 1e11)
    monkeypatch.setattr(calibrate_cpu, "_start", lambda *_: 1e-6)
    monkeypatch.setattr(calibrate_cpu, "_paged", lambda *_: 1e-10)
    monkeypatch.setattr(calibrate_cpu, "_product", lambda *_: next(rates))
    threads, steps = torch.get_num_threads(), []
    found = list(measure_cpu(0.01, lambda what, done: steps.append(done)))
    assert [each.threads for each in found] == [1, 2]
    assert steps == sorted(steps) and steps[0] >= 0 and steps[-1] <= 1
    slower = iter([1e11] * len(found[0].matrix) + [5e10, 9e10] + [1e11] * 20)
    monkeypatch.setattr(calibrate_cpu, "_product", lambda *_: next(slower))
    assert list(measure_cpu(0.01, lambda *_: None))[1].matrix["float32"] == 9e10
    slowest = iter([1e11] * len(found[0].matrix) + [5e10] * 20)
    monkeypatch.setattr(calibrate_cpu, "_product", lambda *_: next(slowest))
    with pytest.raises(BusyError, match="2 threads: products in float32: 50.0 G/s"):
        list(measure_cpu(0.01, lambda *_: None))
    assert torch.get_num_threads() == threads


def test_thread_counts() -> None:
    assert [thread_counts(n) for n in (1, 2, 3, 6, 8)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4, 6], [1, 2, 4, 8],
    ]  # fmt: skip


def test_a_call_is_timed_at_least_so_often() -> None:
    calls: list[int] = []
    assert typical(lambda: calls.append(1), 0.0, least=3) > 0
    assert len(calls) > 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_there_is_no_gpu() -> None:
    with pytest.raises(UnknownDeviceError, match="torch sees no GPU here"):
        named("cuda")


@pytest.mark.gpu
def test_a_gpu_is_measured(own: Path) -> None:
    made = calibrate(5)
    assert [each.calibration.kind for each in made] == ["cpu", "cuda"]
    rates = made[1].calibration.runs[0]
    assert rates.matrix["bfloat16"] > rates.matrix["float64"] / 2
    assert 1e-7 < rates.launch_seconds < 1e-4 and 1e-7 < rates.dispatch_seconds < 1e-3
    assert named("cuda").calibration == made[1].calibration.hash
