"""What `pip install` delivers: a wheel that holds the four packages and registers the backend."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = ("perfopt", "passes", "backends", "cost_model")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that no stale `build/` gets into it."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    for folder in BUILT_FROM:
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--quiet", "--wheel-dir", str(work), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = work.glob("perfopt-*.whl")
    return built


def test_wheel_holds_every_module_under_one_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = set()
    for folder in BUILT_FROM:
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".py", ".toml", ".typed"} and "__pycache__" not in file.parts:
                path = file.relative_to(ROOT).as_posix()
                expected.add(path if folder == "perfopt" else f"perfopt/{path}")
    assert expected - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"perfopt"}


def test_wheel_registers_the_backend_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    text = archive.read(entry).decode()
    assert "[torch_dynamo_backends]\nperfopt = perfopt.backend:backend" in text
    assert "[console_scripts]\nperfopt = perfopt.cli:main" in text
    assert "perfopt/py.typed" in archive.namelist()
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_wheel_works_from_any_directory(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    elsewhere = tmp_path / "elsewhere"
    for folder in ("passes", "backends", "cost_model"):  # a user's own folders of these names
        (elsewhere / folder).mkdir(parents=True)
        (elsewhere / folder / "__init__.py").write_text("raise ImportError('shadowed')\n")
    code = f"""
import sys
sys.path.insert(0, {str(site)!r})
import perfopt
assert perfopt.__file__.startswith({str(site)!r}), perfopt.__file__
import torch
assert "perfopt" in torch.compiler.list_backends()
import perfopt.cost_model.cost
compiled = torch.compile(lambda x: torch.nn.functional.gelu(x) * 2, backend="perfopt")
x = torch.arange(8.0)
torch.testing.assert_close(compiled(x), torch.nn.functional.gelu(x) * 2)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
