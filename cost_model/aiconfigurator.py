"""Tables of the PyPI package aiconfigurator-core, where it is installed, without importing it.

Its measurements lie in Parquet files by system, operation, framework and version. Each framework
is a source of its own, in its newest version.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perfopt.cost_model.device import UnknownDeviceError
from perfopt.cost_model.specification import Device
from perfopt.cost_model.tables import (
    DTYPES,
    MESSAGE_BYTES,
    Skipped,
    Table,
    TableError,
    device_of,
    gemm_values,
    suffixed,
)

PACKAGE = "aiconfigurator_core"
Columns = Mapping[str, Any]


def folder() -> Path:
    """Where the installed package keeps its measurements.

    Raises `TableError` that says what to install.
    """
    try:
        found = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        raise TableError("aiconfigurator-core is not installed: pip install aiconfigurator-core")
    data = Path(next(iter(found.submodule_search_locations))) / "systems" / "data"
    if not data.is_dir():
        raise TableError(f"the installed aiconfigurator-core has no measurements in {data}")
    return data


def _parquet(path: Path) -> Columns:
    """The columns of a file as arrays, by pyarrow or pandas."""
    try:
        arrow = importlib.import_module("pyarrow.parquet")
    except ImportError:
        try:
            pandas = importlib.import_module("pandas")
            frame = pandas.read_parquet(path)
        except ImportError:
            raise TableError("reading it needs pyarrow: pip install pyarrow") from None
        return {name: frame[name].to_numpy() for name in frame.columns}
    table = arrow.read_table(path)
    return {name: np.asarray(table[name].to_numpy()) for name in table.schema.names}


def package_tables(skipped: list[Skipped]) -> list[Table]:
    """Every table of the package; what cannot be read is added to `skipped`, with the reason."""
    data = folder()
    found: list[Table] = []
    for system in sorted(each for each in data.iterdir() if each.is_dir()):
        try:
            device = device_of(system.name)
        except UnknownDeviceError as error:
            skipped.append(Skipped(system.name, str(error).partition("; known")[0]))
            continue
        for pattern, read in _FILES.items():
            for path in _newest(system, pattern):
                name = path.relative_to(data).as_posix()
                source = "/".join(["aiconfigurator", path.parent.parent.name])
                try:
                    found += read(source, device, _parquet(path), skipped, name)
                except (TableError, KeyError, OSError, ValueError) as error:
                    skipped.append(Skipped(name, f"cannot be read: {error}"))
    return found


def _newest(system: Path, pattern: str) -> list[Path]:
    """The file of the newest version of each framework."""
    newest: dict[Path, Path] = {}
    for path in sorted(system.glob(pattern), key=lambda each: _version(each.parent.name)):
        newest[path.parent.parent] = path
    return list(newest.values())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text))


def _products(
    source: str, device: Device, columns: Columns, skipped: list[Skipped], name: str
) -> Iterator[Table]:
    dtypes = columns["gemm_dtype"]
    for dtype in sorted(set(dtypes)):
        chosen = dtypes == dtype
        if dtype not in DTYPES:
            skipped.append(Skipped(name, f"dtype {dtype!r} is not priced", int(chosen.sum())))
            continue
        sizes = {each: columns[each][chosen].astype(float) for each in ("m", "n", "k")}
        # Scales by block make kernels of their own.
        family = suffixed("gemm", DTYPES[dtype]) + ("_block" if dtype.endswith("_block") else "")
        yield Table(
            source, device, family, "gemm", sizes,
            columns["latency"][chosen].astype(float) * 1e-3, gemm_values(DTYPES[dtype]), name,
        )  # fmt: skip


def _prefill(
    source: str, device: Device, columns: Columns, skipped: list[Skipped], name: str
) -> Iterator[Table]:
    plain = (columns["attn_dtype"] == "bfloat16") & (columns["kv_cache_dtype"] == "bfloat16")
    chosen = plain & (columns["step"] == 0)
    if left := int((~chosen).sum()):
        skipped.append(Skipped(name, "only bfloat16 without a prefix is priced", left))
    if not chosen.any():
        return
    names = {
        "batch": "batch_size", "heads": "num_heads", "kv_heads": "num_key_value_heads",
        "length": "isl", "head_dim": "head_dim",
    }  # fmt: skip
    sizes = {key: columns[column][chosen].astype(float) for key, column in names.items()}
    sizes["kv_heads"] = np.where(sizes["kv_heads"] > 0, sizes["kv_heads"], sizes["heads"])
    window = columns.get("window_size")
    count = int(chosen.sum())
    sizes["window"] = np.zeros(count) if window is None else window[chosen].astype(float)
    yield Table(
        source, device, "attention", "attention", sizes,
        columns["latency"][chosen].astype(float) * 1e-3, {"dtype": "bfloat16"}, name,
    )  # fmt: skip


def _exchanges(
    source: str, device: Device, columns: Columns, skipped: list[Skipped], name: str
) -> Iterator[Table]:
    known = np.isin(columns["nccl_dtype"], list(MESSAGE_BYTES))
    if left := int((~known).sum()):
        skipped.append(Skipped(name, "dtypes that are not priced", left))
    for op in sorted(set(columns["op_name"][known])):
        chosen = known & (columns["op_name"] == op)
        item = np.array([MESSAGE_BYTES[each] for each in columns["nccl_dtype"][chosen]])
        sizes = {
            "bytes": columns["message_size"][chosen].astype(float) * item,
            "ranks": columns["num_gpus"][chosen].astype(float),
            "item": item,
        }
        yield Table(
            source, device, f"collective/{op}", "collective", sizes,
            columns["latency"][chosen].astype(float) * 1e-3, {"op": str(op)}, name,
        )  # fmt: skip


_Read = Callable[[str, Device, Columns, list[Skipped], str], Iterator[Table]]
_FILES: dict[str, _Read] = {
    "gemm/*/*/gemm_perf.parquet": _products,
    "attention/*/*/context_attention_perf.parquet": _prefill,
    "comm/nccl/*/nccl_perf.parquet": _exchanges,
}
