"""What the benchmarks between hosts make of what they have seen."""

from __future__ import annotations

import math

import pytest

from tether.bench import fidelity, network
from tether.bench.fidelity import Cycles
from tether.bench.network import Found
from tether.bench.remote import Interfaces, Reading, call_on
from tether.bench.transfer import transfer
from tether.errors import RunError
from tether.protocols import Averaging
from tether.testing.hosts import Host


def test_the_rates_of_a_link_are_those_between_the_first_and_the_last_reading_of_a_time() -> None:
    interfaces = Interfaces([])
    interfaces.readings = [Reading(t, ((sent, 2 * sent), (0, sent))) for t, sent in ((0, 0), (1, 10), (3, 50), (4, 90))]
    assert interfaces.rates(0.5, 3.5) == [(20.0, 40.0), (0.0, 20.0)]
    with pytest.raises(RunError, match="measure for longer"):
        interfaces.rates(0.5, 2.0)


def test_a_cycle_is_the_mean_time_between_two_ends_of_its_kind_after_the_warm_up() -> None:
    cycles = Cycles()
    for second in range(11):
        cycles.record("hub", {"shard": 0}, float(second))
        cycles.record("hub", {"shard": 1}, second + 0.5)
        cycles.record("hub", {"other": 1}, second + 0.1)
    assert cycles.seconds(10.0) == 1.0
    assert math.isnan(Cycles().seconds(10.0))


def test_a_simulated_round_of_averaging_takes_its_steps_and_its_exchange() -> None:
    found = fidelity._simulate(Averaging(tau=5), 2, "100mbit", 5.0, 0.1, 60.0)
    alone = 5 * 0.1
    assert alone + 2 * 5 / 12.5 < found < alone + 4 * 5 / 12.5


def test_the_best_protocol_is_compared_with_each_other_system_and_with_one_worker() -> None:
    curve = [(1000, 0.3), (2000, 0.2)]
    found = {"mpca": Found(10.0, 100.0, curve), "tide": Found(5.0, 200.0, curve), "ddp": Found(50.0, 9.0, curve)}
    rows = [{"system": name, "error": 0.2, "error_of_one": 0.15} for name in found]
    ratios = network._ratios(found, ["mpca", "tide"], ["ddp"], rows)
    assert ratios == {
        "ddp over tide, seconds": 10.0,
        "error of tide less that of one at equal samples": pytest.approx(0.05),
    }
    assert network._interpolate([(1000, 0.3), (2000, 0.2), (3000, 0.1), (9000, 0.0)], 2100) == pytest.approx(0.2)


def test_a_function_runs_in_a_process_of_its_own_and_its_failure_is_told() -> None:
    assert call_on(Host(), divmod, 17, 5) == (3, 2)
    with pytest.raises(RunError, match="ZeroDivisionError"):
        call_on(Host(), divmod, 1, 0)


def test_messages_over_loopback_are_measured_beside_a_raw_socket() -> None:
    found = transfer(megabytes=1.0, messages=4, rounds=1)
    assert [row["what"] for row in found["rows"]] == ["raw socket", "without encryption", "encrypted"]
    assert all(row["GB_per_second"] > 0 and row["cpu_seconds_per_GB"] > 0 for row in found["rows"])
