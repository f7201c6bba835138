"""What a fused region is, and what lowering it gives to the program."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch import fx

Size = int | sympy.Expr


@dataclass(frozen=True)
class Alloc:
    """A buffer that the program allocates: an output of a region, or its scratch.

    `shape` and `strides` count elements and may hold expressions in the graph's size symbols.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]


@dataclass(frozen=True)
class Call:
    """One kernel launch: the entry symbol and its arguments in order.

    An argument is the name of a region input or of an `Alloc` (its address is passed), or a size
    (an `int` or an expression in the graph's symbols, passed as int64). The number of threads
    follows as the last argument where the kernel runs on a CPU; the program adds it. There, the
    entry of a `checked` kernel returns non-zero where an index was out of range, and the program
    raises `IndexError`; on a GPU the kernel stops by itself, as eager's do.
    """

    entry: str
    args: tuple[str | Size, ...]
    checked: bool = False


@dataclass(frozen=True)
class LoweredRegion:
    """A region as kernel launches.

    `inputs` names the tensor placeholders in the order of the region's arguments, with "" for an
    argument that is a SymInt (its symbol is used instead). `outputs` come in the order of the
    region's results. `allocs` must all exist before the first of `calls`. All of it is on `device`,
    but for inputs of one element without dimensions on the CPU, which the program takes there.
    `source` is the user's line behind it.
    """

    name: str
    inputs: tuple[str, ...]
    allocs: tuple[Alloc, ...]
    outputs: tuple[str, ...]
    calls: tuple[Call, ...]
    device: torch.device = torch.device("cpu")
    source: str = ""


def is_region(node: fx.Node) -> bool:
    """Whether `node` calls a fused region (a submodule that fusion made)."""
    return node.op == "call_module" and node.meta.get("region") is True


def region_graph(node: fx.Node) -> fx.GraphModule:
    """The subgraph that a region node calls."""
    owner = node.graph.owning_module
    assert owner is not None
    module = owner.get_submodule(str(node.target))
    assert isinstance(module, fx.GraphModule)
    return module
