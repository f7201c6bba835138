"""The eager float32 transformer models of published runs, as steps; see `steps`.

They follow the implementations of Hugging Face transformers at the time of those runs: attention
without fused kernels, one kernel per operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfopt.cost_model.specification import Device
from perfopt.cost_model.steps import Step, accumulate, backward, forward


@dataclass(frozen=True)
class Shape:
    """The sizes of one run. `split` ranks share each layer (tensor parallelism)."""

    batch: float
    length: float
    width: float
    heads: float
    inner: float
    layers: int
    vocabulary: float
    training: bool = False
    split: int = 1

    @property
    def rows(self) -> float:
        """Tokens of the whole batch."""
        return self.batch * self.length


def pointwise(elements: float, tensors: float = 2.0, name: str = "mul") -> Step:
    """A pointwise step; see `Step`."""
    return Step("pointwise", (elements, tensors), name)


def linear(rows: float, inner: float, out: float, bias: bool = True) -> Step:
    """A linear layer of `(rows, inner)` elements."""
    weights = inner * out + (out if bias else 0.0)
    return Step("product", (1.0, rows, out, inner), "bias" if bias else "", weights)


def norm(shape: Shape) -> Step:
    """A layer normalisation of every token."""
    return Step("norm", (shape.rows, shape.width), weights=2 * shape.width)


def _dropout(shape: Shape, elements: float) -> Iterator[Step]:
    if shape.training:
        yield pointwise(elements, 2.25, "dropout")  # and a mask of one byte per element


def _scores(
    shape: Shape, between: Sequence[tuple[float, str]], width: float, keys: float | None = None
) -> Iterator[Step]:
    """Both products of attention with heads of `width`, and what lies between them."""
    heads = shape.batch * shape.heads / shape.split
    keys = shape.length if keys is None else keys
    square = heads * shape.length * keys
    yield Step(
        "product", (heads, shape.length, keys, width),
        copied=heads * (shape.length + keys) * width,
    )  # fmt: skip
    for tensors, name in between:
        yield pointwise(square, tensors, name)
    yield Step("softmax", (heads * shape.length, keys))
    yield from _dropout(shape, square)
    yield Step("product", (heads, shape.length, width, keys), copied=heads * keys * width)
    yield pointwise(heads * shape.length * width, 2.0, "copy")


def _gpt2(shape: Shape) -> Iterator[Step]:
    rows, width, inner, split = shape.rows, shape.width, shape.inner, shape.split
    hidden = rows * width
    for table in (shape.vocabulary, shape.length):
        picked = rows if table is shape.vocabulary else shape.length
        yield Step("pick", (picked, width), weights=table * width, table=table * width)
    yield pointwise(hidden, 3.0, "add")
    yield from _dropout(shape, hidden)
    for _ in range(shape.layers):
        yield norm(shape)
        yield linear(rows, width, 3 * width / split)
        yield from _scores(shape, [(2.0, "div"), (2.0, "where")], width / shape.heads)
        yield linear(rows, width / split, width)
        yield from _dropout(shape, hidden)
        yield pointwise(hidden, 3.0, "add")
        yield norm(shape)
        yield linear(rows, width, inner / split)
        for tensors, name in ((2, "mul"), (2, "pow"), (2, "mul"), (3, "add"), (2, "mul"),
                              (2, "tanh"), (2, "add"), (3, "mul2")):  # fmt: skip
            yield pointwise(rows * inner / split, tensors, name)
        yield linear(rows, inner / split, width)
        yield from _dropout(shape, hidden)
        yield pointwise(hidden, 3.0, "add")
    yield norm(shape)
    yield linear(rows, width, shape.vocabulary / split, bias=False)


def _bert(shape: Shape) -> Iterator[Step]:
    rows, width = shape.rows, shape.width
    hidden = rows * width
    for table in (shape.vocabulary, 2, shape.length):
        picked = shape.length if table is shape.length else rows
        yield Step("pick", (picked, width), weights=table * width, table=table * width)
    yield pointwise(hidden, 3.0, "add")
    yield pointwise(hidden, 2.0, "add")
    yield norm(shape)
    yield from _dropout(shape, hidden)
    for _ in range(shape.layers):
        for _ in range(3):
            yield linear(rows, width, width)
        yield from _scores(shape, [(2.0, "div"), (2.0, "add")], width / shape.heads)
        yield linear(rows, width, width)
        yield from _dropout(shape, hidden)
        yield pointwise(hidden, 3.0, "add")
        yield norm(shape)
        yield linear(rows, width, shape.inner)
        yield pointwise(rows * shape.inner, 2.0, "gelu")
        yield linear(rows, shape.inner, width)
        yield from _dropout(shape, hidden)
        yield pointwise(hidden, 3.0, "add")
        yield norm(shape)
    yield linear(shape.batch, width, width)
    yield linear(shape.batch, width, 2)


def _opt(shape: Shape) -> Iterator[Step]:
    rows, width = shape.rows, shape.width
    hidden = rows * width
    for table in (shape.vocabulary, shape.length):
        yield Step("pick", (rows, width), weights=table * width, table=table * width)
    yield pointwise(hidden, 3.0, "add")
    for _ in range(shape.layers):
        yield norm(shape)
        for _ in range(3):
            yield linear(rows, width, width)
            yield pointwise(hidden, 2.0, "copy")
        yield pointwise(hidden, 2.0, "scale")
        yield from _scores(shape, [(2.0, "add"), (2.0, "max")], width / shape.heads)
        yield linear(rows, width, width)
        yield from _dropout(shape, hidden)
        yield pointwise(hidden, 3.0, "add")
        yield norm(shape)
        yield linear(rows, width, shape.inner)
        yield pointwise(rows * shape.inner, 2.0, "relu")
        yield linear(rows, shape.inner, width)
        yield from _dropout(shape, hidden)
        yield pointwise(hidden, 3.0, "add")
    yield norm(shape)
    yield linear(rows, width, shape.vocabulary, bias=False)


@dataclass(frozen=True)
class Switch:
    """What a Switch transformer has beyond a `Shape`."""

    head_width: float
    decoders: int
    experts: int
    capacity: float


def _root_mean_square(shape: Shape) -> Iterator[Step]:
    elements = shape.rows * shape.width
    yield pointwise(elements, 2.0, "mul")
    yield pointwise(elements, 1.0, "copy")
    yield pointwise(elements, 2.0, "mul2")
    yield replace(pointwise(elements, 2.0, "mul2"), weights=shape.width)


def _switch(shape: Shape, more: Switch) -> Iterator[Step]:
    for _ in range(2):
        yield Step("pick", (shape.rows, shape.width), table=shape.vocabulary * shape.width)
    for k in range(shape.layers + more.decoders):
        for _ in range(1 if k < shape.layers else 2):
            yield from _switch_attention(shape, more)
        yield from _root_mean_square(shape)
        tokens = shape.batch * min(shape.length, more.experts * more.capacity)
        for _ in range(more.experts if k % 2 else 1):
            rows = tokens / more.experts if k % 2 else shape.rows
            yield linear(rows, shape.width, shape.inner, bias=False)
            yield pointwise(rows * shape.inner, 2.0, "relu")
            yield from _dropout(shape, rows * shape.inner)
            yield linear(rows, shape.inner, shape.width, bias=False)
        if k % 2:  # the router's choices and the exchange of tokens
            yield from (pointwise(shape.rows * shape.width, 2.0, "mul") for _ in range(4))
        yield from _dropout(shape, shape.rows * shape.width)
        yield pointwise(shape.rows * shape.width, 3.0, "add")
    yield linear(shape.rows, shape.width, shape.vocabulary, bias=False)


def _switch_attention(shape: Shape, more: Switch) -> Iterator[Step]:
    inner = shape.heads * more.head_width
    yield from _root_mean_square(shape)
    for _ in range(3):
        yield linear(shape.rows, shape.width, inner, bias=False)
    yield from _scores(shape, [(3.0, "add")], more.head_width)
    yield linear(shape.rows, inner, shape.width, bias=False)
    yield from _dropout(shape, shape.rows * shape.width)
    yield pointwise(shape.rows * shape.width, 3.0, "add")


_MODELS: dict[str, Callable[[Shape], Iterator[Step]]] = {"gpt2": _gpt2, "bert": _bert, "opt": _opt}
MODEL_TYPES = (*_MODELS, "switch_transformers")


def steps_of(
    config: Mapping[str, Any], batch: float, length: float, training: bool, split: int = 1
) -> list[Step]:
    """The steps of one forward pass of the model that a transformers configuration describes.

    Raises `ValueError` for a model type that is not known and `KeyError` for a missing size.
    """
    kind = config["model_type"]
    if kind not in MODEL_TYPES:
        raise ValueError(f"model type {kind!r} is not known; known: {', '.join(MODEL_TYPES)}")
    if kind == "switch_transformers":
        shape = Shape(
            batch, length, config["d_model"], config["num_heads"], config["d_ff"],
            config["num_layers"], config["vocab_size"], training, split,
        )  # fmt: skip
        more = Switch(
            config["d_kv"], config["num_decoder_layers"], config["num_experts"],
            config["expert_capacity"],
        )  # fmt: skip
        return list(_switch(shape, more))
    width = config["n_embd"] if kind == "gpt2" else config["hidden_size"]
    inner = {"gpt2": 4 * width, "bert": config.get("intermediate_size"),
             "opt": config.get("ffn_dim")}[kind]  # fmt: skip
    shape = Shape(
        batch, length, width, config.get("n_head") or config["num_attention_heads"], inner,
        config.get("n_layer") or config["num_hidden_layers"], config["vocab_size"], training,
        split,
    )  # fmt: skip
    return list(_MODELS[kind](shape))


def fused(steps: Sequence[Step]) -> list[Step]:
    """The steps with runs of pointwise ones as one kernel: read once, written once."""
    found: list[Step] = []
    for step in steps:
        last = found[-1] if found else None
        if last and step.kind == last.kind == "pointwise" and step.sizes[0] == last.sizes[0]:
            found[-1] = replace(step, sizes=(step.sizes[0], max(step.sizes[1], last.sizes[1])))
        else:
            found.append(step)
    return found


def seconds(device: Device, steps: Sequence[Step], training: bool) -> float:
    """Seconds of one pass: forward, and with `training` backward, gradients accumulated."""
    counts: dict[Step, int] = {}
    for step in steps:
        counts[step] = counts.get(step, 0) + 1
    total = 0.0
    for step, times in counts.items():
        once = forward(device, step)
        if training:
            once += backward(device, step) + accumulate(device, step)
        total += times * once
    return total
