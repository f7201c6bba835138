"""A region as kernels and the launches of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from perfopt.backends.index import Unsupported, as_size
from perfopt.backends.ir import TYPES, Kernel
from perfopt.backends.lowering import build_kernels
from perfopt.backends.region import Alloc, Call, LoweredRegion

_DTYPES = {name: dtype for dtype, name in TYPES.items()}


@dataclass(frozen=True)
class Lowered:
    """A region's launches and the kernels that they launch."""

    region: LoweredRegion
    kernels: tuple[Kernel, ...]


def lower_region(name: str, gm: fx.GraphModule, exact_rounding: bool = False) -> Lowered:
    """The region `gm` (functional ATen, a tuple output) as kernels named after `name`.

    With `exact_rounding` values of 16-bit floats are rounded after every operation, as eager
    does. Raises `Unsupported` where no kernel can hold it; eager execution of `gm` is the fallback.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    members = [node for node in gm.graph.nodes if node.op == "call_function"]
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    results: list[fx.Node] = list(output.args[0])
    for node in results:
        if not isinstance(node, fx.Node) or node.op != "call_function":
            raise Unsupported("a result that the region does not compute")
    tensors = [n for n in members if _is_data(n)]
    lowered = build_kernels(name, tensors, list(dict.fromkeys(results)), exact_rounding)
    names = {node: buffer for buffer, node in lowered.inputs.items()}
    names |= {node: buffer for buffer, node in lowered.outputs.items()}
    return Lowered(
        LoweredRegion(
            name=name,
            inputs=tuple(_input_name(node, names) for node in placeholders),
            allocs=(
                *(_alloc(buffer, node) for buffer, node in lowered.outputs.items()),
                *(Alloc(s.name, _DTYPES[s.type], (s.size,), (1,)) for s in lowered.scratch),
            ),
            outputs=tuple(names[node] for node in results),
            calls=tuple(_call(kernel) for kernel in lowered.kernels),
            device=results[0].meta["val"].device if results else torch.device("cpu"),
        ),
        tuple(lowered.kernels),
    )


def _is_data(node: fx.Node) -> bool:
    """Whether a node computes tensors; size arithmetic is done by the program."""
    value = node.meta.get("val")
    return isinstance(value, (torch.Tensor, tuple, list))


def _input_name(node: fx.Node, names: dict[fx.Node, str]) -> str:
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return ""
    # An input that no kernel reads (only its shape matters) still takes its place.
    return names.get(node, f"unused_{node.name}")


def _alloc(buffer: str, node: fx.Node) -> Alloc:
    tensor = node.meta["val"]
    shape = tuple(as_size(n) for n in tensor.shape)
    strides = tuple(as_size(n) for n in tensor.stride())
    if any(stride == 0 and size != 1 for size, stride in zip(shape, strides, strict=True)):
        raise Unsupported("a result whose elements share memory")
    return Alloc(buffer, tensor.dtype, shape, strides)


def _call(kernel: Kernel) -> Call:
    buffers = tuple(buffer.name for buffer in kernel.buffers)
    return Call(kernel.name, buffers + kernel.sizes, kernel.checked)
