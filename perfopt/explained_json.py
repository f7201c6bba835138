"""Explanations as JSON and back; `docs/explain.md` describes every key of the schema."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from perfopt.capacity import Fit
from perfopt.capture import GraphBreak
from perfopt.cost_model.cost import Cost
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.cost_model.device import Device
from perfopt.cost_model.memory import MemoryReport
from perfopt.explained import Explained, Part, Piece, Ran
from perfopt.workload import Workload

SCHEMA = "perfopt.explain/1"


class SchemaError(ValueError):
    """JSON that is not an explanation, or one of another version."""


def dumps(explained: Explained) -> str:
    """The explanation as indented JSON; equal explanations give equal text."""
    return json.dumps(_whole(explained), indent=1, ensure_ascii=False) + "\n"


def loads(text: str) -> Explained:
    """The explanation that `dumps` wrote; raises `SchemaError`."""
    try:
        table = json.loads(text)
        schema = table["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(f"not an explanation in JSON: {error}") from error
    if schema != SCHEMA:
        raise SchemaError(f"schema is {schema!r}; this version reads {SCHEMA!r}")
    device = table["device"]
    maps = {name: MappingProxyType(device[name]) for name in ("peaks", "vector", "sources")}
    return Explained(
        table["function"],
        Device(**{**device, **maps, **_pairs(device)}),
        table["train"],
        table["options"],
        table["versions"],
        tuple(GraphBreak(**each) for each in table["graph_breaks"]),
        tuple(_read_part(each) for each in table["graphs"]),
        tuple(Ran(**each) for each in table.get("passes", ())),
        _read_memory(table.get("memory")),
        table.get("fit", {}).get("besides", 0),
        _read_workload(table.get("workload")),
    )


def _whole(explained: Explained) -> dict[str, Any]:
    total = explained.cost.seconds
    return {
        "schema": SCHEMA,
        "function": explained.function,
        "train": explained.train,
        "options": dict(explained.options),
        "versions": dict(explained.versions),
        "device": _device(explained.device),
        "total": {
            "cost": _cost(explained.cost),
            "before": _cost(explained.before),
            "peak_bytes": explained.peak_bytes,
            "kernels": sum(len(piece.kernels) for piece in explained.pieces),
            "regions": len(explained.regions),
            "library_calls": len(explained.library_calls),
            "bounds": dict(explained.bounds),
            "mfu": explained.cost.mfu,
            "error": explained.error,
            "rate": explained.rate,
        },
        "workload": None if explained.workload is None else dataclasses.asdict(explained.workload),
        "fit": _fit(explained.fit),
        "graph_breaks": [dataclasses.asdict(each) for each in explained.graph_breaks],
        "lines": [
            {
                "source": line.source,
                "cost": _cost(line.cost),
                "share": _share(line.cost.seconds, total),
                "pieces": [[part.name, piece.name] for part, piece in line.pieces],
            }
            for line in explained.lines
        ],
        "graphs": [_part(part, total) for part in explained.graphs],
        "passes": [dataclasses.asdict(each) for each in explained.passes],
        "memory": _memory(explained.memory),
    }


def _device(device: Device) -> dict[str, Any]:
    table = {field.name: getattr(device, field.name) for field in dataclasses.fields(device)}
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in table.items()}


def _pairs(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a device that JSON has made lists of."""
    copies = tuple((bytes, rate) for bytes, rate in table.get("copies", ()))
    return {"aliases": tuple(table["aliases"]), "copies": copies}


def _read_workload(table: dict[str, Any] | None) -> Workload | None:
    return None if table is None else Workload(**table)


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        "fits": fit.fits, "capacity": fit.capacity, "peak": fit.peak, "margin": fit.margin,
        "besides": fit.besides, "holds": dict(fit.holds),
    }  # fmt: skip


def _memory(found: MemoryReport | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "peak": found.peak, "at": found.at, "kinds": dict(found.kinds),
        "modules": dict(found.modules), "timeline": [list(pair) for pair in found.timeline],
    }  # fmt: skip


def _read_memory(table: dict[str, Any] | None) -> MemoryReport | None:
    if table is None:
        return None
    return MemoryReport(
        table["peak"], table["at"], MappingProxyType(table["kinds"]),
        MappingProxyType(table["modules"]), tuple((n, size) for n, size in table["timeline"]),
    )  # fmt: skip


def _cost(cost: Cost | None) -> dict[str, Any] | None:
    return None if cost is None else dataclasses.asdict(cost)


def _share(seconds: float, total: float) -> float:
    return seconds / total if total else 0.0


def _part(part: Part, total: float) -> dict[str, Any]:
    return {
        "number": part.number,
        "kind": part.kind,
        "function": part.function,
        "operations": part.operations,
        "cost": _cost(part.cost),
        "before": _cost(part.before),
        "peak_bytes": part.peak_bytes,
        "pieces": [_piece(piece, total) for piece in part.pieces],
        "decisions": [_decision(each) for each in part.decisions],
    }


def _piece(piece: Piece, total: float) -> dict[str, Any]:
    return {
        "kind": piece.kind,
        "name": piece.name,
        "source": piece.source,
        "cost": _cost(piece.cost),
        "share": _share(piece.cost.seconds, total),
        "operators": piece.operators,
        "nodes": piece.nodes,
        "kernels": piece.kernels,
        "measured": piece.measured,
        "error": piece.error,
    }


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "pass": decision.pass_name,
        "verdict": decision.verdict.value,
        "nodes": decision.nodes,
        "text": decision.text(),
        "reason": decision.reason,
        "values": dict(decision.values),
        "source": decision.source,
        "before": _cost(decision.before),
        "after": _cost(decision.after),
        "alternative": decision.alternative,
        "alternative_cost": _cost(decision.alternative_cost),
    }


def _read_cost(table: dict[str, Any] | None) -> Cost | None:
    return None if table is None else Cost(**table)


def _read_part(table: dict[str, Any]) -> Part:
    return Part(
        table["number"],
        table["kind"],
        table["function"],
        table["operations"],
        Cost(**table["before"]),
        table["peak_bytes"],
        tuple(
            Piece(
                piece["kind"],
                piece["name"],
                tuple(piece["operators"]),
                tuple(piece["nodes"]),
                tuple(piece["kernels"]),
                piece["source"],
                Cost(**piece["cost"]),
                piece.get("measured"),
                piece.get("error"),
            )
            for piece in table["pieces"]
        ),
        tuple(
            Decision(
                each["pass"],
                Verdict(each["verdict"]),
                tuple(each["nodes"]),
                each["reason"],
                MappingProxyType(each["values"]),
                each["source"],
                _read_cost(each["before"]),
                _read_cost(each["after"]),
                each["alternative"],
                _read_cost(each["alternative_cost"]),
            )
            for each in table["decisions"]
        ),
    )
