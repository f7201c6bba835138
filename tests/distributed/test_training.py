"""Two processes train one model together, through perfopt with eager's losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 80


def together(way: str, meeting: Path) -> list[dict[str, Any]]:
    """What each of the two processes says; both end, whatever happens."""
    command = [sys.executable, "-W", "ignore", str(WORKER), way]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(meeting)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, error) in zip(processes, said, strict=True):
        assert process.returncode == 0, error[-4000:]
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in said]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="no gloo")
@pytest.mark.parametrize("way", ["ddp", "fsdp", "tensor_parallel"])
def test_two_processes_train_as_eager_does(way: str, tmp_path: Path) -> None:
    results = together(way, tmp_path / "meeting")
    for result in results:
        assert result["failed"] == []
        assert result["kernels"] > result["backward"] > 0
        assert result["ours"] == pytest.approx(result["eager"], rel=1e-5)
        assert result["eager"][-1] < result["eager"][0]
    if way == "tensor_parallel":  # one batch, so one loss
        assert results[0]["ours"] == results[1]["ours"]
