"""`perfopt.report` and the command line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import perfopt
from perfopt.cli import main
from tests.perfopt import explained_model


def network(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(torch.mm(x, w) + 1).softmax(-1)


def test_report_of_a_trained_function() -> None:
    compiled = perfopt.compile(network)
    empty = perfopt.report(compiled)
    assert empty.graphs == () and empty.kernels == 0 and "0 graphs" in empty.text()
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    compiled(x, w).sum().backward()
    report = perfopt.report(compiled)
    assert sorted(graph.kind for graph in report.graphs) == ["backward", "forward"]
    assert report.library_calls["aten.mm.default"] == 3
    assert report.kernels == sum(len(graph.regions) for graph in report.graphs) > 0
    assert all("def program(inputs):" in source for source in report.sources)
    saved = [each.seconds_saved for each in report.decisions]
    assert saved == sorted(saved, reverse=True) and saved[0] > 0
    assert set(report.seconds) == {
        "dynamo", "autograd", "passes", "lowering", "kernels", "program",
    }  # fmt: skip
    assert min(report.seconds.values()) >= 0
    text = report.text()
    assert max(map(len, text.splitlines())) <= 80
    for words in ("network 0/0 forward", "applied", "fuse", "test_reports.py:"):
        assert words in text
    assert repr(report).startswith("<perfopt report: 2 graphs") and len(repr(report)) < 80


def test_reports_do_not_mix_functions() -> None:
    first, second = perfopt.compile(network), perfopt.compile(lambda x: x * 2 + 1)
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    first(x, w)
    assert perfopt.report(second).graphs == ()
    second(x)
    assert perfopt.report(first).library_calls == {"aten.mm.default": 1}
    assert "aten.mm.default" not in perfopt.report(second).library_calls


def test_report_of_code_that_an_equal_compilation_made() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    first, second = (torch.compile(network, backend="perfopt") for _ in range(2))
    first(x, w)
    second(x, w)
    assert perfopt.report(second).sources == perfopt.report(first).sources != ()


def test_report_of_modules_and_of_graph_breaks() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2 + 1
            torch._dynamo.graph_break()
            return y.exp() * 3

    compiled = torch.compile(Broken(), backend="perfopt")
    compiled(torch.ones(3))
    functions = [graph.function for graph in perfopt.report(compiled).graphs]
    assert len(functions) == 2 and all("forward" in name for name in functions)


def test_report_of_a_module_compiled_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    holder = Holder()
    holder.compile(backend="perfopt")
    assert perfopt.report(holder).graphs == ()
    holder(torch.randn(2, 4))
    assert perfopt.report(holder).library_calls["aten.addmm.default"] == 1


def test_report_refuses_what_is_not_compiled() -> None:
    with pytest.raises(TypeError, match="function is not compiled"):
        perfopt.report(network)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"perfopt {perfopt.__version__}\n"


def test_lists_of_passes_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    listed = capsys.readouterr().out
    for word in ("canonicalize", "cse", "dce", "fuse", "joint", "graph", "max_nodes"):
        assert word in listed
    assert main(["options"]) == 0
    listed = capsys.readouterr().out
    for word in ("pipeline", "precision", "verify", "disable", "exact_rounding"):
        assert word in listed
    assert main([]) == 0
    assert "passes" in capsys.readouterr().out


def test_what_was_compiled_is_explained() -> None:
    model, args = explained_model.make()
    compiled = perfopt.compile(model)
    compiled(*args).backward()
    for _ in range(2):  # the second time from the kernels of this process
        report = perfopt.report(compiled)
        explained = report.explanation
        assert {part.kind for part in explained.graphs} >= {"forward", "backward"}
        assert explained.train and explained.device.kind == "cpu"
        kernels = sum(len(piece.kernels) for piece in explained.pieces)
        assert kernels == report.kernels
        assert len(explained.library_calls) == sum(report.library_calls.values())
        planned = perfopt.explain(model, *args, train=True)
        assert [p.name for p in planned.pieces] == [p.name for p in explained.pieces]
        assert planned.cost == explained.cost
        assert perfopt.Explanation.from_json(report.to_json()).cost == explained.cost
        torch.compiler.reset()
        compiled = perfopt.compile(model)
        compiled(*args).backward()
