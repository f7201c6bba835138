"""The first step of a model in a process of its own, and the memory of a later one.

    python -m perfopt.first_call REQUEST.json ANSWER.json

`perfopt bench` starts it with the folders of caches that it is to use. The answer has seconds of
the first step, those of its stages where the backend tells them, and bytes alive at most in a
later step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from perfopt.benching import Case, contender, loaded, step_of

WARM_STEPS = 2


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run one contender of a case from its first step on."""
    import torch

    from perfopt.backends.torch_private import allocated_peak
    from perfopt.reports import report

    torch.set_num_threads(request["threads"])
    case = Case.read(request["case"])
    subject = loaded(case)
    call = contender(subject, request["contender"], case.options)
    step = step_of(subject, call)
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    stages: dict[str, float] = {}
    if request["contender"] == "perfopt":
        stages = {name: seconds for name, seconds in report(call).seconds.items() if seconds}
    for _ in range(WARM_STEPS):
        step()
    return {"seconds": first, "stages": stages, "peak_bytes": allocated_peak(step)}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(answer(given)))
