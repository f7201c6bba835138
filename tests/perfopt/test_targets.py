"""What each kind of device needs: compilers that may be missing, prices, files, profiles."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

import perfopt
from perfopt import targets
from perfopt.cost_model.decision import Verdict
from perfopt.cost_model.device import device_named
from perfopt.options import Options
from perfopt.records import COMPILATIONS_CACHE, Compilation

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def network(x: Tensor) -> Tensor:
    return (F.gelu(x) * 2).softmax(-1)


def latest() -> Compilation:
    return max(COMPILATIONS_CACHE, key=lambda job: job.order)


def graph(*values: tuple[torch.device, int]) -> fx.GraphModule:
    """A graph of inputs alone, each on a device and with so many dimensions."""
    made = fx.Graph()
    for number, (device, rank) in enumerate(values):
        meta = torch.empty((2,) * rank, device="meta")
        node = made.placeholder(f"x{number}")
        with torch._subclasses.FakeTensorMode() as mode:
            node.meta["example_value"] = torch._subclasses.FakeTensor(mode, meta, device)
    made.output(())
    return fx.GraphModule({}, made)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The packages that are there, which a test may change."""
    packages = {"torch_mlir", "triton"}
    monkeypatch.setattr(targets, "find_spec", lambda name: name if name in packages else None)
    targets._say_what_is_missing.cache_clear()
    yield packages
    targets._say_what_is_missing.cache_clear()


def test_devices_of_a_graph() -> None:
    assert targets.devices(graph()) == [CPU]
    assert targets.devices(graph((CPU, 0))) == [CPU]
    assert targets.devices(graph((CPU, 2), (GPU, 1))) == [GPU, CPU]
    assert targets.devices(graph((CPU, 0), (GPU, 1))) == [GPU]  # a number comes along


def test_missing_compilers_are_said_once(installed: set[str]) -> None:
    installed.clear()
    for device, package in ((CPU, "torch-mlir"), (GPU, "triton")):
        with pytest.warns(UserWarning, match=f"because {package} is not installed"):
            assert not targets.generates(graph((device, 1)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not targets.generates(graph((device, 1)))


def test_one_compiler_is_enough(installed: set[str]) -> None:
    installed.discard("triton")
    assert targets.generates(graph((CPU, 1)))
    with pytest.warns(UserWarning, match="no kernels for GPUs.*`pip install perfopt.gpu.`"):
        assert targets.generates(graph((CPU, 1), (GPU, 1)))
    assert not targets.generates(graph((GPU, 1)))


def test_other_devices_run_through_aten(installed: set[str]) -> None:
    assert not targets.generates(graph((torch.device("meta"), 1)))
    assert not targets.generates(graph((CPU, 1), (torch.device("meta"), 1)))


def test_without_a_compiler_the_model_runs(installed: set[str]) -> None:
    installed.clear()
    x = torch.randn(5, 9)
    with pytest.warns(UserWarning, match="runs through ATen"):
        compiled = perfopt.compile(network)
        torch.testing.assert_close(compiled(x), network(x), rtol=0, atol=0)
    assert latest().graphs[0].program.regions == ()


# ---- prices -------------------------------------------------------------------------------------


def pretend(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    shape = SimpleNamespace(total_memory=7 << 30, multi_processor_count=11, L2_cache_size=5 << 20)
    named = lambda device=GPU: names[device.index]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", named)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: shape)


def test_a_gpu_has_its_own_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    for number, name in enumerate(("h100", "a100")):
        job = Compilation("0/0", Options())
        targets.price(job, torch.device("cuda", number))
        assert job.device is not None and job.decisions == []
        assert job.device.peaks == device_named(name).peaks
    job = Compilation("0/0", Options())
    targets.price(job, CPU)
    assert job.device is None


def test_an_unknown_gpu_is_priced_as_another_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "Abacus 9000")
    job = Compilation("0/0", Options())
    targets.price(job, GPU)
    assert job.device is not None and job.device.name == "Abacus 9000"
    assert job.device.memory_bytes == 7 << 30 and job.device.cores == 11
    assert job.device.memory_bandwidth == device_named("a100").memory_bandwidth
    (note,) = job.decisions
    assert note.verdict is Verdict.NOTE
    assert "no table has Abacus 9000" in note.text() and "a100" in note.text()


# ---- files and profiles -------------------------------------------------------------------------


def test_cpu_kernels_are_dumped_as_text(tmp_path: Path) -> None:
    perfopt.compile(network, dump=str(tmp_path))(torch.randn(5, 9))
    names = sorted(path.name for path in tmp_path.iterdir())
    stem = "inference_0_0"
    files = ("graph.txt", "kernels.mlir", "kernels.txt", "program.py")
    assert names == [f"{stem}_{name}" for name in files]
    text = (tmp_path / f"{stem}_kernels.txt").read_text()
    assert text.startswith("# test_targets.py:") and "\nkernel region_0(" in text
    assert "@region_0" in (tmp_path / f"{stem}_kernels.mlir").read_text()


def test_a_profile_names_regions_and_lines() -> None:
    compiled = perfopt.compile(network)
    x = torch.randn(5, 9)
    want = compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = compiled(x)
    assert torch.equal(got, want)
    events: list[Any] = profile.events() or []
    names = [event.name for event in events if event.name.startswith("region_")]
    assert len(names) == 1 and names[0].startswith("region_0  test_targets.py:")


def test_only_a_profile_makes_the_program_that_names_regions() -> None:
    compiled = perfopt.compile(network)
    compiled(torch.randn(5, 9))
    source = latest().graphs[0].program.source
    assert source.count("if profiler.") == 1 and "span" not in source
