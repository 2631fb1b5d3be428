"""Who is blamed: what comes out of the user's code is the task's error, anything else unexpected is Tether's own."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import tether
from tether import Averaging, InternalError, Local, Sim, TaskError, UsageError, cli
from tether.progress import make_progress
from tether.protocols.averaging import AveragingWorker
from tether.testing import Blobs, train_quietly


class Forgetful(Blobs):
    """Fails in a method that its loss calls."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.weigh(super().loss(model, batch))

    def weigh(self, loss: Tensor) -> Tensor:
        return loss * {}["weight"]


@pytest.mark.parametrize("on", [Sim(2), Local(2)], ids=["sim", "local"])
def test_an_exception_in_the_users_code_is_the_tasks_and_names_the_innermost_of_its_lines(
    on: Any, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=r"step 1: KeyError: 'weight' \(.*test_errors.py:\d+, in weigh\)") as told:
        train_quietly(Forgetful(), Averaging(tau=5), on, tmp_path / "run", steps=10)
    assert "internal" not in str(told.value) and not getattr(told.value, "__notes__", [])


@pytest.fixture
def broken_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in a protocol, such as nobody expects."""

    def handle(self: AveragingWorker, event: object, now: float) -> list[object]:
        raise LookupError("no such round")

    monkeypatch.setattr(AveragingWorker, "handle", handle)


def test_an_exception_of_our_own_is_an_internal_error_that_asks_for_a_report(
    broken_worker: None, tmp_path: Path
) -> None:
    with pytest.raises(InternalError, match=r"internal error: LookupError: no such round\. .*please report") as told:
        train_quietly(Blobs(), Averaging(tau=5), Sim(2), tmp_path / "run", steps=10)
    assert not isinstance(told.value, UsageError)
    assert isinstance(told.value.__cause__, LookupError), "its traceback is there once, as the cause"


class Sabotaged(Blobs):
    """Breaks Tether itself in the process that it is copied to; only a test would."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

        def handle(self: AveragingWorker, event: object, now: float) -> list[object]:
            raise LookupError("no such round")

        AveragingWorker.handle = handle  # type: ignore[method-assign, assignment]


def test_an_exception_of_our_own_in_a_node_is_an_internal_error_with_the_nodes_traceback(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"internal error in worker-\d: LookupError: no such round") as told:
        train_quietly(Sabotaged(), Averaging(tau=5), Local(2), tmp_path / "run", steps=10)
    assert "Traceback" not in str(told.value)
    assert "in handle" in told.value.__notes__[0] and told.value.__notes__[0].count("Traceback") == 1


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


@pytest.mark.parametrize("goal", [{"epochs": "5"}, {"steps": [3]}, {"seconds": "1s"}], ids=str)
def test_a_goal_of_a_wrong_type_is_refused_as_such(goal: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(goal))} must be more than 0, not "):
        tether.run(Blobs(), on=Sim(2), run_dir=tmp_path / "run", progress=make_progress(quiet=True), **goal)
