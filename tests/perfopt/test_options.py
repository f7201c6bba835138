"""Options: what is taken, what is refused and how, and the ways to switch perfopt off."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import perfopt
from perfopt.options import MODES, described
from tests.perfopt.comparing import compare


def network(x: Tensor) -> Tensor:
    return F.gelu(x * 2) + 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pipelin": "graph(fuse)"}, ["unknown option 'pipelin'", "'pipeline'", "memory_budget"]),
        ({"mode": "defualt"}, ["mode is 'defualt'", "did you mean 'default'", *MODES]),
        ({"mode": "max-autotune"}, ["mode is 'max-autotune'", *MODES]),
        ({"precision": "bf16"}, ["precision is 'bf16'", "not available yet", "keep"]),
        ({"memory_budget": "20 parsecs"}, ["memory_budget is '20 parsecs'", "'20GiB'", "auto"]),
        ({"verify": "yes"}, ["verify is 'yes'", "True", "False"]),
        ({"limit": -1}, ["limit is -1", "from 0"]),
        ({"dump": 3}, ["dump is 3", "string"]),
        ({"disable": 3}, ["disable is 3"]),
        ({"pipeline": "graph(fuze)"}, ["pipeline is", "fuze", "fuse"]),
        ({"pipeline": "graf(fuse)"}, ["pipeline is", "graf", "graph"]),
    ],
)
def test_refusals_name_the_value_and_what_is_allowed(given: Any, words: list[str]) -> None:
    with pytest.raises(perfopt.OptionError) as caught:
        perfopt.compile(network, **given)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.key in str(next(iter(given))) + "e" or caught.value.key in given


def test_nearest_and_allowed_are_attributes() -> None:
    with pytest.raises(perfopt.OptionError) as caught:
        perfopt.Options.from_user(options={"verifi": True})
    assert caught.value.nearest == "verify"
    assert set(caught.value.allowed) == {name for name, _, _ in described()}


def test_torch_compile_reports_and_logs_them(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(network, backend="perfopt", options={"verifi": True})
    with (
        caplog.at_level(logging.ERROR, "perfopt"),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="did you mean 'verify'"),
    ):
        compiled(torch.ones(2))
    assert "unknown option 'verifi'" in caplog.text


def test_a_misspelt_option_is_logged_even_where_errors_are_suppressed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = torch.compile(network, backend="perfopt", options={"verifi": True})
    with torch._dynamo.config.patch(suppress_errors=True), caplog.at_level(logging.ERROR):
        torch.testing.assert_close(compiled(torch.ones(2)), network(torch.ones(2)))
    assert any(
        record.name.startswith("perfopt") and "verifi" in record.getMessage()
        for record in caplog.records
    )


def test_the_users_dictionary_stays_as_it_is() -> None:
    given = {"mode": "default", "disable": ["head"], "limit": 3}
    kept = copy.deepcopy(given)
    compiled = torch.compile(network, backend="perfopt", options=given)
    compiled(torch.ones(2))
    assert given == kept
    assert perfopt.Options.from_user(options=given).disable == ("head",)


def test_modes_arrive_alone_and_among_options() -> None:
    x = torch.randn(4, requires_grad=True)
    for compiled in (
        torch.compile(network, backend="perfopt", mode="aten"),
        torch.compile(network, backend="perfopt", options={"mode": "aten"}),
        perfopt.compile(network, mode="aten"),
    ):
        torch.compiler.reset()
        compare(network, [x], compiled)
        report = perfopt.report(compiled)
        assert report.kernels == 0 and report.decisions == ()
        assert "aten.gelu_backward.default" in report.library_calls


def test_compile_as_a_decorator() -> None:
    @perfopt.compile(fullgraph=True, limit=2)
    def function(x: Tensor) -> Tensor:
        return network(x)

    compare(network, [torch.randn(4, requires_grad=True)], function)
    with pytest.raises(perfopt.OptionError):
        perfopt.compile(verifi=True)


def test_limit_counts_over_all_graphs() -> None:
    def two(x: Tensor) -> Tensor:
        y = F.gelu(x + 1)
        return torch.mm(y, y.t()).exp() + 1

    x = torch.randn(4, 4, requires_grad=True)
    applied = []
    for limit in (0, 1, None):
        torch.compiler.reset()
        compiled = perfopt.compile(two, limit=limit)
        compare(two, [x], compiled)
        decisions = perfopt.report(compiled).decisions
        applied.append(sum(each.verdict.value == "applied" for each in decisions))
    assert applied[0] == 0 and applied[1] == 1 and applied[2] > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_exact_rounding_rounds_where_eager_does(dtype: torch.dtype) -> None:
    def chain(x: Tensor, y: Tensor) -> Tensor:
        return ((x * 2.3 + y) * x - y / 3).relu() * y + x.float().sum(-1, keepdim=True).to(x.dtype)

    x, y = torch.randn(33, 40).to(dtype), torch.randn(33, 40).to(dtype)
    exact = perfopt.compile(chain, exact_rounding=True)
    assert torch.equal(exact(x, y), chain(x, y))
    assert perfopt.report(exact).kernels > 0
    compare(chain, [x, y], perfopt.compile(chain))


def test_dump_writes_graphs_programs_and_kernels(tmp_path: Path) -> None:
    compiled = perfopt.compile(network, dump=str(tmp_path / "dump"))
    compiled(torch.randn(4, requires_grad=True)).sum().backward()
    files = {path.name for path in (tmp_path / "dump").iterdir()}
    kinds = ("graph.txt", "program.py", "kernels.txt", "kernels.mlir")
    assert files == {f"{part}_0_0_{kind}" for part in ("forward", "backward") for kind in kinds}
    assert "def program(inputs)" in (tmp_path / "dump" / "forward_0_0_program.py").read_text()


def test_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFOPT_DISABLE", "1")
    compiled = perfopt.compile(network)
    x = torch.randn(4, requires_grad=True)
    compare(network, [x], compiled)
    assert perfopt.report(compiled).graphs == ()


class Two(nn.Module):
    """Two stages of the same operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.LayerNorm(8), nn.GELU())
        self.second = nn.Sequential(nn.LayerNorm(8), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.mm(self.first(x), x[:8]) * 2)


