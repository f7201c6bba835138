"""Random graphs: operations of every kind that kernels hold, on inputs of every shape and dtype.

A graph is a list of steps (an operation, the values it takes, a number that it may use). Steps that
eager refuses are left out, so that every list of steps is a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Step = tuple[int, int, int, int]  # operation, first value, second value, number
MOST = 4000  # elements of a value
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42, 6e4, -1e37)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
DTYPES = (torch.float32, *FLOATS, *INTEGERS, torch.bool)
LAYOUTS = ("plain", "transposed", "sliced", "expanded", "offset", "shifted")
SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 15, 16, 17, 33)
NARROWED = ("whole", "one row", "one column", "last", "none")


# ---- inputs -------------------------------------------------------------------------------------


def make_input(
    shape: Sequence[int], dtype: torch.dtype, layout: str, special: bool, seed: int
) -> Tensor:
    """Random numbers, with NaN, infinities and the like among the floats where `special`."""
    generator = torch.Generator().manual_seed(seed)
    place = _place(shape, layout)
    if dtype == torch.bool:
        made = torch.randint(2, place.shape, generator=generator).bool()
    elif not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -100
        made = torch.randint(low, 101, place.shape, generator=generator).to(dtype)
    else:
        made = torch.randn(place.shape, generator=generator, dtype=torch.float64)
        if special:
            odd = torch.tensor(SPECIAL, dtype=torch.float64)
            chosen = torch.randint(len(SPECIAL), place.shape, generator=generator)
            rare = torch.rand(place.shape, generator=generator) < 0.15
            made = torch.where(rare, odd[chosen], made)
        made = made.to(dtype)
    return _laid_out(made, shape, layout)


def _place(shape: Sequence[int], layout: str) -> Tensor:
    """A tensor of the shape that holds the elements of an input."""
    sizes = list(shape)
    if layout == "transposed":
        sizes.reverse()
    elif layout == "sliced" and sizes:
        sizes[-1] *= 2
    elif layout == "expanded" and sizes:
        sizes[len(sizes) // 2] = 1
    elif layout == "offset":
        sizes = [3, *sizes]
    elif layout == "shifted" and sizes:
        sizes[-1] += 3
    return torch.empty(sizes, device="meta")


def _laid_out(x: Tensor, shape: Sequence[int], layout: str) -> Tensor:
    if layout == "transposed" and shape:
        return x.permute(*range(x.ndim)[::-1])
    if layout == "offset":
        return x[1]
    if not shape:
        return x
    if layout == "sliced":
        return x[..., ::2]
    if layout == "shifted":
        return x[..., 1:-2]
    return x.expand(*shape)


def narrowed(shape: Sequence[int], how: str) -> list[int]:
    """A shape that broadcasts to `shape`."""
    sizes = list(shape)
    if how == "one row" and sizes:
        sizes[0] = 1
    elif how == "one column" and sizes:
        sizes[-1] = 1
    elif how == "last":
        sizes = sizes[-1:]
    elif how == "none":
        sizes = []
    return sizes


# ---- operations ---------------------------------------------------------------------------------

Operation = Callable[[Tensor, Tensor, int], Any]


def _dim(x: Tensor, p: int) -> int:
    return p % max(x.ndim, 1)


def _dims(x: Tensor, p: int) -> list[int]:
    """A choice of dimensions, by the bits of a number; at least one."""
    chosen = [d for d in range(x.ndim) if p >> d & 1]
    return chosen or [_dim(x, p)]


def _float(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float()


def _whole(x: Tensor) -> Tensor:
    """Small integers: what lies out of range converts as the machine likes, so it is cut off."""
    if not x.is_floating_point():
        return x
    return x.nan_to_num(0.0, 50.0, -50.0).clamp(-50, 50).int()


def _index(y: Tensor, size: int) -> Tensor:
    """The elements of `y` as indices below `size`; raises where there is none."""
    return _whole(y).long().reshape(-1)[:9] % size


def _power(x: Tensor, p: int) -> Tensor:
    return x ** (2, 3, 0.5, -1, 4, 1, -2, 0, -0.5, 2.5)[p % 10]


def _shaped(x: Tensor, p: int) -> Tensor:
    """A reshape: flattened, dimensions joined, or one taken apart."""
    kind = p % 4
    if kind == 0 or not x.ndim:
        return x.reshape(-1)
    if kind == 1:
        return x.reshape(-1, x.shape[-1])
    if kind == 2:
        return x.flatten(0, min(1, x.ndim - 1))
    for part in (2, 3, 5, 7):
        if x.shape[-1] % part == 0:
            return x.reshape(*x.shape[:-1], part, -1)
    return x.unsqueeze(0)


def _permuted(x: Tensor, p: int) -> Tensor:
    order = list(range(x.ndim))
    turn = p % max(x.ndim, 1)
    return x.permute(*(order[turn:] + order[:turn])) if p % 3 else x.transpose(0, -1)


def _sliced(x: Tensor, p: int) -> Tensor:
    d, size = _dim(x, p), x.shape[_dim(x, p)]
    bounds = ((0, size // 2, 1), (1, size, 1), (0, size, 2), (size // 3, size - 1, 3))
    start, stop, step = bounds[p // 7 % 4]
    return torch.ops.aten.slice.Tensor(x, d, start, max(stop, start), step)


def _shifted(x: Tensor, p: int) -> Tensor:
    if x.dtype == torch.bool:  # the shapes of which only eager gives
        return x
    return x << p % 5 if p % 2 else x >> p % 5


def _padded(x: Tensor, p: int) -> Tensor:
    amounts = [(p >> k) % 4 - 1 for k in (0, 2, 4, 6)][: 2 * min(x.ndim, 2)]
    return F.pad(x, amounts, value=p % 5 - 1)


def _joined(x: Tensor, y: Tensor, p: int) -> Tensor:
    d = _dim(x, p)
    other = y if y.shape == x.shape else x.flip(d)
    if p % 3 == 0:
        other = other.narrow(d, 0, other.shape[d] // 2)
    return torch.cat([x, other, x] if p % 2 else [other, x], d)


def _cast(x: Tensor, p: int) -> Tensor:
    to = (*FLOATS, *INTEGERS, torch.bool)[p % 8]
    if x.is_floating_point() and not to.is_floating_point and to != torch.bool:
        x = x.nan_to_num(0.0, 50.0, -50.0).clamp(0 if to == torch.uint8 else -50, 50)
    return x.to(to)


POINTWISE: list[Operation] = [
    lambda x, y, p: x + y, lambda x, y, p: x - y, lambda x, y, p: x * y,
    lambda x, y, p: torch.add(x, y, alpha=p % 4), lambda x, y, p: p % 5 - x,
    lambda x, y, p: x * (0.5, -1.0, 3, 2.5)[p % 4] + (1, -0.25)[p % 2],
    lambda x, y, p: x / y, lambda x, y, p: x / (p % 7 + 1),
    lambda x, y, p: x // (p % 9 - 4), lambda x, y, p: x % (p % 9 - 4),
    lambda x, y, p: torch.fmod(x, (p % 5) + 1),
    lambda x, y, p: torch.div(x, p % 5 + 1, rounding_mode="trunc"),
    lambda x, y, p: _float(x) // _float(y), lambda x, y, p: torch.remainder(_float(x), _float(y)),
    lambda x, y, p: torch.maximum(x, y), lambda x, y, p: torch.minimum(x, y),
    lambda x, y, p: torch.where(x > y, x, y), lambda x, y, p: torch.where(y.bool(), x, p % 3),
    lambda x, y, p: x.masked_fill(y > 0, p % 3), lambda x, y, p: x.clamp(-1, p % 3),
    lambda x, y, p: torch.clamp(x, min=y), lambda x, y, p: x.clamp_min(p % 3 - 1),
    lambda x, y, p: (x < y, x <= y, x > y, x >= y, x == y, x != y)[p % 6],
    lambda x, y, p: (x < 1, x <= 0.5, x > 0, x >= -1, x == 0, x != 0)[p % 6],
    lambda x, y, p: (torch.logical_and, torch.logical_or, torch.logical_xor)[p % 3](x, y),
    lambda x, y, p: torch.logical_not(x),
    lambda x, y, p: (x & y, x | y, x ^ y, ~x)[p % 4], lambda x, y, p: (x & 6, x | 1, x ^ 3)[p % 3],
    lambda x, y, p: _shifted(x, p),
    lambda x, y, p: x.neg(), lambda x, y, p: x.abs(), lambda x, y, p: x.sign(),
    lambda x, y, p: x.relu(), lambda x, y, p: _power(x, p),
    lambda x, y, p: (x.floor(), x.ceil(), x.trunc(), x.round())[p % 4],
    lambda x, y, p: (x.isnan(), x.isinf(), x.isfinite())[p % 3], lambda x, y, p: x.nan_to_num(),
    lambda x, y, p: x.exp(), lambda x, y, p: x.log(), lambda x, y, p: x.sqrt(),
    lambda x, y, p: x.rsqrt(), lambda x, y, p: x.reciprocal(), lambda x, y, p: x.tanh(),
    lambda x, y, p: x.sigmoid(), lambda x, y, p: x.sin() if p % 2 else x.cos(),
    lambda x, y, p: (x.expm1(), x.log1p(), x.log2(), x.exp2(), x.log10())[p % 5],
    lambda x, y, p: (x.erf(), x.erfc(), x.atan(), x.asinh(), x.sinh())[p % 5],
    lambda x, y, p: (x.tan(), x.asin(), x.acos(), x.cosh(), x.atanh(), x.acosh())[p % 6],
    lambda x, y, p: torch.atan2(_float(x), _float(y)),
    lambda x, y, p: torch.copysign(x, y.nan_to_num()),  # the sign of NaN means nothing
    lambda x, y, p: torch.hypot(_float(x), _float(y)), lambda x, y, p: _float(x).abs() ** y,
    lambda x, y, p: F.gelu(x, approximate=("none", "tanh")[p % 2]), lambda x, y, p: F.silu(x),
    lambda x, y, p: F.leaky_relu(x, 0.1), lambda x, y, p: F.softplus(x),
    lambda x, y, p: torch.lerp(x, y, 0.3), lambda x, y, p: torch.xlogy(x, y),
    lambda x, y, p: F.hardswish(x), lambda x, y, p: F.elu(x),
]  # fmt: skip
CASTS: list[Operation] = [lambda x, y, p: _cast(x, p)]
REDUCTIONS: list[Operation] = [
    lambda x, y, p: x.sum(_dims(x, p), keepdim=bool(p % 2)), lambda x, y, p: x.sum(),
    lambda x, y, p: _float(x).mean(_dims(x, p), keepdim=bool(p % 2)),
    lambda x, y, p: x.amax(_dims(x, p), keepdim=bool(p % 2)),
    lambda x, y, p: x.amin(_dims(x, p), keepdim=bool(p % 2)),
    lambda x, y, p: x.prod(_dim(x, p), keepdim=bool(p % 2)),
    lambda x, y, p: x.any(_dim(x, p)) if p % 2 else x.any(),
    lambda x, y, p: x.all(_dim(x, p), keepdim=True) if p % 2 else x.all(),
    lambda x, y, p: _float(x).var(_dims(x, p), correction=p % 2, keepdim=bool(p % 3)),
    lambda x, y, p: torch.var_mean(_float(x), _dims(x, p), correction=p % 2),
    lambda x, y, p: (x.argmax, x.argmin)[p % 2](_dim(x, p // 2), keepdim=bool(p // 8 % 2)),
    lambda x, y, p: x.argmax(), lambda x, y, p: tuple((x.max, x.min)[p % 2](_dim(x, p))),
    lambda x, y, p: _float(x).softmax(_dim(x, p)), lambda x, y, p: x.max(),
    lambda x, y, p: _float(x).log_softmax(_dim(x, p)),
    lambda x, y, p: _float(x).logsumexp(_dims(x, p)),
    lambda x, y, p: F.layer_norm(_float(x), x.shape[-1:]),
    lambda x, y, p: x * (_float(x).pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt(),
    lambda x, y, p: x - _float(x).mean(_dims(x, p), keepdim=True),
    lambda x, y, p: torch.linalg.vector_norm(_float(x), (2, 1)[p % 2], _dims(x, p)),
    lambda x, y, p: x / (x.abs().amax(_dims(x, p), keepdim=True) + 1),
    lambda x, y, p: x * x.sum(_dims(x, p), keepdim=True) * 0.1,
]  # fmt: skip
VIEWS: list[Operation] = [
    lambda x, y, p: _shaped(x, p), lambda x, y, p: _permuted(x, p), lambda x, y, p: _sliced(x, p),
    lambda x, y, p: x.unsqueeze(p % (x.ndim + 1)), lambda x, y, p: x.squeeze(),
    lambda x, y, p: x.select(_dim(x, p), p // 5 % x.shape[_dim(x, p)]),
    lambda x, y, p: x.unsqueeze(0).expand(3, *x.shape).movedim(0, p % (x.ndim + 1)),
    lambda x, y, p: x.flip(_dims(x, p)), lambda x, y, p: x.contiguous(),
    lambda x, y, p: x.transpose(0, -1).contiguous(),
    lambda x, y, p: x.chunk(2, _dim(x, p)),
]  # fmt: skip
PLACEMENTS: list[Operation] = [
    lambda x, y, p: _joined(x, y, p), lambda x, y, p: torch.stack([x, y], _dim(x, p)),
    lambda x, y, p: _padded(x, p), lambda x, y, p: x[_index(y, x.shape[0])],
    lambda x, y, p: x.index_select(_dim(x, p), _index(y, x.shape[_dim(x, p)])),
    lambda x, y, p: F.embedding(_index(y, x.shape[0]), x.reshape(x.shape[0], -1)),
    lambda x, y, p: x.gather(_dim(x, p), _whole(y).long() % x.shape[_dim(x, p)]),
    lambda x, y, p: x.gather(-1, _whole(y).long()[..., :1] % x.shape[-1]),
    lambda x, y, p: x[:, _index(y, x.shape[1])],
    lambda x, y, p: x[_index(y, x.shape[0])[:, None], _index(y, x.shape[1])[None]],
    lambda x, y, p: torch.slice_scatter(x, _sliced(x, 14) * 2, 0, 0, x.shape[0], 2),
    lambda x, y, p: torch.select_scatter(x, x.select(0, 0) + 1, 0, p % x.shape[0]),
    lambda x, y, p: x + torch.arange(x.shape[-1]) * (p % 3), lambda x, y, p: x.tril(p % 3 - 1),
    lambda x, y, p: x * torch.full_like(x, p % 4), lambda x, y, p: x.roll(p % 3, _dim(x, p)),
]  # fmt: skip
OPERATIONS: list[Operation] = POINTWISE + 10 * CASTS + 2 * (REDUCTIONS + VIEWS + PLACEMENTS)


def _like(x: Tensor, y: Tensor) -> Tensor:
    """`y`, or a part of it that broadcasts to `x`."""
    try:
        if torch.broadcast_shapes(x.shape, y.shape) == x.shape:
            return y
    except RuntimeError:
        pass
    return y.reshape(-1)[:1] if y.numel() else x


def _apply(step: Step, values: list[Tensor]) -> list[Tensor]:
    number, first, second, p = step
    x = values[first % len(values)]
    result = OPERATIONS[number % len(OPERATIONS)](x, _like(x, values[second % len(values)]), p)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def accepted(steps: Sequence[Step], inputs: Sequence[Tensor]) -> list[Step]:
    """The steps that eager takes and that keep values small, one after the other."""
    values, kept = list(inputs), []
    for step in steps:
        try:
            made = _apply(step, values)
        except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError):
            continue
        if all(v.numel() <= MOST and v.ndim <= 5 for v in made):
            values += made
            kept.append(step)
    return kept


def function_of(steps: Sequence[Step], outputs: int) -> Callable[..., tuple[Tensor, ...]]:
    """A function that applies the steps to its inputs and to one another's results."""

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for step in steps:
            values += _apply(step, values)
        return tuple(values[-outputs:])

    return function


def random_graph(
    random: Random, sizes: Sequence[int] = SIZES
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """A function of 3 to 14 operations with up to 4 results, and its inputs."""
    shape = [random.choice(sizes) for _ in range(random.randint(0, 4))]
    while torch.Size(shape).numel() > MOST // 2:
        shape.pop()
    special = random.random() < 0.5
    inputs = [
        make_input(
            narrowed(shape, random.choice(NARROWED)), random.choice(DTYPES),
            random.choice(LAYOUTS), special, random.randrange(10_000),
        )
        for _ in range(random.randint(2, 3))
    ]  # fmt: skip
    steps = [
        (random.randrange(len(OPERATIONS)), number(random), number(random), number(random))
        for _ in range(random.randint(3, 14))
    ]
    return function_of(accepted(steps, inputs), random.randint(1, 4)), inputs


def number(random: Random) -> int:
    """What an operand or an option of an operation is chosen by."""
    return random.randrange(10_000)
