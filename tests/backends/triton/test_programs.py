"""Programs for GPUs, run in Triton's interpreter: what they compute, compile and launch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from examples.train_gpt import GPT, Shape
from perfopt.backends import program
from perfopt.backends.triton import launch, versions
from perfopt.cost_model.decision import Verdict
from perfopt.options import environment_with
from tests.backends.triton.programs import GPU, Built, built, captured, compiled

aten = torch.ops.aten
CPU = torch.device("cpu")


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2 + y).relu().exp()


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def from_second(node: fx.Node) -> torch.device:
    """The CPU for what is computed from the second input alone, else a GPU."""
    if node.op == "placeholder":
        return CPU if "arg1" in node.name else GPU
    if node.target is aten._to_copy.default:
        return GPU
    homes = {from_second(each) for each in node.all_input_nodes}
    return CPU if homes == {CPU} else GPU


def notes(made: Built) -> list[str]:
    return [d.text() for d in made.job.every_decision() if d.verdict is not Verdict.APPLIED]


def test_a_gpt_trains_as_in_eager() -> None:
    model = GPT(Shape(19, 1, 2, 32, 12))
    tokens, targets = torch.randint(19, (2, 3, 12))
    with built(model, (tokens, targets)) as made:
        outputs, gradients = made.trained(torch.ones(()))
        launched = len(made.driver.launches)
    loss = model(tokens, targets)
    loss.backward()
    close(outputs[0], loss.detach())
    wanted = {p.data_ptr(): p.grad for p in model.parameters()}
    pairs = zip(made.inputs, gradients, strict=True)
    found = {x.data_ptr(): g for x, g in pairs if g is not None}
    assert found.keys() == wanted.keys()
    for address, gradient in found.items():
        close(gradient, wanted[address])
    assert launched == sum(graph.program.launches for graph in made.job.graphs) >= 18
    assert not any(decision.verdict is Verdict.FAILED for decision in made.job.every_decision())


def test_text_and_names() -> None:
    with built(scaled, (torch.randn(5, 7), torch.randn(7))) as made:
        made["inference"](*made.inputs)
        (launched,) = made.driver.launches
    text = made["inference"].record.program.source
    assert "region_0(arg0_1.data_ptr(), arg1_1.data_ptr(), exp.data_ptr())" in text
    assert "threads" not in text and "fault" not in text
    assert launched.metadata.name.startswith("region_0__test_programs_py_")
    assert made.job.graphs[0].sources["compiled"] + made.job.graphs[0].sources["disk"] == 1


def test_one_graph_on_two_kinds_of_devices() -> None:
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        small = (y + 1).sin() * 2
        return (x * 3).cos() - 1, small, ((small + x) * 0.5).exp() * 2

    args = torch.randn(6, 9), torch.randn(6, 9)
    with built(both, args, where=from_second) as made:
        close(made["inference"](*made.inputs), both(*args))
        assert len(made.driver.launches) == 2
    program = made["inference"].record.program
    # What would mix them is left to ATen.
    assert len(program.regions) == 3 and program.library_calls == {"aten.add.Tensor": 1}
    assert ", threads)" in program.source


@pytest.mark.parametrize("number", [2.5, 2**40 + 1, True], ids=str)
def test_a_number_on_the_cpu_is_taken_along(number: float) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x * y + y).relu()

    args = torch.randn(6, 9).double(), torch.tensor(number)
    with built(function, args, where=from_second) as made:
        close(made["inference"](*made.inputs), (function(*args),))
        assert len(made.driver.launches) == 1
    assert "= number_on(" in made["inference"].record.program.source


def test_what_is_computed_of_a_number_stays_on_the_cpu() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scaled = x * y
        z = (y * 2).sin() + 1
        return scaled.exp() * z, z

    args = torch.randn(6, 9), torch.tensor(0.5)
    with built(function, args, where=from_second) as made:
        close(made["inference"](*made.inputs), function(*args))
        assert len(made.driver.launches) == 1
    refused = [text for text in notes(made) if "tensors on" in text]
    assert refused and all("cpu" in text and "cuda:0" in text for text in refused)


def test_tensors_that_start_anywhere() -> None:
    args = torch.randn(64), torch.randn(64)
    with built(scaled, args) as made:
        run = made["inference"]
        for starts in ((0, 0), (1, 0), (1, 1), (3, 3)):
            given = [torch.randn(68)[start : start + 64] for start in starts]
            close(run(*given), (scaled(*given),))
        binaries = [each.binary for each in made.driver.launches]
        (launcher,) = launch._LAUNCHER_CACHE.values()
    assert len(set(binaries)) == 3 and binaries[2] == binaries[3]
    assert set(launcher.ready) == {(True, True, True), (False, True, True), (False, False, True)}


def test_two_variants_for_all_sizes() -> None:
    args = torch.randn(48, 32), torch.randn(32)
    with built(lambda x, y: scaled(x, y).sum(-1), args, dynamic=True) as made:
        (launcher,) = launch._LAUNCHER_CACHE.values()
        assert list(launcher.ready) == [(True,) * 4]
        for rows, columns in ((48, 32), (5, 7), (16, 64), (33, 16), (100, 3)):
            x, y = torch.randn(rows, columns), torch.randn(columns)
            sizes = {48: rows, 32: columns}
            given = [
                sizes[each] if isinstance(each, int) else (x if each.ndim == 2 else y)
                for each in made.inputs
            ]
            close(made["inference"](*given), (scaled(x, y).sum(-1),))
        assert set(launcher.ready) == {(True,) * 4, (True, True, True, False)}


def test_numbers_beyond_32_bits_are_passed_whole() -> None:
    with built(lambda x: (x * 2).relu(), (torch.randn(48, 32),), dynamic=True, run=False) as made:
        (launcher,) = launch._LAUNCHER_CACHE.values()
        launcher.entry(0, 0, 2**33)
        launcher.entry(0, 0, 2**33 + 1)
        first, second = made.driver.launches
    assert [each.arguments[:3] for each in (first, second)] == [(0, 0, 2**33), (0, 0, 2**33 + 1)]
    assert first.grid[0] == 2**33 // 1024 and second.grid[0] == first.grid[0] + 1
    for each in (first, second):
        assert list(each.source.signature.values())[:3] == ["*fp32", "*fp32", "i64"]
    assert (2,) in first.source.attrs and not second.source.attrs.get((2,))


@pytest.mark.parametrize("shape", [(0, 5), (0,), (3, 0, 2)], ids=str)
def test_nothing_is_launched_for_nothing(shape: tuple[int, ...]) -> None:
    args = torch.randn(shape), torch.randn(shape)
    with built(lambda x, y: (scaled(x, y), scaled(x, y).sum()), args) as made:
        results = made["inference"](*made.inputs)
        assert all(each.grid[0] > 0 for each in made.driver.launches)
        assert results[0].shape == shape and float(results[1]) == 0.0
        assert len(made.driver.launches) <= 1  # the sum of nothing is 0


def test_an_index_out_of_range_stops_the_kernel() -> None:
    def function(table: Tensor, index: Tensor) -> Tensor:
        return F.embedding(index, table).exp() + 1

    args = torch.randn(5, 8), torch.tensor([0, 4])
    with built(function, args) as made:
        program = made["inference"]
        close(program(*made.inputs), (function(*args),))
        wrong = [x if x.dtype.is_floating_point else torch.tensor([0, 5]) for x in made.inputs]
        with pytest.raises(IndexError):
            program(*wrong)
        assert made.driver.launches[0].metadata.debug


def test_equal_kernels_are_compiled_once() -> None:
    graphs = captured(scaled, (torch.randn(4, 4), torch.randn(4)))
    with compiled(graphs) as made:
        plan = graphs.plan.plans[0] if graphs.plan.plans else None
        assert plan is not None
        entries = [made["inference"].record.program.run.__globals__["region_0"]]
        kernels = made.job.graphs[0].plan.kernels["region_0"]
        again = launch.compile_kernels(kernels)
    assert again["region_0"] is entries[0]


@pytest.mark.parametrize("where", ["_compiled", "symbol"])
def test_a_kernel_that_does_not_compile_runs_through_aten(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 3).cos() - 1, (y + 1).sin() * 2

    module: Any = versions if where == "_compiled" else launch
    right = getattr(module, where)

    def failing(subject: Any, *more: Any) -> Any:
        name = subject if isinstance(subject, str) else subject.function.__name__
        if name.startswith("region_0"):
            raise RuntimeError("out of patience\nand more")
        return right(subject, *more)

    monkeypatch.setattr(module, where, failing)
    args = torch.randn(6, 9), torch.randn(4, 5)
    with built(function, args) as made:
        close(made["inference"](*made.inputs), function(*args))
        assert len(made.driver.launches) == 1
    program = made["inference"].record.program
    assert program.regions == ("region_1",) and program.library_calls["aten.cos.default"] == 1
    failed = [d for d in made.job.every_decision() if d.verdict is Verdict.FAILED]
    assert [d.nodes for d in failed] == [("region_0",)]
    assert failed[0].text().endswith("does not compile: out of patience")


def test_what_triton_refuses_runs_through_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    right = launch.module_text

    def broken(printed: Any, name: str) -> str:
        return right(printed, name).replace("tl.program_id(0)", "tl.no_such_thing(0)")

    monkeypatch.setattr(launch, "module_text", broken)
    args = torch.randn(6, 9), torch.randn(6, 9)
    for _ in range(2):  # nothing of the first attempt is left
        with built(lambda x, y: ((x * 3).cos(), (y[:5] + 1).sin()), args) as made:
            made["inference"](*made.inputs)
            assert made.driver.launches == []
        failed = [d for d in made.job.every_decision() if d.verdict is Verdict.FAILED]
        assert len(failed) == 2 and all("does not compile" in d.text() for d in failed)


def test_what_was_compiled_is_found_by_the_next_process() -> None:
    graphs = captured(lambda x: (x * 12.34567).cos(), (torch.randn(6, 9),))
    found = []
    for _ in range(2):
        with compiled(graphs, run=False) as made:  # `compiled` forgets what this process has
            found.append({k: n for k, n in made.job.graphs[0].sources.items() if n})
    assert found == [{"compiled": 1}, {"disk": 1}]


# ---- several GPUs -------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two GPUs, of which the first is current; what is made the current one is listed."""
    current: list[Any] = [0]
    seen: list[Any] = []

    @contextmanager
    def device(wanted: torch.device | int) -> Iterator[None]:
        index = wanted.index if isinstance(wanted, torch.device) else wanted
        seen.append(index)
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(program, "current_gpu", lambda: current[-1])
    return seen