def kernels(model: nn.Module, **options: Any) -> tuple[int, int]:
    """Kernels, forward and backward."""
    torch.compiler.reset()
    compiled = perfopt.compile(model, **options)
    compiled(torch.randn(8, 8)).sum().backward()
    forward, backward = perfopt.report(compiled).graphs
    if forward.kind != "forward":
        forward, backward = backward, forward
    return forward.launches, backward.launches


def test_disabled_modules_run_through_aten_forward_and_backward() -> None:
    every = kernels(Two())
    assert min(every) >= 2
    for names in (["first"], ["*rst"], "first"):
        some = kernels(Two(), disable=names)
        assert 0 < some[0] < every[0] and 0 < some[1] < every[1]
    model = Two()
    perfopt.disable(model.second)
    some = kernels(model)
    assert 0 < some[0] < every[0] and some[1] < every[1]
    assert perfopt.disable(model) is model
    assert kernels(model) == (0, 0)


def test_without_torch_mlir_it_says_so_once_and_runs_through_aten() -> None:
    code = """
import sys, warnings
sys.modules["torch_mlir"] = None
import torch, perfopt
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for f in (lambda x: x.softmax(-1), lambda x: x.exp() + 1):
        compiled = perfopt.compile(f)
        torch.testing.assert_close(compiled(torch.ones(3, 4)), f(torch.ones(3, 4)))
        assert perfopt.report(compiled).kernels == 0
texts = [str(w.message) for w in caught if "torch-mlir" in str(w.message)]
assert len(texts) == 1 and "pip install perfopt[cpu]" in texts[0], texts
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
