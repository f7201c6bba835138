"""A model run once: its outputs, gradients and buffers by name, in its own dtype or in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from perfopt.backends.torch_private import tree_flatten, tree_map

SEED = 0
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A callable and what it is called with; `train` asks for gradients too."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    train: bool = False

    def copied(self) -> Subject:
        """The same with a model and inputs of its own."""
        model = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model
        args, kwargs = tree_map(_copied, (self.args, dict(self.kwargs)))
        return Subject(model, args, kwargs, self.train)

    def doubled(self) -> Subject:
        """The same in float64: run it within `float64`."""
        made = self.copied()
        model = made.model.double() if isinstance(made.model, nn.Module) else made.model
        args, kwargs = tree_map(_double, (made.args, dict(made.kwargs)))
        return Subject(model, args, kwargs, self.train)


def seeded(seed: int) -> None:
    """Start torch's random numbers anew."""
    torch.manual_seed(seed)


def _copied(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if x.layout is not torch.strided or any(
        s == 0 and n > 1 for n, s in zip(x.shape, x.stride(), strict=True)
    ):
        return x.detach().clone().requires_grad_(x.requires_grad)
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return made.copy_(x.detach()).requires_grad_(x.requires_grad)


def _double(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().double().requires_grad_(x.requires_grad)
    return x


class _Doubling(TorchFunctionMode):
    """Makes float64 of every floating-point dtype that a model asks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with float64 in the place of other floating-point dtypes."""
        if getattr(func, "__name__", "") in ("float", "half", "bfloat16") and len(args) == 1:
            func = Tensor.double
        args, kwargs = tree_map(_double_dtype, (args, kwargs or {}))
        return func(*args, **kwargs)


def _double_dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value


@contextmanager
def float64() -> Iterator[None]:
    """Floating-point tensors made inside are float64, whatever dtype is asked for."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubling():
            yield
    finally:
        torch.set_default_dtype(former)


def run(subject: Subject, model: Callable[..., Any] | None = None) -> Results:
    """Call the subject, or `model` in the place of its own, once from a fixed seed.

    With `train`, gradients are those of the loss where there is one, else of a fixed weighted sum
    of all outputs.
    """
    torch.manual_seed(SEED)
    call = subject.model if model is None else model
    with torch.set_grad_enabled(subject.train):
        outputs = call(*subject.args, **subject.kwargs)
    flat = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor)]
    results = {f"output {number}": x.detach() for number, x in enumerate(flat)}
    if subject.train:
        results |= _gradients(subject, outputs, flat)
    if isinstance(subject.model, nn.Module):
        results |= {f"buffer {k}": x.detach() for k, x in subject.model.named_buffers()}
    return results


def loss_of(outputs: Any) -> Tensor | None:
    """The loss among a model's outputs: its `loss`, or the only output if that is one number."""
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    flat = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor)]
    return flat[0] if len(flat) == 1 and flat[0].numel() == 1 else None


def training_loss(outputs: Any) -> Tensor:
    """What a training step descends: the outputs' loss, else the mean squares of all of them.

    Raises `ValueError` where nothing in it asks for gradients.
    """
    loss = loss_of(outputs)
    if loss is None:
        flat = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor)]
        squares = [x.square().mean() for x in flat if x.is_floating_point()]
        loss = torch.stack(squares).sum() if squares else None
    if loss is None or not loss.requires_grad:
        raise ValueError("there is nothing to train: no output depends on what has gradients")
    return loss


def _gradients(subject: Subject, outputs: Any, flat: list[Tensor]) -> Results:
    leaves = named_leaves(subject)
    loss = loss_of(outputs)
    ends = [x for x in flat if x.grad_fn is not None] if loss is None else [loss]
    if not ends or not leaves or ends[0].grad_fn is None:
        return {}
    above = [torch.ones_like(x) if loss is not None else _weights(x) for x in ends]
    grads = torch.autograd.grad(ends, list(leaves.values()), above, allow_unused=True)
    # By value: their strides may follow those of what came from above.
    return {
        f"gradient of {name}": grad.contiguous()
        for name, grad in zip(leaves, grads, strict=True)
        if grad is not None
    }


def named_leaves(subject: Subject) -> dict[str, Tensor]:
    """The parameters and inputs that gradients are asked for."""
    leaves: dict[str, Tensor] = {}
    if isinstance(subject.model, nn.Module):
        leaves |= {k: p for k, p in subject.model.named_parameters() if p.requires_grad}
    inputs = tree_flatten((subject.args, dict(subject.kwargs)))[0]
    for number, x in enumerate(inputs):
        if isinstance(x, Tensor) and x.requires_grad:
            leaves[f"input {number}"] = x
    return leaves


def _weights(x: Tensor) -> Tensor:
    """Numbers that depend on the position alone."""
    count = torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)
    return (torch.sin(count + 1) + 1.5).to(x.dtype)
