"""The first step of a model in a process of its own.

    python -m perfopt.first_call REQUEST.json ANSWER.json

`perfopt bench` starts it with the folders of caches that it is to use. The answer has seconds of
the first step, and those of its stages where the backend tells them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from perfopt.backends.torch_private import compile_seconds
from perfopt.bench_rows import OURS, Case
from perfopt.benching import contender, loaded, step_of
from perfopt.reports import report


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run one contender of a case for its first step."""
    torch.set_num_threads(request["threads"])
    case = Case.read(request["case"])
    subject = loaded(case)
    call = contender(subject, request["contender"], case.options)
    step = step_of(subject, call)
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    ours = request["contender"] == OURS
    stages = report(call).seconds if ours else compile_seconds()
    return {"seconds": first, "stages": {name: taken for name, taken in stages.items() if taken}}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(answer(given)), encoding="utf-8")
