"""Peak bytes of an eager PyTorch program, simulated on meta tensors.

Nothing is computed or allocated: every operation, those of backward too, runs on meta tensors,
whose storages have a size and a life but no memory. The peak is that of the live bytes, each
storage rounded up to the caching allocator's 512 bytes, with the workspaces that cuBLAS keeps for
each thread that ran a product: forward runs in one thread, backward in another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from perfopt.backends.torch_private import TorchDispatchMode, tree_leaves

_ROUND = 512  # bytes, the allocator's granularity
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Peak(TorchDispatchMode):
    """Follows the storages made inside it; `peak` is the most bytes that were alive at once.

    Backward is known by gradients being off. What it made and then adds to is added to in place, as
    autograd does where gradients meet.
    """

    def __init__(self, workspace: int = 0) -> None:
        super().__init__()
        self.peak = 0
        self._workspace = workspace
        self._alive: dict[int, tuple[StorageWeakRef, int, bool]] = {}
        self._live = 0
        self._threads: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and self._meet(args):
            func = torch.ops.aten.add_.Tensor
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _PRODUCTS:
            self._threads.add(torch.is_grad_enabled())
        self._purge()
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._enter(leaf)
        self.peak = max(self.peak, self._now())
        return result

    def forget(self) -> None:
        """Start a new peak from what is alive now."""
        self._purge()
        self.peak = self._now()

    def _now(self) -> int:
        return self._live + self._workspace * len(self._threads)

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        held = StorageWeakRef(storage)
        if held.cdata not in self._alive:
            size = -(-storage.nbytes() // _ROUND) * _ROUND
            self._alive[held.cdata] = (held, size, torch.is_grad_enabled())
            self._live += size

    def _meet(self, args: Any) -> bool:
        """Whether an addition is of two gradients of which backward made the first."""
        first, second = args[:2]
        if torch.is_grad_enabled() or not isinstance(second, Tensor):
            return False
        *_, ahead = self._alive.get(StorageWeakRef(first.untyped_storage()).cdata, (True,))
        return not ahead and first.shape == second.shape and first.dtype == second.dtype

    def _purge(self) -> None:
        for key in [key for key, (held, *_) in self._alive.items() if held.expired()]:
            self._live -= self._alive.pop(key)[1]


def steady_peak(build: Callable[[], Callable[[], object]], workspace: int = 0) -> int:
    """Peak bytes of a step once the gradients of an earlier step are there.

    `build` makes parameters and inputs on the device "meta" and returns the step. `workspace` is
    what a product's library keeps, in bytes, for each thread that ran one.
    """
    with Peak(workspace) as run:
        step = build()
        step()
        run.forget()
        step()
        return run.peak


def empty(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """A meta tensor; `grad` makes it a leaf that wants a gradient."""
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def kernel(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of autograd that only allocates: `forward(ctx, ...)`, `backward(ctx, ...)`."""
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type("Kernel", (torch.autograd.Function,), members)
    made: Callable[..., Any] = function.apply
    return made


def kept(ctx: Any, result: Any, *tensors: Tensor) -> Any:
    """`result`, with `tensors` kept for backward."""
    ctx.save_for_backward(*tensors)
    return result
