"""What a compiled kernel holds: registers that did not fit, and how wide its accesses are."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from tests.backends.triton.driver import Launch

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_WIDTHS = {
    "ptx": {
        "load": r"ld\.global\S*?(?:\.v(\d))?\.[buf](\d+) ",
        "store": r"st\.global\S*?(?:\.v(\d))?\.[buf](\d+) ",
    },
    "amdgcn": {
        "load": r"(?:global|buffer|flat)_load_(\S+)",
        "store": r"(?:global|buffer|flat)_store_(\S+)",
    },
}
_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


@dataclass(frozen=True)
class Binary:
    """One kernel: bytes spilled per thread, and bytes of each of its loads and stores."""

    spilled: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]


def assembly(launch: Launch) -> dict[str, Any]:
    """Every stage of a launched kernel's compilation by name: "ttgir", "ptx", "amdgcn"..."""
    known = launch.source.fn.device_caches[0][0].values()
    return next(kernel.asm for kernel in known if kernel.metadata.hash == launch.metadata.hash)


def examined(launch: Launch) -> Binary:
    """What is in the kernel of a launch."""
    asm = assembly(launch)
    if "ptx" in asm:
        text, spilled = asm["ptx"], _local_bytes(launch.binary)
    else:
        text = asm["amdgcn"]
        found = re.findall(r"(?:spill_count|private_segment_fixed_size): +(\d+)", text)
        assert found, "no counts of spilled registers in the assembly"
        spilled = sum(map(int, found))
    widths = _WIDTHS["ptx" if "ptx" in asm else "amdgcn"]
    return Binary(spilled, _widths(text, widths["load"]), _widths(text, widths["store"]))


def _widths(text: str, pattern: str) -> tuple[int, ...]:
    found = []
    for match in re.finditer(pattern, text):
        if match.lastindex == 1 and not match[1].isdigit():
            found.append(_BYTES.get(match[1], 1))
        else:
            found.append(int(match[1] or 1) * int(match[2]) // 8)
    return tuple(found)


def _local_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [_TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.findall(r"(?:STACK|LOCAL):(\d+)", told.stdout)
    assert found, told.stdout
    return sum(map(int, found))
