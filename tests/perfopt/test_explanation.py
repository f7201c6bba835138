"""`perfopt.explain`: parts that add up, texts, JSON, and models that were never in memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor, nn

import perfopt
from perfopt import OptionError
from perfopt.capture import CaptureError
from perfopt.cost_model.cost import Cost
from perfopt.cost_model.decision import Verdict
from perfopt.cost_model.device import UnknownDeviceError
from perfopt.explained_json import SCHEMA
from perfopt.explained_text import count_text, seconds_text
from perfopt.explanation import explain_made, explain_made_each
from perfopt.factory import Made
from tests.perfopt import explained_model
from tests.source_tree import ROOT

FILE = Path(explained_model.__file__)


@pytest.fixture(scope="module")
def trained() -> perfopt.Explanation:
    model, args = explained_model.make()
    return perfopt.explain(model, *args, train=True, device="h100")


def test_totals_are_the_sums_of_their_parts(trained: perfopt.Explanation) -> None:
    assert [part.kind for part in trained.graphs] == ["joint", "forward", "backward"]
    pieces = [*trained.regions, *trained.library_calls]
    assert len(pieces) == sum(len(part.pieces) for part in trained.graphs)
    for name in ("seconds", "bytes", "flops", "launches"):
        total = getattr(trained.cost, name)
        assert sum(getattr(piece.cost, name) for piece in pieces) == pytest.approx(total)
        assert sum(getattr(line.cost, name) for line in trained.lines) == pytest.approx(total)
    assert sum(trained.bounds.values()) == pytest.approx(trained.cost.seconds)
    assert sum(len(line.decisions) for line in trained.lines) == len(trained.decisions)
    table = json.loads(trained.to_json())
    fit, total = table["fit"], table["total"]
    assert sum(fit["holds"].values()) == fit["peak"] == total["peak_bytes"] == trained.peak_bytes
    assert fit["margin"] == fit["capacity"] - fit["peak"] and fit["fits"] is True
    source = "the first dimension of the first input, [32, 64]"
    assert table["workload"] == {"count": 32, "unit": "samples", "source": source}
    assert total["rate"] == 32 / total["cost"]["seconds"]
    seconds = [piece.cost.seconds for piece in trained.regions]
    assert seconds == sorted(seconds, reverse=True)


def test_decisions_account_for_what_the_passes_gain(trained: perfopt.Explanation) -> None:
    for part in trained.graphs:
        saved = sum(each.seconds_saved for each in part.decisions)
        if part.kind != "joint":
            assert part.before.seconds - saved == pytest.approx(part.cost.seconds)
    assert trained.cost.seconds < trained.before.seconds


def test_everything_runs_where_the_program_runs_it() -> None:
    model, args = explained_model.make()
    explanation = perfopt.explain(model, *args, train=True)
    compiled = perfopt.compile(model)
    compiled(*args).backward()
    report = perfopt.report(compiled)
    assert len(explanation.regions) == len(report.regions)
    assert sum(len(piece.kernels) for piece in explanation.regions) == report.kernels
    assert len(explanation.library_calls) == sum(report.library_calls.values())
    texts = sorted((each.verdict.value, each.text()) for each in explanation.decisions)
    assert texts == sorted((each.verdict.value, each.text()) for each in report.decisions)


def test_json_comes_back(trained: perfopt.Explanation) -> None:
    text = trained.to_json()
    again = perfopt.Explanation.from_json(text)
    assert again == trained and again.to_json() == text and again.text() == trained.text()
    table = json.loads(text)
    assert table["schema"] == SCHEMA
    shares = [piece["share"] for part in table["graphs"] for piece in part["pieces"]]
    assert sum(shares) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="perfopt.explain/0"):
        perfopt.Explanation.from_json(text.replace(SCHEMA, "perfopt.explain/0"))
    with pytest.raises(ValueError, match="not an explanation"):
        perfopt.Explanation.from_json("[]")


def test_every_key_of_the_schema_is_described(trained: perfopt.Explanation) -> None:
    described = set(re.findall(r"`(\w+)`", (ROOT / "docs/explain.md").read_text()))
    free = {"options", "versions", "values", "bounds", "peaks", "vector", "sources", "kinds",
                "modules", "holds"}  # fmt: skip

    def keys(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(keys, value))
        if not isinstance(value, dict):
            return set()
        inner = [keys(each) for key, each in value.items() if key not in free]
        return set(value).union(*inner)

    assert keys(json.loads(trained.to_json())) - described == set()
    assert f"`{SCHEMA}`" in (ROOT / "docs/explain.md").read_text()


def test_two_processes_write_the_same_bytes() -> None:
    command = [sys.executable, "-c", "from perfopt.cli import main; raise SystemExit(main())"]
    command += ["explain", f"{FILE}:make", "--train", "--json", "--device", "a100"]
    runs = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT
        )
        for seed in ("1", "2")
    ]
    first, second = (run.communicate()[0] for run in runs)
    assert first == second and json.loads(first)["train"] is True


def test_text(trained: perfopt.Explanation) -> None:
    text = trained.text()
    assert max(map(len, text.splitlines())) <= 80
    for line in ("explained_model.py:24", "explained_model.py:27", "explained_model.py:28"):
        assert line in text
    assert len(trained.text(every=True)) > len(text)
    assert repr(trained).startswith("<perfopt explanation: Model on H100") and str(trained) == text


class Golden(expecttest.TestCase):
    """Short texts, whole."""

    def test_inference(self) -> None:
        model = explained_model.Model().eval()
        text = perfopt.explain(model, torch.randn(4096, 64), device="h100").text()
        self.assertExpectedInline(
            text,
            """\
