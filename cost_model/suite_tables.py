"""Readers of published tables of benchmark suites: timm, llm-foundry and Liger."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from perfopt.cost_model.device import UnknownDeviceError, device_named
from perfopt.cost_model.specification import Device
from perfopt.cost_model.tables import Reader, Row, Skipped, Table, TableError, by_device, numbers
from perfopt.cost_model.training import Decoder

# MPT's sizes: width, layers, heads. Its vocabulary is padded to 50,368.
_DECODERS = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16),
    "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}  # fmt: skip
_VOCABULARY = 50368
_NIC = re.compile(r"(\d+)\s*Gbps")


def _in_name(path: Path) -> Device:
    """The device that one of the words of a file's name spells."""
    for word in path.stem.split("-"):
        if word == "cpu":  # as a device that would be this machine
            continue
        try:
            return device_named(word.replace("_", " "))
        except UnknownDeviceError:
            continue
    raise TableError("names no known device")


def _timm(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    device, training = _in_name(path), "-train-" in path.stem
    kind = "train" if training else "infer"
    counts = _counts(path) if training else {}
    found: list[tuple[float, ...]] = []
    for row in rows:
        try:
            key = (row["model"], row[f"{kind}_img_size"])
            products, activations = counts.get(key, ("", "")) if training else (
                row["infer_gmacs"], row["infer_macts"],
            )  # fmt: skip
            texts = (products, activations, row[f"{kind}_batch_size"],
                     row[f"{kind}_samples_per_sec"])  # fmt: skip
        except KeyError as error:
            raise TableError(f"has no column {error}") from None
        try:
            values = tuple(float(text) for text in texts)
        except ValueError:
            continue
        if min(values) > 0:
            found.append(values)
    if left := len(rows) - len(found):
        skipped.append(Skipped(path.name, "models without counts of their work", left))
    if not found:
        raise TableError("holds no models with counts of their work")
    products, activations, batch, rate = np.array(found).T
    compiled = "-dynamo" in path.stem
    mode = "cpu" if device.kind == "cpu" else "training" if training else (
        "compiled" if compiled else "eager"
    )  # fmt: skip
    family = f"model_{'train' if training else 'compiled' if compiled else 'eager'}"
    columns = {"products": products * 1e9, "activations": activations * 1e6, "batch": batch}
    dtype = "float16" if "-amp-" in path.stem else "float32"
    order = "nhwc" if "-nhwc-" in path.stem else "nchw"
    yield Table(
        "timm", device, f"{family}/{order}", "images", columns, batch / rate,
        {"mode": mode, "dtype": dtype},
    )  # fmt: skip


def _counts(path: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """The work of each model by its inference runs: files of training runs do not hold it."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for other in sorted(path.parent.glob("benchmark-infer-*.csv")):
        with other.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                key = (row.get("model") or "", row.get("infer_img_size") or "")
                found[key] = (row.get("infer_gmacs") or "", row.get("infer_macts") or "")
    return found


def _decoders(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    for device, members in by_device(rows, "GPU", skipped, path.name):
        try:
            plain = [row for row in members if row["Model"] in _DECODERS and _plain(row)]
            sections = [_NIC.search(row["section"]) for row in plain]
            checkpointing = np.array([row["Activation Checkpointing"] == "True" for row in plain])
            models = np.array([row["Model"] for row in plain])
        except KeyError as error:
            raise TableError(f"has no column {error}") from None
        if left := len(members) - len(plain):
            reason = "models or precisions that are not priced"
            skipped.append(Skipped(path.name, f"{device.name}: {reason}", left))
        if not plain:
            continue
        ranks = numbers(plain, "# GPUs")
        columns: dict[str, Any] = {
            "model": models, "checkpointing": checkpointing, "ranks": ranks,
            "length": numbers(plain, "SeqLen (T)"), "batch": numbers(plain, "MicroBatchSize"),
            # The section gives the rate between nodes of eight devices.
            "nic": np.array([float(s[1]) * 1e9 / 8 / 8 if s else 25e9 for s in sections]),
        }  # fmt: skip
        tokens = columns["length"] * columns["batch"]
        yield Table(
            "llm-foundry", device, "training", "training", columns,
            tokens / numbers(plain, "Throughput (T/s/GPU)"),
            {"decoders": decoders()},
        )  # fmt: skip


def decoders() -> Mapping[str, Decoder]:
    """MPT's decoders by name."""
    return MappingProxyType({name: Decoder(*of, _VOCABULARY) for name, of in _DECODERS.items()})


def _plain(row: Row) -> bool:
    return row["Precision"].endswith("bf16") and row["Activation CPUOffload"] == "False"


# Liger's kernels whose traffic is plain: the settings that give the rows of one tensor, the bytes
# of an element unless the settings name a dtype, and by provider and pass the kernels and the
# tensors that they read and write.
_TOKENS, _ROWS, _MEGATRON = ("B", "T"), ("M",), ("S", "B")
LIGER: dict[str, tuple[Sequence[str], int, dict[tuple[str, str], tuple[int, float]]]] = {
    "layer_norm": (_ROWS, 4, {("liger", "forward"): (1, 2)}),
    "rms_norm": (_ROWS, 2, {("liger", "forward"): (1, 2)}),
    "megatron_rms_norm": (_MEGATRON, 2, {("liger", "forward"): (1, 2)}),
    "fused_add_rms_norm": (_ROWS, 4, {
        ("liger_fused_add_rms_norm", "forward"): (1, 4), ("liger_rms_norm", "forward"): (2, 5),
        ("huggingface", "forward"): (6, 10),
    }),
    "relu_squared": (_ROWS, 2, {
        ("liger", "forward"): (1, 2), ("liger", "backward"): (1, 3), ("torch", "forward"): (2, 4),
        ("torch", "backward"): (4, 10),
    }),
    "megatron_swiglu": (_MEGATRON, 2, {
        ("liger", "forward"): (1, 3), ("liger_in_place", "forward"): (1, 3),
    }),
    "kl_div": (_TOKENS, 4, {("liger", "forward"): (1, 2), ("torch", "forward"): (4, 9)}),
    "tvd": (_TOKENS, 4, {("liger", "forward"): (1, 3), ("torch", "forward"): (4, 8)}),
}  # fmt: skip
_ITEMS = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}
_BASELINES = ("torch", "huggingface", "megatron", "torch_compile")


def _liger(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    for device, members in by_device(rows, "gpu_name", skipped, path.name):
        times = [row for row in members if row.get("metric_name") == "speed"]
        groups: dict[str, list[tuple[float, float, float]]] = {}
        left = 0
        for row in times:
            found = _moved(row)
            if found is None:
                left += 1
                continue
            kind = "eager_op" if row["kernel_provider"] in _BASELINES else "fused_op"
            groups.setdefault(kind, []).append((*found, float(row["y_value_50"]) * 1e-3))
        if left:
            skipped.append(Skipped(path.name, f"{device.name}: kernels that are not priced", left))
        for family, values in groups.items():
            kernels, moved, seconds = np.array(values).T
            yield Table(
                "liger", device, family, "stream", {"kernels": kernels, "bytes": moved}, seconds
            )
        if peaks := [row for row in members if row.get("metric_name") == "memory"]:
            yield _peaks(device, peaks)


def _peaks(device: Device, rows: Sequence[Row]) -> Table:
    """Peak memory: the table's "seconds" are bytes, `kind` "memory" says so."""
    try:
        columns: dict[str, Any] = {
            "kernel": np.array([row["kernel_name"] for row in rows]),
            "provider": np.array([row["kernel_provider"] for row in rows]),
            "mode": np.array([row["kernel_operation_mode"] for row in rows]),
            "value": numbers(rows, "x_value"),
        }
        configs = np.empty(len(rows), dtype=object)
        configs[:] = [json.loads(row["extra_benchmark_config_str"]) for row in rows]
    except KeyError as error:
        raise TableError(f"has no column {error}") from None
    except ValueError as error:
        raise TableError(f"cannot be understood: {error}") from None
    columns["config"] = configs
    return Table(
        "liger", device, "peak_memory", "memory", columns, numbers(rows, "y_value_50", 2.0**20)
    )


def _moved(row: Row) -> tuple[float, float] | None:
    """The kernels of a row and the bytes that they move; None where they are not known."""
    try:
        known = LIGER.get(row["kernel_name"])
        key = (row["kernel_provider"], row["kernel_operation_mode"])
        if known is None or key not in known[2]:
            return None
        names, item, passes = known
        config = json.loads(row["extra_benchmark_config_str"])
        rows = prod(float(config[name]) for name in names)
        kernels, tensors = passes[key]
        item = _ITEMS.get(str(config.get("dtype")), item)
        return float(kernels), rows * float(row["x_value"]) * item * tensors
    except KeyError as error:
        raise TableError(f"has no column or setting {error}") from None
    except (TypeError, ValueError):
        raise TableError(f"cannot be understood at {row.get('kernel_name')!r}") from None


SUITE_READERS: dict[str, Reader] = {
    "timm/benchmark-*.csv": _timm,
    "llm-foundry/mpt_training_throughput.csv": _decoders,
    "liger/all_benchmark_data.csv": _liger,
}
