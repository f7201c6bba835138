"""Predictions of the rows of `model_tables`: whole models and the nodes of their graphs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from perfopt.cost_model.collectives import collective_seconds
from perfopt.cost_model.efficiency import Constants, tables
from perfopt.cost_model.estimate import Array
from perfopt.cost_model.images import images
from perfopt.cost_model.steps import accumulate, backward, forward
from perfopt.cost_model.streaming import pointwise
from perfopt.cost_model.tables import Table
from perfopt.cost_model.training import step_seconds
from perfopt.cost_model.workloads import fused, seconds, steps_of

_NODE = 8  # devices of one node of the published training runs
_FLOAT = 4  # bytes of an element of the published runs


def runs(table: Table, fit: Constants | None = None) -> Array:
    """Seconds of one pass of each run: forward, with "train" backward too."""
    of, found = table.columns, []
    for k in range(len(table.seconds)):
        config = table.values["configs"][str(of["model"][k])]
        training, option = of["mode"][k] == "train", str(of["option"][k])
        size = float(of["batch"][k]), float(of["seqlen"][k])
        found.append(_run(table, config, size, training, option))
    return np.array(found)


def _run(
    table: Table, config: Any, size: tuple[float, float], training: bool, option: str
) -> float:
    device, (batch, length) = table.device, size
    parallel = re.fullmatch(r"(dp|tp|pp)(\d+)(?:_\d+)?", option)
    kind, ranks = (parallel[1], int(parallel[2])) if parallel else ("", 1)
    share = batch / ranks if kind == "dp" else batch
    steps = steps_of(config, share, length, training, ranks if kind == "tp" else 1)
    if option == "fusion":
        steps = fused(steps)
    total = seconds(device, steps, training)
    if kind == "dp":
        weights = sum(step.weights for step in steps) * _FLOAT
        total += collective_seconds(device, "all_reduce", weights, ranks, dtype="float32")
    elif kind == "tp":
        width = config.get("n_embd") or config["hidden_size"]
        layers = config.get("n_layer") or config["num_hidden_layers"]
        hidden = batch * length * width * _FLOAT
        once = collective_seconds(device, "all_reduce", hidden, ranks, dtype="float32")
        total += once * layers * (4 if training else 2)
    return total


def nodes(table: Table, fit: Constants | None = None) -> Array:
    """Seconds of each node as the run measured it: its kernel and what calls it."""
    device, host = table.device, tables()["harness"][table.source]["host"]
    found = []
    for step, kind in zip(table.columns["step"], table.columns["host"], strict=True):
        if table.values["direction"] == "forward":
            least = 0.0 if kind in ("value", "view") or step.kind == "host" else host["least"]
            found.append(max(forward(device, step) + host[kind], least))
        else:
            once = backward(device, step) + accumulate(device, step)
            found.append(once + host["backward"])
    return np.array(found)


def visions(table: Table, fit: Constants | None = None) -> Array:
    """Seconds of one batch of each vision model."""
    of = table.columns
    return images(
        table.device, of["products"], of["activations"], of["batch"], mode=table.values["mode"],
        dtype=table.values["dtype"], fit=fit,
    )  # fmt: skip


def trainings(table: Table, fit: Constants | None = None) -> Array:
    """Seconds of forward and backward of one micro-batch of each run."""
    of, found = table.columns, []
    share = tables()["harness"][table.source]["rate_share"]
    for k in range(len(table.seconds)):
        ranks = int(of["ranks"][k])
        nodes = max(1, ranks // _NODE) if ranks % _NODE == 0 else 1
        once = step_seconds(
            table.device, table.values["decoders"][str(of["model"][k])], float(of["length"][k]),
            float(of["batch"][k]), ranks, checkpointing=bool(of["checkpointing"][k]),
            nodes=nodes, nic=float(of["nic"][k]),
        )  # fmt: skip
        found.append(once / share)
    return np.array(found)


def streams(table: Table, fit: Constants | None = None) -> Array:
    """Seconds of kernels that only move memory, each with its own launch."""
    of = table.columns
    each = pointwise(table.device, of["bytes"] / of["kernels"], fit=fit).seconds
    return each * of["kernels"]
