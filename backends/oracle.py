"""What a generated kernel can hold: the one answer that fusion acts on and others foresee by."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from perfopt.backends.index import Unsupported
from perfopt.backends.ir import TYPES
from perfopt.backends.lowering import KNOWN, build_kernels

DEVICES = ("cpu", "cuda")  # torch's types of devices that kernels run on; AMD's GPUs are "cuda"
DISABLED = "perfopt_disable"  # node.meta mark of modules that the user keeps out of kernels


def lowerable(node: fx.Node) -> str | None:
    """None if a generated kernel can hold the node, else the reason why not."""
    if node.op != "call_function":
        return f"{node.op} is not an operation"
    if node.target not in KNOWN:
        return f"{node.target} is not lowered"
    if node.meta.get(DISABLED):
        return "its module is disabled"
    if node.target is operator.getitem:
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.target not in KNOWN:
            return "an item of an operation that is not lowered"
        return None
    value, home = node.meta.get("val"), device_of(node)
    tensors = list(value) if isinstance(value, (tuple, list)) else [value]
    tensors += [arg.meta.get("val") for arg in node.all_input_nodes]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (reason := _foreign(tensor, home)):
            return reason
    if isinstance(value, (tuple, list)):
        return None  # judged with the items that pick its results
    return fusible([node])


def device_of(node: fx.Node) -> torch.device | None:
    """The device that a node computes tensors on; None where it computes none."""
    value = node.meta.get("val")
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(each, torch.Tensor):
            return each.device
    return None


def _foreign(tensor: torch.Tensor, home: torch.device | None) -> str | None:
    """Why kernels on the device `home` cannot touch a tensor, or None."""
    if tensor.device.type not in DEVICES:
        return f"a tensor on {tensor.device}"
    if tensor.device != home and (tensor.device.type != "cpu" or tensor.ndim):
        return f"tensors on {home} and {tensor.device}"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.dtype not in TYPES:
        return f"a tensor of {tensor.dtype}"
    if tensor.is_neg() or tensor.is_conj():
        return "a lazily negated or conjugated tensor"
    return None


def fusible(nodes: Sequence[fx.Node]) -> str | None:
    """None if the nodes, in graph order, can be one kernel, else the reason why not.

    The answer is the lowering itself, whose result is thrown away, so it cannot disagree with
    what is generated later.
    """
    homes = dict.fromkeys(home for node in nodes if (home := device_of(node)) is not None)
    if len(homes) > 1:
        return f"tensors on {' and '.join(map(str, homes))}"
    try:
        build_kernels("foreseen", nodes, _results(nodes))
    except Unsupported as refusal:
        return str(refusal)
    return None


def _results(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    members = set(nodes)
    used = [n for n in nodes if not n.users or any(user not in members for user in n.users)]
    return [n for n in used if isinstance(n.meta.get("val"), torch.Tensor)]
