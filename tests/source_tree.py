"""The repository as parsed files, for the tests of its architecture."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Folder -> package, lowest layer first: a file imports its own layer or lower ones.
PACKAGES = {
    "cost_model": "perfopt.cost_model",
    "backends": "perfopt.backends",
    "passes": "perfopt.passes",
    "perfopt": "perfopt",
}
OTHERS = ("tests", "examples", "benchmarks")


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root, dotted name ("" outside the package), its tree."""

    path: str
    module: str
    text: str
    tree: ast.Module

    def __str__(self) -> str:
        return self.path


def _module_name(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    if folder not in PACKAGES:
        return ""
    return ".".join([PACKAGES[folder], *(part for part in rest if part != "__init__")])


def _read(folders: tuple[str, ...]) -> tuple[Source, ...]:
    sources = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            relative = path.relative_to(ROOT).as_posix()
            sources.append(Source(relative, _module_name(path), text, ast.parse(text)))
    return tuple(sources)


@cache
def package_sources() -> tuple[Source, ...]:
    """The files of the four folders that are installed."""
    return _read(tuple(PACKAGES))


@cache
def all_sources() -> tuple[Source, ...]:
    """Every Python file of the repository."""
    return package_sources() + _read(OTHERS)


def layer(module: str) -> int:
    """The position of a module's layer; 0 is the lowest, and the roof is `perfopt` itself."""
    for position, package in enumerate(PACKAGES.values()):
        if module == package or module.startswith(package + "."):
            return position
    raise ValueError(f"{module!r} is in none of {list(PACKAGES.values())}")


def imported_names(source: Source) -> Iterator[str]:
    """Each dotted name that `source` imports anywhere: in functions and TYPE_CHECKING too.

    Relative imports are resolved. `from a import b` gives `a.b`, whether b is a module or not. A
    string that is exactly the name of one of our modules counts as well: lazy tables hold such.
    """
    modules = {each.module for each in package_sources()} - {"", "perfopt"}
    package = source.module
    if not source.path.endswith("__init__.py"):
        package = package.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and node.value in modules:
            yield node.value


def imported_modules(source: Source) -> set[str]:
    """Which of our own modules `source` imports, itself left out."""
    modules = {each.module for each in package_sources()}
    found = set()
    for name in imported_names(source):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name:
            found.add(name)
    return found - {source.module}


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain that starts at a name; "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])
