"""The live display of a run: in a terminal, as plain lines in a file, or nothing at all.

A run calls `meter` after every step of every worker, so that call only keeps what it is given. A picture is made when
one is due: in a terminal by the display's own thread, four times a second; elsewhere by the first call after five
seconds. Nothing here is read back by the run: a display cannot change a result.

Two clocks meet. The `time` that is passed in is the run's own, virtual in the simulator: samples per second and shares
of time are in it. How long people have waited, and still have to, is in the time of the wall.
"""

from __future__ import annotations

import math
import sys
import time as wall
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from tether.trace import Meter

#: wall seconds between two progress lines where there is no terminal
LINE_SECONDS = 5.0
#: pictures a second in a terminal
REFRESH_HZ = 4.0
#: wall seconds between two looks at the meters; the rates are taken from these
LOOK_SECONDS = 0.2
#: workers shown without leaving some out, and how many of a larger number are shown
WORKERS_SHOWN_MAX, WORKERS_SHOWN_OF_MANY = 16, 8
#: wall seconds over which samples per second are taken: long enough to be calm, short enough to show a straggler
RATE_SECONDS = 10.0

Clock = Callable[[], float]


class Progress:
    """What a run reports to while it goes. This one, for quiet runs, shows nothing."""

    def begin(self, title: str, workers: Sequence[str], steps: int) -> None:
        """The run starts; each of `workers` is to take `steps` steps."""

    def meter(self, meter: Meter, time: float) -> None:
        """The meter of a worker at the run's own `time`. Cheap: called after every step."""

    def evaluation(self, metrics: dict[str, float], time: float, step: int) -> None:
        """The joint model was evaluated."""

    def note(self, text: str) -> None:
        """Something happened that people should know: a worker died, another joined."""

    def end(self, text: str) -> None:
        """The run ended; `text` says how."""

    def close(self) -> None:
        """Gives the terminal back; also after an error, when nobody calls `end`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_progress(console: Console | None = None, quiet: bool = False, clock: Clock = wall.monotonic) -> Progress:
    """The display that fits where the output goes; standard error unless a console is given."""
    if quiet:
        return Progress()
    if console is None:
        # rich takes FORCE_COLOR for a terminal, but an animation in a log file helps nobody.
        console = Console(stderr=True, force_interactive=None if sys.stderr.isatty() else False)
    return LiveProgress(console, clock) if console.is_interactive else LineProgress(console, clock)


class _Watch:
    """What is known of a run, and the figures drawn from it."""

    def __init__(self, title: str, workers: Sequence[str], steps: int, now: float) -> None:
        self.title = title
        self.steps = steps
        self.begun = now
        self.time = 0.0
        self.meters = {name: Meter(name) for name in workers}
        self.members = frozenset(workers)
        self.evaluated: tuple[dict[str, float], float, int] | None = None
        # (wall time, run's time, samples of every worker), oldest first
        self._past: deque[tuple[float, float, dict[str, int]]] = deque()
        # (wall time, fraction) when the first step was seen: starting processes is no measure of training
        self._first: tuple[float, float] | None = None

    def workers(self) -> list[Meter]:
        """The meters of all workers: those named at the beginning, and whoever else has taken a step since."""
        meters = list(self.meters.items())  # one operation: another thread may be adding a worker
        return [meter for name, meter in meters if name in self.members or meter.steps > 0]

    def fraction(self) -> float:
        workers = self.workers()
        if self.steps <= 0 or not workers:
            return 0.0
        return min(1.0, sum(meter.steps for meter in workers) / len(workers) / self.steps)

    def look(self, now: float) -> None:
        """Takes note of the samples at this moment, for the rates; called when a picture is made."""
        fraction = self.fraction()
        if fraction <= 0:
            return
        if self._first is None:
            self._first = (now, fraction)
        past = self._past
        if past and now - past[-1][0] < LOOK_SECONDS:
            return
        past.append((now, self.time, {meter.node: meter.samples for meter in self.workers()}))
        while len(past) > 2 and now - past[1][0] >= RATE_SECONDS:
            past.popleft()

    def rate(self, node: str | None = None) -> float:
        """Recent samples per second of the run's own time, of one worker or of all."""
        if not self._past:
            return math.nan
        _, time, samples = self._past[0]
        if self.time <= time:  # the first picture: the only rate there is, is that since the beginning
            time, samples = 0.0, {}
        workers = [meter for meter in self.workers() if node is None or meter.node == node]
        taken = sum(max(0, meter.samples - samples.get(meter.node, 0)) for meter in workers)
        return taken / (self.time - time) if self.time > time else math.nan

    def left(self, now: float) -> float:
        """Wall seconds until the end, if the run goes on as since its first step."""
        fraction = self.fraction()
        if self._first is None or fraction <= self._first[1]:
            return math.nan
        return (1 - fraction) * (now - self._first[0]) / (fraction - self._first[1])

    def loss(self) -> float:
        known = [meter.loss for meter in self.workers() if math.isfinite(meter.loss)]
        return sum(known) / len(known) if known else math.nan


