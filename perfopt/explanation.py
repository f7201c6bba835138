"""`perfopt.explain`: what a model costs on a device, and what the compiler decides about it.

The model is captured with tensors that have no memory, so neither weights nor the device are
needed, and nothing is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import fx

from perfopt import explained_html, explained_json, explained_text
from perfopt.backends.ir import Kernel
from perfopt.backends.region import is_region, region_graph
from perfopt.backends.show import describe
from perfopt.backends.torch_private import is_overload
from perfopt.backends.triton.printer import print_kernel
from perfopt.calibrations import named
from perfopt.capture import Capture, Made, capture
from perfopt.cost_model.cost import Cost
from perfopt.cost_model.decision import Decision
from perfopt.cost_model.device import Device
from perfopt.cost_model.memory import MemoryReport, memory_of
from perfopt.cost_model.roofline import CostModel
from perfopt.cost_model.traffic import is_view
from perfopt.cost_model.trust import expected_error, family
from perfopt.explained import Explained, Part, Piece, Ran
from perfopt.measured import measure
from perfopt.options import Options
from perfopt.passes.graph_text import graph_text
from perfopt.passes.source import first_source_line, source_line
from perfopt.pipelines import cost_model
from perfopt.records import Compilation, Plan
from perfopt.workload import Workload


class Explanation(Explained):
    """What a model costs on a device and what was decided about it, as data, text and JSON.

    `regions` and `library_calls` are what runs, `decisions` what was chosen and refused, each with
    what costs most first; `lines` has both by the user's line, `graphs` by graph, `graph_breaks`
    the reasons why there are several. `cost` is the sum of all that runs, `before` its price
    without the passes.
    """

    def __repr__(self) -> str:
        seconds = explained_text.seconds_text(self.cost.seconds)
        return (
            f"<perfopt explanation: {self.function} on {self.device.name}, {seconds}, "
            f"{len(self.regions)} regions, {len(self.library_calls)} library calls>"
        )

    def __str__(self) -> str:
        return self.text()

    def text(self, every: bool = False) -> str:
        """For reading at 80 columns; with `every`, what takes less than 1% of the time too."""
        return explained_text.whole(self, every)

    def why(self, node: str) -> str:
        """What became of one operation or region; raises `ValueError` for an unknown name."""
        return explained_text.why(self, node)

    def after_passes(self) -> str:
        """Every graph after each pass, where the explanation was made with `passes`."""
        return explained_text.passes(self)

    def kernels(self) -> str:
        """The kernels that would be generated, as text."""
        return explained_text.kernels(self)

    def to_html(self, kernels: bool = False) -> str:
        """As one HTML page that needs no other file; with `kernels`, their source too.

        Raises `PlotError` without matplotlib, which `pip install perfopt[html]` brings.
        """
        return explained_html.page(self, kernels)

    def to_json(self) -> str:
        """As JSON of the schema in `docs/explain.md`."""
        return explained_json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Explanation:
        """What `to_json` wrote; raises `ValueError` for anything else."""
        read = explained_json.loads(text)
        return cls(**{each.name: getattr(read, each.name) for each in dataclasses.fields(read)})


def explain(
    model: Callable[..., Any],
    *args: Any,
    train: bool = False,
    device: str | Device = "cpu",
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """What `model(*args, **kwargs)` costs on `device`, and what perfopt decides about it.

    Nothing is computed: weights and inputs only lend their shapes, and the device, by name, need
    not be here. With `train` the backward pass is explained too. `options` are those of
    `perfopt.compile`. Raises `UnknownDeviceError`, `OptionError`, or `CaptureError` where the model
    asks for the values of tensors.
    """
    name = getattr(model, "__qualname__", type(model).__name__)
    return explain_made(lambda: (model, args, kwargs), name, train, device, options)


def explain_each(
    model: Callable[..., Any],
    *args: Any,
    devices: Sequence[str | Device],
    train: bool = False,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Explanation, ...]:
    """`explain` for each of `devices`, in their order; the model is traced once for all of them."""
    name = getattr(model, "__qualname__", type(model).__name__)
    return explain_made_each(lambda: (model, args, kwargs), name, train, devices, options)


def explain_made(
    make: Callable[[], Made],
    name: str,
    train: bool = False,
    device: str | Device = "cpu",
    options: Mapping[str, Any] | None = None,
    passes: bool = False,
    measured: bool = False,
    optimizer: str = "none",
    workload: Workload | None = None,
) -> Explanation:
    """The same for what `make` gives: a callable, its arguments and its keywords.

    `make` runs where tensors have no memory, so that models of any size can be built. With `passes`
    the graph after each pass is kept as text. With `measured` the model is run as well, which needs
    memory and the device: only "cpu" so far, else `ValueError`. `workload` is what a step works
    through; without it, what the shapes of the inputs say.
    """
    (found,) = explain_made_each(
        make, name, train, [device], options, passes, measured, optimizer, workload
    )
    return found


def explain_made_each(
    make: Callable[[], Made],
    name: str,
    train: bool = False,
    devices: Sequence[str | Device] = ("cpu",),
    options: Mapping[str, Any] | None = None,
    passes: bool = False,
    measured: bool = False,
    optimizer: str = "none",
    workload: Workload | None = None,
) -> tuple[Explanation, ...]:
    """`explain_made` for each of `devices`, in their order, from one trace of the model."""
    chosen = Options.from_user(options=options)
    targets = [named(each) if isinstance(each, str) else each for each in devices]
    for device, target in zip(devices, targets, strict=True):
        if measured and device != "cpu":
            raise ValueError(
                f"measuring needs the device: this machine is 'cpu', not {target.name!r}"
            )
    seconds = None
    found = []
    for target, captured in zip(targets, capture(make, train, targets, chosen), strict=True):
        parts = tuple(_parts(captured.jobs, CostModel(target)))
        if measured:
            seconds = measure(make, train, chosen) if seconds is None else seconds
            parts = _measured(parts, seconds)
        found.append(
            Explanation(
                name,
                target,
                train,
                MappingProxyType(_changed(chosen)),
                _versions(),
                captured.breaks,
                parts,
                tuple(_passes(captured)) if passes else (),
                *_memory(captured.jobs, optimizer if train else "none"),
                workload or captured.workload,
            )
        )
    return tuple(found)


def _memory(
    jobs: Sequence[Compilation], optimizer: str = "none"
) -> tuple[MemoryReport | None, int]:
    """The memory of the graph that needs most, its backward graph with it; peaks of the others."""
    found = []
    for job in jobs:
        plans = {plan.kind: plan for plan in _plans(job)}
        first = plans.get("forward") or plans.get("inference")
        if first is None:
            continue
        graph = first.graph.graph
        inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
        named = dict(zip(inputs, job.inputs, strict=False))
        back = plans.get("backward")
        report = memory_of(
            graph,
            back.graph.graph if back else None,
            results=job.results,
            parameters=[name for name, kind in named.items() if kind == "parameters"],
            buffers=[name for name, kind in named.items() if kind == "buffers"],
            optimizer=optimizer,
        )
        found.append(report)
    most = max(found, key=lambda report: report.peak, default=None)
    return most, sum(report.peak for report in found if report is not most)


def _plans(job: Compilation) -> Sequence[Plan]:
    return [graph.plan for graph in job.graphs] if job.plans is None else job.plans


def _measured(
    parts: tuple[Part, ...], seconds: Mapping[tuple[str, str], float]
) -> tuple[Part, ...]:
    return tuple(
        replace(
            part,
            pieces=tuple(
                replace(piece, measured=seconds.get((part.name, piece.name)))
                for piece in part.pieces
            ),
        )
        for part in parts
    )


def _passes(captured: Capture) -> Iterator[Ran]:
    for number, job in enumerate(captured.jobs):
        for kind, steps in job.history:
            for step in steps:
                text = graph_text(step.graph) if step.changed else ""
                yield Ran(f"{number} {kind}", step.text, text)


def _changed(options: Options) -> dict[str, object]:
    """The options that are not at their defaults."""
    found: dict[str, object] = {}
    for each in dataclasses.fields(options):
        value = getattr(options, each.name)
        if value != each.default:
            found[each.name] = list(value) if isinstance(value, tuple) else value
    return found


def explain_compiled(jobs: Sequence[Compilation], name: str) -> Explanation:
    """The same of what was compiled for this machine."""
    graphs = [graph for job in jobs for graph in job.graphs]
    options = jobs[0].options if jobs else Options()
    devices = [job.device for job in jobs if job.device is not None]  # GPUs
    cost = CostModel(devices[0]) if devices else cost_model(torch.get_num_threads())
    memory, besides = _memory(jobs)
    return Explanation(
        name,
        cost.device,
        any(graph.kind == "backward" for graph in graphs),
        MappingProxyType(_changed(options)),
        _versions(),
        (),
        tuple(_parts(jobs, cost)),
        memory=memory,
        besides=besides,
    )


def _versions() -> Mapping[str, str]:
    return MappingProxyType({"perfopt": version("perfopt"), "torch": torch.__version__})


def _parts(jobs: Sequence[Compilation], cost: CostModel) -> Iterator[Part]:
    for number, job in enumerate(jobs):
        function = _function(job.code)
        if job.decisions:
            made = tuple(map(_plain, job.decisions))
            yield Part(number, "joint", function, 0, Cost(), 0, (), made)
        for plan in _plans(job):
            yield _part(number, function, plan, cost)


def _function(code: CodeType | None) -> str:
    """The user's function; "" where Dynamo began in torch's own code, as for `nn.Sequential`."""
    if code is None or code.co_filename.startswith(str(Path(torch.__file__).parent)):
        return ""
    return code.co_qualname.replace("<locals>.", "")


def _part(number: int, function: str, plan: Plan, cost: CostModel) -> Part:
    return Part(
        number,
        plan.kind,
        function,
        sum(node.op == "call_function" for node in plan.captured.graph.nodes),
        cost.graph(plan.captured),
        cost.peak_bytes(plan.graph),
        tuple(_pieces(plan, cost)),
        tuple(map(_plain, plan.decisions)),
    )


def _pieces(plan: Plan, cost: CostModel) -> Iterator[Piece]:
    for node in plan.graph.graph.nodes:
        if not is_region(node):
            yield from _call(node, cost)
            continue
        inside = [n for n in region_graph(node).graph.nodes if n.op == "call_function"]
        kernels = plan.kernels.get(str(node.target))
        if kernels is None:  # the lowering refused it
            for each in inside:
                yield from _call(each, cost)
            continue
        yield Piece(
            "region",
            str(node.target),
            tuple(_operator(each) for each in inside if not is_view(each)),
            tuple(each.name for each in inside),
            tuple(_kernel_text(kernel, cost.device) for kernel in kernels),
            first_source_line(inside),
            price := cost.node(node),
            error=expected_error(cost.device, "region", price.seconds),
        )


def _kernel_text(kernel: Kernel, device: Device) -> str:
    """The kernel for reading: for a GPU the Triton source, for a CPU its operations."""
    if device.kind == "gpu":
        return print_kernel(kernel).named(kernel.name)
    return describe(kernel)


def _call(node: fx.Node, cost: CostModel) -> Iterator[Piece]:
    """A library call, unless it only looks at memory or computes a size."""
    price = cost.node(node)
    if price.launches:
        names = (_operator(node),), (node.name,)
        error = expected_error(cost.device, family(names[0]), price.seconds)
        line = source_line(node)
        yield Piece("library call", node.name, *names, (), line, price, error=error)


def _operator(node: fx.Node) -> str:
    if is_overload(node.target):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def _plain(decision: Decision) -> Decision:
    """The decision with values that JSON can hold."""
    values = {
        key: value if isinstance(value, (bool, int, float, str)) else str(value)
        for key, value in decision.values.items()
    }
    return replace(decision, values=MappingProxyType(values))
