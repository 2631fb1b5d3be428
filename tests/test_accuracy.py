"""The accuracy benchmark: what it compares, and that it compares like with like."""

from __future__ import annotations

from pathlib import Path

import pytest

from tether.bench.accuracy import accuracy

HOT = ["is it hot outside", "how warm is it", "will the heat last", "what is the temperature"]
WET = ["will it rain", "is there snow on the road", "do i need an umbrella", "when does the storm come"]


def test_workers_are_compared_with_the_fewest_over_the_same_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{text},{label}\n" for label, texts in (("hot", HOT), ("wet", WET)) for text in texts] * 12
    (tmp_path / "weather.csv").write_text("text,label\n" + "".join(rows))
    found = accuracy(tmp_path, seeds=2, texts=[("weather.csv", 2)], workers=(2, 1), on="sim")
    assert [(row["apply"], row["workers"]) for row in found["rows"]] == [
        (apply, workers) for apply in ("inline", "server") for workers in (1, 2)
    ]
    for one, two in (found["rows"][:2], found["rows"][2:]):
        assert one["points_more"] == one["least"] == one["most"] == 0
        assert two["points_more"] == pytest.approx(two["accuracy"] - one["accuracy"])
        assert two["least"] <= two["points_more"] <= two["most"]
        assert one["accuracy"] > 90 and two["accuracy"] > 60, "both learn, in as many epochs"
        assert found["ratios"][f"fewest points more, {one['apply']}"] == min(0, two["points_more"])
    assert len(capsys.readouterr().err.splitlines()) == 8
