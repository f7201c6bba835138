"""Source lines in programs."""

from __future__ import annotations

import torch
from torch import fx

from perfopt.backends.codegen import source_line

OWN = '  File "/home/me/model.py", line 12, in forward\n    return self.layer(x)\n'
TORCH = f'  File "{torch.__path__[0]}/nn/functional.py", line 125, in linear\n    return f(x)\n'


def line(trace: str) -> str:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = trace
    return source_line(node)


def test_the_users_line_is_preferred() -> None:
    assert line(OWN + TORCH) == line(OWN) == "model.py:12  return self.layer(x)"
    assert line(TORCH) == "functional.py:125  return f(x)"
    assert line("") == line("what") == ""
