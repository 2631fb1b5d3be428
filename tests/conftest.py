"""What all tests share: the same examples of hypothesis, one thread, signals as in a terminal, nothing left behind,
transcripts that can be rewritten, one Spark."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tether.cli import app as cli

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

torch.set_num_threads(1)  # as in every node: for tensors this small two only wait for each other


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell has started the tests in the background; what they start and interrupt is in the foreground
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _children() -> set[int]:
    """The processes that this one has started, but for the one that multiprocessing has for itself."""
    with suppress(OSError):
        files = [task / "children" for task in Path("/proc/self/task").iterdir()]
        pids = {int(pid) for file in files for pid in file.read_text().split()}
        return {pid for pid in pids if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}
    return set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that fails leaves no process behind: those of a run end when whoever has started them does."""
    before = _children()
    try:
        yield
    except BaseException:
        if not any(map(item.get_closest_marker, ("spark", "ray"))):  # which have processes that all their tests share
            for pid in _children() - before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        raise


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-transcripts", action="store_true", help="write tests/transcripts/*.txt anew")
    parser.addoption("--mutations", type=int, default=300, help="damaged inputs for each decoder in tests/test_fuzz.py")


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A cluster of three executors on this machine, which takes half a minute to start: all tests share it."""
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    from tether.runtimes.spark import jvm

    session = jvm.session("local-cluster[3,3,1024]")
    yield session
    session.stop()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Runs a command line in the folder of the test; returns its output, or its error if it failed."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def call(line: str) -> str:
        monkeypatch.setattr("sys.argv", ["tether", *line.split()])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said, wrong = capsys.readouterr()
        return str(wrong if ended.value.code else said)

    yield call
    signal.signal(signal.SIGTERM, before)
