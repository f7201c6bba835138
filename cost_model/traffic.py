"""Bytes: what nodes read and write, views and broadcast dimensions counted for what they are.

Every size is evaluated at its hint, so nothing here adds a guard. A view (an alias of its operand,
or an item of a tuple) moves nothing; what is read through it is charged to its root, the value
that the memory was written by, and never more than the root holds.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx

aten = torch.ops.aten
UNBACKED = 8192  # stands for a size that depends on data and has no hint
_MORE_VIEWS = frozenset({aten._unsafe_view.default, aten.lift_fresh_copy.default})
# They read, of their first operand, only what they give.
_PICKING = frozenset(
    {
        aten.embedding.default, aten.index.Tensor, aten.gather.default, aten._unsafe_index.Tensor,
        aten.index_select.default, aten.slice_scatter.default,
    }
)  # fmt: skip
# They read nothing but the shape of their operand.
_SHAPE_ONLY = frozenset(
    {
        aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
        aten.empty_like.default, aten.rand_like.default, aten.randn_like.default,
        aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
        aten.new_empty.default, aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default,
    }
)  # fmt: skip
Read = tuple[fx.Node, fx.Node, int]  # (root, the alias it is read through, bytes)


# Whether sizes are given as expressions instead of numbers: see `symbolic`.
_SYMBOLIC: ContextVar[bool] = ContextVar("symbolic", default=False)


@contextmanager
def symbolic() -> Iterator[None]:
    """Within it symbolic sizes are `sympy` expressions, and so is all that is computed of them."""
    token = _SYMBOLIC.set(True)
    try:
        yield
    finally:
        _SYMBOLIC.reset(token)


def larger(sizes: Iterable[Any], least: Any = 0) -> Any:
    """The largest of numbers or expressions, and of `least`."""
    every = list(dict.fromkeys([*sizes, least]))
    if not any(isinstance(size, sympy.Basic) for size in every):
        return max(every)
    return sympy.Max(*every)


def smaller(first: Any, second: Any) -> Any:
    """The smaller of two numbers or expressions."""
    if isinstance(first, sympy.Basic) or isinstance(second, sympy.Basic):
        return sympy.Min(first, second)
    return min(first, second)


def hint(size: Any) -> int:
    """A size or stride as a number: itself, or what a symbolic one was when it was traced.

    Within `symbolic` an expression.
    """
    if isinstance(size, int):
        return size
    if _SYMBOLIC.get():
        return size.node.expr
    value = size.node.hint if size.node.has_hint() else UNBACKED
    return int(value)


def elements(tensor: torch.Tensor) -> int:
    """The number of elements, repeated ones included."""
    count = 1
    for size in tensor.shape:
        count *= hint(size)
    return count


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory that a strided tensor's elements lie in; a stride of 0 repeats them."""
    count = 1
    if tensor.layout is not torch.strided:
        return elements(tensor) * tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if hint(stride) != 0 or hint(size) == 0:
            count *= hint(size)
    return count * tensor.element_size()


def value_bytes(value: Any) -> int:
    """Bytes of a `meta["val"]`: of a tensor, or of all tensors in a tuple; 0 for numbers."""
    if isinstance(value, torch.Tensor):
        return tensor_bytes(value)
    if isinstance(value, (tuple, list)):
        return sum(value_bytes(each) for each in value)
    return 0


@cache
def _aliasing(target: Any) -> bool:
    if not hasattr(target, "_schema"):
        return target is operator.getitem
    infos = [each.alias_info for each in target._schema.returns]
    aliases = bool(infos) and all(info is not None and not info.is_write for info in infos)
    return aliases or target in _MORE_VIEWS


def is_view(node: fx.Node) -> bool:
    """Whether the node's value is memory that its first operand holds already."""
    return node.op == "call_function" and _aliasing(node.target) and bool(node.args)


