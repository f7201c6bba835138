"""Whole programs for a GPU that is not there: built by the compiler's own stages, then run.

A model is captured on the CPU; its graphs are then told that their tensors are on a GPU, and go
through passes, lowering, Triton's compiler and program as any other. What they launch goes to a
stand-in driver, or on to Triton's interpreter, which runs it on CPU memory.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from perfopt import compiler
from perfopt.backends.torch_private import calling_backend, compile_id
from perfopt.backends.triton import launch
from perfopt.cost_model.device import device_named
from perfopt.options import Options
from perfopt.records import Compilation, GraphRecord
from tests.backends.triton.driver import FakeDriver, Launch, pretending
from tests.backends.triton.interpreter import interpret

GPU = torch.device("cuda", 0)
Where = Callable[[fx.Node], torch.device]


def told_to_be_on_gpu(gm: fx.GraphModule, where: Where | None = None) -> fx.GraphModule:
    """The graph with its tensors on a GPU, or `where` that says."""
    for node in gm.graph.nodes:
        device = GPU if where is None else where(node)

        def moved(value: Any, device: torch.device = device) -> Any:
            if isinstance(value, torch.device):
                return device
            if not isinstance(value, FakeTensor):
                return value
            with value.fake_mode, torch.no_grad():
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                )

        for key in ("val", "example_value"):
            if key in node.meta:
                node.meta[key] = tree_map(moved, node.meta[key])
        node.args, node.kwargs = tree_map(moved, (node.args, node.kwargs))
    gm.recompile()
    return gm


class _Storages(TorchDispatchMode):
    """Knows the memory of every tensor that was given to it or made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[int, int] = {}

    def add(self, value: Any) -> None:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            storage = value.untyped_storage()
            self.ends[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_flatten(result)[0]:
            self.add(each)
        return result

    def tensor(self, address: int, dtype: torch.dtype) -> Tensor:
        """What is at an address, up to the end of its storage."""
        starts = sorted(self.ends)
        at = bisect.bisect_right(starts, address) - 1
        end = self.ends[starts[at]] if at >= 0 else 0
        if end < address or not address:
            return torch.empty(0, dtype=dtype)
        count = (end - address) // dtype.itemsize
        if not count:
            return torch.empty(0, dtype=dtype)
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype)


@dataclass
class OnGpu:
    """One graph's program for a GPU, callable on CPU tensors."""

    record: GraphRecord
    storages: _Storages = field(default_factory=_Storages)

    def __post_init__(self) -> None:
        space = self.record.program.run.__globals__
        for name, value in space.items():
            if name.startswith("empty_strided"):
                space[name] = _empty_strided
            elif isinstance(value, torch.device):
                space[name] = torch.device("cpu")

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """What the program returns; its launches go to the driver that is active."""
        with self.storages, torch.no_grad():
            for each in inputs:
                self.storages.add(each)
            return self.record.program.run(list(inputs))

    def calls(self, entry: Callable[..., None]) -> bool:
        """Whether the program has this entry."""
        space = self.record.program.run.__globals__
        return any(getattr(value, "__wrapped__", value) is entry for value in space.values())


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


@dataclass
class Built:
    """What became of one model: its compilation and the programs of its graphs."""

    job: Compilation
    programs: list[OnGpu]
    driver: FakeDriver
    inputs: list[Any]
    read: int = 0  # bytes, by the launches that were interpreted
    written: int = 0

    def __getitem__(self, kind: str) -> OnGpu:
        return next(made for made in self.programs if made.record.kind == kind)

    def interpret(self, each: Launch) -> None:
        """Run a launch in Triton's interpreter, on the memory of the program that made it."""
        launcher = next(x for x in launch._LAUNCHER_CACHE.values() if x.function is each.source.fn)
        program = next(x for x in self.programs if x.calls(launcher.entry))
        printed, addresses = launcher.printed, each.arguments
        buffers, tensors = printed.kernel.buffers, []
        for buffer, address in zip(buffers, addresses, strict=False):
            tensors.append(program.storages.tensor(address, launch._DTYPES[buffer.type]))
        sizes = addresses[len(buffers) : len(buffers) + len(printed.sizes)]
        written = [buffer.written for buffer in buffers]
        memory = interpret(each.source.fn, each.grid[0], tensors, written, sizes, printed.constants)
        self.read += memory.loads
        self.written += memory.stores

    def trained(self, *tangents: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The outputs of forward, the saved ones included, and the gradients by `inputs`."""
        forward, backward = self["forward"], self["backward"]
        outputs = forward(*self.inputs)
        nodes = forward.record.plan.captured.graph.output_node().args[0]
        known = {str(node): value for node, value in zip(nodes, outputs, strict=True)}
        rest = iter(tangents)
        asked = backward.record.plan.captured.graph.find_nodes(op="placeholder")
        given = [known[n.name] if n.name in known else next(rest) for n in asked]
        return outputs, backward(*given)


@dataclass(frozen=True)
class Captured:
    """A model's graphs, told to be on a GPU, with the inputs of the graph as Dynamo orders them."""

    plan: Compilation
    inputs: list[Any]


def captured(
    function: Callable[..., Any],
    args: Sequence[Any],
    dynamic: bool = False,
    where: Where | None = None,
) -> Captured:
    """The graphs of `function(*args)`, before any pass."""
    planned: list[Compilation] = []
    given: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        owner, code, _ = calling_backend()
        job = Compilation(compile_id(), Options(), owner, code, plans=[])
        planned.append(job)
        # An int of a SymInt would fix its value.
        given.extend(x.node.hint if isinstance(x, torch.SymInt) else x for x in inputs)
        return compiler.run_stages(job, gm, inputs, True)

    torch.compiler.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    (plan,) = planned
    for each in plan.plans or ():
        told_to_be_on_gpu(each.captured, where)
    return Captured(plan, [_plain(x) for x in given])


@contextmanager
def compiled(
    graphs: Captured, target: str = "sm_90", device: str = "h100", run: bool = True, **options: Any
) -> Iterator[Built]:
    """The programs of a model for a GPU; within it they can be called.

    With `run` they compute, in Triton's interpreter; without, their launches are only kept.
    """
    plan = graphs.plan
    job = Compilation(plan.number, Options(**options), code=plan.code, device=device_named(device))
    launch._LAUNCHER_CACHE.clear()  # what is in it launches by another driver
    with pretending(target) as driver:
        for each in plan.plans or ():
            compiler._part(job, each.kind, True, each.captured, [])
        made = Built(job, [OnGpu(record) for record in job.graphs], driver, graphs.inputs)
        if run:
            driver.run = made.interpret
        try:
            yield made
        finally:
            driver.run = None


@contextmanager
def built(
    function: Callable[..., Any],
    args: Sequence[Any],
    dynamic: bool = False,
    where: Where | None = None,
    **given: Any,
) -> Iterator[Built]:
    """The programs of `function(*args)`, as `compiled` makes them."""
    with compiled(captured(function, args, dynamic, where), **given) as made:
        yield made


def _plain(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
