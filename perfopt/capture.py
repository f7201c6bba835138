"""The graphs that a model would be compiled to, found without weights, kernels or the device."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from perfopt.backends.torch_private import (
    calling_backend,
    compile_alone,
    compile_id,
    fake_parameters,
    fake_tensors,
    graph_breaks,
    tree_leaves,
    tree_map,
)
from perfopt.compiler import run_stages
from perfopt.cost_model.device import Device
from perfopt.disabling import is_disabled
from perfopt.options import Options
from perfopt.pipelines import check_pipeline
from perfopt.records import Compilation
from perfopt.workload import Workload, workload_of

_VALUELESS = ("DataDependentOutputException", "GuardOnDataDependentSymNode")
_GPU = re.compile(r"(cuda|xpu|mps)(:\d+)?")
Made = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class CaptureError(RuntimeError):
    """A model that cannot be run on tensors without values; the message says where and why."""


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo ended a graph before the model's end: its reason, and the user's line."""

    reason: str
    explanation: str
    source: str


@dataclass(frozen=True)
class Capture:
    """A model's compilations, planned only, in the order in which Dynamo found them.

    `workload` is what its inputs are by their shapes.
    """

    jobs: tuple[Compilation, ...]
    breaks: tuple[GraphBreak, ...]
    workload: Workload | None


def capture(
    make: Callable[[], Made], train: bool, devices: Sequence[Device], options: Options
) -> list[Capture]:
    """Plan the compilation of what `make` gives, for each device, tracing it once for all.

    `make` gives a callable, its arguments and its keywords. It is called where tensors have no
    memory; real ones that it gives count as such. With `train` the backward graphs are planned too.
    Raises `CaptureError`; what `make` raises passes.
    """
    check_pipeline(options)
    jobs: list[list[Compilation]] = []  # one list for each of Dynamo's graphs

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        owner, code, root = calling_backend()
        number = compile_id()
        jobs.append(
            [Compilation(number, options, owner, code, device=each, plans=[]) for each in devices]
        )
        first, *others = jobs[-1]
        generate = options.mode != "aten" and not is_disabled(root)
        return run_stages(first, gm, inputs, generate, others)

    with fake_tensors() as fake:
        with _OnCpu():
            function, args, kwargs = _made(make, fake)

        def empty(x: Any) -> Any:
            return fake(x) if isinstance(x, Tensor) else x

        args, kwargs = tree_map(empty, (tuple(args), dict(kwargs)))
        with (
            warnings.catch_warnings(),
            _without_weights(function, fake),
            torch.set_grad_enabled(train),
            graph_breaks() as breaks,
        ):
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            try:
                compile_alone(function, backend)(*args, **kwargs)
            except Exception as error:
                raise _plainer(error, lambda: function(*args, **kwargs)) from error
    reasons = tuple(_break(*each) for each in breaks)
    if not any(group[0].plans for group in jobs):
        why = f": {reasons[0].reason}" if reasons else ""
        raise CaptureError(f"nothing was captured: torch.compile leaves this to eager{why}")
    workload = workload_of(tree_leaves((args, kwargs)))
    return [Capture(tuple(each), reasons, workload) for each in zip(*jobs, strict=True)]


def _made(make: Callable[[], Made], fake: Callable[[Tensor], Tensor]) -> Made:
    try:
        return make()
    except Exception as error:
        if not any(type(each).__name__ in _VALUELESS for each in _causes(error)):
            raise
    with fake_parameters(fake):  # the model looks at values while it is built
        return make()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU, so that any model can be built anywhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with the CPU in the place of GPUs."""
        if getattr(func, "__name__", "") in ("cuda", "xpu") and args:
            return args[0]
        args, kwargs = tree_map(_cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


def _cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type not in ("cpu", "meta"):
        return torch.device("cpu")
    if isinstance(value, str) and _GPU.fullmatch(value):
        return "cpu"
    return value


@contextmanager
def _without_weights(function: Any, fake: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Tensors without memory in the place of a module's parameters and buffers."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    made: dict[int, Tensor] = {}
    if isinstance(function, nn.Module):
        for module in function.modules():
            tables: list[dict[str, Any]] = [module._parameters, module._buffers]
            for held in tables:
                kept.append((held, dict(held)))
                for name, value in held.items():
                    if value is not None:
                        held[name] = made.setdefault(id(value), fake(value))
    try:
        yield
    finally:
        for held, former in kept:
            held.clear()
            held.update(former)


def _break(reason: str, file: str, line: int) -> GraphBreak:
    """Dynamo's reason taken apart; addresses and links say nothing to a reader."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", reason)
    first, _, rest = text.partition("\n")
    found = re.search(r"Explanation: (.*?)(?=\n  Hint:|\n\n|\Z)", rest, re.DOTALL)
    explanation = " ".join(found.group(1).split()) if found else ""
    return GraphBreak(first.strip(), explanation, f"{Path(file).name}:{line}" if file else "")


def _plainer(error: Exception, eager: Callable[[], Any]) -> CaptureError:
    """What is wrong, in the words of the model run eagerly where that fails as well."""
    try:
        eager()
    except Exception as own:
        return CaptureError(_problem(own))
    return CaptureError(_problem(error))


def _problem(error: BaseException) -> str:
    """One line of what went wrong: the innermost cause, and the user's line."""
    where = user_line(error)
    inner = error
    while (cause := inner.__cause__) is not None:
        inner, where = cause, user_line(cause) or where
    text = next((line.strip() for line in str(inner).splitlines() if line.strip()), "")
    name = type(inner).__name__
    if name in _VALUELESS:
        text = f"the model reads the value of a tensor, which has none here ({text})"
    else:
        text = f"{name}: {text}" if text else name
    return f"{where}: {text}" if where else text


def user_line(error: BaseException) -> str:
    """`file.py:12` of the innermost frame outside of torch and perfopt that raised, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_TORCH, _HERE, "<"))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
