"""On a real GPU: generated kernels beside eager and float64, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import perfopt
from examples.train_gpt import GPT, Shape
from perfopt.cost_model.decision import Verdict
from perfopt.records import COMPILATIONS_CACHE
from tests.backends.test_lower import CASES

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Tensors are made on the GPU, and no kernel fails unseen."""
    torch.compiler.reset()
    with torch.device(DEVICE):
        yield
    failed = [
        decision.text()
        for job in COMPILATIONS_CACHE
        for decision in job.every_decision()
        if decision.verdict is Verdict.FAILED
    ]
    torch.compiler.reset()
    assert failed == []


def there(values: Any) -> tuple[Any, ...]:
    """Arguments on the GPU."""
    return tuple(x.to(DEVICE) if isinstance(x, Tensor) else x for x in values)


def launches() -> int:
    """The kernel launches of all programs that were compiled."""
    return sum(graph.program.launches for job in COMPILATIONS_CACHE for graph in job.graphs)


def chain(x: Tensor, y: Tensor) -> Tensor:
    return (F.gelu(x * 2) + y).softmax(-1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_regions_are_as_right_as_eager(name: str, dynamic: bool) -> None:
    function, inputs = CASES[name]
    args = there(inputs())
    compiled = torch.compile(function, backend="perfopt", dynamic=dynamic, options={"verify": True})
    compiled(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_and_backward(dtype: torch.dtype) -> None:
    x, y = (torch.randn(64, 512, dtype=dtype).requires_grad_() for _ in range(2))
    compiled = perfopt.compile(chain, verify=True)
    compiled(x, y).square().sum().backward()
    assert launches() >= 2
    got = x.grad, y.grad
    x.grad = y.grad = None
    chain(x, y).square().sum().backward()
    close: dict[str, float] = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got, (x.grad, y.grad), **close)


def test_the_demo_trains_as_eager_does() -> None:
    eager = GPT(Shape(65, 2, 4, 128, 64))
    ours = copy.deepcopy(eager)
    compiled = torch.compile(ours, backend="perfopt")
    rates = [torch.optim.AdamW(model.parameters(), 1e-3) for model in (eager, ours)]
    for _ in range(5):
        tokens, targets = torch.randint(65, (2, 8, 64))
        losses = []
        for model, rate in zip((eager, compiled), rates, strict=True):
            loss = model(tokens, targets)
            loss.backward()
            rate.step()
            rate.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert launches() >= 20


def test_tensors_that_start_anywhere() -> None:
    compiled = torch.compile(chain, backend="perfopt", options={"verify": True})
    for start in range(4):
        compiled(*(torch.randn(64 * 48 + 4)[start:][: 64 * 48].view(64, 48) for _ in range(2)))


def test_a_number_on_the_cpu() -> None:
    x, number = torch.randn(64, 48), torch.tensor(2.5, device="cpu")
    compiled = perfopt.compile(lambda x, n: (x * n).relu() + n, verify=True)
    torch.testing.assert_close(compiled(x, number), (x * number).relu() + number)


def test_the_stream_that_is_current() -> None:
    compiled = perfopt.compile(chain)
    x, y = torch.randn(4096, 4096), torch.randn(4096, 4096)
    want = compiled(x, y)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = compiled(x, y)
    stream.synchronize()
    assert torch.equal(got, want)


def test_a_cuda_graph() -> None:
    compiled = perfopt.compile(chain)
    x, y = torch.randn(64, 48), torch.randn(64, 48)
    compiled(x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compiled(x, y)
    x.copy_(torch.randn(64, 48))
    graph.replay()
    torch.testing.assert_close(result, chain(x, y))


def test_another_gpu_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, y = (torch.randn(64, 48, device="cuda:1") for _ in range(2))
    got = perfopt.compile(chain, verify=True)(x, y)
    assert got.device == x.device and torch.cuda.current_device() == 0


def test_profiles_name_regions_and_lines() -> None:
    compiled = perfopt.compile(chain)
    x, y = torch.randn(64, 48), torch.randn(64, 48)
    compiled(x, y)
    with torch.profiler.profile() as profile:
        compiled(x, y)
        torch.cuda.synchronize()
    events: list[Any] = profile.events() or []
    assert any(event.name.startswith("region_0__test_gpu_py_") for event in events)
