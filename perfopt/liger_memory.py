"""Peak memory of the programs of Liger's table, simulated.

Each program is a builder that takes the provider, the swept value, the row's settings and the
device, and returns a step; None where that provider's program is not known.
"""

from __future__ import annotations

import numpy as np

from perfopt.cost_model.estimate import Array
from perfopt.cost_model.specification import Device
from perfopt.cost_model.tables import Table
from perfopt.eager_memory import steady_peak
from perfopt.liger_layers import (
    embedding,
    linear_cross_entropy,
    linear_jsd,
    llama4_rope,
    mixture,
    mlp,
    neighborhood,
)
from perfopt.liger_rows import (
    Builder,
    Config,
    Step,
    add_norm,
    cross_entropy,
    divergence,
    gated,
    layer_norm,
    relu_squared,
    rms_norm,
)

# cuBLAS's default workspace per handle and stream, as PyTorch sets it: 32 MiB on Hopper and later,
# 8 MiB and 128 KiB before.
_HOPPER = 90
_WORKSPACE, _WORKSPACE_BEFORE = 32 << 20, (8 << 20) + (128 << 10)


def peaks(table: Table, fit: object = None) -> Array:
    """Predicted peak bytes of each row of a table of Liger's; NaN for a program not known."""
    of, found = table.columns, []
    for kernel, provider, mode, value, config in zip(
        of["kernel"], of["provider"], of["mode"], of["value"], of["config"], strict=True
    ):
        found.append(_peak(table.device, kernel, provider, int(value), {**config, "pass": mode}))
    return np.array(found)


def _peak(device: Device, kernel: str, provider: str, value: int, config: Config) -> float:
    builder = PROGRAMS.get(kernel)
    if builder is None:
        return float("nan")
    step: list[Step | None] = []

    def build() -> Step:
        step.append(builder(provider, value, config, device))
        return step[0] or (lambda: None)

    digits = device.arch.removeprefix("sm_")
    later = digits.isdecimal() and int(digits) >= _HOPPER
    size = steady_peak(build, _WORKSPACE if later else _WORKSPACE_BEFORE)
    return float("nan") if step[0] is None else float(size)


PROGRAMS: dict[str, Builder] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "megatron_rms_norm": rms_norm,
    "fused_add_rms_norm": add_norm,
    "relu_squared": relu_squared,
    "megatron_swiglu": gated,
    "jsd": divergence("jsd"),
    "kl_div": divergence("kl_div"),
    "tvd": divergence("tvd"),
    "cross_entropy": cross_entropy,
    "megatron_cross_entropy": cross_entropy,
    "llama4_rope": llama4_rope,
    "fused_linear_jsd": linear_jsd,
    "fused_linear_cross_entropy": linear_cross_entropy,
    "fused_neighborhood_attention": neighborhood,
    "fused_moe": mixture,
    "swiglu": mlp,
    "geglu": mlp,
    "embedding": embedding,
}
