"""Peak memory by kind and by module, beside what torch allocates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import perfopt
from perfopt.backends.torch_private import allocated_peak
from perfopt.cost_model.memory import KINDS, memory_of
from perfopt.explanation import explain_made

WIDTH, ROWS = 64, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + inner


class Stack(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def explained() -> perfopt.Explanation:
    return perfopt.explain(Stack(), torch.randn(ROWS, WIDTH), train=True)


def test_kinds_add_up_to_the_peak(explained: perfopt.Explanation) -> None:
    memory = explained.memory
    assert memory is not None and set(memory.kinds) <= set(KINDS)
    assert sum(memory.kinds.values()) == memory.peak == explained.peak_bytes
    weights = sum(4 * p.numel() for p in Stack().parameters())
    assert memory.kinds["parameters"] == weights
    assert memory.kinds["inputs"] >= 4 * ROWS * WIDTH
    assert max(size for _, size in memory.timeline) <= memory.peak


def test_what_is_kept_belongs_to_modules(explained: perfopt.Explanation) -> None:
    assert explained.memory is not None
    modules = explained.memory.modules
    assert {"blocks.0.up", "blocks.1.up", "blocks.2.up"} <= set(modules)
    assert modules["blocks.0.up"] >= 4 * ROWS * 4 * WIDTH
    assert list(modules.values()) == sorted(modules.values(), reverse=True)


def test_the_optimizers_state_counts() -> None:
    def make() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, object]]:
        return Stack(), (torch.randn(ROWS, WIDTH),), {}

    weights = sum(4 * p.numel() for p in Stack().parameters())
    plain = explain_made(make, "m", True)
    adam = explain_made(make, "m", True, optimizer="adamw")
    assert adam.peak_bytes == plain.peak_bytes + 2 * weights
    assert adam.memory is not None and adam.memory.kinds["optimizer"] == 2 * weights


def test_the_prediction_is_within_five_percent_of_what_is_allocated() -> None:
    torch.compiler.reset()
    model, x = Stack(), torch.randn(ROWS, WIDTH)
    compiled = perfopt.compile(model)

    def step() -> None:
        compiled(x).backward()
        for parameter in model.parameters():
            parameter.grad = None

    for _ in range(2):
        step()
    given = 4 * (x.numel() + sum(p.numel() for p in model.parameters()))
    measured = allocated_peak(step) + given
    predicted = perfopt.report(compiled).explanation.peak_bytes
    assert predicted == pytest.approx(measured, rel=0.05)


def test_an_unknown_optimizer_is_said() -> None:
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(ValueError, match="optimizer is 'adam'; allowed: none"):
        memory_of(graph, optimizer="adam")
