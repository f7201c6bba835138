"""First steps in fresh processes, with empty caches and with those that the first one left."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from perfopt.bench_rows import BenchError, Case, Start
from perfopt.calibrations import FOLDER, calibration_path
from perfopt.options import environment_with

_PATIENCE = 3600  # seconds that a process may take


def first_starts(case: Case, contender: str) -> tuple[Start, Start]:
    """The first step with empty caches, then in another process with what that one left.

    Raises `BenchError` where a process fails. perfopt's caches hold what was measured of this
    machine, as decisions depend on it.
    """
    with tempfile.TemporaryDirectory(prefix="perfopt_bench_") as name:
        folder = Path(name)
        request = folder / "request.json"
        table = {"case": asdict(case), "contender": contender, "threads": torch.get_num_threads()}
        request.write_text(json.dumps(table), encoding="utf-8")
        _calibrate(folder / "perfopt")
        return _start(folder, request), _start(folder, request)


def _calibrate(cache: Path) -> None:
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        path = calibration_path(kind)
        if path is not None and path.is_file():
            (cache / FOLDER).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, cache / FOLDER / path.name)


def _start(folder: Path, request: Path) -> Start:
    answer = folder / "answer.json"
    command = [sys.executable, "-m", f"{__package__}.first_call", str(request), str(answer)]
    environment = environment_with(
        PERFOPT_CACHE_DIR=str(folder / "perfopt"),
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        TRITON_CACHE_DIR=str(folder / "triton"),
    )
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"in a fresh process: not finished after {_PATIENCE} s") from None
    if done.returncode:
        ended = f"ended by signal {-done.returncode}" if done.returncode < 0 else "no message"
        last = (done.stderr.strip().splitlines() or [ended])[-1]
        raise BenchError(f"in a fresh process: {last}")
    return Start(**json.loads(answer.read_text(encoding="utf-8")))
