"""Kernels from the disk: what finds them, what is refused, and that they compute the same."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from perfopt.backends.cache import Cache, Key
from perfopt.backends.lower import Lowered, lower_region
from perfopt.backends.mlir import compile as compiling
from perfopt.backends.mlir import objects as module
from perfopt.backends.mlir.compile import COMPILED, DISK, MEMORY, compile_kernels
from perfopt.backends.mlir.objects import Objects, described, surroundings
from tests.backends.kernels import Function, launch, traced

ROOT = Path(__file__).resolve().parents[3]
PARTS = {"option.mode": "default", "option.limit": "None", "calibration": "none"}
X = torch.linspace(-3, 3, 60).reshape(4, 15)


@pytest.fixture(autouse=True)
def _as_new() -> Iterator[None]:
    """The process knows no kernel, as at its start."""
    forget()
    yield
    forget()


def forget() -> None:
    for cache in (compiling._ENTRY_CACHE, compiling._RECENT_CACHE, module._LINKED_CACHE):
        cache.clear()
    gc.collect()


def lowered(function: Function, name: str = "region_0", x: torch.Tensor = X) -> Lowered:
    return lower_region(name, traced(function, x))


def run(
    made: Lowered, objects: Objects | None, x: torch.Tensor = X
) -> tuple[torch.Tensor, Counter[str]]:
    sources: Counter[str] = Counter()
    entries = compile_kernels(made.kernels, None, objects, sources)
    return launch(made, entries, (x,), {})[0], +sources


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1)


def test_a_kernel_from_the_disk_computes_the_same(tmp_path: Path) -> None:
    made = lowered(softmax)
    want, sources = run(made, Objects(Cache(tmp_path), PARTS))
    assert sources == {COMPILED: 1}
    assert run(made, Objects(Cache(tmp_path), PARTS))[1] == {MEMORY: 1}
    forget()
    got, sources = run(made, Objects(Cache(tmp_path), PARTS))
    assert sources == {DISK: 1} and torch.equal(got, want)
    torch.testing.assert_close(got, softmax(X))
    assert run(made, None)[1] == {MEMORY: 1}


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: torch.erf(x).to(torch.bfloat16), torch.linspace(-2, 2, 100_003)),
        (lambda x: torch.fmod(x, 0.7) ** 1.5, torch.linspace(0, 2, 77, dtype=torch.float64)),
        (lambda x: (x * x).sum(0), torch.linspace(-1, 1, 900 * 64).reshape(900, 64)),
        (lambda x: x.argmax(-1), torch.linspace(-1, 1, 90).sin().reshape(9, 10)),
        (lambda x: x + 1, torch.tensor(3)),
        (lambda x: x * 2, torch.empty(0, 5)),
    ],
    ids=["bf16", "libm", "columns", "argmax", "scalar", "empty"],
)
def test_kinds_of_kernels(tmp_path: Path, function: Function, x: torch.Tensor) -> None:
    made = lowered(function, x=x)
    want, first = run(made, Objects(Cache(tmp_path)), x)
    forget()
    got, second = run(made, Objects(Cache(tmp_path)), x)
    assert second[DISK] == first[COMPILED] and second[COMPILED] == 0
    assert torch.equal(got, want)
    torch.testing.assert_close(got, function(x), rtol=2e-2 if got.dtype.itemsize == 2 else None,
                               atol=1e-2 if got.dtype.itemsize == 2 else None)  # fmt: skip


def test_an_index_out_of_range_is_found_by_a_stored_kernel(tmp_path: Path) -> None:
    table = torch.randn(5, 4)
    index = torch.tensor([0, 7])
    gm = traced(lambda t, i: t[i] * 2, table, torch.tensor([0, 1]))
    made = lower_region("region_0", gm)
    for _ in range(2):
        entries = compile_kernels(made.kernels, None, Objects(Cache(tmp_path)))
        with pytest.raises(IndexError):
            launch(made, entries, (table, index), {})
        (good,) = launch(made, entries, (table, torch.tensor([4, 0])), {})
        assert torch.equal(good, table[[4, 0]] * 2)
        forget()


def key_of(cache: Cache, objects: Objects | None = None) -> Key:
    (kernel,) = lowered(softmax).kernels
    text = compiling.print_kernel(kernel, compiling.host_lanes())
    settings = compiling._compiler(compiling.host_lanes())
    return (objects or Objects(cache, PARTS)).key(kernel, text, settings)


EVERY = [*PARTS, *surroundings(), "kind", "text", "shape", "lanes", "bf16", "mlir", "level"]


def test_keys_have_these_parts_and_no_path(tmp_path: Path) -> None:
    key = key_of(Cache(tmp_path), Objects(Cache(tmp_path), PARTS, "label", "batch"))
    assert sorted(key.parts) == sorted(EVERY)
    assert not any("/" in value for value in key.parts.values())
    assert key == key_of(Cache(tmp_path / "b"), Objects(Cache(tmp_path / "b"), PARTS, "c", "d"))
    for name in ("perfopt", "torch", "torch-mlir", "llvmlite"):
        assert key.parts[f"version.{name}"][0].isdigit()
    assert key.parts["shape"] == "4 over 15: f32 to f32"


@pytest.mark.parametrize("part", EVERY)
def test_a_change_of_any_part_misses(tmp_path: Path, part: str) -> None:
    cache = Cache(tmp_path)
    run(lowered(softmax), Objects(cache, PARTS))
    key = key_of(cache)
    assert Objects(cache).load({"k": key}).keys() == {"k"}
    for value in ("", "another", key.parts[part] + " "):
        other = Key(MappingProxyType({**key.parts, part: value}))
        assert Objects(cache).load({"k": other}) == {}
    less = {name: value for name, value in key.parts.items() if name != part}
    assert Objects(cache).load({"k": Key(less)}) == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(module, "_version", lambda package: "9"),
        lambda patch: patch.setattr(module, "FORMAT", "next"),
        lambda patch: patch.setattr(compiling, "_LEVEL", 2),
        lambda patch: patch.setattr(compiling, "host_has_bf16", lambda: False),
        lambda patch: patch.setattr(module.platform, "machine", lambda: "riscv64"),
    ],
    ids=["versions", "format", "level", "bf16", "machine"],
)
def test_what_the_parts_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]
) -> None:
    made, cache = lowered(softmax), Cache(tmp_path)
    monkeypatch.setattr(compiling, "host_has_bf16", lambda: True)
    assert run(made, Objects(cache, PARTS))[1] == {COMPILED: 1}
    for count in (1, 0):
        forget()
        assert run(made, Objects(cache, PARTS))[1] == {DISK: 1}
        if count:
            change(monkeypatch)
            surroundings.cache_clear()
            forget()
            assert run(made, Objects(cache, PARTS))[1] == {COMPILED: 1}
    surroundings.cache_clear()


def test_another_size_or_option_is_another_kernel(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert run(lowered(softmax), Objects(cache, PARTS))[1] == {COMPILED: 1}
    forget()
    wide = torch.randn(4, 16)
    assert run(lowered(softmax, x=wide), Objects(cache, PARTS), wide)[1] == {COMPILED: 1}
    forget()
    other = Objects(cache, {**PARTS, "option.limit": "3"})
    assert run(lowered(softmax), other)[1] == {COMPILED: 1}


def test_what_is_new_in_a_graph_is_compiled_alone(tmp_path: Path) -> None:
    first = lowered(softmax, "region_0"), lowered(torch.exp, "region_1")
    second = lowered(torch.tanh, "region_0"), lowered(softmax, "region_1")
    counts = []
    for pair in (first, second, second):
        sources: Counter[str] = Counter()
        kernels = [kernel for made in pair for kernel in made.kernels]
        entries = compile_kernels(kernels, None, Objects(Cache(tmp_path)), sources)
        counts.append(+sources)
        for made, function in zip(pair, (torch.tanh, softmax), strict=True):
            if pair is second:
                torch.testing.assert_close(launch(made, entries, (X,), {})[0], function(X))
        forget()
    assert counts == [{COMPILED: 2}, {DISK: 1, COMPILED: 1}, {DISK: 2}]


@pytest.mark.parametrize("damage", ["gone", "torn", "no object", "no symbol", "writable"])
def test_an_object_that_does_not_load_is_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    made, cache = lowered(softmax), Cache(tmp_path)
    want, _ = run(made, Objects(cache))
    forget()
    (entry,) = (entry for entry in cache.entries() if entry.key.parts["kind"] == "object")
    path = tmp_path / f"{entry.key.digest}.entry"
    stored = cache.get(entry.key)
    assert stored is not None
    symbols, _, content = stored.partition(b"\n")
    if damage == "gone":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:-500])
    elif damage == "writable":
        path.chmod(0o666)
    elif damage == "no object":
        cache.put(entry.key, symbols + b"\n" + content[: len(content) // 2])
    else:
        cache.put(entry.key, json.dumps({"symbols": ["kernel_0", "no_such"]}).encode() + b"\n"
                  + content)  # fmt: skip
    got, sources = run(made, Objects(cache))
    assert sources == {COMPILED: 1} and torch.equal(got, want)
    assert ("does not load" in caplog.text) == damage.startswith("no ")
    forget()
    got, sources = run(made, Objects(cache))
    assert sources == {DISK: 1} and torch.equal(got, want)


def test_without_llvmlite_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    module.can_load.cache_clear()
    try:
        got, sources = run(lowered(softmax), Objects(Cache(tmp_path)))
    finally:
        module.can_load.cache_clear()
    assert sources == {COMPILED: 1} and list(tmp_path.iterdir()) == []
    torch.testing.assert_close(got, softmax(X))


def test_without_room_for_the_object_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiling.tempfile, "TemporaryDirectory", full)
    got, sources = run(lowered(softmax), Objects(Cache(tmp_path)))
    assert sources == {COMPILED: 1} and list(tmp_path.iterdir()) == []
    torch.testing.assert_close(got, softmax(X))


def test_the_process_keeps_so_many_and_those_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_RECENT", 2)
    functions: list[Function] = [torch.exp, torch.tanh, torch.sigmoid, softmax]
    objects = Objects(Cache(tmp_path))
    regions = [lowered(function) for function in functions]
    used = compile_kernels(regions[0].kernels, None, objects)
    for made in regions[1:]:
        run(made, objects)
    gc.collect()
    assert len(compiling._RECENT_CACHE) == 2 and len(compiling._ENTRY_CACHE) == 3
    torch.testing.assert_close(launch(regions[0], used, (X,), {})[0], functions[0](X))
    assert run(regions[0], objects)[1] == {MEMORY: 1}
    assert run(regions[1], objects)[1] == {DISK: 1}
    del used
    for made in regions[2:]:
        run(made, objects)
    for _ in range(3):  # unloaded and loaded again
        run(regions[2], objects)
        forget()
        got, sources = run(regions[0], objects)
        assert sources == {DISK: 1}
        torch.testing.assert_close(got, functions[0](X))


def test_processes_side_by_side_and_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.backends.mlir.object_processes", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


WARM = """
import json, sys, torch, perfopt
torch.set_num_threads(2)
def network(x, w):
    return torch.nn.functional.gelu(x @ w + 1).softmax(-1) * 2
