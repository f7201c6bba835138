"""Readers of published tables of measured times, one kind of file each.

A file is recognised by its place below the directory of tables ("aiconfigurator/gemm_*.csv"). It
gives one `Table` per device and operation. Nothing here predicts; see `validation`.
"""

from __future__ import annotations

import csv
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfopt.cost_model.device import UnknownDeviceError, device_named
from perfopt.cost_model.estimate import Array
from perfopt.cost_model.specification import Device

Row = Mapping[str, str]
DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32",
    "f32": "float32", "fp8": "float8", "fp8_block": "float8", "int8": "int8", "nvfp4": "float4",
    "float16": "float16", "bfloat16": "bfloat16", "float32": "float32", "f64": "float64",
}  # fmt: skip
# Bytes of an element of a message, by NCCL's name of its dtype.
MESSAGE_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "float": 4}
_XLA_ARCHES = {"gfx942": "MI300X", "gfx950": "MI355X", "gfx90a": "MI250X-GCD"}


class TableError(ValueError):
    """A file that is not what its name says; the text names the file and the reason."""


@dataclass(frozen=True)
class Table:
    """Measurements of one operation on one device: `seconds[i]` of the shape at `columns[...][i]`.

    `family` names the operation, `kind` what predicts it; `values` are numbers of the whole table
    that are no columns. For `kind` "memory" the `seconds` are bytes.
    """

    source: str
    device: Device
    family: str
    kind: str
    columns: Mapping[str, Any]
    seconds: Array
    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    file: str = ""


@dataclass(frozen=True)
class Skipped:
    """What was not read: a file, or rows of one, and why."""

    file: str
    reason: str
    rows: int = 0


def numbers(rows: Sequence[Row], column: str, scale: float = 1.0) -> Array:
    """A column as float64, times `scale`. Raises `TableError` that names the column."""
    try:
        return np.array([float(row[column]) for row in rows]) * scale
    except KeyError:
        raise TableError(f"has no column {column!r}") from None
    except (TypeError, ValueError):
        raise TableError(f"holds something other than numbers in column {column!r}") from None


def words(rows: Sequence[Row], column: str) -> NDArray[np.str_]:
    """A column as text."""
    try:
        return np.array([row[column] for row in rows])
    except KeyError:
        raise TableError(f"has no column {column!r}") from None


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by the names of its header."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"cannot be read: {error}") from None
    if not rows:
        raise TableError("holds no rows")
    return rows


def device_of(name: str) -> Device:
    """The device that a table names, with "_" for spaces or an architecture of AMD for itself."""
    return device_named(_XLA_ARCHES.get(name, name).replace("_", " "))


Reader = Callable[[Path, Sequence[Row], list[Skipped]], Iterator[Table]]


def by_device(
    rows: Sequence[Row], column: str, skipped: list[Skipped], file: str
) -> Iterator[tuple[Device, list[Row]]]:
    """The rows of each known device; those of unknown ones are noted as skipped."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if column not in row:
            raise TableError(f"has no column {column!r}")
        groups.setdefault(row[column], []).append(row)
    for name, members in groups.items():
        try:
            yield device_of(name), members
        except UnknownDeviceError as error:
            skipped.append(Skipped(file, str(error).partition("; known")[0], len(members)))


def _named(path: Path, pattern: str) -> tuple[str, str]:
    """The two parts of a file's name that a pattern captures: dtype and system."""
    found = re.fullmatch(pattern, path.stem)
    if found is None:
        raise TableError("does not name a dtype and a system")
    dtype = found["dtype"]
    if dtype not in DTYPES:
        raise TableError(f"is of dtype {dtype!r}; known: {', '.join(sorted(DTYPES))}")
    return DTYPES[dtype], found["system"]


def suffixed(family: str, dtype: str, usual: str = "bfloat16") -> str:
    """The family of an operation in a dtype: the dtype is named where it is not the usual one."""
    return family if dtype == usual else f"{family}_{dtype}"


