"""perfopt: a torch.compile backend that prices every decision by a roofline cost model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfopt.api import compile, disable
    from perfopt.bench_rows import BenchError
    from perfopt.benching import Bench, bench
    from perfopt.explanation import Explanation, explain, explain_each
    from perfopt.options import OptionError, Options
    from perfopt.reports import report

__all__ = [
    "Bench", "BenchError", "Explanation", "OptionError", "Options", "bench", "compile", "disable",
    "explain", "explain_each", "report",
]  # fmt: skip

_HOMES = {
    "Bench": "perfopt.benching",
    "BenchError": "perfopt.bench_rows",
    "Explanation": "perfopt.explanation",
    "OptionError": "perfopt.options",
    "Options": "perfopt.options",
    "bench": "perfopt.benching",
    "compile": "perfopt.api",
    "disable": "perfopt.api",
    "explain": "perfopt.explanation",
    "explain_each": "perfopt.explanation",
    "report": "perfopt.reports",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: parts of the package load without torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("perfopt")
    if name not in _HOMES:
        raise AttributeError(f"module 'perfopt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