def root(node: fx.Node) -> fx.Node:
    """The node that made the memory of `node`'s value, views walked back."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def memory(node: fx.Node) -> tuple[fx.Node, int]:
    """Which memory the node's value lies in: the node that made it, and which of its results."""
    while is_view(node):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        if node.target is operator.getitem and not is_view(source):
            number = node.args[1]
            return source, number if isinstance(number, int) else 0
        node = source
    return node, 0


def made(node: fx.Node) -> list[tuple[tuple[fx.Node, int], int]]:
    """The places of memory that a computing node makes, named as by `memory`, with their bytes."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return [((node, k), value_bytes(each)) for k, each in enumerate(value)]
    return [((node, 0), value_bytes(value))]


def held_bytes(node: fx.Node) -> int:
    """The bytes of the memory that the node's value lies in."""
    maker, number = memory(node)
    value = maker.meta.get("val")
    if isinstance(value, (tuple, list)) and number < len(value):
        value = value[number]
    return value_bytes(value)


def users_through_views(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes (the output included) that read the node's memory, views walked forward."""
    for user in node.users:
        if is_view(user) and user.args[0] is node:
            yield from users_through_views(user)
        else:
            yield user


@cache
def _written_arguments(target: Any) -> tuple[int, ...]:
    if not hasattr(target, "_schema"):
        return ()
    arguments = target._schema.arguments
    return tuple(
        k for k, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    )


def mutates(node: fx.Node) -> bool:
    """Whether the node writes to an operand."""
    return bool(_written_arguments(node.target))


def reads(node: fx.Node) -> list[Read]:
    """What one computing node reads: for each tensor operand its root, its alias and the bytes."""
    if node.target in _SHAPE_ONLY or is_view(node):
        return []
    found: dict[fx.Node, int] = {}
    # copy_ overwrites its first operand without reading it.
    unread = node.args[0] if node.target is aten.copy_.default else None
    for operand in node.all_input_nodes:
        size = 0 if operand is unread else value_bytes(operand.meta.get("val"))
        if operand is node.args[0] and node.target in _PICKING:
            size = smaller(size, value_bytes(node.meta.get("val")))
        if size:
            found[operand] = size
    return [(root(operand), operand, size) for operand, size in found.items()]


def read_bytes(found: Iterable[Read]) -> int:
    """Bytes of reads that share what they have in common: no memory counts for more than it is."""
    aliases: dict[tuple[fx.Node, int], dict[fx.Node, int]] = {}
    for _, alias, size in found:
        through = aliases.setdefault(memory(alias), {})
        through[alias] = larger([size], through.get(alias, 0))
    return sum(
        smaller(sum(sizes.values()), _held(*where) or sum(sizes.values()))
        for where, sizes in aliases.items()
    )


def _held(maker: fx.Node, number: int) -> int:
    value = maker.meta.get("val")
    if isinstance(value, (tuple, list)) and number < len(value):
        value = value[number]
    return value_bytes(value)


def written_bytes(node: fx.Node) -> int:
    """Bytes that a computing node writes: its results, and the operands that it overwrites."""
    if is_view(node):
        return 0
    overwritten = [node.args[k] for k in _written_arguments(node.target) if k < len(node.args)]
    if overwritten:
        operands = [arg for arg in overwritten if isinstance(arg, fx.Node)]
        return sum(value_bytes(arg.meta.get("val")) for arg in operands)
    return value_bytes(node.meta.get("val"))


def escaping_bytes(node: fx.Node, members: Collection[fx.Node]) -> int:
    """Bytes of the node's results that something outside of `members` uses."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        items = [user for user in node.users if user.target is operator.getitem]
        return sum(escaping_bytes(item, members) for item in items)
    if any(user not in members for user in users_through_views(node)):
        return value_bytes(value)
    return 0


def region_bytes(members: Mapping[fx.Node, Any] | set[fx.Node]) -> int:
    """Bytes that the nodes move as one kernel: outside reads once, escaping results once."""
    moved = 0
    outside: list[Read] = []
    for node in members:
        if is_view(node):
            continue
        moved += escaping_bytes(node, members)
        outside += [read for read in reads(node) if read[0] not in members]
    return moved + read_bytes(outside)
