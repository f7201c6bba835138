"""The cache on disk: keys, many and killed writers, bad files, limits, folders without room."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perfopt.backends import cache as module
from perfopt.backends.cache import TRITON, Cache, Difference, Entry, Key, differences, nearest

WRITER = """
import sys
from pathlib import Path
from perfopt.backends.cache import Cache, Key
folder, number = Path(sys.argv[1]), sys.argv[2]
cache = Cache(folder, 200_000)
for turn in range(60):
    key = Key({"kind": "kernel", "text": str(turn % 20)})
    want = f"{turn % 20}:".encode() * 1000
    found = cache.get(key)
    assert found in (None, want), found[:20]
    cache.put(key, want, f"writer {number}")
"""


def key(**parts: str) -> Key:
    return Key({"kind": "kernel", "text": "t", "cpu": "zen", **parts})


def only_file(cache: Cache) -> Path:
    (path,) = cache.directory.glob("*.entry")
    return path


def run(code: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_is_put_is_got(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "folder")
    assert cache.get(key()) is None and list(cache.entries()) == [] and cache.size() == 0
    for payload in (b"", b"\n", bytes(range(256)) * 10):
        cache.put(key(), payload, "a label", "a batch")
        assert cache.get(key()) == payload and cache.get(key()) == payload
    (entry,) = cache.entries()
    assert (entry.label, entry.batch, entry.hits) == ("a label", "a batch", 2)
    assert entry.key == key() and abs(entry.made - time.time()) < 60
    assert cache.size() == entry.size > 2560
    assert only_file(cache).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


def test_any_part_makes_another_key(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(key(a="1", b="2"), b"x")
    assert cache.get(key(b="2", a="1")) == b"x"
    for other in (key(a="1", b="3"), key(a="1"), key(a="1", b="2", c=""), key(a="2", b="1")):
        assert cache.get(other) is None


def test_the_nearest_is_the_same_kernel_then_the_likeliest() -> None:
    def entry(made: float, label: str = "", batch: str = "", **parts: str) -> Entry:
        return Entry(key(**parts), label, batch, made, made, 1, 0)

    now = entry(9, "net", "now", text="k", limit="3", cpu="zen5")
    same = entry(1, "other", text="k", limit="None", cpu="zen4")
    likely = entry(2, "net", text="j", limit="3", cpu="zen5")
    together = entry(8, "net", "now", text="k", limit="3", cpu="zen4")
    later = entry(10, "net", text="k", limit="3", cpu="zen4")
    thing = entry(3, "net", text="k", limit="3", cpu="zen5", kind="object")
    assert nearest(now, [likely, same, together, later, thing, now]) is same
    assert nearest(now, [likely, together, entry(4, text="j")]) is likely
    assert nearest(now, [together, later, thing]) is None
    assert differences(same.key, now.key) == [
        Difference("cpu", "zen4", "zen5"),
        Difference("limit", "None", "3"),
    ]
    assert differences(key(), key(new="1")) == [Difference("new", "", "1")]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text", "renamed", "version", "short"])
def test_what_is_not_whole_is_removed(tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path)
    cache.put(key(), b"payload" * 100)
    path = only_file(cache)
    content = path.read_bytes()
    wanted = key()
    if damage == "cut":
        path.write_bytes(content[:-200])
    elif damage == "short":
        path.write_bytes(content[:40])
    elif damage == "flip":
        path.write_bytes(content.replace(b"payload", b"qayload", 1))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_bytes(b"hello\n[1, 2]\n3\n")
    elif damage == "version":
        path.write_bytes(content.replace(b"perfopt-cache 1", b"perfopt-cache 0"))
    else:
        wanted = key(text="another")
        path = path.rename(tmp_path / f"{wanted.digest}.entry")
    assert cache.get(wanted) is None and not path.exists()
    cache.put(wanted, b"again")
    assert cache.get(wanted) == b"again"


def test_damage_anywhere_is_found(tmp_path: Path) -> None:
    cache, chance = Cache(tmp_path), random.Random(0)
    cache.put(key(), b"payload", "label", "batch")
    path = only_file(cache)
    whole = path.read_bytes()
    deep = b"perfopt-cache 1\nabc\n" + b"[" * 100_000
    for content in [deep, *(damaged(whole, chance) for _ in range(400))]:
        path.write_bytes(content)
        list(cache.entries())
        assert cache.get(key()) in (None, b"payload")
        if not content.startswith(whole):
            assert not path.exists()


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content with a byte changed, taken out or put in, or with its end gone."""
    at = chance.randrange(len(content))
    byte = bytes([chance.randrange(256)])
    kind = chance.randrange(4)
    if kind == 3:
        return content[:at]
    return content[:at] + (b"" if kind == 2 else byte) + content[at + (kind != 1) :]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_files_that_others_may_write_are_refused(tmp_path: Path, mode: int) -> None:
    cache = Cache(tmp_path)
    cache.put(key(), b"x")
    only_file(cache).chmod(mode)
    assert cache.get(key()) is None and list(cache.entries()) == []
    cache.put(key(), b"y")
    assert cache.get(key()) == b"y"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_of_others_are_refused(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(key(), b"x")
    os.chown(only_file(cache), 12345, 12345)
    assert cache.get(key()) is None
    cache.put(key(), b"y")
    assert cache.get(key()) == b"y"


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling"])
def test_what_is_no_file_is_no_entry(tmp_path: Path, kind: str) -> None:
    cache = Cache(tmp_path)
    path = tmp_path / f"{key().digest}.entry"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "nowhere")
    assert cache.get(key()) is None and list(cache.entries()) == []
    cache.put(key(), b"y")
    assert cache.get(key()) == b"y"


