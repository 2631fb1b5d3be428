"""Faults of real processes: the schedule, what counts as lost, and one run that is struck and survives."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tether.chaos import EPOCHS, LOCAL, PROTOCOLS, SPARK, Blow, Ended, fault_of, schedule, strike, undisturbed
from tether.errors import UsageError
from tether.tasks.digits import Digits
from tether.testing import descendants


def test_a_schedule_strikes_everything_as_often_and_follows_from_its_seed() -> None:
    blows = schedule(3 * len(LOCAL), 1, "local", None)
    assert blows == schedule(3 * len(LOCAL), 1, "local", None) != schedule(3 * len(LOCAL), 2, "local", None)
    struck = [(blow.kind, blow.target) for blow in blows]
    assert all(struck.count(pair) == 3 for pair in LOCAL)
    assert {blow.protocol for blow in blows} == set(PROTOCOLS)
    assert not [blow for blow in blows if blow.protocol == "grid" and blow.target == "hub"]
    assert {(blow.kind, blow.target) for blow in schedule(8, 0, "spark", "mpca")} == set(SPARK)
    with pytest.raises(UsageError, match="unknown protocol for chaos 'thing'"):
        schedule(1, 0, "local", "thing")


SAMPLES = math.ceil(EPOCHS * len(Digits().train_data()) / Digits().batch_size) * Digits().batch_size


def ended(samples: int = SAMPLES, error: float = 0.02, status: int | None = 0) -> Ended:
    return Ended(status, 5.0, {"samples": samples, "metrics": {"error": error}}, "tether: no worker is left")


def test_whatever_a_run_has_lost_is_told() -> None:
    assert fault_of(ended(), ended()) == ""
    assert "samples count" in fault_of(ended(samples=SAMPLES - 1), ended())
    assert fault_of(ended(error=0.06), ended()) == "an error of 0.06 instead of 0.02"
    assert fault_of(ended(status=1), ended()) == "tether: no worker is left"
    assert "hung" in fault_of(ended(), ended(), hung=True)
    assert fault_of(ended(), ended(), left=2) == "2 processes are left"
    assert "damaged" in fault_of(ended(), ended(), unnoticed=True)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_a_killed_driver_is_resumed_and_leaves_nothing_behind() -> None:
    survived = strike(Blow("kill", "driver", "averaging", 0.2), "local", undisturbed("averaging", "local"))
    assert (survived.outcome, survived.fault) == ("resumed", "")
    assert survived.processes_left == 0
    assert not descendants(os.getpid())
