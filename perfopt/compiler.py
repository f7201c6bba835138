"""The stages, in order: from Dynamo's graph to a callable. Read this file first.

    Dynamo graph -> AOTAutograd joint graph -> forward | backward | inference graph -> Program
       pre passes        joint passes                     graph passes

AOTAutograd makes the graph functional ATen and traces the backward pass beside it; operators that
kernels can hold in pieces are taken apart on the way. Joint passes run before torch parts forward
from backward. Of each part, the graph passes group nodes into regions; regions are lowered to
kernels, all kernels of a graph are compiled as one module, and the rest becomes calls of ATen.
Whatever cannot be lowered or compiled runs through ATen, with a decision that says why.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from perfopt.backends.codegen import source_line
from perfopt.backends.decompositions import decompositions
from perfopt.backends.index import Unsupported
from perfopt.backends.ir import Kernel
from perfopt.backends.lower import lower_region
from perfopt.backends.program import Program, build_program
from perfopt.backends.region import LoweredRegion, is_region, region_graph
from perfopt.backends.torch_private import (
    calling_backend,
    compile_id,
    compile_joint,
    split_joint,
)
from perfopt.budgets import split_within
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.disabling import is_disabled, mark_disabled
from perfopt.options import Options
from perfopt.passes.base import Level, copy_graph
from perfopt.passes.remat import PLAN
from perfopt.passes.remat_schedule import RESULTS
from perfopt.pipelines import pipeline_of, run_passes
from perfopt.records import Compilation, GraphRecord, Plan
from perfopt.targets import (
    can_generate,
    compile_regions,
    devices,
    dump_kernels,
    generates,
    price,
)
from perfopt.verify import verify_region


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    applied: list[Decision] | None = None,
) -> Callable[..., Any]:
    """A callable that computes what Dynamo's graph computes, forward and backward.

    Applied decisions are added to `applied`; given to several graphs, `limit` counts over them.
    """
    owner, code, root = calling_backend()
    job = Compilation(compile_id(), options, owner, code)
    job.applied = job.applied if applied is None else applied
    generate = options.mode != "aten" and generates(gm) and not is_disabled(root)
    if generate:
        price(job, devices(gm)[0])
    return run_stages(job, gm, example_inputs, generate)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """No search for garbage cycles inside: one takes as long as the passes, and finds little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collecting()
def run_stages(
    job: Compilation,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    generate: bool,
    others: Sequence[Compilation] = (),
) -> Callable[..., Any]:
    """The stages of one compilation, with generated kernels or by ATen alone.

    `others` are planned as well, for their devices: traced once, they take what comes after the
    trace for themselves. Passes on Dynamo's graph come before, and are those of `job`.
    """
    for each in (job, *others):
        each.inputs = _kinds(gm, example_inputs)
    start = time.perf_counter()
    gm = run_passes(job, Level.PRE, gm) if generate else gm
    compiled = compile_joint(
        gm,
        example_inputs,
        forward=partial(_part, job, "forward", generate),
        backward=partial(_part, job, "backward", generate),
        inference=partial(_inference, job, others, generate),
        partition=partial(_partition_each, job, others, generate),
        decompositions=decompositions() if generate else {},
        donate=job.options.donate,
        both=job.plans is not None,
    )
    job.backend_seconds = time.perf_counter() - start
    job.seconds["autograd"] = job.backend_seconds - sum(job.seconds.values())
    return compiled


