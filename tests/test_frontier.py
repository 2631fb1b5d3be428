"""What the benchmark of all protocols makes of their curves."""

from __future__ import annotations

import math

import pytest

from tether.analysis.sweep_plots import frontier_png
from tether.bench.frontier import PROTOCOLS, compare


def test_the_target_is_the_best_that_all_reach_by_the_mean_of_three_evaluations() -> None:
    fast = [(float(time), error) for time, error in enumerate([0.9, 0.6, 0.3, 0.3, 0.3, 0.1])]
    slow = [(10.0 * time, error) for time, error in enumerate([0.9, 0.9, 0.9, 0.6, 0.3, 0.9])]
    target, times, ends = compare({"fast": fast, "slow": slow})
    assert target == pytest.approx(0.6)
    assert times == {"fast": 2.0, "slow": 40.0}  # the first moment, though the last is worse again
    assert ends == pytest.approx({"fast": 0.7 / 3, "slow": 0.6})


def test_every_protocol_is_in_the_picture() -> None:
    times = {label: 10.0 + number for number, label in enumerate(PROTOCOLS)}
    rows = [{"task": "fashion", "link": "1gbit", "workers": 8, "what": "seconds to 0.12", **times}]
    assert frontier_png(rows, list(PROTOCOLS)).startswith(b"\x89PNG")
    assert all(math.isfinite(seconds) for seconds in times.values())
