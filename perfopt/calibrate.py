"""`perfopt calibrate`: measure this machine, and keep what was measured."""

from __future__ import annotations

import torch

from perfopt.calibrate_cpu import Progress, measure_cpu
from perfopt.calibrate_gpu import measure_gpu
from perfopt.calibrations import calibration_path, cpu_name
from perfopt.cost_model.calibration import Calibration, write


def calibrate(seconds: float = 20.0, progress: Progress | None = None) -> list[Calibration]:
    """Measure the CPU, and the GPU where there is one, in about so many seconds, and keep it.

    Nothing is kept where there is no cache directory. Raises `ValueError` unless `seconds` is from
    1 to 600, and `OSError` where the file cannot be written.
    """
    if not 1 <= seconds <= 600:
        raise ValueError(f"{seconds:g} seconds; 1 to 600 are allowed")
    tell = progress or (lambda what, done: None)
    gpu = torch.cuda.is_available()
    share = 0.5 if gpu else 1.0
    made = [
        Calibration(
            cpu_name(), "cpu", torch.__version__,
            tuple(measure_cpu(seconds * share, lambda what, done: tell(what, done * share))),
        )
    ]  # fmt: skip
    if gpu:
        name = torch.cuda.get_device_name()
        rates = measure_gpu(seconds * share, lambda what, done: tell(what, share + done * share))
        made.append(Calibration(name, "cuda", torch.__version__, (rates,)))
    for each in made:
        path = calibration_path(each.kind)
        if path is not None:
            write(path, each)
    return made
