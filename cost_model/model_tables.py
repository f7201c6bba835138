"""Readers of published tables of whole models and of the nodes of their graphs."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from perfopt.cost_model.steps import Step
from perfopt.cost_model.suite_tables import SUITE_READERS
from perfopt.cost_model.tables import (
    READERS,
    Reader,
    Row,
    Skipped,
    Table,
    TableError,
    by_device,
    device_of,
    numbers,
)
from perfopt.cost_model.workloads import linear, pointwise, steps_of

_PARALLEL = re.compile(r"(dp|tp|pp)(\d+)(?:_(\d+))?")


def _runs(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    """NeuSight's end-to-end runs: eager, fused, and on several devices."""
    configs: dict[str, Any] = {}
    for device, members in by_device(rows, "device", skipped, path.name):
        groups: dict[str, list[Row]] = {}
        for row in members:
            try:
                name = row["model"]
                if name not in configs:
                    configs[name] = _config(path.parent / "dl_configs" / f"{name}.json")
                option = row["option"]
            except KeyError as error:
                raise TableError(f"has no column {error}") from None
            parallel = _PARALLEL.fullmatch(option)
            if option not in ("", "fusion") and parallel is None:
                skipped.append(Skipped(path.name, f"option {option!r} is not priced", 1))
                continue
            family = "model" if not option else "model_fused" if not parallel else "model_parallel"
            groups.setdefault(family, []).append(row)
        for family, group in groups.items():
            columns: dict[str, Any] = {
                name: np.array([row[name] for row in group]) for name in ("model", "mode", "option")
            }
            columns |= {name: numbers(group, name) for name in ("seqlen", "batch")}
            yield Table(
                "neusight", device, family, "model", columns,
                numbers(group, "e2e_latency_ms", 1e-3), {"configs": MappingProxyType(configs)},
            )  # fmt: skip


def _config(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"needs dl_configs/{path.name}: {error}") from None
    if not isinstance(found, dict):
        raise TableError(f"needs dl_configs/{path.name}: it holds no object")
    try:
        steps_of(found, 1, 16, training=False)
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(f"cannot price dl_configs/{path.name}: {error}") from None
    return found


# Nodes that give another view of a tensor, and those whose result is no tensor at all.
_VIEWS = ("view", "permute", "transpose", "expand", "unsqueeze", "squeeze", "reshape", "split")
_SAME = ("to", "type", "float", "detach")
_POINTWISE = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow", "tanh": "tanh",
    "gelu": "gelu", "relu": "relu", "where": "where", "max": "max", "contiguous": "copy",
    "clone": "copy", "neg": "mul",
}  # fmt: skip
_FACTORIES = ("ones", "zeros", "full", "arange", "empty")


def _nodes(path: Path, rows: Sequence[Row], skipped: list[Skipped]) -> Iterator[Table]:
    """The nodes of one run, forward, and backward where the run trained."""
    found = re.fullmatch(
        r"fx_nodes_(?P<device>[^_]+)_(?P<model>.+)_(?P<mode>inf|train)_.*", path.stem
    )
    if found is None:
        raise TableError("does not name a device, a model and a mode")
    device, training = device_of(found["device"]), found["mode"] == "train"
    parts: dict[str, list[tuple[Step, str, float]]] = {"forward": [], "backward": []}
    unknown = 0
    for row in rows:
        try:
            ahead, behind = float(row["fw_latency"]), float(row["bw_latency"])
            behind += float(row["acc_latency"])
            step = None if ahead == 0.0 else step_of(row, training)
        except KeyError as error:
            raise TableError(f"has no column {error}") from None
        except (ValueError, SyntaxError, IndexError):
            raise TableError(f"cannot be understood at node {row.get('Name')!r}") from None
        if step is None:
            unknown += ahead > 0.0
            continue
        parts["forward"].append((*step, ahead * 1e-3))
        if behind > 0.0:
            parts["backward"].append((*step, behind * 1e-3))
    if unknown:
        skipped.append(Skipped(path.name, "nodes that are not priced", unknown))
    for name, nodes in parts.items():
        if nodes:
            steps = np.empty(len(nodes), dtype=object)
            steps[:] = [node[0] for node in nodes]
            columns = {"step": steps, "host": np.array([node[1] for node in nodes])}
            yield Table(
                "neusight", device, f"node/{name}", "node", columns,
                np.array([node[2] for node in nodes]), {"direction": name},
            )  # fmt: skip


