"""Programs of Liger's table that work row by row: normalisations, gates and losses of logits.

PyTorch's and Hugging Face's programs are written out. Of Liger's kernels only what they allocate
and keep for backward is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from perfopt.cost_model.specification import Device
from perfopt.eager_memory import empty, kept, kernel

Config = Mapping[str, Any]
Step = Callable[[], object]
Builder = Callable[[str, int, Config, Device], Step | None]
_DTYPES = {
    "torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16,
    "torch.float16": torch.float16,
}  # fmt: skip


def dtype_of(config: Config, default: torch.dtype) -> torch.dtype:
    """The dtype that a row's settings name."""
    return _DTYPES.get(str(config.get("dtype")), default)


def _norm(
    value: int, config: Config, default: torch.dtype, function: Callable[..., Tensor], weights: int
) -> Step:
    """A normalisation of rows of `value` elements, its weights in the dtype of the rows."""
    rows = config["M"] if "M" in config else config["S"] * config["B"]
    dtype = dtype_of(config, default)
    x, dy = empty(rows, value, dtype=dtype, grad=True), empty(rows, value, dtype=dtype)
    affine = [empty(value, dtype=dtype, grad=True) for _ in range(weights)]
    return lambda: function(x, *affine).backward(dy, retain_graph=True)


def _one_pass(partials: int) -> Callable[..., Tensor]:
    """A normalisation whose kernels keep the input and a figure per row.

    `partials` are the rows of partial sums, of float32, that its backward pass makes for each
    weight.
    """

    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Any:
        return kept(ctx, torch.empty_like(x), x, *weights, empty(*x.shape[:-1]))

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        _, *weights, _ = ctx.saved_tensors
        parts = [empty(partials, w.shape[0]) for w in weights]
        sums = [p.sum(0).to(w.dtype) for p, w in zip(parts, weights, strict=True)]
        return torch.empty_like(dy), *sums

    return kernel(forward, backward)


def layer_norm(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """A layer norm of rows, with weight and bias."""
    fused = _one_pass(device.cores)
    function = fused if provider == "liger" else (
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b)
    )  # fmt: skip
    return _norm(value, config, torch.float32, function, 2)


