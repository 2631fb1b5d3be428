"""Which code is blamed: an exception in the user's code is a TaskError, any other unexpected one an InternalError."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import tether
from tether import Averaging, InternalError, Local, Sim, TaskError, UsageError
from tether.cli import app as cli
from tether.execution.progress import make_progress
from tether.protocols.averaging import AveragingWorker
from tether.testing.conformance import Blobs, train_quietly


class Forgetful(Blobs):
    """Fails in a method that its loss calls."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.weigh(super().loss(model, batch))

    def weigh(self, loss: Tensor) -> Tensor:
        return loss * {}["weight"]


@pytest.mark.parametrize("on", [Sim(2), Local(2)], ids=["sim", "local"])
def test_an_exception_in_the_users_code_is_a_task_error_that_names_the_innermost_line_of_it(
    on: Any, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=r"step 1: KeyError: 'weight' \(.*test_errors.py:\d+, in weigh\)") as caught:
        train_quietly(Forgetful(), Averaging(tau=5), on, tmp_path / "run", steps=10)
    assert "internal" not in str(caught.value) and not getattr(caught.value, "__notes__", [])


@pytest.fixture
def broken_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected fault in a protocol."""

    def handle(self: AveragingWorker, event: object, now: float) -> list[object]:
        raise LookupError("no such round")

    monkeypatch.setattr(AveragingWorker, "handle", handle)


def test_any_other_exception_is_an_internal_error_that_asks_for_a_report(broken_worker: None, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"internal error: LookupError: no such round\. .*please report") as caught:
        train_quietly(Blobs(), Averaging(tau=5), Sim(2), tmp_path / "run", steps=10)
    assert not isinstance(caught.value, UsageError)
    assert isinstance(caught.value.__cause__, LookupError), "its traceback is there once, as the cause"


class Sabotaged(Blobs):
    """Breaks Tether itself in the process that it is copied to, which only a test does."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

        def handle(self: AveragingWorker, event: object, now: float) -> list[object]:
            raise LookupError("no such round")

        AveragingWorker.handle = handle  # type: ignore[method-assign, assignment]


def test_any_other_exception_in_a_node_is_an_internal_error_with_the_nodes_traceback(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"internal error in worker-\d: LookupError: no such round") as caught:
        train_quietly(Sabotaged(), Averaging(tau=5), Local(2), tmp_path / "run", steps=10)
    assert "Traceback" not in str(caught.value)
    assert "in handle" in caught.value.__notes__[0] and caught.value.__notes__[0].count("Traceback") == 1


def test_the_command_line_shows_an_internal_error_with_one_traceback_and_its_request_last(
    broken_worker: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tether", "train", "digits", "-p", "averaging", "--on", "sim", "--steps", "4"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    err = capsys.readouterr().err
    assert ended.value.code == 1
    assert err.count("Traceback") == 1 and err.count("please report it") == 1
    assert err.splitlines()[-1].startswith("tether: internal error: LookupError: no such round")


USE_SPARK = "import sys, tether\nif 'without' in sys.argv: sys.modules['pyspark'] = None\nprint(tether.spark.FrameTask)"


@pytest.mark.parametrize("pyspark", ["with", "without"])
def test_tether_spark_needs_no_import_of_its_own_and_names_the_extra_to_install(pyspark: str) -> None:
    if pyspark == "with":
        pytest.importorskip("pyspark", reason="pyspark is not installed")
    done = subprocess.run([sys.executable, "-c", USE_SPARK, pyspark], capture_output=True, text=True, timeout=300)
    if pyspark == "with":
        assert done.stdout.strip() == "<class 'tether.spark.frame.FrameTask'>", done.stderr
    else:
        expected = (
            "UsageError: this needs pyspark, which is not installed: in Tether's folder, "
            "pip install -c constraints.txt '.[spark]'"
        )
        assert done.returncode == 1 and done.stderr.strip().endswith(expected)


@pytest.mark.parametrize(
    "goal",
    [{"epochs": "5"}, {"steps": [3]}, {"seconds": "1s"}, {"patience": "2"}, {"seed": "0"}, {"checkpoint_seconds": "1"}],
    ids=str,
)
def test_a_goal_of_a_wrong_type_is_refused_as_such(goal: dict[str, Any], tmp_path: Path) -> None:
    name, value = next(iter(goal.items()))
    with pytest.raises(UsageError, match=f"^{name} must be a number, not {re.escape(repr(value))}$"):
        tether.run(Blobs(), on=Sim(2), run_dir=tmp_path / "run", progress=make_progress(quiet=True), **goal)


@pytest.mark.parametrize("call", [tether.run, tether.start, tether.resume], ids=lambda call: call.__name__)
def test_an_unknown_argument_is_refused_with_the_one_that_was_probably_meant(call: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"unknown argument 'epoch'; known: .* Did you mean 'epochs'\?"):
        call(Blobs(), epoch=1)


def test_a_missing_or_surplus_argument_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"run\(\): missing a required argument: 'task'"):
        tether.run()  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"run\(\): too many positional arguments"):
        tether.run(Blobs(), Averaging(), Sim(2), 5)  # type: ignore[misc]


@pytest.mark.parametrize("on", [4, Local], ids=repr)
def test_a_runtime_that_is_none_is_refused_with_those_that_there_are(on: Any) -> None:
    expected = (
        "on must be tether.Local(...), tether.Sim(...), tether.Spark(...), tether.Ray(...) or tether.Cluster(...)"
    )
    names = "or one of the names local, sim, spark, ray, cluster"
    with pytest.raises(UsageError, match=f"^{re.escape(f'{expected}, not {on!r}')}; {names}$"):
        tether.run(Blobs(), on=on, steps=1)


def test_the_class_of_a_protocol_is_refused_with_what_to_write() -> None:
    for options in ({"protocol": Averaging}, {"warmup": Averaging}):
        with pytest.raises(UsageError, match=r"write tether\.Averaging\(\)$"):
            tether.run(Blobs(), on=Sim(2), steps=1, **options)


@pytest.mark.parametrize("runtime", [Local, Sim])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": "4"}, "workers must be a whole number, not '4'"),
        ({"workers": 2.5}, "workers must be a whole number, not 2.5"),
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
    ],
    ids=str,
)
def test_a_runtime_says_which_of_its_settings_is_wrong(
    runtime: Callable[..., Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        runtime(**settings)


def test_processes_need_a_number_of_restarts_and_time_to_respond() -> None:
    with pytest.raises(UsageError, match=r"^restarts must be at least 0, not -1$"):
        Local(restarts=-1)
    for seconds in (1.0, "60"):
        with pytest.raises(UsageError, match=f"^hung_seconds must be a number of at least 2, not {seconds!r}$"):
            Local(hung_seconds=seconds)  # type: ignore[arg-type]
