"""Predictions beside measured tables: errors by source, device, operation and size class.

Sources are never pooled: each has its own way to measure, and they differ by a third at small
sizes. What a source's way adds to every row is a constant of `efficiency.toml` under `[harness]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfopt.cost_model.attention import attention
from perfopt.cost_model.collectives import CollectiveError, collective_array
from perfopt.cost_model.efficiency import Constants, tables
from perfopt.cost_model.estimate import Array, Estimate
from perfopt.cost_model.gemm import BYTES, gemm
from perfopt.cost_model.model_validation import nodes, runs, streams, trainings, visions
from perfopt.cost_model.streaming import INSTRUCTIONS, gather, normalisation, pointwise, softmax
from perfopt.cost_model.tables import Table

SIZES = ("tiny", "small", "medium", "large")
_EDGES = (10e-6, 100e-6, 1e-3)  # predicted seconds between the size classes
_COLLECTIVES = {"alltoall": "all_to_all"}


@dataclass(frozen=True)
class Score:
    """The error of one class of predictions, in percent; `size_class` "all" is of every size."""

    source: str
    device: str
    family: str
    size_class: str
    rows: int
    mape: float
    median_ape: float


def size_class(seconds: float) -> str:
    """The size class of a prediction: "tiny" below 10 us, "small" below 100 us, "medium" below
    1 ms, else "large"."""
    return SIZES[int(np.searchsorted(_EDGES, seconds, side="right"))]


def harness(source: str, vendor: str = "") -> Constants:
    """What a source's way to measure adds: `call_seconds` to every call, and more.

    A source may have constants of its own for a vendor's devices.
    """
    found: Mapping[str, Any] = tables()["harness"].get(source.partition("/")[0], {})
    return {"call_seconds": 0.0, **found, **found.get(vendor, {})}


Predictor = Callable[[Table, Constants | None], Array]


def _gemm(table: Table, fit: Constants | None) -> Array:
    sizes = table.columns
    dtype = table.values["dtype"]
    product = gemm(
        table.device, sizes["m"], sizes["n"], sizes["k"], batch=sizes.get("b", 1.0), fit=fit,
        dtype=dtype, result_bytes=table.values.get("result_bytes"),
    ).seconds  # fmt: skip
    if not table.values.get("quantised"):
        return product
    # A layer first converts its bfloat16 operand, in a kernel of its own.
    converted = sizes["m"] * sizes["k"] * (2 + BYTES[dtype])
    return np.asarray(product + pointwise(table.device, converted).seconds)


def _attention(table: Table, fit: Constants | None) -> Array:
    of = table.columns
    return attention(
        table.device, of["batch"], of["heads"], of["kv_heads"], of["length"], of["length"],
        of["head_dim"], window=of["window"], paged=True, fit=fit, dtype=table.values["dtype"],
    ).seconds  # fmt: skip


def _collective(table: Table, fit: Constants | None) -> Array:
    op = _COLLECTIVES.get(table.values["op"], table.values["op"])
    of = table.columns
    result = np.full(table.seconds.shape, np.nan)
    for ranks in np.unique(of["ranks"]):
        for item in np.unique(of["item"]):
            chosen = (of["ranks"] == ranks) & (of["item"] == item)
            dtype = "bfloat16" if item == 2 else "int8" if item == 1 else "float32"
            try:
                result[chosen] = collective_array(
                    table.device, op, of["bytes"][chosen], int(ranks), dtype=dtype
                )
            except CollectiveError:
                continue  # more ranks than the device's links join: left out of the score
    return result


def _linear(table: Table, fit: Constants | None) -> Array:
    of = table.columns  # N is reduced over, K is the width of the result
    rows = of["B"] * of["M"]
    return gemm(table.device, rows, of["K"], of["N"], dtype="float32", fit=fit).seconds


def _bmm(table: Table, fit: Constants | None) -> Array:
    of = table.columns
    return gemm(
        table.device, of["M"], of["K"], of["N"], batch=of["B"], dtype="float32", fit=fit
    ).seconds


def _elementwise(table: Table, fit: Constants | None) -> Array:
    of = table.columns
    count = of["B"] * of["H"]
    # "addu" adds a number to a tensor, "add" two tensors.
    two = np.isin(of["op"], ("add", "sub", "mul", "div", "pow"))
    plain = [op.removesuffix("u") if op not in ("relu", "gelu") else op for op in of["op"]]
    weights = np.array([INSTRUCTIONS.get(op, 1) for op in plain])
    moved = count * 4 * np.where(two, 3, 2)
    return pointwise(table.device, moved, instructions=count * weights, fit=fit).seconds


def _rows(estimate: Callable[..., Estimate]) -> Predictor:
    def predict(table: Table, fit: Constants | None) -> Array:
        of = table.columns
        return estimate(table.device, of["B"], of["H"], 4.0, fit=fit).seconds

    return predict


def _vidur(table: Table, fit: Constants | None) -> Array:
    """One operation of a Llama layer in float16, its heads and width divided among the workers."""
    of, device = table.columns, table.device
    tokens, workers, width = of["num_tokens"], of["num_tensor_parallel_workers"], of["n_embd"]
    inner = of["n_expanded_embd"] / workers
    head = width / of["n_head"]
    queries = width / workers
    keys = of["n_kv_head"] * head / workers
    # The framework's own kernels load one element at a time.
    narrow: dict[str, Any] = {"load": 2.0}
    half = partial(gemm, device, dtype="float16")
    streamed: dict[str, Callable[[], Estimate]] = {
        "emb": lambda: gather(device, tokens, width * 2, **narrow),
        "input_layernorm": lambda: normalisation(device, tokens, width, 2.0, **narrow),
        "post_attention_layernorm": lambda: normalisation(device, tokens, width, 2.0, **narrow),
        "attn_pre_proj": lambda: half(tokens, queries + 2 * keys, width),
        "attn_post_proj": lambda: half(tokens, width, queries),
        "attn_rope": lambda: pointwise(device, tokens * (queries + keys) * 4, **narrow),
        "mlp_up_proj": lambda: half(tokens, 2 * inner, width),
        "mlp_act": lambda: pointwise(device, tokens * inner * 6, **narrow),
        "mlp_down_proj": lambda: half(tokens, width, inner),
        "add": lambda: pointwise(device, tokens * width * 6),
    }
    return streamed[table.values["op"]]().seconds


PREDICTORS: dict[str, Predictor] = {
    "gemm": _gemm,
    "attention": _attention,
    "collective": _collective,
    "linear": _linear,
    "bmm": _bmm,
    "elementwise": _elementwise,
    "layer_norm": _rows(normalisation),
    "softmax": _rows(softmax),
    "vidur": _vidur,
    "model": runs,
    "node": nodes,
    "images": visions,
    "training": trainings,
    "stream": streams,
}
# Kinds whose predictions have the source's calls in them already.
_WHOLE = ("model", "node", "images", "training", "memory")
_NONE: Mapping[str, Predictor] = MappingProxyType({})


def predicted(
    table: Table, fit: Constants | None = None, more: Mapping[str, Predictor] = _NONE
) -> Array:
    """Predicted seconds of each row, as the table's source measures; NaN where there are none.

    `fit` replaces the constants of the table's operation. `more` predicts kinds of tables that
    `PREDICTORS` does not: peak bytes of programs take PyTorch to simulate, which is above here.
    """
    added = (
        0.0 if table.kind in _WHOLE else harness(table.source, table.device.vendor)["call_seconds"]
    )
    return np.asarray({**PREDICTORS, **more}[table.kind](table, fit) + added)


def scores(measured: Iterable[Table], more: Mapping[str, Predictor] = _NONE) -> list[Score]:
    """The errors of all tables, by source, device, family and size class, "all" first.

    A family with a part behind "/" counts under its first part too. Tables of peak memory have no
    size classes but "all". `more` is as for `predicted`.
    """
    errors: dict[tuple[str, str, str], list[tuple[Array, NDArray[np.str_]]]] = {}
    for table in measured:
        guess = predicted(table, more=more)
        known = np.isfinite(guess) & (table.seconds > 0)
        error = np.abs(guess[known] / table.seconds[known] - 1) * 100
        classes = np.array(SIZES)[np.searchsorted(_EDGES, guess[known], side="right")]
        if table.kind == "memory":
            classes = np.full(classes.shape, "")
        whole = table.family.partition("/")[0]
        for family in dict.fromkeys((table.family, whole)):
            key = (table.source, table.device.name, family)
            errors.setdefault(key, []).append((error, classes))
    found: list[Score] = []
    for key, parts in sorted(errors.items()):
        error = np.concatenate([part[0] for part in parts])
        classes = np.concatenate([part[1] for part in parts])
        if error.size:
            found += _by_size(key, error, classes)
    return found


def _by_size(key: tuple[str, str, str], error: Array, classes: NDArray[np.str_]) -> Iterable[Score]:
    yield _score(key, "all", error)
    for name in SIZES:
        members = error[classes == name]
        if members.size:
            yield _score(key, name, members)


def _score(key: tuple[str, str, str], name: str, error: Array) -> Score:
    mean, median = float(np.mean(error)), float(np.median(error))
    return Score(*key, name, int(error.size), round(mean, 2), round(median, 2))


def as_rows(found: Sequence[Score]) -> list[dict[str, Any]]:
    """The scores as plain rows for JSON."""
    return [asdict(each) for each in found]