def _llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def rms_norm(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """An RMS norm of rows."""
    # PyTorch's own is one kernel each way too, and sums over rows without float32 partials.
    function = {
        "liger": _one_pass(device.cores), "huggingface": _llama_norm, "torch": _one_pass(1),
        "megatron": _one_pass(1),
    }.get(provider)  # fmt: skip
    return None if function is None else _norm(value, config, torch.bfloat16, function, 1)


def add_norm(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """An RMS norm of a sum that is returned too."""
    dtype, rows = dtype_of(config, torch.float32), config["M"]
    x, r = (empty(rows, value, dtype=dtype, grad=True) for _ in range(2))
    dy, ds = (empty(rows, value, dtype=dtype) for _ in range(2))
    weight, inner = (empty(value, grad=True) for _ in range(2))

    def forward(ctx: Any, x: Tensor, r: Tensor, w: Tensor) -> Any:
        total = torch.empty_like(x)
        return kept(ctx, (torch.empty_like(x), total), total, w, empty(rows))

    def backward(ctx: Any, dy: Tensor, ds: Tensor) -> Any:
        dx = torch.empty_like(dy)
        return dx, dx, empty(device.cores, value).sum(0)

    fused, plain = kernel(forward, backward), _one_pass(device.cores)

    def separate(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        total = x.float() + r.float()
        normed = plain(total, inner) if provider == "liger_rms_norm" else (
            total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        )  # fmt: skip
        return weight * normed.to(dtype), total.to(dtype)

    def step() -> None:
        both = fused(x, r, weight) if provider == "liger_fused_add_rms_norm" else separate(x, r)
        torch.autograd.backward(both, (dy, ds))

    known = ("liger_fused_add_rms_norm", "liger_rms_norm", "huggingface")
    return step if provider in known else None


def relu_squared(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """The square of a relu."""
    # The published rows are of one row of `value` elements, whatever M says.
    x = empty(value, dtype=dtype_of(config, torch.bfloat16), grad=True)
    dy = torch.empty_like(x)
    fused = kernel(lambda ctx, x: kept(ctx, torch.empty_like(x), x),
                    lambda ctx, dy: torch.empty_like(dy))  # fmt: skip
    function = fused if provider == "liger" else lambda x: torch.square(F.relu(x))
    return lambda: function(x).backward(dy, retain_graph=True)


def gated(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """Megatron's gate: the halves of one tensor."""
    x = empty(config["S"], config["B"], 2 * value, dtype=torch.bfloat16, grad=True)

    def forward(ctx: Any, both: Tensor) -> Any:
        return kept(ctx, empty(*both.shape[:-1], value, dtype=both.dtype), both)

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        if provider != "megatron":
            dy = dy.contiguous()
        return both.detach() if provider == "liger_in_place" else torch.empty_like(both)

    def plain(both: Tensor) -> Tensor:
        gate, up = torch.chunk(both, 2, -1)
        return F.silu(gate) * up

    function = plain if provider == "torch" else kernel(forward, backward)

    def step() -> None:
        x.grad = None
        result = function(x)
        result.sum().backward()

    return step if provider in ("torch", "megatron", "liger", "liger_in_place") else None


def jsd(log_q: Tensor, log_p: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of rows of log probabilities, its mean over rows."""
    log_p, log_q = log_p.float(), log_q.float()
    mixed = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
    distance = nn.KLDivLoss(reduction="none", log_target=True)
    ahead = 0.5 * distance(torch.log(mixed), log_p).sum(-1)
    loss = ahead + 0.5 * distance(torch.log(mixed), log_q).sum(-1)
    return (loss / log_q.shape[0]).sum()


def divergence(name: str) -> Builder:
    """A distance of distributions; Liger's forward kernels make the gradient but for KL's."""

    def forward(ctx: Any, p: Tensor, q: Tensor) -> Any:
        if name == "kl_div":
            return kept(ctx, empty(p.shape[0]).sum(), q)
        loss = empty(*p.shape) if name == "jsd" else empty(p.shape[0])
        gradient = torch.empty_like(p)
        if name == "tvd":
            gradient = gradient / p.shape[0]
        return kept(ctx, loss.sum(), gradient)

    def backward(ctx: Any, dy: Tensor) -> Any:
        (held,) = ctx.saved_tensors
        if name == "tvd":
            held = held * dy
        return torch.empty_like(held) if name == "kl_div" else held, None

    plain: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "jsd": jsd, "kl_div": nn.KLDivLoss(reduction="batchmean"),
        "tvd": lambda p, q: torch.sum(torch.abs(p - q) / 2.0) / p.size(0),
    }  # fmt: skip

    def build(provider: str, value: int, config: Config, device: Device) -> Step | None:
        rows = config["B"] * config["T"]
        of = F.softmax if name == "tvd" else F.log_softmax
        given = of(empty(rows, value, grad=True), dim=-1)
        wanted = (F.log_softmax if name == "jsd" else F.softmax)(empty(rows, value), dim=-1)
        function = kernel(forward, backward) if provider == "liger" else plain[name]
        return lambda: function(given, wanted).backward(retain_graph=True)

    return build


def cross_entropy(provider: str, value: int, config: Config, device: Device) -> Step | None:
    """Liger's gradient is written over the logits; Megatron's wrapper copies them first."""
    megatron = "S" in config
    if provider not in (("liger",) if megatron else ("liger", "huggingface", "torch")):
        return None
    rows = config["S"] * config["B"] if megatron else config["B"] * config["T"]
    x = empty(rows, value, dtype=torch.bfloat16 if megatron else torch.float32, grad=True)
    target = empty(rows, dtype=torch.long)

    def forward(ctx: Any, x: Tensor, target: Tensor) -> Any:
        gradient = x.clone() if megatron else x.detach()
        losses = empty(rows)
        return kept(ctx, losses if megatron else losses.sum(), gradient)

    def backward(ctx: Any, dy: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return torch.empty_like(gradient) if megatron else gradient, None

    function = kernel(forward, backward) if provider == "liger" else F.cross_entropy
    return lambda: function(x, target).sum().backward()
