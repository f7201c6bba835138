"""Graphs for the tests of passes: functions traced to ATen, and graphs run side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from perfopt.backends.decompositions import decompositions
from perfopt.cost_model.device import Device
from perfopt.cost_model.roofline import CostModel

# A device of round figures: 1 us a call, 10 GB/s, 100 GFLOP/s.
ROUND = Device(
    name="round", kind="cpu", peaks={"float32": 1e11, "float64": 5e10},
    vector={"float32": 1e11, "float64": 5e10}, memory_bandwidth=1e10, memory_bytes=1e10,
    launch_seconds=1e-6, cores=1,
)  # fmt: skip


def prices() -> CostModel:
    return CostModel(ROUND)


def trace(fn: Callable[..., Any], *args: Any, symbolic: bool = False) -> fx.GraphModule:
    mode = "symbolic" if symbolic else "fake"
    return make_fx(fn, decomposition_table=decompositions(), tracing_mode=mode)(*args)


def run(gm: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    torch.manual_seed(1)
    with torch.no_grad():
        copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        found = fx.Interpreter(gm).run(*copies)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def assert_same(one: fx.GraphModule, other: fx.GraphModule, args: Sequence[Any]) -> None:
    """Both graphs give the same to the last bit, NaN and signed zeros included."""
    for a, b in zip(run(one, args), run(other, args), strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b
            continue
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        if a.is_floating_point():
            assert torch.equal(torch.signbit(a), torch.signbit(b))


def targets(gm: fx.GraphModule) -> list[str]:
    """The calls of a graph in order, by short names."""
    return [
        str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
        for node in gm.graph.nodes
        if node.op.startswith("call_")
    ]


def members(gm: fx.GraphModule) -> list[list[str]]:
    """What each region of a graph calls."""
    return [targets(module) for name, module in gm.named_children() if "region_" in name]


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


WIDTH, HEADS = 16, 2


def gpt_block(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """A transformer block in plain operations: (batch, time, WIDTH) in and out."""
    batch, time, width = x.shape
    ln1, b1, qkv, out, ln2, b2, up, down = weights
    q, k, v = (layer_norm(x, ln1, b1) @ qkv).split(width, dim=-1)
    q, k, v = (t.reshape(batch, time, HEADS, -1).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / (width // HEADS) ** 0.5
    mask = torch.ones(time, time, dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    mixed = (softmax(scores) @ v).transpose(1, 2).reshape(batch, time, width)
    x = x + mixed @ out
    return x + F.gelu(layer_norm(x, ln2, b2) @ up, approximate="tanh") @ down


def gpt_arguments(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, list[torch.Tensor]]:
    shapes = [(WIDTH,), (WIDTH,), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH,),
              (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]  # fmt: skip
    return torch.randn(2, 6, WIDTH, dtype=dtype), [torch.randn(s, dtype=dtype) for s in shapes]


def with_gradients(fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A function that gives the sum of `fn` and its gradients for the first argument and lists."""

    def stepped(x: torch.Tensor, weights: list[torch.Tensor]) -> Any:
        leaves = [x, *weights]
        with torch.enable_grad():
            loss = fn(x, weights).square().sum()
            return [loss, *torch.autograd.grad(loss, leaves)]

    return stepped


def gpt_step(symbolic: bool = False) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A block's forward and backward pass as one graph, with arguments for it."""
    x, weights = gpt_arguments()
    leaves = [x.requires_grad_(), *(w.requires_grad_() for w in weights)]
    step = with_gradients(gpt_block)
    gm = trace(lambda *flat: step(flat[0], list(flat[1:])), *leaves, symbolic=symbolic)
    return gm, [leaf.detach() for leaf in leaves]


def text(gm: fx.GraphModule) -> str:
    """A graph in a few lines: one per call, regions with what they hold."""
    lines = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr") or (
            node.op == "call_function" and "getitem" in str(node.target)
        ):
            continue
        if node.op == "output":
            lines.append(f"return {', '.join(map(str, node.all_input_nodes))}")
            continue
        operands = ", ".join(map(str, node.args))
        name = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
        if node.op == "call_module":
            inner = " ".join(targets(gm.get_submodule(str(node.target))))  # type: ignore[arg-type]
            name, operands = "region", f"{operands}: {inner}"
        results = [user.name for user in node.users] if name == "region" else [node.name]
        lines.append(f"{', '.join(results)} = {name}({operands})")
    return "\n".join(lines)
