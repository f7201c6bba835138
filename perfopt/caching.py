"""The cache that a compilation uses, what its keys hold of the options, and Triton's folder."""

from __future__ import annotations

import dataclasses
import os
from functools import cache
from pathlib import Path
from types import MappingProxyType

from perfopt.backends.cache import TRITON, Cache
from perfopt.backends.mlir.objects import Objects
from perfopt.calibrations import calibration_hash
from perfopt.options import Options, cache_directory, cache_limit
from perfopt.pipelines import pipeline_of
from perfopt.records import Compilation

# Neither changes any code, and `dump` is a path, which another user or rank has otherwise.
_WITHOUT_PART = ("dump", "verify")


def compiled_objects(job: Compilation, kind: str) -> Objects | None:
    """Where the kernels of a compilation's graph of a kind are kept; None where no cache is wanted.

    Raises `OptionError` for a limit that is none.
    """
    directory = cache_directory()
    if directory is None:
        return None
    label = f"{job.function} {kind}".strip()
    batch = f"{os.getpid()}.{job.order}"
    return Objects(_cache_at(directory, cache_limit()), key_parts(job.options), label, batch)


def triton_directory() -> Path | None:
    """The folder for Triton's sources and binaries; None where no cache is wanted.

    Each file or folder in it is one thing to Triton, or else none: they are removed one by one
    where the cache outgrows its limit, which is looked at once in a process.
    """
    directory = cache_directory()
    if directory is None:
        return None
    _trimmed(directory, cache_limit())
    return directory / TRITON


def key_parts(options: Options) -> MappingProxyType[str, str]:
    """What every key has of the options, each in a part of its own, and of the prices."""
    parts = {
        f"option.{each.name}": str(getattr(options, each.name))
        for each in dataclasses.fields(options)
        if each.name not in _WITHOUT_PART
    }
    # In full: two spellings of the same passes are one, and a new default is another.
    parts["option.pipeline"] = str(pipeline_of(options))
    parts["calibration"] = calibration_hash()
    return MappingProxyType(parts)


@cache
def _trimmed(directory: Path, limit: int) -> None:
    _cache_at(directory, limit).trim()


@cache
def _cache_at(directory: Path, limit: int) -> Cache:
    return Cache(directory, limit)
