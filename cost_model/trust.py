"""How far a piece's price can be trusted: the measured error of its class, by the scoreboard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from perfopt.cost_model.errors import measured_error
from perfopt.cost_model.specification import Device

_FAMILIES = {
    "mm": "gemm", "addmm": "gemm", "_scaled_mm": "gemm", "bmm": "gemm", "baddbmm": "gemm",
    "_linear_pointwise": "gemm", "convolution": "convolution",
    "convolution_backward": "convolution", "embedding": "gather", "gather": "gather",
    "index": "gather", "index_select": "gather", "embedding_dense_backward": "scatter",
    "index_put": "scatter", "scatter_add": "scatter", "native_layer_norm": "layer_norm",
    "_fused_rms_norm": "rms_norm", "_softmax": "softmax", "_log_softmax": "softmax",
}  # fmt: skip
_EDGES = ((10e-6, "tiny"), (100e-6, "small"), (1e-3, "medium"))


def family(operators: Sequence[str]) -> str:
    """The family of the scoreboard that a region, or a call of one operator, belongs to."""
    if len(operators) != 1:
        return "region"
    name = operators[0].split(".")[1] if "." in operators[0] else operators[0]
    if name.startswith("_scaled_dot_product"):
        return "attention"
    return _FAMILIES.get(name, "elementwise")


@lru_cache(maxsize=4096)
def expected_error(device: Device, family: str, seconds: float) -> float | None:
    """The mean absolute percentage error of prices like this one; None where none was measured."""
    size = next((name for edge, name in _EDGES if seconds < edge), "large")
    found = measured_error(device, family, size)
    return None if found is None else found.mape