Model, inference on H100-SXM5-80GB

  graphs     0 inference 25.4 us
  runs       2 regions as 2 kernels, 2 library calls
  predicted  25.4 us, 39.3 us without the passes
  rate       161 M samples/s, 4096 samples a step
  MFU        4.6%
  error      6% on average, by docs/accuracy.md
  bound by   launch 61.0%, latency 39.0%
  work       93.1 MFLOP, 11.7 MB moved
  memory     5.28 MB at most of 80.0 GB: fits, 80.0 GB left
             workspace 4.19 MB, inputs 1.05 MB, parameters 39.0 KB, at region_1

by line, most costly first                 time  share  bound     bytes     FLOP

explained_model.py:24                   13.0 us  51.1%  launch  7.37 MB   80.7 M
  run: addmm                            9.92 us  39.0%  launch  3.18 MB   67.1 M
  run: gelu in 1 kernel                 3.08 us  12.1%  launch  4.19 MB   13.6 M
    + fuse: 1 operations in one kernel with 1 results

explained_model.py:27                   9.91 us  39.0%  latency 2.27 MB   10.5 M
  run: addmm                            9.91 us  39.0%  latency 2.27 MB   10.5 M

explained_model.py:23                   2.53 us   9.9%  launch  2.10 MB   1.87 M
  run: 7 ops in 1 kernel                2.53 us   9.9%  launch  2.10 MB   1.87 M
    + fuse: 7 operations in one kernel with 1 results; saves 13.9 us

all                                     25.4 us 100.0%  launch  11.7 MB   93.1 M
""",
        )

    def test_graph_break(self) -> None:
        model, args, kwargs = explained_model.broken()
        text = perfopt.explain(model, *args, device="a100", **kwargs).text()
        self.assertExpectedInline(
            text.partition("by line")[0],
            """\
Model, inference on A100-SXM4-80GB

  graphs     0 inference 11.2 us, 1 inference 9.21 us
  runs       2 regions as 2 kernels, 2 library calls
  predicted  20.4 us, 32.5 us without the passes
  rate       1.56 M samples/s, 32 samples a step
  MFU        0.2%
  error      10% on average, by docs/accuracy.md
  bound by   launch 100.0%
  work       727 KFLOP, 130 KB moved
  memory     74.8 KB at most of 80.0 GB: fits, 80.0 GB left
             parameters 33.8 KB, results 16.4 KB, workspace 16.4 KB, inputs 8.19
             KB, at region_1

