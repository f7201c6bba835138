"""The user's source line of a node."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)


def source_line(node: fx.Node) -> str:
    """`file.py:12` of the innermost frame outside of torch that made the node, or ""."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return ""
    frames = _FRAME.findall(trace)
    chosen = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    if not chosen:
        return ""
    path, line = chosen[-1]
    return f"{Path(path).name}:{line}"


def first_source_line(nodes: Iterable[fx.Node]) -> str:
    """The source line of the first node that has one, or ""."""
    return next((line for line in map(source_line, nodes) if line), "")