def test_eight_writers(tmp_path: Path) -> None:
    writers = [run(WRITER, tmp_path, number) for number in range(8)]
    for writer in writers:
        _, error = writer.communicate(timeout=120)
        assert writer.returncode == 0, error
    cache = Cache(tmp_path)
    entries = list(cache.entries())
    assert 0 < len(entries) <= 20 and not list(tmp_path.glob("*.unfinished"))
    for entry in entries:
        want = f"{entry.key.parts['text']}:".encode() * 1000
        assert cache.get(entry.key) == want


def test_a_writer_that_is_killed_leaves_nothing_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from perfopt.backends.cache import Cache, Key\n"
        "def killed(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "cache = Cache(Path(sys.argv[1]))\n"
        "key = Key({'kind': 'kernel', 'text': 't', 'cpu': 'zen'})\n"
        "if sys.argv[2] == 'new': os.replace = killed\n"
        "else: cache.put(key, b'old'); os.replace = killed\n"
        "cache.put(key, b'half')\n"
    )
    cache = Cache(tmp_path)
    for state, found in (("new", None), ("old", b"old")):
        writer = run(code, tmp_path, state)
        writer.communicate(timeout=60)
        assert writer.returncode == -9
        assert cache.get(key()) == found
    torn = list(tmp_path.glob("*.unfinished"))
    assert len(torn) == 2
    cache.put(key(), b"whole")
    assert cache.get(key()) == b"whole" and len(list(tmp_path.glob("*.unfinished"))) == 2
    for path in torn:
        os.utime(path, (1, 1))
    Cache(tmp_path).put(key(text="u"), b"x")
    assert not list(tmp_path.glob("*.unfinished")) and cache.get(key()) == b"whole"


def test_what_is_not_read_for_longest_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=13_000)
    for number in range(10):
        cache.put(key(text=str(number)), bytes(1000))
        os.utime(tmp_path / f"{key(text=str(number)).digest}.entry", (number, number))
    assert cache.get(key(text="0")) is not None  # makes it the newest
    for number in range(10, 15):
        cache.put(key(text=str(number)), bytes(1000))
    assert cache.size() <= 13_000
    there = [number for number in range(15) if cache.get(key(text=str(number))) is not None]
    assert 0 in there and 14 in there and 1 not in there and 2 not in there
    cache.put(key(text="big"), bytes(13_500))
    assert cache.get(key(text="big")) is None and cache.get(key(text="14")) is not None


def test_the_limit_is_kept_while_writing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=100_000)
    for number in range(300):
        cache.put(key(text=str(number)), bytes(2000))
        assert cache.size() <= 105_000
    nothing = Cache(tmp_path / "nothing", limit=0)
    nothing.put(key(), b"x")
    assert nothing.size() == 0


def test_tritons_files_count_and_go(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=10_000)
    folder = tmp_path / TRITON / "abc"
    folder.mkdir(parents=True)
    (folder / "kernel.cubin").write_bytes(bytes(6000))
    (tmp_path / TRITON / "kernel.py").write_bytes(bytes(1000))
    (tmp_path / "notes.txt").write_text("the user's own")
    assert cache.triton()[0] == 2 and 7000 <= cache.size() < 16_000
    for path in (folder / "kernel.cubin", folder, tmp_path / TRITON / "kernel.py"):
        os.utime(path, (1, 1))
    cache.put(key(), bytes(3500))
    assert not folder.exists() and cache.get(key()) is not None
    cache.put(key(text="u"), bytes(10))
    count, size = cache.clear()
    assert count >= 2 and size > 3500 and cache.size() == 0
    assert (tmp_path / "notes.txt").exists()


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    Cache(tmp_path).put(key(), b"x")

    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module.tempfile, "mkstemp", refused)
    monkeypatch.setattr(module, "_count", refused)
    cache = Cache(tmp_path)
    with pytest.warns(UserWarning, match="Read-only file system.*PERFOPT_CACHE_DIR"):
        cache.put(key(text="u"), b"y")
    cache.put(key(text="v"), b"y")
    assert not recwarn.list
    assert cache.get(key()) == b"x" and cache.get(key(text="u")) is None
    (entry,) = cache.entries()
    assert entry.hits == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_read(tmp_path: Path) -> None:
    Cache(tmp_path).put(key(), b"x")
    only_file(Cache(tmp_path)).chmod(0o400)
    tmp_path.chmod(0o500)
    with pytest.warns(UserWarning, match="Permission denied"):
        Cache(tmp_path).put(key(text="u"), b"y")
    assert Cache(tmp_path).get(key()) == b"x"
    tmp_path.chmod(0o700)


def test_a_file_for_a_folder(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("mine")
    cache = Cache(place)
    with pytest.warns(UserWarning, match="keeps no compiled kernels"):
        cache.put(key(), b"x")
    assert cache.get(key()) is None and list(cache.entries()) == [] and cache.clear() == (0, 0)
    assert place.read_text() == "mine"


def test_no_room_on_the_disk(tmp_path: Path) -> None:
    code = (
        "import resource, sys, warnings\nfrom pathlib import Path\n"
        "from perfopt.backends.cache import Cache, Key\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "cache = Cache(Path(sys.argv[1]))\n"
        "small, big = Key({'text': 's'}), Key({'text': 'b'})\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    cache.put(small, b'x'); cache.put(big, bytes(9000)); cache.put(big, bytes(9001))\n"
        "assert len(said) == 1, said\n"
        "assert cache.get(small) == b'x' and cache.get(big) is None\n"
        "assert len(list(Path(sys.argv[1]).iterdir())) == 1\n"
    )
    done = run(code, tmp_path)
    _, error = done.communicate(timeout=60)
    assert done.returncode == 0, error
