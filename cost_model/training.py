"""Time of one training step of a GPT-like decoder in mixed precision, sharded over devices.

Products in bfloat16, fused attention, streams between them; with checkpointing the forward pass
runs again. Parameters are gathered for each pass and gradients scattered, beside the computation.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfopt.cost_model.attention import attention
from perfopt.cost_model.collectives import collective_seconds
from perfopt.cost_model.gemm import gemm
from perfopt.cost_model.specification import Device
from perfopt.cost_model.streaming import normalisation, pointwise


@dataclass(frozen=True)
class Decoder:
    """A decoder: its width, layers, heads and vocabulary."""

    width: int
    layers: int
    heads: int
    vocabulary: int

    @property
    def layer_parameters(self) -> float:
        """Elements of the weights of one layer."""
        return 12.0 * self.width**2


def step_seconds(
    device: Device,
    model: Decoder,
    length: float,
    batch: float,
    ranks: int,
    *,
    checkpointing: bool,
    dtype: str = "bfloat16",
    nodes: int = 1,
    nic: float = 0.0,
) -> float:
    """Seconds of forward and backward of `batch` sequences of `length` tokens on each rank."""
    rows, width = batch * length, float(model.width)

    def product(n: float, k: float) -> float:
        ahead = gemm(device, rows, n, k, dtype=dtype).seconds
        first = gemm(device, rows, k, n, dtype=dtype).seconds
        second = gemm(device, k, n, rows, dtype=dtype).seconds
        return float(ahead * (2 if checkpointing else 1) + first + second)

    def stream(elements: float, tensors: float) -> float:
        # Backward passes move about twice as much as what they belong to.
        times = 4 if checkpointing else 3
        return times * float(pointwise(device, elements * tensors * 2).seconds)

    head = width / model.heads
    sizes = (batch, model.heads, model.heads, length, length, head)
    seen = float(attention(device, *sizes, dtype=dtype).seconds)
    behind = float(attention(device, *sizes, dtype=dtype, backward=True).seconds)
    layer = (
        product(3 * width, width) + product(width, width)
        + product(4 * width, width) + product(width, 4 * width)
        + seen * (2 if checkpointing else 1) + behind
        + stream(rows * width, 6) + stream(rows * 4 * width, 2)
        + (8 if checkpointing else 6) * float(normalisation(device, rows, width, 2.0).seconds)
    )  # fmt: skip
    layer = max(layer, _exchange(device, model.layer_parameters * 2, ranks, nodes, nic))
    logits = rows * model.vocabulary
    # The loss in float32: a copy, a softmax, and its gradient.
    loss = float(pointwise(device, logits * 4 * 6).seconds)
    return model.layers * layer + product(model.vocabulary, width) + loss


def _exchange(device: Device, size: float, ranks: int, nodes: int, nic: float) -> float:
    """Seconds to gather the parameters of a layer twice and to scatter its gradients."""
    if ranks == 1:
        return 0.0
    once = collective_seconds(device, "all_gather", size, ranks, nodes=nodes, nic=nic)
    scattered = collective_seconds(device, "reduce_scatter", size, ranks, nodes=nodes, nic=nic)
    return 2 * once + scattered
