"""Which cache is used: the environment, the parts that options give keys, and what misses."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import perfopt
from perfopt import caching
from perfopt.backends.cache import LIMIT, Cache
from perfopt.backends.mlir import compile as compiling
from perfopt.caching import calibration_hash, key_parts, triton_directory
from perfopt.options import Options, cache_directory, cache_limit
from perfopt.passes.pipeline import DEFAULT, parse_pipeline


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a process that knows no kernel."""
    monkeypatch.setenv("PERFOPT_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def forget() -> None:
    torch.compiler.reset()
    gc.collect()
    for cache in (compiling._ENTRY_CACHE, compiling._RECENT_CACHE):
        cache.clear()


def network(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1)


def sources(**options: Any) -> dict[str, int]:
    """Where the kernels of a fresh compilation came from."""
    forget()
    compiled = perfopt.compile(network, **options)
    x = torch.linspace(-1, 1, 30).reshape(3, 10)
    torch.testing.assert_close(compiled(x), network(x))
    (graph,) = perfopt.report(compiled).graphs
    return {way: count for way, count in graph.cached.items() if count}


# Other values of options that compile the network.
OTHER: dict[str, Any] = {
    "pipeline": "graph(fuse)",
    "donate": True,
    "exact_rounding": True,
    "limit": 100,
    "disable": ("nothing",),
}
WITHOUT = {"dump", "verify"}


def test_every_option_has_a_part_of_its_own_but_those_that_change_no_code() -> None:
    names = {f"option.{each.name}" for each in dataclasses.fields(Options)}
    parts = key_parts(Options())
    assert set(parts) == names - {f"option.{name}" for name in WITHOUT} | {"calibration"}
    assert parts["option.pipeline"] == str(parse_pipeline(DEFAULT))
    assert key_parts(Options(pipeline=DEFAULT)) == parts
    assert parts["calibration"] == calibration_hash() == "none"


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(Options)])
def test_an_option_changes_its_part_alone(name: str) -> None:
    other = Options()
    # Unchecked: some take one value only.
    object.__setattr__(other, name, "graph(fuse)" if name == "pipeline" else ("another",))
    before, now = key_parts(Options()), key_parts(other)
    changed = {part for part in now if now[part] != before[part]}
    assert changed == ({f"option.{name}"} if name not in WITHOUT else set())


@pytest.mark.parametrize("name", OTHER)
def test_an_option_misses_and_its_return_hits(name: str) -> None:
    assert sources() == {"compiled": 1}
    assert sources() == {"disk": 1}
    assert sources(**{name: OTHER[name]}) == {"compiled": 1}
    assert sources(**{name: OTHER[name]}) == {"disk": 1}
    assert sources() == {"disk": 1}


def test_verify_and_dump_hit(tmp_path: Path) -> None:
    assert sources() == {"compiled": 1}
    assert sources(verify=True, dump=str(tmp_path / "dumped")) == {"disk": 1}


def test_the_calibration_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources() == {"compiled": 1}
    monkeypatch.setattr(caching, "calibration_hash", lambda: "0123")
    assert sources() == {"compiled": 1}
    monkeypatch.undo()


def test_reports_say_where_kernels_came_from() -> None:
    for words in ("1 compiled", "1 from the cache"):
        forget()
        compiled = perfopt.compile(network)
        compiled(torch.ones(2, 3))
        assert f"  different kernels: {words}" in perfopt.report(compiled).text()
    torch.compiler.reset()
    compiled = perfopt.compile(network)
    compiled(torch.ones(2, 3))
    assert "1 from this process" in perfopt.report(compiled).text()


def test_entries_are_named_for_people(folder: Path) -> None:
    sources()
    labels = {entry.label for entry in Cache(folder).entries()}
    assert labels == {"network inference region_0", "network inference 1 kernels"}


def test_no_cache_is_wanted(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PERFOPT_CACHE_DIR", "")
    assert cache_directory() is None and triton_directory() is None
    assert sources() == sources() == {"compiled": 1}
    assert not folder.exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PERFOPT_CACHE_DIR", "~/mine")
    assert cache_directory() == tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERFOPT_CACHE_DIR", "here")
    assert cache_directory() == tmp_path / "here"
    monkeypatch.delenv("PERFOPT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "perfopt"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory() == tmp_path / ".cache" / "perfopt"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_directory() is None


def test_tritons_folder(folder: Path) -> None:
    assert triton_directory() == folder / "perfopt-triton"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", LIMIT), ("0", 0), ("500000000", 500_000_000), ("1GiB", 1 << 30), ("1 gib", 1 << 30),
        ("1.5MiB", 3 << 19), (" 64KiB ", 1 << 16), ("2TiB", 2 << 40),
    ],
)  # fmt: skip
def test_limits(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("PERFOPT_CACHE_LIMIT", text)
    assert cache_limit() == size


@pytest.mark.parametrize("text", ["1XB", "lots", "-1", "1e9", "1GiB2", "GiB", "9" * 400, "٣"])
def test_bad_limits(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PERFOPT_CACHE_LIMIT", text)
    with pytest.raises(perfopt.OptionError) as caught:
        cache_limit()
    assert caught.value.key == "PERFOPT_CACHE_LIMIT"
    assert repr(text) in str(caught.value) and "GiB" in str(caught.value)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="PERFOPT_CACHE_LIMIT"):
        perfopt.compile(network)(torch.ones(2, 3))