1 graph break
  explained_model.py:26: Call to `torch._dynamo.graph_break()`
    User-inserted graph break. Message: None

""",
        )

    def test_why(self) -> None:
        explanation = perfopt.explain(explained_model.Model(), torch.randn(64, 64), device="l4")
        self.assertExpectedInline(
            explanation.why("addmm_1"),
            """\
addmm_1 in 0 inference of Model.forward
  a call of aten.addmm.default at explained_model.py:27
    6.37 us, 39.0% of the whole, bound by launch: 40.5 KB, 164 KFLOP
""",
        )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0"), (3e-9, "3 ns"), (9.996e-7, "1.00 us"), (1.234e-5, "12.3 us"),
        (0.9996, "1.00 s"), (0.1239, "124 ms"), (4321.0, "4321 s"), (-2e-6, "-2.00 us"),
    ],
)  # fmt: skip
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (12, "12 B"), (999.7, "1.00 KB"), (123456, "123 KB"), (1.39e15, "1.39 PB")],
)
def test_counts_have_three_digits(count: float, text: str) -> None:
    assert count_text(count, "B") == text


def test_why_answers_for_regions_and_operations(trained: perfopt.Explanation) -> None:
    region = trained.regions[0]
    assert f"in {len(region.kernels)} kernel" in trained.why(region.nodes[0])
    assert region.nodes[0] in trained.why(region.name)
    with pytest.raises(ValueError, match="'regio_0'; nearest: region_0"):
        trained.why("regio_0")


def test_kernels_are_those_of_the_device(trained: perfopt.Explanation) -> None:
    assert "@triton.jit" in trained.kernels()
    x = torch.randn(4, 8)
    assert "kernel region_0(" in perfopt.explain(torch.nn.functional.gelu, x).kernels()


def test_refused_alternatives_have_their_price() -> None:
    def function(x: Tensor) -> Tensor:
        y = x + 1
        return (y @ y + y).exp()

    explanation = perfopt.explain(function, torch.randn(64, 64), device="h100")
    refused = [d for d in explanation.decisions if d.verdict is Verdict.REJECTED]
    assert refused and all(each.alternative_cost is not None for each in refused)
    assert "would cost" in explanation.text()


def test_graph_breaks_have_a_reason_and_a_line() -> None:
    model, args, kwargs = explained_model.broken()
    explanation = perfopt.explain(model, *args, train=True, **kwargs)
    (found,) = explanation.graph_breaks
    assert "graph_break" in found.reason and "User-inserted" in found.explanation
    assert found.source == "explained_model.py:26"
    assert {part.number for part in explanation.graphs} == {0, 1}


@pytest.mark.parametrize("options", [None, {"memory_budget": 0.7}, {"mode": "aten"}])
def test_several_devices_take_one_trace(options: dict[str, Any] | None) -> None:
    devices = ["h100", "mi300x", "l4", "cpu"]
    called = []

    def make() -> Made:
        called.append(1)
        return (*explained_model.make(), {})

    together = explain_made_each(make, "m", True, devices, options, passes=True)
    assert len(called) == 1 and len(together) == 4
    for name, found in zip(devices, together, strict=True):
        alone = explain_made(make, "m", True, name, options, passes=True)
        assert found == alone and found.to_json() == alone.to_json()


def test_several_devices_take_one_trace_around_a_graph_break() -> None:
    model, args, kwargs = explained_model.broken()
    for train in (False, True):
        devices = ["h100", "a100"]
        for each in perfopt.explain_each(model, *args, devices=devices, train=train, **kwargs):
            alone = perfopt.explain(model, *args, train=train, device=each.device, **kwargs)
            assert len(each.graph_breaks) == 1 and each == alone


def test_models_need_no_memory() -> None:
    explanation = explain_made(lambda: (*explained_model.huge(), {}), "huge", device="b200")
    assert explanation.peak_bytes > 4e12 and "does not fit" in explanation.text()
    assert explanation.cost.flops == pytest.approx(2.0 * 16 * (1 << 40), rel=1e-3)


def test_models_are_converted_without_memory() -> None:
    def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.BatchNorm1d(64))
        model.append(nn.Linear(64, 64, bias=False))
        model[3].weight = model[0].weight
        model.to(torch.bfloat16)
        assert model[3].weight is model[0].weight and model[3].weight.dtype is torch.bfloat16
        return model.double().bfloat16(), (torch.randn(8, 64).bfloat16(),), {}

    explanation = explain_made(make, "converted", train=True, device="h100")
    weights = 2 * (64 * 64 + 7 * 64)
    assert weights < explanation.graphs[1].peak_bytes < 2 * weights + 20 * 2 * 8 * 64
    model = nn.Linear(2, 2)
    assert model.double().weight is model.weight and model.weight.dtype is torch.float64


def test_models_for_gpus_are_built_without_one() -> None:
    def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        with torch.device("cuda"):
            model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        return model.cuda().to("cuda:0"), (torch.randn(4, 8, device="cuda").cuda(),), {}

    assert explain_made(make, "gpu", device="h100").regions


def test_the_users_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    tied = nn.Sequential(model, model[0])
    before = {name: (id(x), x.clone()) for name, x in tied.state_dict(keep_vars=True).items()}
    explanation = perfopt.explain(tied, torch.randn(8, 4), train=True)
    assert explanation.cost.launches > 0
    for name, x in tied.state_dict(keep_vars=True).items():
        assert id(x) == before[name][0] and torch.equal(x, before[name][1])
    assert type(tied(torch.randn(8, 4))) is Tensor


def test_explaining_leaves_compiled_functions_compiled() -> None:
    calls = []

    def counting(gm: Any, inputs: Any) -> Any:
        calls.append(gm)
        return gm.forward

    def function(x: Tensor) -> Tensor:
        return x * 2 + 1

    compiled = torch.compile(function, backend=counting)
    x = torch.randn(4)
    compiled(x)
    for _ in range(10):
        assert perfopt.explain(function, x).regions
    assert torch.equal(compiled(x), function(x)) and len(calls) == 1


def test_options_and_devices() -> None:
    x = torch.randn(64, 64)
    plain = perfopt.explain(explained_model.Model(), x, device="h100", options={"mode": "aten"})
    assert plain.regions == () and plain.options == {"mode": "aten"}
    fused = perfopt.explain(explained_model.Model(), x, device="mi300x")
    assert fused.regions and fused.device.name == "MI300X"
    disabled = perfopt.explain(explained_model.Model(), x, options={"pipeline": "graph()"})
    assert disabled.regions == () and disabled.cost == disabled.before != Cost()
    with pytest.raises(UnknownDeviceError, match="H100"):
        perfopt.explain(explained_model.Model(), x, device="h10")
    with pytest.raises(OptionError, match="mode"):
        perfopt.explain(explained_model.Model(), x, options={"mod": "aten"})


def test_models_that_cannot_be_captured() -> None:
    with pytest.raises(CaptureError, match=r"explained_model.py:60: .* reads the value"):
        explain_made(lambda: (*explained_model.reading(), {}), "reading")
    with pytest.raises(CaptureError, match="reduction dim|shapes cannot be multiplied"):
        explain_made(lambda: (*explained_model.mismatched(), {}), "mismatched")
    with pytest.raises(CaptureError, match="nothing was captured"):
        perfopt.explain(lambda x: x, torch.ones(3))
    with pytest.raises(CaptureError, match="nothing was captured"):
        perfopt.explain(nn.LSTM(8, 8), torch.randn(2, 5, 8))