def _gemms(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    dtype, system = _named(path, r"gemm_(?P<dtype>[a-z0-9]+(?:_block)?)_(?P<system>.+)")
    columns = {name: numbers(rows, name) for name in ("m", "n", "k")}
    yield Table(
        "aiconfigurator", device_of(system), suffixed("gemm", dtype), "gemm", columns,
        numbers(rows, "latency_ms", 1e-3), gemm_values(dtype),
    )  # fmt: skip


def gemm_values(dtype: str) -> Mapping[str, Any]:
    """What aiconfigurator's products of a dtype are: whole layers, converting their operand."""
    quantised = dtype not in ("bfloat16", "float16", "float32")
    # Results are in bfloat16.
    return MappingProxyType({"dtype": dtype, "quantised": quantised, "result_bytes": 2.0})


def _attention(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    dtype, system = _named(path, r"context_attention_(?P<dtype>[a-z0-9]+)_(?P<system>.+)")
    names = {
        "batch": "batch_size", "heads": "num_heads", "kv_heads": "num_key_value_heads",
        "length": "isl", "head_dim": "head_dim",
    }  # fmt: skip
    columns: dict[str, Any] = {name: numbers(rows, column) for name, column in names.items()}
    columns["window"] = (
        numbers(rows, "window_size") if "window_size" in rows[0] else np.zeros(len(rows))
    )
    # A table may count the heads that share keys as 0 where every head has its own.
    columns["kv_heads"] = np.where(columns["kv_heads"] > 0, columns["kv_heads"], columns["heads"])
    yield Table(
        "aiconfigurator", device_of(system), suffixed("attention", dtype), "attention", columns,
        numbers(rows, "latency_ms", 1e-3), {"dtype": dtype},
    )  # fmt: skip


def _nccl(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    for device, members in by_device(rows, "system", skipped, path.name):
        dtypes = words(members, "nccl_dtype")
        if unknown := set(dtypes) - set(MESSAGE_BYTES):
            known = ", ".join(MESSAGE_BYTES)
            raise TableError(f"is of dtype {str(min(unknown))!r}; known: {known}")
        # The column counts elements, whatever its name says: equal bytes end at half as many.
        item = np.array([MESSAGE_BYTES[each] for each in dtypes])
        message = numbers(members, "message_size_elems_or_bytes") * item
        ops, ranks = words(members, "op_name"), numbers(members, "num_gpus")
        seconds = numbers(members, "latency_ms", 1e-3)
        for op in sorted(set(ops)):
            chosen = ops == op
            columns = {"bytes": message[chosen], "ranks": ranks[chosen], "item": item[chosen]}
            yield Table(
                "aiconfigurator", device, f"collective/{op}", "collective", columns,
                seconds[chosen], {"op": op},
            )  # fmt: skip


def _xla(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    for device, members in by_device(rows, "device", skipped, path.name):
        groups: dict[str, list[Row]] = {}
        for row in members:
            groups.setdefault(row["dtypes"], []).append(row)
        for dtypes, group in groups.items():
            try:
                dtype, result = _xla_dtype(dtypes, device)
            except TableError as error:
                skipped.append(Skipped(path.name, f"{device.name}: {error}", len(group)))
                continue
            columns = {name: numbers(group, name) for name in ("b", "m", "n", "k")}
            work = 2 * columns["b"] * columns["m"] * columns["n"] * columns["k"]
            yield Table(
                "xla", device, suffixed("gemm", dtype), "gemm", columns,
                work / numbers(group, "measured_flops_per_s"),
                {"dtype": dtype, "result_bytes": result},
            )  # fmt: skip


def _xla_dtype(dtypes: str, device: Device) -> tuple[str, float]:
    """The dtype to price and the bytes of a result's element, of "bf16xbf16->f32"."""
    found = re.fullmatch(r"([a-z0-9]+?)x([a-z0-9]+)->([a-z0-9]+)", dtypes)
    if found is None:
        raise TableError(f"dtypes {dtypes!r} are not as in 'bf16xbf16->f32'")
    first, second, result = found.groups()
    size = 1.0 if result.startswith("f8") else {"f64": 8.0, "f32": 4.0}.get(result, 2.0)
    if first == "f32":
        if device.vendor == "AMD":
            raise TableError("float32 rows are faster than the device can be")
        return "tf32", size  # XLA's default precision on these devices
    if first.startswith("f8"):
        # AMD's library has no kernel of mixed operands with the first one's result: it converts.
        mixed = first != second and result.startswith("f8e4m3") and device.vendor == "AMD"
        return ("float16" if mixed else "float8"), size
    if first not in DTYPES:
        raise TableError(f"dtype {first!r} is not known")
    return DTYPES[first], size


_NEUSIGHT_FAMILY = {"ln": "layer_norm", "softmax": "softmax", "linear": "linear", "bmm": "bmm"}


def _neusight(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    family = _NEUSIGHT_FAMILY.get(path.stem, "elementwise")
    for device, members in by_device(rows, "Device", skipped, path.name):
        names = ("B", "M", "N", "K") if path.stem in ("linear", "bmm") else ("B", "H")
        columns: dict[str, Any] = {name: numbers(members, name) for name in names}
        columns["op"] = words(members, "OPName")
        yield Table("neusight", device, family, family, columns, numbers(members, "Latency", 1e-3))


_VIDUR_OPS = (
    "emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj",
    "post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add",
)  # fmt: skip


def _vidur_ops(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    device = device_of(path.stem.partition("_")[0])
    names = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "vocab_size", "num_tokens",
             "num_tensor_parallel_workers")  # fmt: skip
    columns = {name: numbers(rows, name) for name in names}
    for op in _VIDUR_OPS:
        column = f"time_stats.{op}.median"
        if column not in rows[0]:
            raise TableError(f"has no column {column!r}")
        known = np.array([row[column] != "" for row in rows])
        chosen = [row for row, there in zip(rows, known, strict=True) if there]
        kept = {name: values[known] for name, values in columns.items()}
        yield Table("vidur", device, op, "vidur", kept, numbers(chosen, column, 1e-3), {"op": op})


def _vidur_network(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    device = device_of(path.stem.partition("_")[0])
    inside = [row for row in rows if row.get("devices_per_node") == row.get("num_workers")]
    if not inside:
        raise TableError("holds no rows of one node")
    columns = {
        "bytes": numbers(inside, "size"), "ranks": numbers(inside, "num_workers"),
        "item": np.full(len(inside), 2.0),
    }  # fmt: skip
    yield Table(
        "vidur", device, "collective/all_reduce", "collective", columns,
        numbers(inside, "time_stats.all_reduce.median", 1e-3), {"op": "all_reduce"},
    )  # fmt: skip


READERS: dict[str, Reader] = {
    "aiconfigurator/gemm_*.csv": _gemms,
    "aiconfigurator/context_attention_*.csv": _attention,
    "aiconfigurator/nccl_collectives.csv": _nccl,
    "xla/default_matmul_perf_table.csv": _xla,
    "neusight/linear.csv": _neusight,
    "neusight/bmm.csv": _neusight,
    "neusight/elem.csv": _neusight,
    "neusight/ln.csv": _neusight,
    "neusight/softmax.csv": _neusight,
    "vidur/compute/*_mlp.csv": _vidur_ops,
    "vidur/network/*_all_reduce.csv": _vidur_network,
}


def reader_of(name: str, readers: Mapping[str, Reader]) -> Reader | None:
    """The reader of a file by its path below the directory of tables, "/" between."""
    return next((read for glob, read in readers.items() if fnmatch.fnmatch(name, glob)), None)


def read_file(path: Path, name: str, reader: Reader, skipped: list[Skipped]) -> list[Table]:
    """The tables of one file. What cannot be read is added to `skipped`, with the reason."""
    noted: list[Skipped] = []
    try:
        found = list(reader(path, rows_of(path), noted))
    except (TableError, UnknownDeviceError) as error:
        skipped.append(Skipped(name, str(error).partition("; known: cpu")[0]))
        return []
    skipped += [Skipped(name, each.reason, each.rows) for each in noted]
    return found
