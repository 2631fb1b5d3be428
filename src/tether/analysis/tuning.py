"""The result of a search for a protocol's alpha: the best value, and the corridor of good values around it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tether.analysis.runs import Row, format_number
from tether.protocols import Options


@dataclass(frozen=True)
class Point:
    """One value of alpha, and the result of the run with it."""

    alpha: float
    #: the metric at the end of the run; None if the run diverged
    value: float | None
    seconds: float | None
    steps: int
    failed: str | None
    #: seconds and metric at each evaluation
    curve: list[list[float]]


@dataclass(frozen=True)
class Tuning:
    """The result of a search; `points` are in the order of alpha."""

    task: str
    #: its alpha is the best one, if any run converged
    protocol: Options
    metric: str
    #: whether smaller values of the metric are better
    falling: bool
    tolerance: float
    virtual: bool
    workers: int
    samples: int
    samples_of_all: int
    points: list[Point]

    @property
    def best(self) -> Point | None:
        """The best point; the middle one if several are equal."""
        values = [point.value for point in self.points if point.value is not None]
        if not values:
            return None
        lowest = min(values) if self.falling else max(values)
        equal = [point for point in self.points if point.value == lowest]
        return equal[len(equal) // 2]

    @property
    def limit(self) -> float:
        """The worst value of the metric that the corridor admits."""
        lowest = self.best.value if self.best and self.best.value is not None else math.nan
        return lowest + (1 if self.falling else -1) * self.tolerance * abs(lowest)

    @property
    def limit_text(self) -> str:
        return f"{100 * self.tolerance:g}% worse than the best"

    @property
    def corridor(self) -> list[Point]:
        """The best point and its neighbours on both sides, up to the first that exceeds the tolerance."""
        if self.best is None:
            return []
        at = self.points.index(self.best)
        first, last = at, at
        while first > 0 and self._within(self.points[first - 1]):
            first -= 1
        while last + 1 < len(self.points) and self._within(self.points[last + 1]):
            last += 1
        return self.points[first : last + 1]

    def _within(self, point: Point) -> bool:
        if point.value is None:
            return False
        return point.value <= self.limit if self.falling else point.value >= self.limit

    @property
    def percent(self) -> bool:
        return self.metric == "error"

    @property
    def recommendation(self) -> str:
        """The advice to the user, in words."""
        best, corridor = self.best, self.corridor
        if best is None or best.value is None:
            return "No alpha converged: lower the learning rate."
        value = f"{best.value:.2%}" if self.percent else f"{best.value:.4g}"
        advice = [f"Take alpha={best.alpha:g}: {self.metric} {value}."]
        if len(corridor) > 1:
            advice.append(
                f"Corridor: {corridor[0].alpha:g} to {corridor[-1].alpha:g}, at most {self.limit_text} "
                f"({len(corridor)} of {len(self.points)} values)."
            )
        else:
            advice.append(f"No neighbour is in the corridor: all are more than {self.limit_text}.")
        for end, word in ((self.points[0], "smallest"), (self.points[-1], "largest")):
            if best is end:
                advice.append(f"The best is the {word} value that was tried: a {word[:-3]}er one may be better.")
            elif end in corridor:
                advice.append(f"The corridor reaches the {word} value that was tried: it may be wider.")
        if best is self.points[-1]:
            advice.append("In a short run the joint model hardly moves with a small alpha: compare with more epochs.")
        advice.append(
            f"Each value is one run with one seed on {self.samples:,} of {self.samples_of_all:,} samples, "
            f"{best.steps:,} steps per worker: small differences may be chance."
        )
        return "\n".join(advice)

    @property
    def figures(self) -> Row:
        """The whole result, for JSON."""
        best, corridor = self.best, self.corridor
        return {
            "task": self.task,
            "protocol": self.protocol.name,
            "metric": self.metric,
            "workers": self.workers,
            "samples": self.samples,
            "samples_of_all": self.samples_of_all,
            "tolerance": self.tolerance,
            "alpha": best.alpha if best else None,
            "value": best.value if best else None,
            "corridor": [corridor[0].alpha, corridor[-1].alpha] if corridor else None,
            "at_edge": best in (self.points[0], self.points[-1]),
            "points": [asdict(point) for point in self.points],
            "recommendation": self.recommendation,
        }

    def table(self) -> Table:
        """The points, for a terminal."""
        title = f"{self.task}, {self.protocol.name}, {self.workers} workers{', simulated' if self.virtual else ''}"
        result = Table(box=SIMPLE_HEAD, title=title, title_style="bold", title_justify="left")
        for heading in ("alpha", self.metric, "worse by", "virtual s" if self.virtual else "seconds", ""):
            result.add_column(heading, justify="right" if heading else "left")
        best, corridor = self.best, self.corridor
        for point in self.points:
            value = "diverged" if point.value is None else format_number(point.value)
            worse = "-"
            if point.value is not None and best and best.value:
                worse = f"{abs(point.value / best.value - 1):.1%}"
            mark = "best" if point is best else "corridor" if point in corridor else ""
            style = "bold" if point is best else None if point in corridor else "dim"
            result.add_row(f"{point.alpha:g}", value, worse, format_number(point.seconds), mark, style=style)
        return result