def _kinds(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[str, ...]:
    """What each of Dynamo's inputs is: "parameters", "buffers" or "inputs"."""
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    if len(names) != len(example_inputs):
        return ()
    return tuple(
        "parameters" if isinstance(value, torch.nn.Parameter)
        else "buffers" if "_buffers_" in name
        else "inputs"
        for name, value in zip(names, example_inputs, strict=True)
    )  # fmt: skip


def _inference(
    job: Compilation,
    others: Sequence[Compilation],
    generate: bool,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
) -> Callable[..., Any]:
    for each in others:
        _part(each, "inference", generate, gm, inputs)
    return _part(job, "inference", generate, gm, inputs)


def _partition_each(
    job: Compilation,
    others: Sequence[Compilation],
    generate: bool,
    joint: fx.GraphModule,
    inputs: Any,
    **given: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The halves of the joint graph for `job`; `others` part a copy each, and plan both halves."""
    for each in others:
        halves = _partition(each, generate, copy_graph(joint), inputs, **given)
        for kind, half in zip(("forward", "backward"), halves, strict=True):
            _part(each, kind, generate, half, ())
    return _partition(job, generate, joint, inputs, **given)


def _partition(
    job: Compilation, generate: bool, joint: fx.GraphModule, inputs: Any, **given: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The joint passes, then the split: by what they marked, else by torch's minimum cut."""
    mark_disabled(joint, job.options.disable)
    job.results = given["num_fwd_outputs"]
    if not generate:
        return split_joint(joint, inputs, **given)
    joint.graph.output_node().meta[RESULTS] = job.results
    joint = run_passes(job, Level.JOINT, joint)
    shared = any(each.name == "cse" for each in pipeline_of(job.options).joint)
    if PLAN in joint.meta:
        return split_within(job, joint, inputs, shared, **given)
    return split_joint(joint, inputs, shared, **given)


@_without_collecting()  # again: a backward graph may be compiled later
def _part(
    job: Compilation, kind: str, generate: bool, gm: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """The program of the forward, backward or inference graph."""
    mark_disabled(gm, job.options.disable)
    captured = gm
    nodes = sum(node.op == "call_function" for node in gm.graph.nodes)
    decisions: list[Decision] = []
    if generate and kind == "inference":  # without a backward graph this is the joint graph
        gm = run_passes(job, Level.JOINT, gm, decisions, kind)
    if generate:
        gm = run_passes(job, Level.GRAPH, gm, decisions, kind)
    with job.timed("lowering"):
        lowered, kernels = _lower(job, gm, decisions)
    if job.plans is not None:
        job.plans.append(Plan(kind, captured, gm, kernels, tuple(decisions)))
        return build_program(kind, captured, {}, {}).run
    with job.timed("kernels"):
        sources: Counter[str] = Counter()
        entries = compile_regions(job, kind, lowered, kernels, decisions, sources)
    with job.timed("program"):
        name = f"{kind} {job.number}".strip()
        build = partial(
            build_program, name, gm, lowered, entries,
            check_strides=kind == "backward",
            verify=partial(verify_region, name) if job.options.verify else None,
            clock=job.clock(kind),
        )  # fmt: skip
        program = build(recorded=_recorded(build) if entries else None)
    plan = Plan(kind, captured, gm, kernels, tuple(decisions))
    record = GraphRecord(kind, nodes, program, plan, dict(sources))
    job.graphs.append(record)
    if job.options.dump:
        _dump(job, record, gm, lowered)
    program.run.compilation = job  # type: ignore[attr-defined]  # lives as long as what it made
    return program.run


def _recorded(build: Callable[..., Program]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """The program that names its regions for torch's profiler, made when it is first run."""
    made: list[Program] = []

    def run(inputs: list[Any]) -> tuple[Any, ...]:
        if not made:
            made.append(build(record=torch.profiler.record_function))
        return made[0].run(inputs)

    return run


def _lower(
    job: Compilation, gm: fx.GraphModule, decisions: list[Decision]
) -> tuple[dict[str, LoweredRegion], dict[str, tuple[Kernel, ...]]]:
    """Every region as launches and kernels, by its name; refusals become decisions."""
    lowered: dict[str, LoweredRegion] = {}
    kernels: dict[str, tuple[Kernel, ...]] = {}
    for node in gm.graph.nodes:
        if not is_region(node):
            continue
        name = str(node.target)
        try:
            made = lower_region(name, region_graph(node), job.options.exact_rounding)
            if job.plans is None and not can_generate(made.region.device.type):
                raise Unsupported(f"no compiler for a kernel on {made.region.device}")
        except Unsupported as refusal:
            decisions.append(_note(node, Verdict.NOTE, "runs through ATen: {why}", str(refusal)))
            continue
        lowered[name] = replace(made.region, source=source_line(node))
        kernels[name] = made.kernels
    return lowered, kernels


def _note(node: fx.Node, verdict: Verdict, reason: str, why: str) -> Decision:
    values = MappingProxyType({"why": why})
    return Decision("lower", verdict, (node.name,), reason, values, source_line(node))


def _dump(
    job: Compilation,
    record: GraphRecord,
    gm: fx.GraphModule,
    lowered: Mapping[str, LoweredRegion],
) -> None:
    folder = Path(job.options.dump)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{record.kind}_{job.number.replace('/', '_')}".rstrip("_")
    graph = gm.print_readable(print_output=False)
    (folder / f"{stem}_graph.txt").write_text(graph)
    (folder / f"{stem}_program.py").write_text(record.program.source)
    dump_kernels(folder, stem, lowered, record.plan.kernels)
