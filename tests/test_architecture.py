"""The house rules that neither types nor linting keep: layers, sizes, docstrings, state."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.source_tree import (
    PACKAGES,
    ROOT,
    Source,
    all_sources,
    dotted,
    imported_modules,
    imported_names,
    layer,
    package_sources,
)

MAX_FILE, MAX_FUNCTION, MAX_LINE = 500, 70, 100
Function = ast.FunctionDef | ast.AsyncFunctionDef
MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "update"),
    *("setdefault", "add", "discard", "appendleft", "popleft", "move_to_end", "sort"),
}

each_file = pytest.mark.parametrize("source", all_sources(), ids=str)
each_module = pytest.mark.parametrize("source", package_sources(), ids=str)


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


@each_file
def test_sizes(source: Source) -> None:
    lines = source.text.splitlines()
    assert len(lines) <= MAX_FILE, f"{source} has {len(lines)} lines, {MAX_FILE} are allowed"
    long = [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE]
    assert not long, f"{source}: longer than {MAX_LINE} characters: lines {long}"
    for function in functions(source.tree):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        where = f"{source}:{function.lineno} {function.name}"
        assert length <= MAX_FUNCTION, f"{where} has {length} lines, {MAX_FUNCTION} are allowed"


@each_file
def test_module_docstring(source: Source) -> None:
    assert not source.tree.body or ast.get_docstring(source.tree), f"{source}: no docstring"


@each_module
def test_public_docstrings(source: Source) -> None:
    def missing(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            decorators = {dotted(each) for each in node.decorator_list}
            if not ast.get_docstring(node) and "overload" not in decorators:
                yield f"{prefix}{node.name} (line {node.lineno})"
            if isinstance(node, ast.ClassDef):
                yield from missing(node.body, f"{node.name}.")

    assert list(missing(source.tree.body)) == []


@each_module
def test_layers(source: Source) -> None:
    own = layer(source.module)
    upward = sorted(name for name in imported_modules(source) if layer(name) > own)
    assert upward == [], f"{source} may import its own layer or lower ones"


def test_no_import_cycles() -> None:
    graph = {source.module: imported_modules(source) for source in package_sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@each_file
def test_no_package_is_imported_by_its_folder(source: Source) -> None:
    folders = set(PACKAGES) - {"perfopt"}
    bare = [name for name in imported_names(source) if name.split(".")[0] in folders]
    assert bare == [], f"{source}: write perfopt.{bare[0]}"


@each_module
def test_environment_is_read_in_options_alone(source: Source) -> None:
    if source.path == "perfopt/options.py":
        return
    reads = {dotted(node) for node in ast.walk(source.tree)} | set(imported_names(source))
    assert reads.isdisjoint({"os.environ", "os.getenv", "os.environb"})


@each_module
def test_only_the_command_line_prints(source: Source) -> None:
    if source.path == "perfopt/cli.py":
        return
    used = {dotted(node) for node in ast.walk(source.tree)}
    assert used.isdisjoint({"print", "sys.stdout", "sys.stderr", "sys.__stdout__"})


@each_module
def test_private_torch_stays_in_one_file(source: Source) -> None:
    if source.path == "backends/torch_private.py":
        return
    names = {dotted(node) for node in ast.walk(source.tree)} | set(imported_names(source))
    names |= {
        node.value
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value
    }
    private = re.compile(r"torch(\.\w+)*\._(?!_)\w+")  # dunders such as __version__ are public
    found = {name for name in names if private.match(name) and not name.startswith("torch.ops.")}
    assert found == set(), f"{source}: give these a name in backends/torch_private.py"


@each_module
def test_module_state_is_constant_or_a_named_cache(source: Source) -> None:
    """Functions change no module-level name, but for those that end in CACHE."""
    top: set[str] = set()
    for node in source.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        top |= {target.id for target in targets if isinstance(target, ast.Name)}
    changed = {name for function in functions(source.tree) for name in _changed(function)}
    assert {name for name in changed & top if not name.endswith("CACHE")} == set()


def _changed(function: Function) -> Iterator[str]:
    """Names that a function changes without having bound them itself."""
    bound = {arg.arg for arg in ast.walk(function) if isinstance(arg, ast.arg)}
    shared: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            shared |= set(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    yield from shared
    for node in ast.walk(function):
        target = ""
        if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            target = dotted(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = dotted(node.func.value) if node.func.attr in MUTATORS else ""
        elif isinstance(node, ast.AugAssign):
            target = dotted(node.target)
        if target and target not in bound:
            yield target


def test_links_lead_to_few_places() -> None:
    """No host but these: a registry's or a machine's address has no place in the sources."""
    allowed = {"www.apache.org", "arxiv.org", "github.com", "docs.pytorch.org"}
    suffixes = {".py", ".md", ".toml", ".txt", ".cfg", ""}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = set()
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in suffixes and path.is_file():
            hosts = re.findall(r"https?://([\w.-]+)", path.read_text())
            found |= {(name, host) for host in hosts if host not in allowed}
    assert found == set()


@pytest.mark.parametrize("module", ["perfopt", "perfopt.cost_model", "perfopt.cost_model.cost"])
def test_the_ground_floor_imports_without_the_roof(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = ("torch_mlir", "triton", "llvmlite", "perfopt.backends", "perfopt.passes")
    assert [name for name in run.stdout.split() if name.startswith(heavy)] == []


def test_public_names_exist_and_are_in_the_readme() -> None:
    import perfopt

    readme = (ROOT / "README.md").read_text()
    assert sorted(perfopt.__all__) == list(perfopt.__all__)
    for name in perfopt.__all__:
        assert getattr(perfopt, name).__doc__, f"perfopt.{name} has no docstring"
        assert f"perfopt.{name}" in readme, f"perfopt.{name} is not in README.md"
    assert set(perfopt.__all__) <= set(dir(perfopt))
    with pytest.raises(AttributeError):
        getattr(perfopt, "no_such_name")  # noqa: B009


def test_options_are_in_the_readme_as_the_code_describes_them() -> None:
    from perfopt.options import described

    rows = [f"| `{name}` | `{default}` | {what} |" for name, default, what in described()]
    table = (ROOT / "README.md").read_text().partition("| option | default |")[2]
    listed = [line for line in table.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    assert listed == rows
