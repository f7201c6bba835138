"""What a generated GPU kernel's registers, shared memory and threads let a core hold at once.

Warps hide the memory's latency: a core needs so many bytes in flight that the memory is never idle.
A kernel that holds few warps, because each thread takes many registers or each block much shared
memory, streams slower by the bytes that it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfopt.cost_model.efficiency import Constants, constants
from perfopt.cost_model.specification import Device

_BLOCKS = 32  # blocks that a core holds at most
_GRAIN = 256  # registers of one warp are given out in so many
_SHARED_GRAIN = 1024  # bytes of shared memory that each block takes beside its own
_MOST_REGISTERS = 255  # of one thread


@dataclass(frozen=True)
class Occupancy:
    """What one core holds: `blocks`, their `warps`, the `share` of the warps that it can hold.

    `limit` names what allows no more: "warps", "registers", "shared memory" or "blocks".
    """

    blocks: int
    warps: int
    share: float
    limit: str


def occupancy(
    device: Device, threads: int, registers: int = 0, shared_bytes: float = 0.0
) -> Occupancy:
    """What a core of the device holds of blocks of `threads`, `registers` of each thread.

    `shared_bytes` are of one block. Raises `ValueError` for a block that no core can hold.
    """
    size = device.warp_size or 32
    most = device.warps or 48
    if threads < 1:
        raise ValueError(f"threads is {threads}, not a number from 1")
    if registers > _MOST_REGISTERS:
        raise ValueError(f"registers is {registers}; a thread has at most {_MOST_REGISTERS}")
    warps = -(-threads // size)
    limits = {"warps": most // warps, "blocks": _BLOCKS}
    if registers and device.registers:
        each = -(-registers * size // _GRAIN) * _GRAIN
        limits["registers"] = int(device.registers // (each * warps))
    if shared_bytes and device.shared_bytes:
        limits["shared memory"] = int(device.shared_bytes // (shared_bytes + _SHARED_GRAIN))
    limit = min(limits, key=lambda name: limits[name])
    blocks = limits[limit]
    if blocks < 1:
        raise ValueError(
            f"a block of {threads} threads, {registers} registers and {shared_bytes:.0f} bytes of "
            f"shared memory does not fit: too many {limit} for a core of {device.name}"
        )
    return Occupancy(blocks, blocks * warps, blocks * warps / most, limit)


def stream_share(
    device: Device, held: Occupancy, load: float = 16.0, fit: Constants | None = None
) -> float:
    """The share of the memory's bandwidth that so many warps keep busy, at most 1.

    `load` is the bytes that one lane has in flight: those of a load, times the loads that are
    issued before the first is waited for.
    """
    fit = fit or constants("streaming", device)
    needed = device.memory_bandwidth / device.cores * fit["memory_seconds"]
    flying = held.warps * (device.warp_size or 32) * load
    return min(1.0, flying / needed)


def waves(device: Device, blocks: float, held: Occupancy) -> float:
    """Rounds in which so many blocks run; the last one counts in full."""
    at_once = device.cores * held.blocks
    return float(-(-blocks // at_once))
