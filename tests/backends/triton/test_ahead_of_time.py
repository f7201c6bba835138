"""Kernels compiled for GPUs that are not there, as their programs would launch them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import expecttest
import pytest
import torch

from tests.backends.test_lower import CASES
from tests.backends.triton.binaries import examined
from tests.backends.triton.driver import TARGETS
from tests.backends.triton.programs import Captured, captured, compiled

r, half, bf16 = torch.randn, torch.float16, torch.bfloat16
WIDE = 16  # bytes of the widest access that every target has
AMD = {"gfx942"}

# Arguments by the name of a case of `test_lower`, whose function they are for.
ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "add": lambda: (r(64, 1024), r(64, 1024)),
    "gelu": lambda: (r(64, 1024).to(bf16), r(1024).to(bf16), r(64, 1024).to(bf16)),
    "tanh gelu": lambda: (r(64, 1024),),
    "silu": lambda: (r(512, 1024).to(half), r(512, 1024).to(half)),
    "transposed large": lambda: (r(256, 128), r(128, 256)),
    "softmax": lambda: (r(64, 1024),),
    "softmax of short rows": lambda: (r(1024, 8),),
    "softmax of columns": lambda: (r(256, 256),),
    "log softmax": lambda: (r(8, 16384),),
    "layer norm": lambda: (r(64, 131), r(131), r(131)),
    "RMS norm": lambda: (r(64, 1024).to(bf16), r(1024).to(bf16)),
    "argmax": lambda: (r(64, 1024),),
    "layer norm backward": lambda: (r(256, 256), r(256, 256), r(256, 1), r(256, 1), r(256)),
    "bias gradient": lambda: (r(256, 256), r(256, 256)),
    "row and column sums": lambda: (r(256, 256),),
    "embedding": lambda: (r(50, 256), torch.randint(50, (4, 32)), r(32, 256)),
    "joined heads": lambda: (r(3, 4, 7, 8), r(3, 4, 7, 8)),
}
# Regions whose rows do not start at multiples of 16 bytes.
RAGGED = {"layer norm"}
# Those of 16-bit tensors in programs of 256 points.
SMALL = {"gelu"}
# And those that read something narrower beside: a number for each row, or an index.
NARROW = {"layer norm backward", "embedding"}


@cache
def graphs(name: str) -> Captured:
    torch.manual_seed(0)
    return captured(CASES[name][0], ARGUMENTS[name]())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_kernels_spill_nothing_and_move_16_bytes_at_a_time(name: str, target: str) -> None:
    device = "mi300x" if target in AMD else "h100"
    with compiled(graphs(name), target, device, run=False) as made:
        made["inference"](*made.inputs)
        launches = made.driver.launches
        binaries = [examined(each) for each in launches]
    program = made["inference"].record.program
    assert len(launches) == program.launches > 0 and not program.library_calls
    for launch, binary in zip(launches, binaries, strict=True):
        assert launch.metadata.target.backend == ("hip" if target in AMD else "cuda")
        assert binary.spilled == 0
    if name in RAGGED:
        return
    # The smallest programs have one warp, whose threads are 64 on AMD: 4 elements for each.
    wide = WIDE // 2 if target in AMD and name in SMALL else WIDE
    loads = [width for binary in binaries for width in binary.loads]
    assert loads.count(wide) + loads.count(2 * WIDE) >= len(binaries)
    if name not in NARROW:
        assert min(loads) >= wide, loads


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_tensors_that_start_anywhere_are_read_piece_by_piece(target: str) -> None:
    with compiled(graphs("add"), target, run=False) as made:
        x, y = made.inputs
        moved = torch.randn(x.numel() + 1)[1:].view(x.shape)
        made["inference"](moved, y)
        made["inference"](x, y)
        apart, together = map(examined, made.driver.launches)
    assert 4 in apart.loads and WIDE in apart.loads  # `y` is where it was
    assert min(together.loads) == min(together.stores) == min(apart.stores) == WIDE


def test_sizes_of_any_value_are_compiled_for() -> None:
    with compiled(
        captured(CASES["add"][0], (r(48, 32), r(48, 32)), dynamic=True), run=False
    ) as made:
        made["inference"](*made.inputs)
        made["inference"](*(47 if x == 48 else x for x in made.inputs[:2]), r(47, 32), r(47, 32))
        even, odd = map(examined, made.driver.launches)
    assert min(even.loads) == WIDE and even.spilled == odd.spilled == 0


class TestGolden(expecttest.TestCase):
    def test_launches_and_bytes(self) -> None:
        lines = []
        for name in ARGUMENTS:
            with compiled(graphs(name)) as made:
                results = made["inference"](*made.inputs)
            tensors = {x.data_ptr(): x for x in (*made.inputs, *results)}
            least = sum(x.nbytes for x in tensors.values())
            lines.append(
                f"{name}: {len(made.driver.launches)} launches, {made.read} bytes read, "
                f"{made.written} written; {(made.read + made.written) / least:.2f} of the least"
            )
        self.assertExpectedInline(
            "\n".join(lines),
            """\
add: 1 launches, 524288 bytes read, 262144 written; 1.00 of the least
gelu: 1 launches, 393216 bytes read, 131072 written; 1.33 of the least
tanh gelu: 1 launches, 262144 bytes read, 262144 written; 1.00 of the least
silu: 1 launches, 2097152 bytes read, 1048576 written; 1.00 of the least
transposed large: 1 launches, 262144 bytes read, 131072 written; 1.00 of the least
softmax: 1 launches, 262144 bytes read, 262144 written; 1.00 of the least
softmax of short rows: 1 launches, 32768 bytes read, 32768 written; 1.00 of the least
softmax of columns: 1 launches, 786432 bytes read, 262144 written; 2.00 of the least
log softmax: 1 launches, 1572864 bytes read, 524288 written; 2.00 of the least
layer norm: 1 launches, 50304 bytes read, 33536 written; 1.23 of the least
RMS norm: 1 launches, 262144 bytes read, 131072 written; 1.49 of the least
argmax: 1 launches, 262144 bytes read, 1024 written; 1.00 of the least
layer norm backward: 2 launches, 538624 bytes read, 272384 written; 1.02 of the least
bias gradient: 2 launches, 528384 bytes read, 267264 written; 1.01 of the least
row and column sums: 2 launches, 266240 bytes read, 6144 written; 1.03 of the least
embedding: 1 launches, 524288 bytes read, 131072 written; 3.03 of the least
joined heads: 1 launches, 8064 bytes read, 8064 written; 1.20 of the least""",
        )
