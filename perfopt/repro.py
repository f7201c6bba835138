"""Files that show one fault and nothing else: what `perfopt verify` writes, and what they call.

A file holds a region's subgraph, or one of Dynamo's graphs, as Python code, and its inputs. Inputs
are numbers from a seed where these show the fault too, else the very ones.
"""

from __future__ import annotations

import base64
import operator
import textwrap
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from perfopt.backends.lower import lower_region
from perfopt.backends.mlir.compile import compile_kernels
from perfopt.backends.program import build_program
from perfopt.checking import Check, Recorded, attempt, expected
from perfopt.options import Options
from perfopt.running import Subject
from perfopt.verify import VerificationError, verify_region

Spec = Mapping[str, Any]
_FILE = '''\
"""{title}

    python {file}

exits 1 while the fault is there, 0 once it is gone. Written by perfopt {perfopt}, torch {torch}.
"""

import sys

import torch
from torch import device, inf, nan  # noqa: F401

from perfopt.repro import {check}, tensor


class Graph(torch.nn.Module):
{code}


INPUTS = [
{inputs}
]
OPTIONS = {options}


def problem() -> str:
    """What is wrong, or nothing."""
    return {check}(Graph(), INPUTS, **OPTIONS)


if __name__ == "__main__":
    found = problem()
    print(found or "right")
    sys.exit(1 if found else 0)
'''


def tensor(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    data: str = "",
    grad: bool = False,
) -> Tensor:
    """An input: numbers from a seed, or, as `packed` wrote it, the memory that `data` holds."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    if data:
        raw = bytearray(zlib.decompress(base64.b64decode(data)))
        memory = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
    else:
        numbers = torch.Generator().manual_seed(seed)
        if dtype.is_floating_point:
            memory = torch.randn(size, generator=numbers, dtype=torch.float32).to(dtype)
        else:
            memory = torch.randint(0, 2, (size,), generator=numbers).to(dtype)
    made = torch.as_strided(memory, tuple(shape), tuple(stride))
    return made.requires_grad_(grad and dtype.is_floating_point)


def spec(value: Any, number: int, real: bool) -> str:
    """The text of an input: of its shape and a seed, or of its own memory."""
    if not isinstance(value, Tensor):
        return repr(value)
    parts = [repr(tuple(value.shape)), repr(value.stride()), str(value.dtype)]
    if real:
        size = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        memory = torch.as_strided(value.detach(), (size if value.numel() else 0,), (1,))
        raw = memory.contiguous().view(torch.uint8).numpy().tobytes()
        parts.append(f'data="{base64.b64encode(zlib.compress(raw)).decode()}"' if raw else "seed=0")
    else:
        parts.append(f"seed={number}")
    if value.requires_grad:
        parts.append("grad=True")
    return f"tensor({', '.join(parts)})"


def region_problem(module: nn.Module, inputs: Sequence[Any], exact_rounding: bool = False) -> str:
    """Generate a region's kernels anew, run them, and say how they differ from eager, or ""."""
    try:
        gm = _region(module, inputs)
        region = gm.get_submodule("region_0")
        assert isinstance(region, fx.GraphModule)
        made = lower_region("region_0", region, exact_rounding)
        kernels = compile_kernels(made.kernels)
        program = build_program(
            "repro", gm, {"region_0": made.region}, kernels, verify=partial(verify_region, "repro")
        )
        program.run([x for x in inputs if isinstance(x, Tensor)])
    except VerificationError as error:
        return str(error)
    return ""


