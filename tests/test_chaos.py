"""Faults in real processes: the schedule, what counts as a failure, and one run that survives its fault."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tether.errors import UsageError
from tether.tasks.digits import Digits
from tether.testing.chaos import (
    EPOCHS,
    LOCAL,
    PROTOCOLS,
    SPARK,
    CommandResult,
    Fault,
    failure_of,
    inject,
    run_without_faults,
    schedule,
)
from tether.testing.conformance import descendants


def test_a_schedule_has_every_fault_equally_often_and_follows_from_its_seed() -> None:
    faults = schedule(3 * len(LOCAL), 1, "local", None)
    assert faults == schedule(3 * len(LOCAL), 1, "local", None) != schedule(3 * len(LOCAL), 2, "local", None)
    injected = [(fault.kind, fault.target) for fault in faults]
    assert all(injected.count(pair) == 3 for pair in LOCAL)
    assert {fault.protocol for fault in faults} == set(PROTOCOLS)
    assert not [fault for fault in faults if fault.protocol == "grid" and fault.target == "hub"]
    assert {(fault.kind, fault.target) for fault in schedule(8, 0, "spark", "mpca")} == set(SPARK)
    with pytest.raises(UsageError, match="unknown protocol for chaos 'thing'"):
        schedule(1, 0, "local", "thing")


SAMPLES = math.ceil(EPOCHS * len(Digits().train_data()) / Digits().batch_size) * Digits().batch_size


def ended(samples: int = SAMPLES, error: float = 0.02, status: int | None = 0) -> CommandResult:
    return CommandResult(status, 5.0, {"samples": samples, "metrics": {"error": error}}, "tether: no worker is left")


def test_every_loss_of_a_run_is_a_failure() -> None:
    assert failure_of(ended(), ended()) == ""
    assert "samples count" in failure_of(ended(samples=SAMPLES - 1), ended())
    assert failure_of(ended(error=0.06), ended()) == "an error of 0.06 instead of 0.02"
    assert failure_of(ended(status=1), ended()) == "tether: no worker is left"
    assert "hung" in failure_of(ended(), ended(), hung=True)
    assert failure_of(ended(), ended(), left=2) == "2 processes are left"
    assert "damaged" in failure_of(ended(), ended(), unnoticed=True)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_a_killed_driver_is_resumed_and_leaves_nothing_behind() -> None:
    result = inject(Fault("kill", "driver", "averaging", 0.2), "local", run_without_faults("averaging", "local"))
    assert (result.outcome, result.failure) == ("resumed", "")
    assert result.processes_left == 0
    assert not descendants(os.getpid())
