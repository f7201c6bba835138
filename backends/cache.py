"""Made code on disk, for the next process: entries by keys whose parts can be read.

An entry is one file, named for the digest of its key:

    perfopt-cache 1
    SHA-256 of the next line and the payload
    {"label": ..., "batch": ..., "length": ..., "made": ..., "parts": {...}}
    payload, `length` bytes
    one byte for each time that it was read

Files are written aside and moved into place, so that any number of processes may share a folder
and any of them may be killed. What does not match its checksum or its name, or is not the user's
own, is not used. Reading an entry appends a byte, which counts it and makes it the newest: where
the folder outgrows its limit, the entries not read for longest go first. Triton keeps its own
files and folders in a folder inside, which count and go like entries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

LIMIT = 1 << 30  # bytes
_MAGIC = b"perfopt-cache 1"
_SUFFIX, _UNFINISHED = ".entry", ".unfinished"
TRITON = "perfopt-triton"  # no folder that a user who gives his home may have in it
_STALE = 3600  # seconds after which nobody still writes an unfinished file
_FULL_ENOUGH = 0.9  # of the limit is left when entries had to go
_OTHERS_MAY_WRITE = 0o022


@dataclass(frozen=True)
class Key:
    """What an entry depends on: names of its parts and their values as text."""

    parts: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """A name for these parts, 64 hexadecimal digits."""
        return hashlib.sha256(_json(dict(self.parts))).hexdigest()


@dataclass(frozen=True)
class Entry:
    """An entry without its payload.

    `made` and `used` are seconds of the epoch, `size` the bytes of its file, `hits` how often it
    was read. Entries of one `batch` were made by the same compilation.
    """

    key: Key
    label: str
    batch: str
    made: float
    used: float
    size: int
    hits: int


@dataclass(frozen=True)
class Difference:
    """A part of two keys that differs; "" for a key that lacks it."""

    part: str
    before: str
    now: str


class Refused(ValueError):
    """A file that is no whole entry of this cache."""


class Cache:
    """A folder of entries; it is made when first written to.

    Neither `get` nor `put` raises for what the folder or a file in it is like.
    """

    def __init__(self, directory: Path, limit: int = LIMIT) -> None:
        self.directory = directory
        self.limit = limit
        self._unchecked = limit  # bytes written since the folder's size was last looked at

    def get(self, key: Key) -> bytes | None:
        """The payload stored under `key`, or None; a file that is not whole is removed."""
        path = self._path(key.digest)
        try:
            payload = _payload(path)
        except OSError:
            return None
        except Refused:
            _remove(path)
            return None
        with contextlib.suppress(OSError):  # read-only: not counted
            _count(path)
        return payload

    def put(self, key: Key, payload: bytes, label: str = "", batch: str = "") -> None:
        """Store `payload`; `label` and `batch` are for people, and no parts of the key.

        A folder that cannot be written is warned of once.
        """
        if len(payload) > self.limit:
            return
        head = {"parts": dict(key.parts), "label": label, "batch": batch, "made": time.time()}
        body = _json({**head, "length": len(payload)}) + b"\n" + payload
        checksum = hashlib.sha256(body).hexdigest().encode()
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(self._path(key.digest), b"\n".join((_MAGIC, checksum, body)))
            self._unchecked += len(body)
            if self._unchecked > self.limit // 64:
                self._unchecked = 0
                self.trim()
        except OSError as error:
            _say_unwritable(str(self.directory), error.strerror or str(error))

    def entries(self) -> Iterator[Entry]:
        """Every entry, in no order; payloads are not read, and so not checked."""
        for file in self._files():
            if file.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError, Refused):
                    yield _entry(Path(file.path))

    def clear(self) -> tuple[int, int]:
        """Remove all that is kept here, whole or not; returns how many and their bytes."""
        gone = [size for _, size, path in list(self._kept()) if _remove(path)]
        return len(gone), sum(gone)

    def size(self) -> int:
        """The bytes of all that is kept here."""
        return sum(size for _, size, _ in self._kept())

    def triton(self) -> tuple[int, int]:
        """How many files and folders Triton keeps here, and their bytes."""
        kept = [size for _, size, path in self._kept() if path.parent.name == TRITON]
        return len(kept), sum(kept)

    def trim(self) -> None:
        """Remove what is longest not used, where there is more than the limit allows."""
        now, total, found = time.time(), 0, []
        for used, size, path in self._kept():
            unfinished = path.name.endswith(_UNFINISHED)
            if unfinished and used < now - _STALE:
                _remove(path)
                continue
            total += size
            if not unfinished:
                found.append((used, size, path))
        if total <= self.limit:
            return
        for _, size, path in sorted(found):
            if total <= self.limit * _FULL_ENOUGH:
                break
            if _remove(path):
                total -= size

    def _path(self, digest: str) -> Path:
        return self.directory / f"{digest}{_SUFFIX}"

    def _files(self) -> list[os.DirEntry[str]]:
        found = _listed(self.directory)
        return [file for file in found if file.name.endswith((_SUFFIX, _UNFINISHED))]

    def _kept(self) -> Iterator[tuple[float, int, Path]]:
        """When each file or folder was last read or written, its bytes and its path."""
        for item in [*self._files(), *_listed(self.directory / TRITON)]:
            with contextlib.suppress(OSError):  # another process has removed it
                status = item.stat(follow_symlinks=False)
                used, size = status.st_mtime, status.st_size
                if item.is_dir(follow_symlinks=False):
                    inner = [file.stat(follow_symlinks=False) for file in _listed(item.path)]
                    used = max([used, *(file.st_mtime for file in inner)])
                    size += sum(file.st_size for file in inner)
                yield used, size, Path(item.path)


def nearest(entry: Entry, others: Iterable[Entry]) -> Entry | None:
    """The entry of an earlier batch whose key is most like that of `entry`.

    The same kernel under other circumstances comes before other kernels, then the one that agrees
    in most parts, then the one with the same label, then the latest. None where none came before.
    """

    def likeness(other: Entry) -> tuple[bool, int, bool, float]:
        parts, its = entry.key.parts, other.key.parts
        same = sum(its.get(part) == value for part, value in parts.items())
        return its.get("text") == parts.get("text"), same, other.label == entry.label, other.made

    kind = entry.key.parts.get("kind")
    earlier = [
        other
        for other in others
        if other.key != entry.key and other.batch != entry.batch and other.made <= entry.made
        if other.key.parts.get("kind") == kind
    ]
    return max(earlier, key=likeness, default=None)


def differences(before: Key, now: Key) -> list[Difference]:
    """The parts in which two keys differ, by name."""
    names = sorted({*before.parts, *now.parts})
    pairs = [(name, before.parts.get(name, ""), now.parts.get(name, "")) for name in names]
    return [Difference(*pair) for pair in pairs if pair[1] != pair[2]]


def _json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _open(path: Path) -> int:
    """A descriptor of the user's own regular file; raises `Refused` and OSError."""
    # Without waiting for who might write into a pipe of that name.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode):
        if status.st_uid in (os.geteuid(), 0) and not status.st_mode & _OTHERS_MAY_WRITE:
            return handle
        problem: Exception = PermissionError(f"{path} can be written by others")
    else:
        problem = Refused("not a file")
    os.close(handle)
    raise problem