def test_the_gpu_of_the_tensors_is_the_current_one(two_gpus: list[Any]) -> None:
    args = torch.randn(5, 7), torch.randn(7)
    second = torch.device("cuda", 1)
    with built(scaled, args, where=lambda node: second) as made:
        two_gpus.clear()
        close(made["inference"](*made.inputs), (scaled(*args),))
        assert two_gpus == [1]
    with built(scaled, args) as made:
        two_gpus.clear()
        close(made["inference"](*made.inputs), (scaled(*args),))
        assert two_gpus == []


def test_one_graph_on_two_gpus(two_gpus: list[Any]) -> None:
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 3).cos() - 1, (y + 1).sin() * 2

    def where(node: fx.Node) -> torch.device:
        return GPU if from_second(node) == GPU else torch.device("cuda", 1)

    args = torch.randn(6, 9), torch.randn(6, 9)
    with built(both, args, where=where) as made:
        two_gpus.clear()
        close(made["inference"](*made.inputs), both(*args))
        assert two_gpus == [1] and len(made.driver.launches) == 2


# ---- files --------------------------------------------------------------------------------------


def test_dumped_kernels_run_alone(tmp_path: Path) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = (x * 2 + y).relu()
        return z, z.sum(-1)

    with built(function, (torch.randn(5, 7), torch.randn(7)), dump=str(tmp_path)) as made:
        name = made.job.graphs[0].plan.kernels["region_0"][0].name
    (file,) = tmp_path.glob(f"inference_0_0_{name}__test_programs_py_*.py")
    assert "@triton.jit" in file.read_text() and "kernel region_0(" in file.read_text()
    done = subprocess.run(
        [sys.executable, file.name], cwd=tmp_path, capture_output=True, text=True,
        env=environment_with(TRITON_INTERPRET="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "out0" in done.stdout and "tensor([" in done.stdout
