"""Programs of Liger's table that multiply matrices: losses of a last layer, layers of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from perfopt.cost_model.specification import Device
from perfopt.eager_memory import empty, kept, kernel
from perfopt.liger_rows import Config, Step, dtype_of, jsd

_EXPERTS = 4  # that a loop over a mixture's experts walks through, at most


def llama4_rope(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """Rotations as complex products; Liger's are in place, with the angles in the inputs' dtype."""
    width, length = config.get("hidden_size", value), config.get("seq_len", value)
    heads, head = (config["num_q_heads"], config["num_kv_heads"]), width // config["num_q_heads"]
    dtype = dtype_of(config, torch.bfloat16)
    q, k = (empty(1, length, n, head, dtype=dtype, grad=True) for n in heads)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    angles = empty(1, length, head // 2, dtype=torch.complex64)
    empty(length, 1) @ empty(1, head // 2)  # makes the angles

    def rotated() -> tuple[Tensor, ...]:
        pairs = [torch.view_as_complex(each.float().unflatten(-1, (-1, 2))) for each in (q, k)]
        turned = [torch.view_as_real(each * angles[:, :, None, :]).flatten(3) for each in pairs]
        return tuple(each.to(dtype) for each in turned)

    def parts() -> tuple[Tensor, Tensor]:
        return angles.real.to(dtype), angles.imag.to(dtype)

    def forward(ctx: Any, q: Tensor, k: Tensor) -> Any:
        held = parts()
        return kept(ctx, (q.detach(), k.detach()), held[0][:0])

    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        held = parts()
        return dq, dk, *held[:0]

    fused = kernel(forward, backward)

    def step() -> None:
        both = fused(q, k) if provider == "liger" else rotated()
        torch.autograd.grad(both, (q, k), (dq, dk), retain_graph=True)

    return step if provider in ("liger", "huggingface") else None


def _chunk(tokens: int, vocabulary: int, width: int) -> int:
    """Rows of logits that Liger makes at once: about as much memory as the layer's input."""
    share = -(-tokens // -(-vocabulary // width))
    return 1 << (share - 1).bit_length()


def _gradients_ahead(ctx: Any, loss: Tensor, *gradients: Tensor) -> Any:
    return kept(ctx, loss.sum(), *gradients)


def linear_jsd(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """The divergence of a student's and a teacher's last layers."""
    width, vocabulary, dtype = config["H"], config["V"], dtype_of(config, torch.bfloat16)
    student, teacher = (empty(vocabulary, width, dtype=dtype, grad=True) for _ in range(2))
    x = empty(value, width, dtype=dtype, grad=True)
    y = empty(value, width, dtype=dtype)

    def plain() -> Tensor:
        logits, wanted = F.linear(x, student), F.linear(y, teacher)
        ours = torch.log_softmax(logits / 1.0, -1)
        theirs = torch.log_softmax(wanted / 1.0, -1)
        # The logits live as long as the caller's frame.
        loss = jsd(ours, theirs).to(dtype)
        del logits, wanted
        return loss

    def forward(ctx: Any, x: Tensor, student: Tensor, y: Tensor, teacher: Tensor) -> Any:
        gradients = torch.zeros_like(student), torch.zeros_like(x)
        loss = empty(value, vocabulary)
        rows = _chunk(value, vocabulary, width)
        for start in range(0, value, rows):
            part = x[start : start + rows]
            logits = (part @ student.t()).float()
            wanted = (y[start : start + rows] @ teacher.t()).float()
            logits = logits / 1.0
            wanted = wanted / 1.0
            ours, theirs = torch.log_softmax(logits, -1), torch.log_softmax(wanted, -1)
            total = ours.sum(-1, keepdim=True).broadcast_to(ours.shape)
            logits = (ours - torch.softmax(logits, -1) * total) / 1.0
            logits = logits.to(dtype)
            gradients[1][start : start + rows] = logits @ student
            gradients[0].addmm_(logits.t(), part)
        del theirs
        return _gradients_ahead(ctx, loss, *gradients)

    def backward(ctx: Any, dy: Tensor) -> Any:
        weight, given = ctx.saved_tensors
        return given, weight, None, None

    fused = kernel(forward, backward)

    def step() -> None:
        loss = fused(x, student, y, teacher) if provider == "liger" else plain()
        loss.backward()

    return step if provider in ("liger", "torch") else None


def linear_cross_entropy(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """The cross entropy of a last layer."""
    width, vocabulary, dtype = config["H"], config["V"], dtype_of(config, torch.bfloat16)
    weight = empty(vocabulary, width, dtype=dtype, grad=True)
    x, target = empty(value, width, dtype=dtype, grad=True), empty(value, dtype=torch.long)

    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Any:
        gradients = torch.zeros_like(weight), torch.zeros_like(x)
        rows = _chunk(value, vocabulary, width)
        for start in range(0, value, rows):
            part = x[start : start + rows]
            logits = part @ weight.t()
            gradients[1][start : start + rows] = logits @ weight
            gradients[0].addmm_(logits.t(), part)
        return _gradients_ahead(ctx, empty(value), *gradients)

    def backward(ctx: Any, dy: Tensor) -> Any:
        to_weight, given = ctx.saved_tensors
        return given, to_weight, None

    fused = kernel(forward, backward)

    def step() -> None:
        if provider == "liger":
            loss = fused(x, weight, target)
        else:
            logits = F.linear(x, weight)
            loss = F.cross_entropy(logits.float(), target)
        loss.backward()

    return step if provider in ("liger", "huggingface", "torch") else None


def neighborhood(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """Attention over neighbours, with all scores in memory. Both providers' layers are made."""
    width, heads, batch = config["hidden_size"], config["num_heads"], config["batch_size"]
    dtype = dtype_of(config, torch.float32)
    layers, others = (
        [nn.Linear(width, width, bias=config["bias"], device="meta", dtype=dtype) for _ in range(4)]
        for _ in range(2)
    )
    x = empty(batch, value, width, dtype=dtype, grad=True)
    dy = torch.empty_like(x)

    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        result, mask = torch.empty_like(q), empty(value, value)
        scores = empty(batch, heads, value, value, dtype=dtype)
        weights = torch.empty_like(scores)
        del mask
        return kept(ctx, result, q, k, v, weights)

    def backward(ctx: Any, dy: Tensor) -> Any:
        dy = dy.contiguous()
        *inputs, weights = ctx.saved_tensors
        given = tuple(torch.zeros_like(each) for each in inputs)
        scores = torch.zeros_like(weights), torch.empty_like(weights)
        return given + scores[:0]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) * 0.125
        mask = torch.zeros(value, value, dtype=torch.bool, device="meta")
        scores = scores.masked_fill(~mask, float("-inf"))
        return torch.matmul(torch.softmax(scores, -1), v)

    core: Callable[..., Tensor] = kernel(forward, backward) if provider == "liger" else plain

    def step(others: object = others) -> None:  # which are held, though not run
        q, k, v = (
            layer(x).view(batch, value, heads, width // heads).transpose(1, 2)
            for layer in layers[:3]
        )
        mixed = core(q, k, v).transpose(1, 2).contiguous().view(batch, value, width)
        result = layers[3](mixed)
        del q, k, v, mixed
        result.backward(dy, retain_graph=True)

    return step if provider in ("liger", "torch") else None


def mixture(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """A mixture of experts whose weights are scaled copies of their leaves.

    The loop of the plain program walks through a few experts with larger groups of tokens: what is
    kept for backward is the same, what lives for a moment is a little more.
    """
    tokens = value if config["sweep_dim"] == "T" else config["T"]
    experts = value if config["sweep_dim"] == "E" else config["E"]
    width, inner, picked = config["H"], config["intermediate_dim"], config["K"]
    dtype = dtype_of(config, torch.bfloat16)
    x = empty(tokens, width, dtype=dtype, grad=True)
    up = empty(experts, 2 * inner, width, dtype=dtype, grad=True) * 0.02
    down = empty(experts, width, inner, dtype=dtype, grad=True) * 0.02
    share = empty(tokens, picked, dtype=dtype, grad=True)
    walked = min(experts, _EXPERTS)
    group = tokens * picked // walked

    def plain() -> Tensor:
        total = torch.zeros_like(x)
        mask = torch.zeros(experts, picked, tokens, dtype=torch.long, device="meta")
        for expert in range(walked):
            where, which = (empty(group, dtype=torch.long) for _ in range(2))
            gate, gated = F.linear(x[which], up[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * gated, down[expert])
            part = part * share[which, where, None]
            total.index_add_(0, which, part.to(dtype))
        del mask
        return total

    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, share: Tensor) -> Any:
        rows = tokens * picked
        before, after = empty(rows, 2 * inner, dtype=dtype), empty(rows, inner, dtype=dtype)
        each, total = empty(rows, width, dtype=dtype), torch.empty_like(x)
        del after, each
        return kept(ctx, total, x, up, down, share, before)

    def backward(ctx: Any, dy: Tensor) -> Any:
        x, up, down, share, before = ctx.saved_tensors
        rows = tokens * picked
        inside = empty(rows, inner, dtype=dtype), torch.empty_like(before)
        given = torch.empty_like(down), torch.empty_like(up), torch.empty_like(share)
        each = empty(rows, width, dtype=dtype)
        result = torch.empty_like(x), given[1], given[0], given[2]
        del each, inside
        return result

    fused = kernel(forward, backward)

    def step() -> None:
        total = fused(x, up, down, share) if provider == "liger" else plain()
        if config["pass"] != "forward":
            total.backward(torch.empty_like(total), retain_graph=True)

    return step if provider in ("liger", "huggingface") else None


def mlp(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """A gated layer of a decoder; Liger's gate keeps its two inputs and writes over them."""
    batch, width, inner = config["bsz"], config["hidden_size"], config["intermediate_size"]
    dtype = dtype_of(config, torch.bfloat16)
    sizes = ((width, inner), (width, inner), (inner, width))
    gate, up, down = (nn.Linear(*s, bias=False, device="meta", dtype=dtype) for s in sizes)
    x = empty(batch, value, width, dtype=dtype, grad=True)
    dy = torch.empty_like(x)
    act = F.gelu if str(config.get("hidden_act", "silu")).startswith("gelu") else F.silu
    fused = kernel(
        lambda ctx, a, b: kept(ctx, torch.empty_like(a), a, b),
        lambda ctx, dy: tuple(each.detach() for each in ctx.saved_tensors),
    )

    def step() -> None:
        a, b = gate(x), up(x)
        down(fused(a, b) if provider == "liger" else act(a) * b).backward(dy, retain_graph=True)

    return step if provider in ("liger", "huggingface", "torch") else None


def embedding(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """A table of `value` rows."""
    weight = empty(value, config["D"], dtype=dtype_of(config, torch.float32), grad=True)
    index = empty(config["B"], config["T"], dtype=torch.long)
    dy = empty(config["B"], config["T"], config["D"], dtype=weight.dtype)

    def step() -> None:
        F.embedding(index, weight).backward(dy)

    return step if provider in ("liger", "torch") else None
