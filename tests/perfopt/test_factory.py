"""`FILE.py:FACTORY` and what is said where it is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perfopt.factory import FactoryError, load_factory
from tests.perfopt import explained_model

FILE = explained_model.__file__


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_factories_give_models_and_inputs() -> None:
    model, args, kwargs = load_factory(f"{FILE}:make")()
    assert model(*args).shape == () and kwargs == {}
    model, args, kwargs = load_factory(f"{FILE}:broken")()
    assert args == () and list(kwargs) == ["x"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("model", "'model' is not of the form FILE.py:FACTORY"),
        (f"{FILE}:", "is not of the form"),
        (f"{Path(FILE).parent}/explained_mode.py:make", "did you mean 'explained_model.py'"),
        ("/no/such/folder/x.py:make", "no file '/no/such/folder/x.py'"),
        (f"{FILE}:mak", "no function 'mak'; did you mean 'make'"),
        (f"{FILE}:NOT_CALLABLE", "no function 'NOT_CALLABLE'"),
        (f"{FILE}:failing", "failing failed: explained_model.py:48: ValueError: no data"),
        (f"{FILE}:odd", r"odd returned \(Model, int\), not \(model, args\)"),
    ],
)
def test_refusals(spec: str, words: str) -> None:
    with pytest.raises(FactoryError, match=words) as caught:
        load_factory(spec)()
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_run(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import torch\nimport no_such_module_anywhere\n")
    with pytest.raises(FactoryError, match=r"model.py:2: ModuleNotFoundError"):
        load_factory(f"{file}:make")
    file.write_text("def make(:\n")
    with pytest.raises(FactoryError, match=r"model.py:1: SyntaxError"):
        load_factory(f"{file}:make")
    (tmp_path / "beside.py").write_text("INPUTS = (1,)\n")
    file.write_text("from beside import INPUTS\n\ndef make():\n    return abs, INPUTS\n")
    assert load_factory(f"{file}:make")() == (abs, (1,), {})
