"""`perfopt cache`: what is kept on disk, why a kernel was compiled, and how to be rid of it."""

from __future__ import annotations

import argparse
import difflib
import json
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from perfopt.backends.cache import Cache, Difference, Entry, differences, nearest
from perfopt.options import OptionError, cache_directory, cache_limit

WIDTH = 80
_SHORT = 12  # digits of a digest
# Parts that differ from kernel to kernel: told for one of those that differ alike.
_OWN = ("text", "shape")


class UnknownEntryError(ValueError):
    """No kernel in the cache has the digest or label that was asked about."""


def add_cache_command(commands: Any) -> None:
    """Add `cache` with its commands to an argparse command group, as `add_commands` does."""
    parser = commands.add_parser(
        "cache",
        help="compiled kernels on disk: list, why, clear, path",
        description="Compiled kernels are kept on disk for the next process. PERFOPT_CACHE_DIR "
        "names the folder, PERFOPT_CACHE_LIMIT the bytes that it may take, as 1GiB.",
    )
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    made = _add(
        actions, "list", "every entry: what it is, its size, its age, how often it was read"
    )
    made.add_argument("--json", action="store_true", help="JSON, as docs/cache.md describes it")
    made.set_defaults(run=_list)
    made = _add(actions, "why", "why the last compilation, or a kernel, was not in the cache")
    made.add_argument("entry", nargs="?", metavar="KERNEL", help="its digest, or part of its label")
    made.set_defaults(run=_why)
    _add(actions, "clear", "remove everything").set_defaults(run=_clear)
    _add(actions, "path", "where it is").set_defaults(run=_path)


def _add(actions: Any, name: str, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=help, description=help)
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return parser


def _cache() -> Cache:
    directory, limit = cache_directory(), cache_limit()
    if directory is None:
        raise OptionError("PERFOPT_CACHE_DIR", "there is no cache, PERFOPT_CACHE_DIR is empty")
    return Cache(directory, limit)


def _path(args: argparse.Namespace) -> tuple[str, int]:
    return f"{_cache().directory}\n", 0


def _clear(args: argparse.Namespace) -> tuple[str, int]:
    cache = _cache()
    entries, size = cache.clear()
    left = cache.size()
    text = f"removed {_many(entries, 'entry', 'entries')}, {bytes_text(size)}\n"
    if left:
        text += f"{bytes_text(left)} could not be removed from {cache.directory}\n"
    return text, int(left > 0)


def _list(args: argparse.Namespace) -> tuple[str, int]:
    cache = _cache()
    entries = sorted(cache.entries(), key=lambda entry: (-entry.made, entry.label))
    made = _as_json(cache, entries) if args.json else "\n".join(_table(cache, entries)) + "\n"
    return made, 0


def _why(args: argparse.Namespace) -> tuple[str, int]:
    entries = [entry for entry in _cache().entries() if entry.key.parts.get("kind") == "kernel"]
    if args.entry is not None:
        asked = [entry for entry in entries if _is_meant(entry, args.entry)]
        if not asked:
            raise UnknownEntryError(_unknown(args.entry, entries))
        last = max(asked, key=lambda entry: entry.made)
        missed = [entry for entry in asked if entry.batch == last.batch]
    elif entries:
        last = max(entries, key=lambda entry: entry.made)
        missed = [entry for entry in entries if entry.batch == last.batch]
    else:
        return "the cache is empty: nothing was compiled\n", 0
    return "\n".join(_reasons(missed, entries)) + "\n", 0


def _is_meant(entry: Entry, text: str) -> bool:
    return entry.key.digest.startswith(text) or text in entry.label


def _unknown(text: str, entries: Sequence[Entry]) -> str:
    labels = sorted({entry.label for entry in entries})
    close = difflib.get_close_matches(text, labels, n=1, cutoff=0.3)
    hint = f"nearest: {close[0]}" if close else "`perfopt cache list` shows what is there"
    return f"no kernel {text!r} in the cache; {hint}"


def _reasons(missed: Sequence[Entry], entries: Sequence[Entry]) -> Iterator[str]:
    """Why these were compiled; those that differ alike from what was there are told together."""
    alike: dict[tuple[Difference, ...] | None, list[tuple[Entry, Entry | None]]] = {}
    for entry in sorted(missed, key=lambda entry: entry.label):
        near = nearest(entry, entries)
        found = differences(near.key, entry.key) if near else None
        kind = None
        if found is not None:
            kind = tuple(Difference(d.part, "", "") if d.part in _OWN else d for d in found)
        alike.setdefault(kind, []).append((entry, near))
    made = max(entry.made for entry in missed)
    few = len({entry.label for entry in missed}) == len(missed) == 1
    what = missed[0].label if few else _many(len(missed), "kernel", "kernels")
    yield f"{what}: compiled {age_text(time.time() - made)} ago"
    for kind, pairs in alike.items():
        entry, near = pairs[0]
        more = f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
        yield ""
        yield f"{entry.label}{more}:"
        if kind is None or near is None:
            yield "  no kernel was kept before"
            continue
        before = f"{near.label} ({near.key.digest[:_SHORT]})"
        yield from _wrapped(f"the nearest kept before is {before}; then -> now", 2)
        for each in differences(near.key, entry.key):
            yield from _wrapped(f"{each.part}: {_change(each)}", 4)


def _wrapped(text: str, indent: int) -> list[str]:
    first, rest = " " * indent, " " * (indent + 2)
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _change(each: Difference) -> str:
    if each.part == "features":
        before, now = set(each.before.split(",")), set(each.now.split(","))
        signed = [f"-{name}" for name in sorted(before - now)]
        return " ".join(signed + [f"+{name}" for name in sorted(now - before)])
    if each.part == "text":
        return f"{each.before[:_SHORT]} -> {each.now[:_SHORT]} (the kernel itself is another)"
    return f"{each.before or 'none'} -> {each.now or 'none'}"


def _table(cache: Cache, entries: Sequence[Entry]) -> Iterator[str]:
    now, total = time.time(), cache.size()
    yield (
        f"{cache.directory}: {_many(len(entries), 'entry', 'entries')}, "
        f"{bytes_text(total)} of {bytes_text(cache.limit)}"
    )
    count, size = cache.triton()
    if count:
        yield f"of these {bytes_text(size)} are Triton's"
    if entries:
        yield ""
        yield f"{'digest':{_SHORT}}  {'kind':6}  {'size':>9}  {'age':>7}  {'hits':>5}  label"
    for entry in entries:
        yield (
            f"{entry.key.digest[:_SHORT]}  {entry.key.parts.get('kind', ''):6}  "
            f"{bytes_text(entry.size):>9}  {age_text(now - entry.made):>7}  {entry.hits:>5}  "
            f"{entry.label}"
        )


def _as_json(cache: Cache, entries: Sequence[Entry]) -> str:
    rows = [
        {
            "digest": entry.key.digest,
            "kind": entry.key.parts.get("kind", ""),
            "label": entry.label,
            "batch": entry.batch,
            "size": entry.size,
            "made": entry.made,
            "used": entry.used,
            "hits": entry.hits,
            "parts": dict(entry.key.parts),
        }
        for entry in entries
    ]
    whole = {
        "directory": str(cache.directory),
        "size": cache.size(),
        "limit": cache.limit,
        "triton": cache.triton()[1],
        "entries": rows,
    }
    return json.dumps(whole, indent=2) + "\n"


def bytes_text(count: int) -> str:
    """A number of bytes for reading, as "1.6 KiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def age_text(seconds: float) -> str:
    """An age for reading, as "5 min"."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _many(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"
