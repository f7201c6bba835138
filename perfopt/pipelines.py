"""From options to pass pipelines, and their runs."""

from __future__ import annotations

import dataclasses
from functools import cache

import torch
from torch import fx

from perfopt.calibrations import present_device
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.cost_model.device import Device
from perfopt.cost_model.roofline import CostModel
from perfopt.options import OptionError, Options
from perfopt.passes.base import Level, Pass
from perfopt.passes.fuse import Fuse
from perfopt.passes.pipeline import (
    DEFAULT,
    PASSES,
    Pipeline,
    PipelineError,
    parse_pipeline,
    run_pipeline,
)
from perfopt.passes.remat import Remat
from perfopt.records import Compilation


def check_pipeline(options: Options) -> None:
    """Raise `OptionError` unless the pipeline option is one."""
    pipeline_of(options)


def pipeline_of(options: Options) -> Pipeline:
    """The passes that the options ask for; raises `OptionError`."""
    try:
        found = parse_pipeline(options.pipeline or DEFAULT)
    except PipelineError as error:
        problem = f"pipeline is {options.pipeline!r}: {error}; the default is {DEFAULT!r}"
        raise OptionError("pipeline", problem) from error
    if options.memory_budget is not None and not any(isinstance(p, Remat) for p in found.joint):
        problem = f"memory_budget is {options.memory_budget!r}, but the pipeline has no pass remat"
        raise OptionError("memory_budget", problem)
    return found


def run_passes(
    job: Compilation,
    level: Level,
    gm: fx.GraphModule,
    decisions: list[Decision] | None = None,
    kind: str = "joint",
) -> fx.GraphModule:
    """Run the passes of one level; their decisions go to `decisions`, or to the compilation's.

    `kind` is that of the graph: "joint", "forward", "backward" or "inference".

    `limit` counts over all levels and graphs. With `verify`, a pass that fails raises instead of
    being left out.
    """
    options = job.options
    cost = CostModel(job.device) if job.device else cost_model(torch.get_num_threads())
    pipeline = pipeline_of(options)
    kernels = any(isinstance(each, Fuse) for each in pipeline.graph)
    passes = [_budgeted(each, options, cost.device, kernels) for each in pipeline.at(level)]
    if not passes:
        return gm
    limit = None if options.limit is None else max(0, options.limit - len(job.applied))
    with job.timed("passes"):
        result = run_pipeline(gm, passes, cost, level=level, limit=limit, strict=options.verify)
    job.applied += [each for each in result.decisions if each.verdict is Verdict.APPLIED]
    if job.plans is not None:
        job.history.append((kind, result.history))
    (job.decisions if decisions is None else decisions).extend(result.decisions)
    return result.graph


def _budgeted(each: Pass, options: Options, device: Device, kernels: bool) -> Pass:
    """The pass, with the options' memory budget where it is the one to keep it."""
    budget = options.budget()
    if budget is None or not isinstance(each, Remat):
        return each
    kind, size = budget
    if kind == "share":
        return dataclasses.replace(each, share=size, kernels=kernels)
    whole = device.memory_bytes if kind == "auto" else size
    left = max(1, int(whole) - options.reserved())
    return dataclasses.replace(each, budget=left, kernels=kernels)


def cost_model(threads: int) -> CostModel:
    """The prices of this machine with so many threads, by its calibration where there is one."""
    return _prices(present_device(threads))


@cache
def _prices(device: Device) -> CostModel:
    return CostModel(device)


def described_passes() -> list[tuple[str, str, str, str]]:
    """Every pass: its name, its level, its options with their defaults, what it does."""
    rows = []
    for name, kind in PASSES.items():
        fields = dataclasses.fields(kind)
        options = ", ".join(f"{each.name}={each.default!r}" for each in fields)
        summary = (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        rows.append((name, kind.level.value, options, summary))
    return rows
