"""Checks of a model beside eager and float64: what is found, and what is not by mistake."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfopt import compiler
from perfopt.backends import aten_pointwise
from perfopt.checked_text import checked, trained
from perfopt.checking import Check, Curves, check, curves
from perfopt.options import Options
from perfopt.passes import cse
from perfopt.repro import spec, tensor, write
from perfopt.running import Subject, loss_of
from tests.source_tree import ROOT

aten = torch.ops.aten


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(self.first(x))).softmax(-1)
        y = F.dropout(y, 0.2, self.training)
        return torch.tanh(self.second(y)).sum(-1)


@pytest.fixture
def wrong_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that compute sin in the place of tanh."""
    wrong = aten_pointwise.POINTWISE[aten.sin.default]
    monkeypatch.setitem(aten_pointwise.POINTWISE, aten.tanh.default, wrong)


@pytest.fixture
def wrong_cse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over different dimensions count as one."""
    right = cse._key
    monkeypatch.setattr(
        cse, "_key", lambda value: "dims" if isinstance(value, list) else right(value)
    )


def run_alone(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, cwd=ROOT, env=dict(os.environ)
    )


def exit_code(file: Path) -> Any:
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(file), run_name="__main__")
    return done.value.code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_right_models_pass(dtype: torch.dtype) -> None:
    model = Layers().to(dtype)
    found = check(Subject(model, (torch.randn(16, 8, dtype=dtype),), {}, True), Options())
    assert not found.wrong and found.exact and found.culprit is None
    names = [row.name for row in found.rows]
    assert names[0] == "output 0" and "gradient of first.weight" in names
    assert "buffer norm.running_mean" in names
    assert float(model.norm.running_mean.abs().sum()) == 0  # copies ran, not the model


def test_models_that_do_not_run_in_float64_are_compared_with_eager() -> None:
    def function(x: Tensor) -> Tensor:
        return x.view(torch.int32).float() * 2

    found = check(Subject(function, (torch.randn(4, 3),), {}), Options())
    assert not found.wrong and (found.exact or "float64" in found.note)

    def single(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no float64")
        return x.exp() + 1

    found = check(Subject(single, (torch.randn(4, 3),), {}), Options())
    assert not found.wrong and not found.exact and "no float64" in found.note
    assert "compared with eager alone" in checked("single", found)


def test_a_wrong_lowering_is_traced_to_its_region(wrong_tanh: None, tmp_path: Path) -> None:
    found = check(Subject(Layers().eval(), (torch.randn(4, 8),), {}, True), Options())
    assert found.wrong and found.trial.region is not None and found.culprit is not None
    assert found.trial.region.source.startswith("test_checking.py:41")
    decision = found.culprit.decision
    assert decision is not None and decision.pass_name == "fuse" and "tanh" in decision.nodes
    assert [row.name for row in found.rows if row.problem][0] == "output 0"
    file = tmp_path / "repro.py"
    assert write(file, found, Options())
    text = file.read_text()
    assert "aten.tanh" in text and "aten.addmm" not in text and "seed=" in text
    assert exit_code(file) == 1


def test_a_wrong_pass_is_traced_to_its_decision(wrong_cse: None, tmp_path: Path) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.sum(0) * 2, y.exp() + y.sigmoid(), x.sum(1) * 2

    inputs = (torch.randn(4, 4, requires_grad=True), torch.randn(5))
    found = check(Subject(function, inputs, {}, True), Options())
    assert found.wrong and found.trial.region is None and found.culprit is not None
    decision = found.culprit.decision
    assert decision is not None and decision.pass_name == "cse" and decision.nodes[0] == "sum_2"
    text = checked("function", found, "repro.py")
    assert "outside of kernels" in text and "cse: sum_2 is sum_1 computed again" in text
    file = tmp_path / "repro.py"
    assert write(file, found, Options())
    assert "'limit': " in file.read_text() and exit_code(file) == 1


def test_repro_files_run_alone_and_tell_when_the_fault_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "repro.py"
    with monkeypatch.context() as patch:
        wrong = aten_pointwise.POINTWISE[aten.sin.default]
        patch.setitem(aten_pointwise.POINTWISE, aten.tanh.default, wrong)
        x = torch.full((3, 5), 1e-3)  # sin and tanh part for larger numbers only
        x[1, 2] = 2.0
        found = check(Subject(lambda x: torch.tanh(x) * 2, (x,), {}), Options())
        assert write(file, found, Options())
    alone = run_alone(file)
    assert (alone.returncode, alone.stdout, alone.stderr) == (0, "right\n", "")


def test_faults_that_only_real_inputs_show_keep_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right: Callable[..., Any] = aten_pointwise.POINTWISE[aten.exp.default][1]
    kind = aten_pointwise.POINTWISE[aten.exp.default][0]

    def wrong(context: Any, node: Any, operands: Any) -> Any:
        made = right(context, node, operands)
        return context.op("minimum", (made, context.const(1e6, made.type)), made.type)

    monkeypatch.setitem(aten_pointwise.POINTWISE, aten.exp.default, (kind, wrong))
    x = torch.zeros(2, 3)
    x[1, 1] = 20.0
    found = check(Subject(lambda x: torch.exp(x) + 1, (x,), {}), Options())
    assert found.wrong
    file = tmp_path / "repro.py"
    assert write(file, found, Options())
    assert "data=" in file.read_text() and exit_code(file) == 1


def test_a_fault_beside_all_decisions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = compiler.build_program

    def wrong(*args: Any, **kwargs: Any) -> Any:
        program = right(*args, **kwargs)
        return type(program)(
            program.name, program.source, lambda xs: tuple(y + 1 for y in program.run(xs)),
            program.regions, program.launches, program.library_calls,
        )  # fmt: skip

    def build(*args: Any, **kwargs: Any) -> Any:
        made = wrong(*args, **kwargs)
        made.run._boxed_call = True
        return made

    monkeypatch.setattr(compiler, "build_program", build)
    found = check(Subject(lambda x: x.exp() * 2, (torch.ones(3),), {}), Options())
    assert found.wrong and found.culprit is not None and found.culprit.number == 0
    assert "without any decision" in checked("function", found)
    assert write(tmp_path / "repro.py", found, Options())
    assert exit_code(tmp_path / "repro.py") == 1


def test_losses_side_by_side(wrong_tanh: None) -> None:
    subject = Subject(Layers().eval(), (torch.randn(16, 8),), {}, True)
    wrong = curves(subject, 12, Options())
    assert wrong.wrong and len(wrong.ours) == len(wrong.eager) == len(wrong.exact) == 12
    text = trained(wrong)
    assert "losses WRONG" in text and len(text.splitlines()) == 13
    right = curves(subject, 3, Options(mode="aten"))
    assert not right.wrong and right.eager[0] > 0


def test_curves_that_are_not_numbers() -> None:
    nan = float("nan")
    assert not Curves((1.0, nan), (1.0, nan), (1.0, nan)).wrong
    assert Curves((1.0, 2.0), (1.0, nan), (1.0, 2.0)).wrong
    assert Curves((1.0, 2.0), (1.0, 2.5), ()).wrong


def test_losses_are_found() -> None:
    number, other = torch.ones(()), torch.ones(3)
    assert loss_of({"loss": number, "logits": other}) is number
    assert loss_of(number) is number and loss_of((other, number)) is None


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 4).t(),
        torch.randn(2, 1, 3).expand(2, 4, 3),
        torch.arange(6).reshape(2, 3),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.bfloat16, requires_grad=True),
        torch.empty(0, 3),
        torch.tensor(2.5),
    ],
    ids=str,
)
def test_inputs_are_written_with_their_memory(x: Tensor) -> None:
    names = {"tensor": tensor, "torch": torch}
    again = eval(spec(x, 0, real=True), names)
    assert torch.equal(again, x) and again.stride() == x.stride()
    assert (again.dtype, again.requires_grad) == (x.dtype, x.requires_grad)
    random = eval(spec(x, 0, real=False), names)
    assert (random.shape, random.stride(), random.dtype) == (x.shape, x.stride(), x.dtype)


def test_checks_read_as_text() -> None:
    found = check(Subject(lambda x: x.exp() + 1, (torch.ones(3),), {}), Options())
    assert isinstance(found, Check)
    assert checked("f", found).startswith("f: right, 1 of 1 results agree\n")
