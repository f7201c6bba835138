"""`perfopt cache`: list, why, clear and path, for full, empty and wrong caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perfopt.backends.cache import TRITON, Cache, Key
from perfopt.cache_commands import age_text, bytes_text
from perfopt.cli import main

BASE = {
    "kind": "kernel",
    "text": "a" * 64,
    "shape": "4 over 8: f32 to f32",
    "option.limit": "None",
    "version.torch": "2.13.0",
    "features": "avx,avx2",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("PERFOPT_CACHE_DIR", str(tmp_path / "cache"))
    return Cache(tmp_path / "cache")


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["cache", *argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def put(cache: Cache, label: str, batch: str, **parts: str) -> Key:
    changed = {name.replace("_", "."): value for name, value in parts.items()}
    key = Key({**BASE, **changed})
    cache.put(key, b"x" * 100, label, batch)
    time.sleep(0.002)  # one after the other
    return key


def test_path(capsys: pytest.CaptureFixture[str], cache: Cache) -> None:
    assert answer(capsys, "path") == (0, f"{cache.directory}\n", "")
    assert not cache.directory.exists()


def test_list(capsys: pytest.CaptureFixture[str], cache: Cache) -> None:
    code, text, _ = answer(capsys, "list")
    assert (code, text) == (0, f"{cache.directory}: 0 entries, 0 B of 1.0 GiB\n")
    first = put(cache, "net forward region_0", "1")
    put(cache, "net forward 1 kernels", "1", kind="object")
    for _ in range(3):
        cache.get(first)
    (cache.directory / "torn.entry").write_bytes(b"perfopt")
    code, text, _ = answer(capsys, "list")
    head, _, columns, *rows = text.splitlines()
    assert code == 0 and ": 2 entries, " in head and head.endswith(" of 1.0 GiB")
    assert columns.split() == ["digest", "kind", "size", "age", "hits", "label"]
    assert rows[0].split()[1] == "object" and rows[0].endswith("net forward 1 kernels")
    assert rows[1].startswith(first.digest[:12]) and rows[1].split()[6] == "3"
    folder = cache.directory / TRITON
    folder.mkdir()
    (folder / "kernel.py").write_bytes(bytes(2048))
    assert "of these 2.0 KiB are Triton's" in answer(capsys, "list")[1]


def test_list_as_json(capsys: pytest.CaptureFixture[str], cache: Cache) -> None:
    key = put(cache, "net", "1")
    cache.get(key)
    made: dict[str, Any] = json.loads(answer(capsys, "list", "--json")[1])
    (entry,) = made.pop("entries")
    assert made == {
        "directory": str(cache.directory),
        "size": cache.size(),
        "limit": 1 << 30,
        "triton": 0,
    }
    assert entry.pop("made") <= entry.pop("used") + 1
    assert entry == {
        "digest": key.digest,
        "kind": "kernel",
        "label": "net",
        "batch": "1",
        "size": cache.size(),
        "hits": 1,
        "parts": BASE,
    }


def test_why_of_the_last_compilation(capsys: pytest.CaptureFixture[str], cache: Cache) -> None:
    assert answer(capsys, "why")[1] == "the cache is empty: nothing was compiled\n"
    put(cache, "net forward region_0", "1")
    put(cache, "net forward region_1", "1", text="b" * 64)
    code, text, _ = answer(capsys, "why")
    assert code == 0 and "2 kernels: compiled" in text
    assert "net forward region_0 and 1 more:\n  no kernel was kept before" in text
    new = {"version_torch": "2.14.0", "features": "avx,avx512f"}
    put(cache, "net forward region_0", "2", option_limit="3", **new)
    put(cache, "net forward region_1", "2", text="b" * 64, option_limit="3", **new)
    put(cache, "net forward region_2", "2", text="c" * 64, shape="9: f32", option_limit="3", **new)
    text = answer(capsys, "why")[1]
    assert "3 kernels: compiled" in text and "net forward region_0 and 1 more:" in text
    assert "the nearest kept before is net forward region_0" in text
    for line in ("option.limit: None -> 3", "version.torch: 2.13.0 -> 2.14.0"):
        assert text.count(f"    {line}\n") == 2
    assert "features: -avx2 +avx512f" in text
    same, other = text.split("net forward region_2:")
    assert "text:" not in same and "shape:" not in same
    assert "shape: 4 over 8: f32 to f32 -> 9: f32" in other
    assert "-> cccccccccccc (the kernel itself is another)" in other
    assert max(map(len, text.splitlines())) <= 80


def test_why_reads_at_80_columns(capsys: pytest.CaptureFixture[str], cache: Cache) -> None:
    label = "Transformer.forward.inner backward region_123_columns"
    put(cache, label, "1")
    put(cache, label, "2", option_disable=str(tuple(f"blocks.{n}.mlp" for n in range(20))))
    text = answer(capsys, "why")[1]
    assert "option.disable: none -> ('blocks.0.mlp'," in text
    assert max(map(len, text.splitlines())) <= 80


def test_why_of_one_kernel(capsys: pytest.CaptureFixture[str], cache: Cache) -> None:
    put(cache, "net forward region_0", "1")
    key = put(cache, "net forward region_0", "2", option_limit="3")
    put(cache, "other forward region_0", "3", text="d" * 64)
    for asked in (key.digest, key.digest[:10], "net forward region_0", "net"):
        code, text, _ = answer(capsys, "why", asked)
        assert code == 0 and text.startswith("net forward region_0: compiled ")
        assert "option.limit: None -> 3" in text and "text:" not in text
    code, out, error = answer(capsys, "why", "net forward regio_0")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "no kernel 'net forward regio_0'" in error and "nearest: net forward region_0" in error
    assert "perfopt cache list" in answer(capsys, "why", "zzz")[2]


def test_clear(capsys: pytest.CaptureFixture[str], cache: Cache) -> None:
    assert answer(capsys, "clear")[:2] == (0, "removed 0 entries, 0 B\n")
    put(cache, "net", "1")
    put(cache, "net", "1", text="b")
    (cache.directory / "half.unfinished").write_bytes(b"x")
    (cache.directory / "notes.txt").write_text("mine")
    size = cache.size()
    assert answer(capsys, "clear")[:2] == (0, f"removed 3 entries, {bytes_text(size)}\n")
    assert os.listdir(cache.directory) == ["notes.txt"]


def test_clear_says_what_it_cannot_remove(
    capsys: pytest.CaptureFixture[str], cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "net", "1")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "unlink", refused)
    code, text, _ = answer(capsys, "clear")
    assert code == 1 and text.startswith("removed 0 entries, 0 B\n")
    assert f"could not be removed from {cache.directory}" in text


@pytest.mark.parametrize("action", ["list", "why", "clear", "path"])
def test_bad_settings_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setenv("PERFOPT_CACHE_LIMIT", "lots")
    code, out, error = answer(capsys, action)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("perfopt cache: PERFOPT_CACHE_LIMIT is 'lots'") and "GiB" in error
    monkeypatch.delenv("PERFOPT_CACHE_LIMIT")
    monkeypatch.setenv("PERFOPT_CACHE_DIR", "")
    code, out, error = answer(capsys, action)
    assert (code, out) == (2, "") and "PERFOPT_CACHE_DIR is empty" in error
    assert main(["cache", action, "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["lst"], ["list", "extra"], ["why", "a", "b"]])
def test_bad_arguments(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["cache", *argv])
    assert done.value.code == 2 and "usage: perfopt" in capsys.readouterr().err


def test_the_command_needs_no_torch() -> None:
    code = (
        "import argparse, sys; from perfopt.cache_commands import add_cache_command\n"
        "parser = argparse.ArgumentParser(); add_cache_command(parser.add_subparsers())\n"
        "args = parser.parse_args(['cache', 'list']); args.run(args); print(*sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "sympy", "rich"}.isdisjoint(done.stdout.split())


def test_texts() -> None:
    sizes = [0, 1023, 1024, 1536, 5 << 20, 3 << 40, 5 << 50]
    said = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 MiB", "3.0 TiB", "5120.0 TiB"]
    assert [bytes_text(size) for size in sizes] == said
    ages = [-1, 5, 59, 61, 7200, 200_000]
    assert [age_text(age) for age in ages] == ["0 s", "5 s", "59 s", "1 min", "2 h", "2 days"]