compiled = perfopt.compile(network)
x, w = torch.randn(300, 64, requires_grad=True), torch.randn(64, 512, requires_grad=True)
compiled(x, w).square().sum().backward()
mine = x.grad, w.grad
x.grad = w.grad = None
network(x, w).square().sum().backward()
for got, want in zip(mine, (x.grad, w.grad)):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
loaded = any(name.startswith("torch_mlir") for name in sys.modules)
assert "torch._inductor.pattern_matcher" not in sys.modules, "a third of a second"
print(json.dumps([loaded, [dict(g.cached) for g in perfopt.report(compiled).graphs]]))
"""


def test_a_warm_process_imports_no_compiler(tmp_path: Path) -> None:
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", WARM], capture_output=True, text=True, timeout=300,
            env=os.environ | {"PERFOPT_CACHE_DIR": str(tmp_path / "cache")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout))
    (cold, first), (warm, second) = said
    assert cold and not warm
    assert [graph["compiled"] for graph in first] == [graph["disk"] for graph in second]
    assert all(graph["compiled"] == 0 < graph["disk"] for graph in second)


def test_described() -> None:
    assert described(lowered(torch.exp).kernels[0]) == "60: f32 to f32"
    assert described(lowered(torch.exp, x=torch.tensor(1.0)).kernels[0]) == "scalar: f32 to f32"
