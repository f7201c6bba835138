"""Processes that compile small kernels into one cache: many at once, killed ones, later ones.

    python -m tests.backends.mlir.object_processes FOLDER

Imports once and forks, so that eight processes cost little more than one. Exits with 0 where each
of them computed what eager computes.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from perfopt.backends.cache import Cache
from perfopt.backends.lower import lower_region
from perfopt.backends.mlir.compile import DISK, compile_kernels
from perfopt.backends.mlir.objects import Objects
from tests.backends.kernels import Function, launch, traced

X = torch.linspace(-2, 2, 24).reshape(4, 6)
FUNCTIONS: tuple[Function, ...] = (
    lambda x: torch.exp(x) * 2,
    lambda x: x.softmax(-1),
    lambda x: torch.tanh(x).sum(0),
)
LOWERED = [lower_region(f"region_{i}", traced(f, X)) for i, f in enumerate(FUNCTIONS)]


def compute(folder: Path) -> Counter[str]:
    """Compile the kernels, each by itself, check what they compute, and count their sources."""
    sources: Counter[str] = Counter()
    for function, lowered in zip(FUNCTIONS, LOWERED, strict=True):
        objects = Objects(Cache(folder), {"option.mode": "default"})
        entries = compile_kernels(lowered.kernels, None, objects, sources)
        (result,) = launch(lowered, entries, (X,), {}, threads=1)
        torch.testing.assert_close(result, function(X))
    return sources


def forked(work: Callable[[], object]) -> int:
    """The id of a process that does `work` and ends with 0, or 1 where that raises."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(process: int) -> int:
    """How a process ended: its exit code, or less than 0 where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed_at(folder: Path, write: int) -> None:
    """Compute, and be killed before so many files are in place."""
    replace, left = os.replace, [write]

    def counted(*paths: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)

    os.replace = counted  # type: ignore[assignment]
    compute(folder)


def from_disk(folder: Path) -> None:
    """Compute, with all kernels from the disk."""
    sources = compute(folder)
    assert sources[DISK] == len(FUNCTIONS) == sources.total(), sources
    assert not any(name.startswith("torch_mlir") for name in sys.modules)


def main(folder: Path) -> None:
    """Many at once, then one that needs no compiler; killed at every write, and one after each."""
    codes = list(map(ended, [forked(lambda: compute(folder / "many")) for _ in range(8)]))
    codes.append(ended(forked(lambda: from_disk(folder / "many"))))
    assert codes == [0] * 9, codes
    for write in range(2 * len(FUNCTIONS)):
        place = folder / f"killed_{write}"
        killed = ended(forked(lambda place=place, write=write: killed_at(place, write)))
        after = ended(forked(lambda place=place: compute(place)))
        last = ended(forked(lambda place=place: from_disk(place)))
        assert (killed, after, last) == (-signal.SIGKILL, 0, 0), (write, killed, after, last)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
