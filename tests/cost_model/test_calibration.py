"""Calibrations: their file, their hash, and the device that they give."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from perfopt.cost_model.calibration import (
    Calibration,
    CalibrationError,
    Rates,
    dumps,
    loads,
    read,
    write,
)
from perfopt.cost_model.device import ONEDNN, host_device

KIB, MIB = 1 << 10, 1 << 20
COPIES = ((64.0 * KIB, 200e9), (float(MIB), 150e9), (16.0 * MIB, 90e9), (256.0 * MIB, 40e9))


def rates(threads: int) -> Rates:
    return Rates(
        threads, {"float32": 1e11 * threads, ONEDNN: 2e11 * threads, "float64": 5e10 * threads},
        {"float32": 1.5e11 * threads, "float64": 7e10 * threads}, COPIES, 1.4e-6,
        thread_seconds=3e-6 * (threads > 1),
    )  # fmt: skip


MADE = Calibration("A CPU, 4 cores", "cpu", "2.13.0", (rates(1), rates(2), rates(4)))


def test_it_comes_back() -> None:
    again = loads(dumps(MADE))
    assert dumps(again) == dumps(MADE) and again.hash == MADE.hash
    assert len(MADE.hash) == 12 and int(MADE.hash, 16)
    assert again.runs[1].copies == COPIES


def test_every_figure_changes_the_hash() -> None:
    others = [
        replace(MADE, device="Another"),
        replace(MADE, torch="2.14.0"),
        replace(MADE, runs=MADE.runs[:2]),
        replace(MADE, runs=(replace(rates(1), launch_seconds=1.5e-6),)),
        replace(MADE, runs=(replace(rates(1), matrix={"float32": 1e11 + 1}),)),
    ]
    assert len({MADE.hash, *(each.hash for each in others)}) == 6


def test_numbers_of_threads_between() -> None:
    assert MADE.at(2) is MADE.runs[1]
    three, many = MADE.at(3), MADE.at(8)
    assert three.threads == 3 and three.matrix["float32"] == pytest.approx(3e11)
    assert many.vector["float32"] == pytest.approx(12e11)
    assert three.copies == MADE.runs[1].copies
    only = replace(MADE, runs=(rates(4),))
    assert only.at(1).matrix["float32"] == pytest.approx(1e11)


def test_the_host_is_as_measured() -> None:
    device = host_device(2, MADE)
    assert device.peaks == {"float32": 2e11, ONEDNN: 4e11, "float64": 1e11}
    assert device.vector_peak("float32") == 3e11
    assert (device.memory_bandwidth, device.launch_seconds) == (40e9, 1.4e-6)
    assert (device.cache_bytes, device.cache_bandwidth) == (16 * MIB, 90e9)
    assert device.thread_seconds == 3e-6 and device.calibration == MADE.hash
    assert MADE.hash in device.sources["memory_bandwidth"]
    assert host_device(2).calibration == "none"
    assert host_device(2, MADE) == device and hash(host_device(2, MADE)) == hash(device)


def test_copies_lie_between_what_was_measured() -> None:
    device = host_device(1, MADE)
    assert device.copy_bandwidth(1) == 200e9
    assert device.copy_bandwidth(MIB) == 150e9
    assert device.copy_bandwidth(8.5 * MIB) == pytest.approx(120e9)
    assert device.copy_bandwidth(1 << 40) == 40e9
    assert host_device(1).copy_bandwidth(1 << 30) == host_device(1).memory_bandwidth


def test_a_machine_without_caches_worth_the_name() -> None:
    flat = replace(rates(1), copies=((64.0 * KIB, 45e9), (256.0 * MIB, 40e9)))
    assert host_device(1, replace(MADE, runs=(flat,))).cache_bandwidth == 0.0


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "one.json"
    assert read(path) is None
    write(path, MADE)
    found = read(path)
    assert found is not None and found.hash == MADE.hash
    assert [each.name for each in path.parent.iterdir()] == ["one.json"]


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.json"
    write(path, MADE)

    def full(*names: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write(path, replace(MADE, device="Another"))
    found = read(path)
    assert found is not None and found.device == MADE.device
    assert [each.name for each in tmp_path.iterdir()] == ["one.json"]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{", '{"schema": "perfopt.calibration/0"}',
        dumps(MADE)[:-20],
        dumps(replace(MADE, runs=())),
        dumps(replace(MADE, runs=(replace(rates(1), matrix={}),))),
        dumps(replace(MADE, runs=(replace(rates(1), copies=()),))),
        dumps(replace(MADE, runs=(replace(rates(1), vector={"float32": -1.0}),))),
        dumps(replace(MADE, runs=(replace(rates(1), matrix={"float32": float("nan")}),))),
        dumps(MADE).replace("thread_seconds", "threads_seconds"),
    ],
)  # fmt: skip
def test_what_is_none_is_told_and_not_used(tmp_path: Path, text: str) -> None:
    with pytest.raises(CalibrationError):
        loads(text)
    path = tmp_path / "one.json"
    path.write_text(text, encoding="utf-8")
    assert read(path) is None