class LineProgress(Progress):
    """For logs and pipes: a line at the beginning, for every evaluation, now and then between them, and at the end."""

    def __init__(self, console: Console, clock: Clock = wall.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._watch: _Watch | None = None
        self._due = self._look_due = math.inf

    def begin(self, title: str, workers: Sequence[str], steps: int) -> None:
        now = self._clock()
        self._watch = _Watch(title, workers, steps, now)
        self._due, self._look_due = now + LINE_SECONDS, now
        self._print(f"{title}: {_count(len(workers), 'worker')}, {_count(steps, 'step')} each")

    def meter(self, meter: Meter, time: float) -> None:
        watch = self._watch
        if watch is None:
            return
        watch.meters[meter.node] = meter
        watch.time = time
        now = self._clock()
        if now < self._look_due:
            return
        self._look_due = now + LOOK_SECONDS
        watch.look(now)
        if now >= self._due:
            self._due = now + LINE_SECONDS
            self._print(
                f"{watch.fraction():4.0%}  loss {_figure(watch.loss())}  {_rate(watch.rate())} samples/s  "
                f"{_duration(now - watch.begun)} elapsed  {_duration(watch.left(now))} left"
            )

    def evaluation(self, metrics: dict[str, float], time: float, step: int) -> None:
        self._print(f"step {step:,}, {_seconds(time)}: {_metrics(metrics)}")

    def note(self, text: str) -> None:
        self._print(text)

    def end(self, text: str) -> None:
        self._due = self._look_due = math.inf
        self._print(text)

    def _print(self, text: str) -> None:
        # Without markup, and unwrapped: a line of a log is a line. One that cannot be written ends no run.
        with suppress(OSError):
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


class LiveProgress(Progress):
    """For terminals: a bar, a line for each worker and the joint model's metrics, redrawn in place."""

    def __init__(self, console: Console, clock: Clock = wall.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._watch: _Watch | None = None
        self._live: Live | None = None

    def begin(self, title: str, workers: Sequence[str], steps: int) -> None:
        self.close()
        self._watch = _Watch(title, workers, steps, self._clock())
        # What goes to a file by way of standard output must not be drawn into the terminal.
        redirect = sys.stdout is not None and sys.stdout.isatty()
        self._live = Live(self, console=self._console, refresh_per_second=REFRESH_HZ, redirect_stdout=redirect)
        with suppress(OSError):  # as on a terminal that is gone
            self._live.start(refresh=True)

    def meter(self, meter: Meter, time: float) -> None:
        watch = self._watch
        if watch is not None:
            watch.meters[meter.node] = meter
            watch.time = time

    def evaluation(self, metrics: dict[str, float], time: float, step: int) -> None:
        if self._watch is not None:
            self._watch.evaluated = (metrics, time, step)

    def note(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(Text(text))

    def end(self, text: str) -> None:
        self.close()
        self.note(text)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    def __rich__(self) -> RenderableType:
        watch, now = self._watch, self._clock()
        if watch is None:
            return Text()
        watch.look(now)
        # One line each: what is wrapped would make the display jump.
        title = Text(watch.title, style="bold", no_wrap=True, overflow="ellipsis")
        parts: list[RenderableType] = [title, self._overall(watch, now), Text(), *self._workers(watch)]
        if watch.evaluated is not None:
            metrics, time, step = watch.evaluated
            when = (f"  at step {step:,}, {_seconds(time)}", "dim")
            line = Text.assemble(("joint model  ", "bold"), _metrics(metrics), when, no_wrap=True)
            # The terminal writes "^C" behind the last line: without room it would wrap and spoil the last picture.
            line.truncate(max(1, self._console.size.width - 3), overflow="ellipsis")
            parts += [Text(), line]
        return Group(*parts)

    def _overall(self, watch: _Watch, now: float) -> RenderableType:
        fraction = watch.fraction()
        line = Table.grid(*(Column(no_wrap=True) for _ in range(5)), padding=(0, 2))
        width = min(40, max(8, self._console.size.width - 54))  # 54: the words beside it
        line.add_row(
            # A bar that pulses until the first step: processes that start take seconds.
            ProgressBar(total=1.0, completed=fraction, width=width, pulse=fraction == 0, animation_time=now),
            Text(f"{fraction:.0%}", style="progress.percentage"),
            Text(f"{_rate(watch.rate())} samples/s"),
            Text(f"{_duration(now - watch.begun)} elapsed", style="progress.elapsed"),
            Text(f"{_duration(watch.left(now))} left", style="progress.remaining"),
        )
        return line

    def _workers(self, watch: _Watch) -> list[RenderableType]:
        workers = watch.workers()
        shown = workers if len(workers) <= WORKERS_SHOWN_MAX else workers[:WORKERS_SHOWN_OF_MANY]
        # What else is drawn takes nine lines. A low terminal shows fewer workers: what scrolls cannot be redrawn.
        shown = shown[: max(1, self._console.size.height - 9)]
        lines = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
        lines.add_column("worker", no_wrap=True)
        widths = {"steps": len(f"{watch.steps:,}"), "loss": 7, "samples/s": 9, "computing": 9}
        for heading, width in widths.items():
            lines.add_column(heading, justify="right", no_wrap=True, min_width=width)  # or the columns would jump
        for meter in shown:
            lines.add_row(
                Text(meter.node),
                f"{meter.steps:,}",
                _figure(meter.loss),
                _rate(watch.rate(meter.node) if meter.steps else math.nan),
                f"{meter.utilization(watch.time):.0%}" if meter.steps else "starting",
            )
        more = len(workers) - len(shown)
        return [lines, Text(f"... and {more:,} more", style="dim")] if more else [lines]


def _figure(value: float) -> str:
    """A loss or a metric: short and steady in width, a dash for none."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 1e6:
        return f"{value:.2e}"
    if abs(value) >= 100:
        return f"{value:,.1f}"
    return f"{value:.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:.2e}"


def _rate(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    if value >= 100_000:
        return f"{value / 1e6:.1f}M" if value >= 1e6 else f"{value / 1e3:.0f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _seconds(time: float) -> str:
    return f"{time:.1f} s" if time < 1000 else f"{time:,.0f} s"


def _metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {_figure(value)}" for name, value in metrics.items()) or "no metrics"


def _duration(seconds: float) -> str:
    """1:05 is a minute and five seconds; 2:01:05 has hours."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
