"""What the benchmark of exchanges on Spark makes of what it sees."""

from __future__ import annotations

import pytest

from tether.bench.spark import LinkWatch, Periods, Reading


def test_a_link_is_in_use_both_ways_only_while_both_directions_carry_much() -> None:
    watch = LinkWatch()
    watch._readings = [
        Reading(-1.0, 0, 0),
        Reading(0.0, 10_000_000, 0),  # before it began
        Reading(1.0, 20_000_000, 100_000),  # acknowledgements are no use of a direction
        Reading(2.0, 30_000_000, 10_100_000),
        Reading(3.0, 30_000_000, 20_000_000),
        Reading(4.0, 30_000_000, 20_000_000),
        Reading(5.0, 90_000_000, 90_000_000),  # after it had ended
    ]
    traffic = watch.between(0.0, 4.0, period=2.0)
    assert (traffic.in_use, traffic.both) == (0.75, 0.25)
    assert (traffic.received_MB, traffic.sent_MB) == (10.0, 10.0)


def test_a_run_is_measured_when_every_shard_has_been_renewed_often_enough() -> None:
    periods = Periods()
    for number in range(20):
        if periods.stop_requested():
            break
        for shard in range(3):
            periods.record("hub", {"shard": shard}, 2.0 * number + shard)
    assert number == 7 and periods.seconds() == pytest.approx(2.0) and 0 < periods.began <= periods.ended
    assert periods.watched_seconds() == pytest.approx((periods.ended - periods.began) / 4)
