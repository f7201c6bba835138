"""Fit the constants of `cost_model/efficiency.toml` to published tables, on half of their rows.

    python benchmarks/fit_cost_model.py TABLES [--only SECTION.NAME] [--leave-out]

Prints one TOML table per section and architecture, with the error on the other half of the rows.
With `--leave-out`, the error of each architecture by constants fitted to all the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from perfopt.cost_model.efficiency import Constants, constants
from perfopt.cost_model.tables import READERS, Skipped, Table, read_file
from perfopt.cost_model.validation import predicted

Bounds = dict[str, tuple[float, float]]
ROWS = 2500  # rows of one table that a fit sees
# What each constant may be: (least, most).
GEMM = {
    "launch": (0.7, 2.5), "peak_share": (0.3, 1.0), "memory_share": (0.6, 0.95),
    "tile_cycles": (50, 8000), "step_cycles": (4, 400), "feed": (5, 200),
    "split_cycles": (500, 50000), "sharpness": (1.4, 8), "throttle": (1e-3, 0.6),
}  # fmt: skip
# What the hardware gives, memory and pages are the same for every NVIDIA device.
ATTENTION = {
    "launch": (0.4, 6), "peak_share": (0.3, 1.0), "overlap": (1, 8), "block_cycles": (10, 3000),
    "tile_cycles": (50, 20000), "wide": (1, 8),
}  # fmt: skip
SHARED_ATTENTION = {
    "launch": 3.4, "overlap": 1.5, "block_cycles": 60.0, "tile_cycles": 2500.0, "wide": 2.0,
}  # fmt: skip
STREAMING = {"memory_share": (0.5, 0.95), "cache_share": (0.3, 2), "row_share": (0.5, 1)}
# Of products on float32 lanes, all but these hold for every NVIDIA device.
VECTOR = {"peak_share": GEMM["peak_share"], "tile_cycles": GEMM["tile_cycles"]}
PASCAL = {**VECTOR, "row_slowing": (0.01, 3)}


@dataclass(frozen=True, eq=False)
class Plan:
    """Which constants of which name are fitted to which tables."""

    section: str
    name: str
    bounds: Bounds
    files: tuple[str, ...]
    devices: tuple[str, ...]
    family: str = ""


_F32 = ("neusight/linear.csv", "neusight/bmm.csv")
_STREAM = ("neusight/elem.csv", "neusight/ln.csv", "neusight/softmax.csv")
_PREFILL = "aiconfigurator/context_attention_bf16_{}_sxm.csv"
_XLA = ("xla/default_matmul_perf_table.csv",)
# One sharpness holds for every NVIDIA device's matrix units.
MATRIX = {name: bounds for name, bounds in GEMM.items() if name != "sharpness"}
AMD = {**GEMM, "launch": (0.5, 3), "float16_share": (0.5, 1.5), "float8_share": (0.5, 2)}
PEAK = {"peak_share": GEMM["peak_share"]}
PLANS = [
    Plan("gemm.matrix", "sm_80", MATRIX, ("aiconfigurator/gemm_bf16_a100_sxm.csv",), ()),
    Plan("gemm.matrix", "sm_90", MATRIX, ("aiconfigurator/gemm_bf16_h100_sxm.csv",), ()),
    Plan("gemm.matrix", "sm_100", MATRIX, ("aiconfigurator/gemm_bf16_b200_sxm.csv",), ()),
    Plan("gemm.matrix", "gfx942", AMD, _XLA, ("MI300X",)),
    Plan("gemm.vector", "sm_60", PASCAL, _F32, ("P100-PCIE-16GB",)),
    Plan("gemm.vector", "sm_61", {**PASCAL, "feed": (1, 20)}, _F32, ("P4",)),
    Plan("gemm.vector", "T4", VECTOR, _F32, ("T4",)),
    Plan("gemm.vector", "sm_80", VECTOR, _F32, ("A100-PCIE-80GB",)),
    Plan("gemm.vector", "A100-PCIE-40GB", PEAK, _F32, ("A100-PCIE-40GB",)),
    Plan("gemm.vector", "sm_90", VECTOR, _F32, ("H100-SXM5-80GB",)),
    Plan("attention", "sm_80", ATTENTION, (_PREFILL.format("a100"),), ()),
    Plan("attention", "sm_90", ATTENTION, (_PREFILL.format("h100"),), ()),
    Plan("streaming", "sm_60", STREAMING, _STREAM, ("P100-PCIE-16GB",)),
    Plan("streaming", "sm_61", STREAMING, _STREAM, ("P4",)),
    Plan("streaming", "sm_75", STREAMING, _STREAM, ("T4",)),
    Plan("streaming", "sm_80", STREAMING, _STREAM, ("A100-PCIE-80GB", "A100-PCIE-40GB")),
]  # fmt: skip


def tables_of(plan: Plan, folder: Path) -> list[Table]:
    """The tables that a plan names; exits where there are none."""
    skipped: list[Skipped] = []
    found: list[Table] = []
    for name in plan.files:
        reader = next(read for glob, read in READERS.items() if Path(name).match(glob))
        found += read_file(folder / name, name, reader, skipped)
    chosen = [
        each for each in found
        if (not plan.devices or each.device.name in plan.devices)
        and plan.family in ("", each.family)
    ]  # fmt: skip
    if not chosen:
        raise SystemExit(f"no rows for {plan.section}.{plan.name}: {skipped}")
    return chosen


def half(table: Table, odd: bool, most: int | None = None) -> Table:
    """Every other row of a table, and of those at most so many."""
    chosen = np.arange(int(odd), len(table.seconds), 2)
    if most is not None and len(chosen) > most:
        chosen = np.sort(np.random.default_rng(0).choice(chosen, most, replace=False))
    columns = {name: values[chosen] for name, values in table.columns.items()}
    return Table(
        table.source, table.device, table.family, table.kind, columns, table.seconds[chosen],
        table.values, table.file,
    )  # fmt: skip


def fitted(
    section: str, bounds: Bounds, seen: Sequence[Table], fixed: Constants | None = None
) -> dict[str, float]:
    """Constants that make the logarithms of the errors of these tables small.

    `fixed` are held; the rest are those of each table's device.
    """
    base = constants(section, seen[0].device)
    low, high = np.log(np.array(list(bounds.values()), float)).T
    usual = np.array([max(float(base.get(name, 1.0)), 1e-6) for name in bounds])
    start = np.clip(np.log(usual), low + 1e-3, high - 1e-3)

    def given(logs: np.ndarray, table: Table) -> Constants:
        # Each architecture keeps what is not fitted, such as its tiles.
        own = {**constants(section, table.device), **(fixed or {})}
        return {**own, **dict(zip(bounds, map(float, np.exp(logs)), strict=True))}

    def errors(logs: np.ndarray) -> np.ndarray:
        parts = [np.log(predicted(t, given(logs, t)) / t.seconds) for t in seen]
        # Every table weighs the same, however many rows it has.
        return np.concatenate([part / np.sqrt(len(part) / 1000) for part in parts])

    found = least_squares(
        errors, start, loss="soft_l1", f_scale=0.06, diff_step=1e-3, max_nfev=40, bounds=(low, high)
    )
    return {
        name: float(f"{value:.3g}") for name, value in zip(bounds, np.exp(found.x), strict=True)
    }


def mape(tables: Sequence[Table], given: Constants, section: str) -> list[str]:
    """The errors on the rows that the fit did not see, by family and device."""
    lines = []
    for table in tables:
        unseen = half(table, odd=True)
        own = {**constants(section, table.device), **given}
        error = np.abs(predicted(unseen, own) / unseen.seconds - 1)
        lines.append(f"{table.family} {table.device.name} {100 * error.mean():.1f} %")
    return lines


def mean_of_others(plan: Plan, found: Sequence[Table], plans: Sequence[Plan]) -> Constants | None:
    """The geometric means of the constants of the maker's other architectures, or None.

    What a core draws from the L2 is not averaged over generations: it is its share of the L2's
    published rate, and several times that where clusters of cores share fetches (from sm_90 on).
    """
    device = found[0].device
    others = [
        constants(plan.section, table.device)
        for other, table in ((p, t) for p in plans for t in TABLES[p][:1])
        if other.section == plan.section and other is not plan and other.name == table.device.arch
        and table.device.vendor == device.vendor
    ]  # fmt: skip
    if not others:
        return None
    mean = {
        name: float(np.exp(np.mean([np.log(max(each.get(name, 1.0), 1e-3)) for each in others])))
        for name in plan.bounds
    }
    if plan.section == "attention":
        # Kernels of two generations share less than they have: of the other's, only the peak.
        seen = [half(t, odd=False, most=ROWS) for p in plans if p.section == plan.section
                and p is not plan for t in TABLES[p]]  # fmt: skip
        mean = {**SHARED_ATTENTION, **fitted(plan.section, {"peak_share": (0.3, 1.0)}, seen,
                                             SHARED_ATTENTION)}  # fmt: skip
    if plan.section == "gemm.matrix":
        alone = device.arch in ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89")
        share = 0.77 * device.l2_bandwidth / (device.cores * device.clock)
        mean["feed"] = share if alone else max(each["feed"] for each in others)
    return mean


TABLES: dict[Plan, list[Table]] = {}


def main() -> None:
    """Fit what was asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--only", default="", metavar="SECTION.NAME")
    parser.add_argument("--leave-out", action="store_true")
    args = parser.parse_args()
    TABLES.update((plan, tables_of(plan, args.tables)) for plan in PLANS)
    for plan, found in TABLES.items():
        if not f"{plan.section}.{plan.name}".startswith(args.only):
            continue
        given: Constants | None
        if args.leave_out:
            given = mean_of_others(plan, found, PLANS) if len(plan.bounds) > 1 else None
            if given is None:
                continue
        else:
            given = fitted(
                plan.section, plan.bounds, [half(t, odd=False, most=ROWS) for t in found]
            )
        print(f"[{plan.section}.{plan.name}]")
        own = mape(found, constants(plan.section, found[0].device), plan.section)
        for line, shipped in zip(mape(found, given, plan.section), own, strict=True):
            print(f"# {line} (as shipped: {shipped.split()[-2]} %)")
        if not args.leave_out:
            for name, value in given.items():
                print(f"{name} = {value}")
        print(flush=True)


if __name__ == "__main__":
    main()
