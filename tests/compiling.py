"""A fresh compiler and one thread for every test, and no pass or kernel that fails unseen."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest
import torch

from perfopt.cost_model.decision import Verdict
from perfopt.records import COMPILATIONS_CACHE

logging.getLogger("torch.__trace").setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Whatever a test compiles is forgotten after it, and was made without a failure."""
    threads, start = torch.get_num_threads(), time.monotonic_ns()
    torch.set_num_threads(1)
    torch.compiler.reset()
    yield
    failed = [
        decision.text()
        for job in COMPILATIONS_CACHE
        if job.order >= start
        for decision in job.every_decision()
        if decision.verdict is Verdict.FAILED
    ]
    torch.compiler.reset()
    torch.set_num_threads(threads)
    assert failed == []