def _payload(path: Path) -> bytes:
    """The checked payload of an entry."""
    with open(_open(path), "rb") as file:
        content = file.read()
    magic, _, rest = content.partition(b"\n")
    checksum, _, body = rest.partition(b"\n")
    header, _, tail = body.partition(b"\n")
    key, head = _header(magic, header)
    length = head["length"]
    whole = hashlib.sha256(body[: len(header) + 1 + length]).hexdigest().encode()
    if checksum != whole or length > len(tail):
        raise Refused("torn")
    if path.name != f"{key.digest}{_SUFFIX}":
        raise Refused("another entry's name")
    return tail[:length]


def _entry(path: Path) -> Entry:
    """An entry of its first lines."""
    with open(_open(path), "rb") as file:
        status = os.fstat(file.fileno())
        magic, _, header = (file.readline().rstrip(b"\n") for _ in range(3))
        start = file.tell()
    key, head = _header(magic, header)
    hits = status.st_size - start - head["length"]
    if hits < 0 or path.name != f"{key.digest}{_SUFFIX}":
        raise Refused("torn, or another entry's name")
    used, size = status.st_mtime, status.st_size
    return Entry(key, head["label"], head["batch"], head["made"], used, size, hits)


def _header(magic: bytes, header: bytes) -> tuple[Key, dict[str, Any]]:
    try:
        head = json.loads(header)
        key = Key(MappingProxyType({str(k): str(v) for k, v in head["parts"].items()}))
        head["length"], head["made"] = int(head["length"]), float(head["made"])
        head["label"], head["batch"] = str(head["label"]), str(head["batch"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused("no header") from error
    if magic != _MAGIC or head["length"] < 0:
        raise Refused("another format")
    return key, head


def _write(path: Path, content: bytes) -> None:
    """Put `content` at `path`, whole or not at all.

    It is not forced to the disk: what a crash of the machine tears does not match its checksum.
    """
    handle, name = tempfile.mkstemp(_UNFINISHED, path.stem[:16], path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        _remove(Path(name))
        raise


def _count(path: Path) -> None:
    # Not made anew where another process has just removed it.
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "ab") as file:
        file.write(b"+")


def _remove(path: Path) -> bool:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:
        return False
    return True


def _listed(directory: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except OSError:
        return []


@cache
def _say_unwritable(directory: str, why: str) -> None:
    warnings.warn(
        f"perfopt keeps no compiled kernels for the next process: {directory}: {why}. "
        "PERFOPT_CACHE_DIR names another folder, or none if it is empty.",
        stacklevel=2,
    )
