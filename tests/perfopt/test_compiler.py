"""The stages: what they leave as they found it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import perfopt


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_garbage_collection_is_as_before(enabled: bool, fails: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    options = {"pipeline": "graph(nothing)"} if fails else {}
    compiled = torch.compile(lambda x: (x * 2).exp(), backend="perfopt", options=options)
    x = torch.ones(3, requires_grad=True)
    if fails:
        with pytest.raises(Exception, match="nothing"):
            compiled(x)
    else:
        compiled(x).sum().backward()
        assert len(perfopt.report(compiled).graphs) == 2
    assert gc.isenabled() == enabled
