"""One of two processes that train a small model, eagerly and through perfopt.

Arguments: how it is distributed, the rank, and a file by which the processes meet. It prints the
losses of both and the number of kernels, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import perfopt
from perfopt.cost_model.decision import Verdict
from perfopt.records import COMPILATIONS_CACHE

WORLD, WIDTH, STEPS = 2, 16, 4


class Block(nn.Module):
    """A layer norm and a small network behind a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


class Model(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def ddp(model: Model, compiled: bool) -> Callable[[Tensor], Tensor]:
    """Every process has the whole model and a part of the batch."""
    whole = DistributedDataParallel(model)
    return perfopt.compile(whole) if compiled else whole


def fsdp(model: Model, compiled: bool) -> Callable[[Tensor], Tensor]:
    """Every process has a shard of each block's parameters."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
        if compiled:
            block.compile(backend="perfopt", fullgraph=True)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Model, compiled: bool) -> Callable[[Tensor], Tensor]:
    """Every process has some columns and rows of each weight, and the whole batch."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
    return perfopt.compile(model, fullgraph=True) if compiled else model


WAYS = {"ddp": ddp, "fsdp": fsdp, "tensor_parallel": tensor_parallel}


def train(way: str, rank: int, compiled: bool) -> tuple[list[float], Any]:
    """The losses of a few steps, and what must live as long as they are looked at."""
    torch.manual_seed(0)
    model = Model()
    run = WAYS[way](model, compiled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    share = 0 if way == "tensor_parallel" else rank
    generator = torch.Generator().manual_seed(share)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(6, WIDTH, generator=generator)
        loss = (run(x) - x.flip(-1)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, run


def main() -> None:
    """Train both ways and say what came of it."""
    way, rank, meeting = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    eager, _ = train(way, rank, False)
    ours, alive = train(way, rank, True)
    result: dict[str, Any] = {"eager": eager, "ours": ours}
    graphs = [graph for job in COMPILATIONS_CACHE for graph in job.graphs]
    result["kernels"] = sum(graph.program.launches for graph in graphs)
    result["backward"] = sum(graph.program.launches for graph in graphs if graph.kind == "backward")
    result["failed"] = [
        decision.text()
        for job in COMPILATIONS_CACHE
        for decision in job.every_decision()
        if decision.verdict is Verdict.FAILED
    ]
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    del alive
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
