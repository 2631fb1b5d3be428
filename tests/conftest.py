"""What all tests share: the same examples of hypothesis, one thread, transcripts that can be rewritten, one Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

torch.set_num_threads(1)  # as in every node: for tensors this small two only wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-transcripts", action="store_true", help="write tests/transcripts/*.txt anew")
    parser.addoption("--mutations", type=int, default=300, help="damaged inputs for each decoder in tests/test_fuzz.py")


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A cluster of three executors on this machine, which takes half a minute to start: all tests share it."""
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    from tether.runtimes import jvm

    session = jvm.session("local-cluster[3,3,1024]")
    yield session
    session.stop()