def step_of(row: Row, training: bool) -> tuple[Step, str] | None:
    """The step of an FX node, and what runs it: "value", "view", "kernel" or "module".

    None for a node that is not known.
    """
    operands = [tuple(each) for each in ast.literal_eval(row["input_shapes"] or "[]")]
    result = tuple(ast.literal_eval(row["output_shape"]))
    if row["op"] == "call_module":
        return _module(row["target"], operands[0], result, training)
    target = _target(row["target"])
    count = float(prod(result))
    if target in _FACTORIES:
        return pointwise(count, 1.0, "fill"), "kernel"
    if target in _VIEWS or (target == "getitem" and result != (1,) and operands[:1] != [(1,)]):
        return Step("view"), "view"
    if target in _SAME or not row["dtype"] or target == "getitem":
        return Step("host"), "value"
    if target in ("matmul", "addmm", "bmm"):
        plain = list(ast.literal_eval(row["input_contiguous"] or "[]"))[-2:]
        return _product(operands[-2:], plain, target, result), "kernel"
    if target == "softmax":
        return Step("softmax", (count / result[-1], float(result[-1]))), "kernel"
    if target in _POINTWISE:
        full = [each for each in operands if prod(each) == count]
        name = "mul2" if target == "mul" and len(full) > 1 else _POINTWISE[target]
        return pointwise(count, float(1 + max(len(full), 1)), name), "kernel"
    return None


def _target(text: str) -> str:
    """The name in "<built-in method matmul of type object at 0x...>" and the like."""
    found = re.search(r"(?:function|method|class) '?([A-Za-z_.]+)", text)
    return found[1] if found else text


def _product(
    operands: Sequence[tuple[int, ...]], plain: Sequence[bool], target: str,
    result: tuple[int, ...],
) -> Step:  # fmt: skip
    first = operands[0]
    batch = 1.0 if target == "addmm" else float(prod(result[:-2]))
    m, n, k = float(result[-2]), float(result[-1]), float(first[-1])
    weights = n * k + n if target == "addmm" else 0.0
    copied = (
        0.0
        if target == "addmm"
        else float(
            sum(prod(each) for each, whole in zip(operands, plain, strict=False) if not whole)
        )
    )
    name = "bias" if weights else ""
    return Step("product", (batch, m, n, k), name, weights, copied=copied)


def _module(
    target: str, operand: tuple[int, ...], result: tuple[int, ...], training: bool
) -> tuple[Step, str]:
    name = target.rpartition(".")[2].lower()
    count, width = float(prod(result)), float(result[-1])
    if "drop" in name:
        if not training:
            return Step("host"), "module"
        return pointwise(count, 2.25, "dropout"), "module"
    if "norm" in name or name.startswith("ln_"):
        return Step("norm", (count / width, width), weights=2 * width), "norm"
    if "embedding" in name or name in ("wte", "wpe"):
        return Step("pick", (count / width, width)), "module"
    if "activation" in name:
        return pointwise(count, 2.0, "tanh"), "module"
    rows = float(prod(operand[:-1]))
    return linear(rows, float(operand[-1]), width, bias=name != "lm_head"), "module"


ALL_READERS: dict[str, Reader] = {
    **READERS,
    **SUITE_READERS,
    "neusight/e2e_measured.csv": _runs,
    "neusight/fx_nodes_*.csv": _nodes,
}
