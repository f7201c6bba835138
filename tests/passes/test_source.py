"""Source lines."""

from __future__ import annotations

import torch
from torch import fx

from perfopt.passes.source import first_source_line, source_line

TRACE = f'''  File "/home/me/model.py", line 12, in forward
    return self.layer(x)
  File "{torch.__path__[0]}/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
'''


def node(trace: str | None) -> fx.Node:
    made = fx.Graph().placeholder("x")
    made.meta["stack_trace"] = trace
    return made


def test_the_users_frame_is_preferred() -> None:
    assert source_line(node(TRACE)) == "model.py:12"


def test_without_frames_there_is_no_line() -> None:
    assert source_line(node(None)) == source_line(node("what")) == ""
    assert first_source_line([node(None), node(TRACE)]) == "model.py:12"
