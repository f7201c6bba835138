"""What perfopt needs of torch that torch does not promise to keep: all of it, and only here.

Written for torch 2.11 to 2.14. Everything else in perfopt calls these functions, so that a new
torch release is met by changing this one file.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import sympy
import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.printers import PythonPrinter

__all__ = ["TorchDispatchMode", "get_decompositions", "tree_flatten", "tree_leaves", "tree_map"]

Compiled = Callable[..., Any]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


def compile_joint(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    decompositions: Mapping[Any, Any],
    donate: bool,
    both: bool = False,
) -> Compiled:
    """Run AOTAutograd on Dynamo's graph and return its callable.

    The compilers get functional ATen graphs and return boxed callables. `partition` parts the
    joint graph of training. `donate` lets the backward graph overwrite what was saved for it.
    With `both` the backward graph is compiled at once, not when gradients are first asked for.
    """

    def first(part: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        # Without donation torch leaves the list unset, and takes that for a list of some at any
        # later backward pass that keeps its graph.
        context = TracingContext.try_get()
        if not donate and context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []
        return forward(part, inputs)

    lazily: dict[str, Any] = {"force_non_lazy_backward_lowering": True} if both else {}
    with functorch_config.patch(donated_buffer=donate, **lazily):
        return aot_autograd(
            fw_compiler=first,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=dict(decompositions),
        )(gm, example_inputs)


def split_joint(
    joint: fx.GraphModule,
    inputs: Any,
    shared: bool = False,
    choose: Callable[[fx.Graph], list[fx.Node] | None] | None = None,
    **given: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Part a joint graph by torch's minimum cut, which honours the user's checkpoint tags.

    `choose` says instead what to keep for the backward pass; where it gives None, torch does.
    Where common subexpressions are `shared` already, torch need not look for them: to do so it
    would import much of Inductor.
    """
    usual = partitioners.choose_saved_values_set

    def chosen(graph: fx.Graph, info: Any, *more: Any, **options: Any) -> list[fx.Node]:
        found = choose(graph) if choose is not None else None
        return usual(graph, info, *more, **options) if found is None else found

    with (
        functorch_config.patch(cse=functorch_config.cse and not shared),
        mock.patch.object(partitioners, "choose_saved_values_set", chosen),
    ):
        return min_cut_rematerialization_partition(joint, inputs, **given)


