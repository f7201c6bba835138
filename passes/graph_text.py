"""Graphs as text: one line for every node, with its dtype, its sizes and the user's line."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from perfopt.passes.source import source_line

_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


def graph_text(gm: fx.GraphModule) -> str:
    """The graph; regions with their operations indented below them."""
    return "\n".join(_lines(gm, "")) + "\n"


def _lines(gm: fx.GraphModule, indent: str) -> list[str]:
    lines: list[str] = []
    source = ""
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"{indent}return {_argument(node.args[0])}")
            continue
        text = f"{indent}{node.name}: {_type(node.meta.get('val'))}"
        if node.op != "placeholder":
            text += f" = {_target(node)}({_arguments(node)})"
        now = source_line(node)
        if now and now != source:
            source, text = now, f"{text}  # {now}"
        lines.append(text)
        inner = getattr(gm, str(node.target), None) if node.op == "call_module" else None
        if isinstance(inner, fx.GraphModule):
            lines += _lines(inner, indent + "    ")
    return lines


def _target(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    text = str(node.target)
    return text if text.startswith("aten.") else str(getattr(node.target, "__name__", text))


def _arguments(node: fx.Node) -> str:
    keywords = [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    return ", ".join([*map(_argument, node.args), *keywords])


def _argument(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_argument, value))})"
    return str(value)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        return f"{_SHORT.get(value.dtype, str(value.dtype))}[{sizes}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_type, value))})"
    return type(value).__name__