def _region(module: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """A graph that calls the module as its only region; numbers among the inputs are built in."""
    inner = fx.symbolic_trace(module)
    _evaluate(inner, inputs)
    outer = fx.Graph()
    arguments = []
    for node in inner.graph.nodes:
        if node.op == "placeholder":
            arguments.append(outer.placeholder(node.name))
            arguments[-1].meta = dict(node.meta)
    root = nn.Module()
    root.add_module("region_0", inner)
    call = outer.call_module("region_0", tuple(arguments))
    results = inner.graph.output_node().args[0]
    assert isinstance(results, tuple)
    values = [result.meta["val"] for result in results]  # type: ignore[union-attr]
    call.meta |= {"region": True, "val": tuple(values)}
    items = []
    for number, value in enumerate(values):
        items.append(outer.call_function(operator.getitem, (call, number)))
        items[-1].meta["val"] = value
    outer.output(tuple(items))
    return fx.GraphModule(root, outer)


def _evaluate(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Give every node its value as `meta["val"]`; what are numbers become constants."""
    given = iter(inputs)
    for node in list(gm.graph.nodes):
        if node.op == "output":
            continue
        if node.op == "placeholder":
            value = next(given)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            value = node.target(*args, **kwargs)
        node.meta["val"] = value
        if isinstance(value, (Tensor, tuple, list)):
            continue
        for user in list(node.users):
            user.args, user.kwargs = fx.map_arg(
                (user.args, user.kwargs), partial(_filled, node, value)
            )
        gm.graph.erase_node(node)
    gm.recompile()


def _filled(node: fx.Node, value: Any, each: fx.Node) -> Any:
    return value if each is node else each


def graph_problem(module: nn.Module, inputs: Sequence[Any], **options: Any) -> str:
    """Compile a graph and say how its results or gradients differ from eager's, or ""."""
    train = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    subject = Subject(module, tuple(inputs), {}, train)
    trial = attempt(subject, expected(subject), Options.from_user(options=options))
    if trial.error is not None:
        return f"{type(trial.error).__name__}: {trial.error}"
    if trial.region is not None:
        return str(trial.region)
    return next((f"{row.name} {row.problem}" for row in trial.rows if row.problem), "")


def write(path: Path, found: Check, options: Options) -> bool:
    """Write the smallest file that shows the fault; False where none does."""
    trial, culprit = found.trial, found.culprit
    for error in (trial.region, culprit.trial.region if culprit else None):
        if error is not None and write_region(path, error, options.exact_rounding):
            return True
    if culprit is None:
        return False
    given = {"limit": culprit.number, "verify": True}
    title = "The results of a graph."
    if culprit.decision is not None:
        title = f"{culprit.decision.pass_name}: {culprit.decision.text()}"
    return any(write_graph(path, title, each, given) for each in culprit.trial.recorded)


def write_region(path: Path, error: VerificationError, exact_rounding: bool) -> bool:
    """Write a file that shows a region's fault; False where it does not appear alone."""
    options = {"exact_rounding": True} if exact_rounding else {}
    inputs = error.inputs
    return _write(path, str(error), error.graph, inputs, region_problem, options)


def write_graph(path: Path, title: str, record: Recorded, options: Mapping[str, Any]) -> bool:
    """Write a file that shows the fault in one of Dynamo's graphs; False where it does not appear.

    Graphs that hold other graphs or constants of their own cannot be written.
    """
    graph = record.graph
    if record.inputs is None or any(n.op in ("get_attr", "call_module") for n in graph.graph.nodes):
        return False
    return _write(path, title, graph, record.inputs, graph_problem, options)


def _write(
    path: Path,
    title: str,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    check: Callable[..., str],
    options: Mapping[str, Any],
) -> bool:
    code = fx.GraphModule(graph, graph.graph).code
    for real in (False, True):
        specs = [spec(value, number, real) for number, value in enumerate(inputs)]
        text = _FILE.format(
            title="\n".join(textwrap.wrap(_quoted(title), 98)),
            file=path.name,
            perfopt=version("perfopt"),
            torch=torch.__version__,
            check=check.__name__,
            code="\n".join(f"    {line}".rstrip() for line in code.strip().splitlines()),
            inputs="\n".join(f"    {each}," for each in specs),
            options=repr(dict(options)),
        )
        if _shows(text, path):
            path.write_text(text, encoding="utf-8")
            return True
    return False


def _quoted(text: str) -> str:
    """The text as it may stand in a docstring."""
    return text.replace("\\", "\\\\").replace('"', "'")


def _shows(text: str, path: Path) -> bool:
    """Whether the file, run here, finds the fault."""
    space: dict[str, Any] = {"__name__": "repro"}
    try:
        exec(compile(text, str(path), "exec"), space)
        return bool(space["problem"]())
    except Exception:
        return False
