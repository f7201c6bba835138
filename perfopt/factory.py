"""`FILE.py:FACTORY`: how the command line is told which model to look at."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class FactoryError(ValueError):
    """A specification that names no factory, or a factory that fails; the message is one line."""


def load_factory(spec: str) -> Callable[[], Made]:
    """The factory that `spec`, as `FILE.py:FACTORY`, names: it gives a model and its inputs.

    `FACTORY()` returns `(model, args)` or `(model, args, kwargs)`, where the model is anything that
    can be called. The file's folder is put on the path, as if the file were run. Raises
    `FactoryError`, at once or when called, with the user's line; its cause has the traceback.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier():
        raise FactoryError(f"{spec!r} is not of the form FILE.py:FACTORY")
    path = Path(file)
    if not path.is_file():
        near = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise FactoryError(f"no file {file!r}{_nearest(path.name, near)}")
    module = _module(path)
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise FactoryError(f"{file} has no function {name!r}{_nearest(name, known)}")

    def make() -> Made:
        try:
            made = factory()
        except Exception as error:
            raise FactoryError(f"{name} failed: {_one_line(error, path)}") from error
        return _checked(name, made)

    return make


def _module(path: Path) -> Any:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"perfopt_factory_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise FactoryError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise FactoryError(f"{path} cannot be run: {_one_line(error, path)}") from error
    return module


def _checked(name: str, made: Any) -> Made:
    if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]):
        model, args, *rest = made
        kwargs = rest[0] if rest else {}
        if isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping):
            return model, tuple(args), dict(kwargs)
    shown = type(made).__name__
    if isinstance(made, tuple):
        shown = f"({', '.join(type(each).__name__ for each in made)})"
    raise FactoryError(
        f"{name} returned {shown}, not (model, args) or (model, args, kwargs) with a tuple of args"
    )


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _one_line(error: BaseException, path: Path) -> str:
    """The error's first line, behind the last line of the user's file that led to it."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if Path(frame.filename) == path]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        own = [error.lineno]
    return f"{path.name}:{own[-1]}: {text}" if own else text