def _empty_strided(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


empty_strided_cpu: Callable[..., torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cpu", _empty_strided
)
"""The cheapest way to a new CPU tensor: sizes and strides as tuples, and a dtype."""


def _empty_strided_on_gpu(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


empty_strided_cuda: Callable[..., torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided_on_gpu
)
"""The same on the current GPU."""

current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The number of the current GPU, where torch has been told to use any."""

profiler = torch.autograd.profiler
PROFILING = "profiler._is_profiler_enabled"
"""Whether torch's profiler runs, as Python text over the module `profiler`."""


def fast_call(target: Any) -> Callable[..., Any]:
    """What an operator overload calls anyway, one Python frame sooner."""
    if type(target) is torch._ops.OpOverload:
        return target._op
    return target


def is_overload(target: Any) -> bool:
    """Whether `target` is one overload of an operator, such as `torch.ops.aten.add.Tensor`."""
    return isinstance(target, torch._ops.OpOverload)


def is_view(target: Any) -> bool:
    """Whether a call to `target` returns a view of its first argument."""
    return is_overload(target) and bool(target.is_view)


def python_expression(size: int | sympy.Expr) -> str:
    """A size as Python integer arithmetic over the names of its symbols."""
    return str(size) if isinstance(size, int) else PythonPrinter().doprint(size)


def floor_div(size: int | sympy.Expr, by: int) -> int | sympy.Expr:
    """`size // by`, as an expression that programs can print where it is symbolic."""
    return size // by if isinstance(size, int) else FloorDiv(size, sympy.Integer(by))


def onednn_linear() -> Any:
    """The operator of oneDNN's linear layer, or None where torch has no oneDNN.

    Called as (input, weight, bias, attribute, scalars, algorithm) on f32 matrices.
    """
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if packet is None or not torch.backends.mkldnn.is_available():
        return None
    return packet.default


def compile_id() -> str:
    """Dynamo's number of the frame being compiled, as in its logs; "" outside of one."""
    current = CompileContext.current_compile_id()
    return "" if current is None else str(current)


def frame_seconds(number: str) -> float | None:
    """Seconds that Dynamo took for the frame `number`, everything below it included."""
    for metrics in reversed(get_compilation_metrics()):
        if metrics.compile_id == number and metrics.entire_frame_compile_time_s is not None:
            return float(metrics.entire_frame_compile_time_s)
    return None


def compile_seconds() -> dict[str, float]:
    """Seconds of all compilations of this process by torch's own backends, by stage.

    "dynamo", "autograd", and "inductor", generating and compiling; 0.0 where torch does not tell.
    """
    found = {"dynamo": 0.0, "autograd": 0.0, "inductor": 0.0}
    for each in get_compilation_metrics():
        frame, backend, inductor = (
            float(getattr(each, name, None) or 0.0)
            for name in (
                "entire_frame_compile_time_s", "backend_compile_time_s", "inductor_compile_time_s"
            )
        )  # fmt: skip
        found["dynamo"] += max(0.0, frame - backend)
        # A backward graph is compiled later, in a record that has Inductor's part alone.
        found["autograd"] += max(0.0, backend - inductor)
        found["inductor"] += inductor
    return found


def calling_backend() -> tuple[Any, CodeType | None, Any]:
    """Who called the backend that is running, from the frames below it.

    The object by which `torch.compile` calls its backend, the code that Dynamo compiles, and the
    `self` of the method that it belongs to; None for what is not found.
    """
    owner, frame = None, sys._getframe(1).f_back
    while frame is not None:
        if owner is None and frame.f_code.co_name == "__call__":
            caller = frame.f_locals.get("self")
            owner = caller if isinstance(caller, torch._TorchCompileWrapper) else None
        elif frame.f_code.co_name == "_compile":
            code = frame.f_locals.get("code")
            if isinstance(code, CodeType):
                return owner, code, (frame.f_locals.get("locals") or {}).get("self")
        frame = frame.f_back
    return owner, None, None


def backend_of(compiled: Any) -> Any:
    """The object by which a `torch.compile` result calls its backend, or None."""
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled
    callbacks = [getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)]
    for cell in getattr(compiled, "__closure__", None) or ():
        callbacks.append(getattr(cell.cell_contents, "callback", cell.cell_contents))
    for callback in callbacks:
        if callable(callback):
            inner = innermost_backend(callback)
            if isinstance(inner, torch._TorchCompileWrapper):
                return inner
    return None


def is_compiled(target: Any) -> bool:
    """Whether `target` is what `torch.compile` returned, or a module compiled in place."""
    return (
        hasattr(target, "_torchdynamo_orig_callable")
        or hasattr(target, "dynamo_ctx")
        or getattr(target, "_compiled_call_impl", None) is not None
    )


@contextmanager
def fake_tensors() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Tensors made inside have shapes and no memory; yields what makes such a one of a real one.

    Modules may be moved and converted inside.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    moved: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}

    def apply(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
        """`Module._apply` with new parameters: torch cannot swap those without memory."""
        for child in module.children() if recurse else ():
            child._apply(function)
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is not None and id(value) not in moved:
                    with torch.no_grad():
                        made = function(value)
                    if held is module._parameters:
                        made = torch.nn.Parameter(made, value.requires_grad)
                    moved[id(value)] = (value, made)  # shared by modules, it stays so
                if value is not None:
                    held[name] = moved[id(value)][1]
        return module

    # It draws again until the values please it, and these have none; torch skips meta tensors too.
    unsampled = mock.patch.object(
        torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor
    )
    with mode, mock.patch.object(torch.nn.Module, "_apply", apply), unsampled:
        yield partial(mode.from_tensor, static_shapes=True)


@contextmanager
def fake_parameters(fake: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside of `fake_tensors`: tensors have values again, but the parameters of modules do not.

    For models that look at values while they are built; one parameter at a time is in memory.
    """

    def taken(module: Any, name: str, parameter: Any) -> Any:
        if parameter is None or isinstance(parameter, FakeTensor):
            return parameter
        return torch.nn.Parameter(fake(parameter.detach()), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(taken)
    try:
        with unset_fake_temporarily():
            yield
    finally:
        hook.remove()


def compile_alone(function: Callable[..., Any], backend: Compiler) -> Callable[..., Any]:
    """`function` compiled by `backend`, whatever other backends made of it before.

    The backend runs outside of `fake_tensors`.
    """

    def outside(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        with unset_fake_temporarily():
            return backend(gm, inputs)

    # Recompilations of one function count against a limit, but for those that are kept apart.
    known = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    more: dict[str, Any] = {"isolate_recompiles": True} if known else {}
    return torch.compile(function, backend=outside, **more)


@contextmanager
def graph_breaks() -> Iterator[list[tuple[str, str, int]]]:
    """Graph breaks that happen inside: reason, file and line of each, once the block has ended."""
    found: list[tuple[str, str, int]] = []
    start = len(graph_break_reasons)
    yield found
    own = str(Path(torch.__file__).parent)
    for each in graph_break_reasons[start:]:
        frames = [frame for frame in each.user_stack if not frame.filename.startswith(own)]
        place = (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)
        found.append((each.reason, *place))


def has_avx512_bf16() -> bool:
    """Whether this processor has the instructions of AVX512-BF16; False where torch cannot tell."""
    asked = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return asked is not None and bool(asked())


def allocated_peak(step: Callable[[], object], gpu: bool = False) -> int:
    """Bytes that `step` has allocated at most at one time, above what was there before.

    Those of torch's allocator for the CPU, or for the current GPU where `gpu`.
    """
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    with _silence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [
        (event.start_ns(), event.nbytes())
        for event in found.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    now = most = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        now += size
        most = max(most, now)
    return most


@contextmanager
def _silence() -> Iterator[None]:
    """Without what libraries write to the error stream: torch's profiler tells of itself there."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
