"""The suite itself: it runs in the background of a shell, and a test that fails leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def pytest_in_the_background(directory: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run a test with our conftest, started as a shell starts a command that ends with `&`."""
    (directory / "test_it.py").write_text(textwrap.dedent(test))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "test_it.py"]
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )


def test_processes_of_tests_can_be_interrupted_although_the_suite_runs_in_the_background(tmp_path: Path) -> None:
    done = pytest_in_the_background(
        tmp_path,
        """
        import signal, subprocess, sys

        def test_it():
            child = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
            assert subprocess.run([sys.executable, "-c", child]).returncode == -signal.SIGINT
        """,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_a_test_that_fails_leaves_no_process_behind(tmp_path: Path) -> None:
    done = pytest_in_the_background(
        tmp_path,
        """
        import subprocess

        def test_it():
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            open("pid", "w").write(str(child.pid))
            assert False
        """,
    )
    assert done.returncode == 1, done.stdout
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
