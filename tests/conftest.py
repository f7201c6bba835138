"""What every test shares: fixed seeds, one thread, and no GPU test without a GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "perfopt",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("perfopt")


def pytest_addoption(parser: pytest.Parser) -> None:
    """One flag writes every golden text anew."""
    parser.addoption("--update-golden", action="store_true", help="write golden texts anew")


def pytest_configure(config: pytest.Config) -> None:
    """Hand the flag to expecttest, which keeps the golden texts."""
    if config.getoption("--update-golden"):
        os.environ["EXPECTTEST_ACCEPT"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where torch sees no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache() -> Iterator[None]:
    """No test, nor a process that it starts, reads or writes the user's own cache."""
    with (
        tempfile.TemporaryDirectory(prefix="perfopt_tests_") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PERFOPT_CACHE_DIR", str(Path(folder, "cache")))
        patch.delenv("PERFOPT_CACHE_LIMIT", raising=False)
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
