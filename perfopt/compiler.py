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
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
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
from perfopt.backends.mlir.compile import compile_kernels
from perfopt.backends.mlir.objects import Objects
from perfopt.backends.program import build_program
from perfopt.backends.region import LoweredRegion, is_region, region_graph
from perfopt.backends.torch_private import (
    calling_backend,
    compile_id,
    compile_joint,
    split_joint,
)
from perfopt.budgets import split_within
from perfopt.caching import compiled_objects
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.disabling import is_disabled, mark_disabled
from perfopt.options import Options
from perfopt.passes.base import Level
from perfopt.passes.remat import PLAN
from perfopt.passes.remat_schedule import RESULTS
from perfopt.pipelines import pipeline_of, run_passes
from perfopt.records import Compilation, GraphRecord, Plan
from perfopt.verify import verify_region

log = logging.getLogger(__name__)


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
    generate = _generates(options, example_inputs) and not is_disabled(root)
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
    job: Compilation, gm: fx.GraphModule, example_inputs: Sequence[Any], generate: bool
) -> Callable[..., Any]:
    """The stages of one compilation, with generated kernels or by ATen alone."""
    start = time.perf_counter()
    gm = run_passes(job, Level.PRE, gm) if generate else gm
    compiled = compile_joint(
        gm,
        example_inputs,
        forward=partial(_part, job, "forward", generate),
        backward=partial(_part, job, "backward", generate),
        inference=partial(_part, job, "inference", generate),
        partition=partial(_partition, job, generate),
        decompositions=decompositions() if generate else {},
        donate=job.options.donate,
        both=job.plans is not None,
    )
    job.backend_seconds = time.perf_counter() - start
    job.seconds["autograd"] = job.backend_seconds - sum(job.seconds.values())
    return compiled


def _generates(options: Options, example_inputs: Sequence[Any]) -> bool:
    """Whether kernels can be generated here: taking operators apart pays only then."""
    if options.mode == "aten" or any(
        isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in example_inputs
    ):
        return False
    if find_spec("torch_mlir") is None:
        _say_that_kernels_are_missing()
        return False
    return True


@cache
def _say_that_kernels_are_missing() -> None:
    warnings.warn(
        "perfopt generates no kernels, because torch-mlir is not installed: everything runs "
        "through ATen. `pip install perfopt[cpu]` brings it.",
        stacklevel=2,
    )


def _partition(
    job: Compilation, generate: bool, joint: fx.GraphModule, inputs: Any, **given: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The joint passes, then the split: by what they marked, else by torch's minimum cut."""
    mark_disabled(joint, job.options.disable)
    if not generate:
        return split_joint(joint, inputs, **given)
    joint.graph.output_node().meta[RESULTS] = given["num_fwd_outputs"]
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
        lowered, kernels = _lower(job.options, gm, decisions)
    if job.plans is not None:
        job.plans.append(Plan(kind, captured, gm, kernels, tuple(decisions)))
        return build_program(kind, captured, {}, {}).run
    with job.timed("kernels"):
        sources: Counter[str] = Counter()
        entries = _compile(lowered, kernels, decisions, compiled_objects(job, kind), sources)
    with job.timed("program"):
        name = f"{kind} {job.number}".strip()
        program = build_program(
            name,
            gm,
            lowered,
            entries,
            check_strides=kind == "backward",
            verify=partial(verify_region, name) if job.options.verify else None,
            clock=job.clock(kind),
        )
    plan = Plan(kind, captured, gm, kernels, tuple(decisions))
    record = GraphRecord(kind, nodes, program, plan, dict(sources))
    job.graphs.append(record)
    if job.options.dump:
        _dump(job, record, gm)
    program.run.compilation = job  # type: ignore[attr-defined]  # lives as long as what it made
    return program.run


def _lower(
    options: Options, gm: fx.GraphModule, decisions: list[Decision]
) -> tuple[dict[str, LoweredRegion], dict[str, tuple[Kernel, ...]]]:
    """Every region as launches and kernels, by its name; refusals become decisions."""
    lowered: dict[str, LoweredRegion] = {}
    kernels: dict[str, tuple[Kernel, ...]] = {}
    for node in gm.graph.nodes:
        if not is_region(node):
            continue
        name = str(node.target)
        try:
            made = lower_region(name, region_graph(node), options.exact_rounding)
        except Unsupported as refusal:
            decisions.append(_note(node, Verdict.NOTE, "runs through ATen: {why}", str(refusal)))
            continue
        lowered[name], kernels[name] = made.region, made.kernels
    return lowered, kernels


def _compile(
    lowered: dict[str, LoweredRegion],
    kernels: Mapping[str, tuple[Kernel, ...]],
    decisions: list[Decision],
    objects: Objects | None,
    sources: Counter[str],
) -> dict[str, Callable[..., Any]]:
    """The entries of all kernels, loaded from `objects` or compiled as one module.

    `sources` counts where they came from. Should compiling fail, each region is compiled by
    itself, and those that fail leave `lowered`.
    """
    every = [kernel for group in kernels.values() for kernel in group]
    if not every:
        return {}
    try:
        return compile_kernels(every, None, objects, sources)
    except Exception:
        log.warning("perfopt: compiling %d kernels failed", len(every), exc_info=True)
    entries: dict[str, Callable[..., Any]] = {}
    for name, group in kernels.items():
        try:
            entries |= compile_kernels(group, None, objects, sources)
        except Exception as error:
            reason = "runs through ATen, its kernel does not compile: {why}"
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            values = MappingProxyType({"why": text})
            decisions.append(Decision("lower", Verdict.FAILED, (name,), reason, values))
            del lowered[name]
    return entries


def _note(node: fx.Node, verdict: Verdict, reason: str, why: str) -> Decision:
    values = MappingProxyType({"why": why})
    return Decision("lower", verdict, (node.name,), reason, values, source_line(node))


def _dump(job: Compilation, record: GraphRecord, gm: fx.GraphModule) -> None:
    folder = Path(job.options.dump)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{record.kind}_{job.number.replace('/', '_')}".rstrip("_")
    graph = gm.print_readable(print_output=False)
    (folder / f"{stem}_graph.txt").write_text(graph)
    (folder / f"{stem}_program.py").write_text(record.program.source)
