"""`perfopt calibrate`: measure this machine, and keep what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perfopt.calibrate_cpu import BusyError, Progress, measure_cpu
from perfopt.calibrate_gpu import measure_gpu
from perfopt.calibrations import calibration_path, cpu_name
from perfopt.cost_model.calibration import Calibration, Rates, write


@dataclass(frozen=True)
class Measured:
    """A calibration as it was kept, and what of it was refused: "" or why."""

    calibration: Calibration
    refused: str = ""


def calibrate(seconds: float = 20.0, progress: Progress | None = None) -> list[Measured]:
    """Measure the CPU, and the GPU where there is one, in about so many seconds, and keep it.

    Where other processes hold some of the cores, only what fewer threads measured is kept. Nothing
    is kept where there is no cache directory. Raises `ValueError` unless `seconds` is from 1 to
    600, `BusyError` where nothing can be trusted, and `OSError` where the file cannot be written.
    """
    if not 1 <= seconds <= 600:
        raise ValueError(f"{seconds:g} seconds; 1 to 600 are allowed")
    tell = progress or (lambda what, done: None)
    gpu = torch.cuda.is_available()
    share = 0.5 if gpu else 1.0
    runs, refused = _of_cpu(seconds * share, lambda what, done: tell(what, done * share))
    made = [Measured(Calibration(cpu_name(), "cpu", torch.__version__, runs), refused)]
    if gpu:
        name = torch.cuda.get_device_name()
        rates = measure_gpu(seconds * share, lambda what, done: tell(what, share + done * share))
        made.append(Measured(Calibration(name, "cuda", torch.__version__, (rates,))))
    for each in made:
        path = calibration_path(each.calibration.kind)
        if path is not None:
            write(path, each.calibration)
    return made


def _of_cpu(seconds: float, progress: Progress) -> tuple[tuple[Rates, ...], str]:
    """The rates up to where they contradict each other, and why no more."""
    runs: list[Rates] = []
    try:
        runs.extend(measure_cpu(seconds, progress))
    except BusyError as error:
        if not runs:
            raise
        return tuple(runs), str(error)
    return tuple(runs), ""
