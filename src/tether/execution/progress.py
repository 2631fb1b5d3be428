"""The live display of a run: in a terminal, in a notebook, as plain lines in a file, or nothing at all.

A run calls `meter` after every step of every worker, so that call only stores its arguments. Pictures are drawn when
they are due: in a terminal and in a notebook by the display's own thread, a few times a second; elsewhere by the first
call after five seconds. The run reads nothing back: a display cannot change a result.

There are two clocks. The `time` that is passed in is the run's own, virtual in the simulator: samples per second and
shares of time refer to it. How long people have waited, and still have to, is wall time.
"""

from __future__ import annotations

import io
import math
import sys
import threading
import time as wall
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from tether.core.trace import Meter

#: wall seconds between two progress lines where there is no terminal
LINE_SECONDS = 5.0
#: pictures a second in a terminal, and in a notebook, where each one is sent to a browser
REFRESH_HZ, NOTEBOOK_HZ = 4.0, 2.0
#: wall seconds between two samples of the meters, from which rates are computed
SAMPLE_SECONDS = 0.2
#: up to this many workers are all shown; of more than that, only the first few
WORKERS_SHOWN_MAX, WORKERS_SHOWN_OF_MANY = 16, 8
#: how many of the last evaluations are shown
EVALUATIONS_SHOWN = 5
#: how many of the last notes a notebook shows, and the size of its picture in characters
NOTES_SHOWN, NOTEBOOK_COLUMNS, NOTEBOOK_LINES = 20, 100, 60
#: wall seconds over which samples per second are averaged: long enough to be calm, short enough to show a straggler
RATE_SECONDS = 10.0

Clock = Callable[[], float]


class Progress:
    """What a run reports to. This base class, for quiet runs, shows nothing."""

    def begin(self, title: str, workers: Sequence[str], steps: int) -> None:
        """A run, or a part of one, starts: each of `workers` makes `steps` steps."""

    def resumed(self, first_step: int) -> None:
        """The part that has just begun continues a run after this step."""

    def starting(self, processes: int) -> None:
        """Processes are being started; training has not begun. A simulated run does not call this."""

    def training(self, startup_seconds: float, time: float) -> None:
        """Training began `time` seconds ago, after this long a start-up. A simulated run does not call this."""

    def meter(self, meter: Meter, time: float) -> None:
        """The meter of a worker at the run's own `time`. Must be cheap: it is called after every step."""

    def evaluation(self, metrics: dict[str, float], time: float, step: int) -> None:
        """The joint model was evaluated."""

    def note(self, text: str) -> None:
        """Something happened that people should know: a worker died, another joined."""

    def end(self, text: str) -> None:
        """The run ended; `text` says how."""

    def close(self) -> None:
        """Release the terminal; also called after an error, when `end` is not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_progress(console: Console | None = None, quiet: bool = False, clock: Clock = wall.monotonic) -> Progress:
    """The display that suits the place where output goes: a notebook, or standard error unless a console is given."""
    if quiet:
        return Progress()
    if console is None:
        # rich takes FORCE_COLOR for a terminal, but an animation in a log file helps nobody.
        console = Console(stderr=True, force_interactive=None if sys.stderr.isatty() else False)
    if console.is_jupyter:
        return NotebookProgress(clock)
    return LiveProgress(console, clock) if console.is_interactive else LineProgress(console, clock)


class RunState:
    """What a display knows about a run, and the figures computed from it."""

    def __init__(self, title: str, workers: Sequence[str], steps: int, now: float) -> None:
        self.title = title
        self.steps = steps
        self.first_step = 0
        #: what the run is doing, if that is known
        self.phase = ""
        #: the wall time from which to count what has elapsed: of start-up, then of training
        self.phase_began = now
        self.time = 0.0
        self.meters = {name: Meter(name) for name in workers}
        self.members = frozenset(workers)
        # (wall time, run's time, samples of every worker), oldest first
        self._past: deque[tuple[float, float, dict[str, int]]] = deque()
        # (wall time, fraction) at the first step that was seen: the time left must not depend on start-up
        self._first: tuple[float, float] | None = None

    def begin_training(self, startup_seconds: float, time: float, now: float) -> None:
        self.phase = f"training; start-up took {_seconds(startup_seconds)}"
        self.phase_began = now - time

    def workers(self) -> list[Meter]:
        """The meters of all workers: those named at the beginning, and any other node that has made a step since."""
        meters = list(self.meters.items())  # one operation: another thread may be adding a worker
        return [meter for name, meter in meters if name in self.members or meter.steps > 0]

    def fraction(self) -> float:
        workers = self.workers()
        if self.steps <= 0 or not workers:
            return 0.0
        return min(1.0, sum(meter.steps for meter in workers) / len(workers) / self.steps)

    @property
    def step(self) -> int:
        """How many steps the run has made, as a mean over its workers."""
        return self.first_step + round(self.fraction() * self.steps)

    def sample(self, now: float) -> None:
        """Remember the samples at this moment, for the rates; called when a picture is drawn."""
        fraction = self.fraction()
        if fraction <= 0:
            return
        if self._first is None:
            self._first = (now, fraction)
        past = self._past
        if past and now - past[-1][0] < SAMPLE_SECONDS:
            return
        past.append((now, self.time, {meter.node: meter.samples for meter in self.workers()}))
        while len(past) > 2 and now - past[1][0] >= RATE_SECONDS:
            past.popleft()

    def rate(self, node: str | None = None) -> float:
        """Recent samples per second of the run's own time, of one worker or of all."""
        if not self._past:
            return math.nan
        _, time, samples = self._past[0]
        if self.time <= time:  # in the first picture, the only rate there is counts from the beginning
            time, samples = 0.0, {}
        workers = [meter for meter in self.workers() if node is None or meter.node == node]
        new = sum(max(0, meter.samples - samples.get(meter.node, 0)) for meter in workers)
        return new / (self.time - time) if self.time > time else math.nan

    def left(self, now: float) -> float:
        """Wall seconds until the end, if the run keeps the pace it has had since its first step."""
        fraction = self.fraction()
        if self._first is None or fraction <= self._first[1]:
            return math.nan
        return (1 - fraction) * (now - self._first[0]) / (fraction - self._first[1])

    def loss(self) -> float:
        known = [meter.loss for meter in self.workers() if math.isfinite(meter.loss)]
        return sum(known) / len(known) if known else math.nan


class FollowedProgress(Progress):
    """Passes everything on to another display, and can say in a few words how far the run is."""

    def __init__(self, display: Progress | None = None) -> None:
        self._display = display or make_progress()
        self._state = RunState("", (), 0, 0.0)
        self._doing = "starting"
        self._metrics: dict[str, float] = {}

    def __str__(self) -> str:
        state = self._state
        where = [f"step {state.step:,} of {state.first_step + state.steps:,}"] if state.steps else []
        return ", ".join([self._doing, *where, *(f"{name}={value:.4g}" for name, value in self._metrics.items())])

    def begin(self, title: str, workers: Sequence[str], steps: int) -> None:
        self._state = RunState(title, workers, steps, 0.0)
        self._display.begin(title, workers, steps)

    def resumed(self, first_step: int) -> None:
        self._state.first_step = first_step
        self._display.resumed(first_step)

    def starting(self, processes: int) -> None:
        self._doing = "starting"
        self._display.starting(processes)

    def training(self, startup_seconds: float, time: float) -> None:
        self._display.training(startup_seconds, time)

    def meter(self, meter: Meter, time: float) -> None:
        self._doing = "training"
        self._state.meters[meter.node] = meter
        self._display.meter(meter, time)

    def evaluation(self, metrics: dict[str, float], time: float, step: int) -> None:
        self._metrics = metrics
        self._display.evaluation(metrics, time, step)

    def note(self, text: str) -> None:
        self._display.note(text)

    def end(self, text: str) -> None:
        self._display.end(text)

    def close(self) -> None:
        self._display.close()


class LineProgress(Progress):
    """For logs and pipes: a line at the beginning, for every evaluation, now and then between them, and at the end."""

    def __init__(self, console: Console, clock: Clock = wall.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._state: RunState | None = None
        self._line_due = self._sample_due = math.inf

    def begin(self, title: str, workers: Sequence[str], steps: int) -> None:
        now = self._clock()
        self._state = RunState(title, workers, steps, now)
        self._line_due, self._sample_due = now + LINE_SECONDS, now
        self._print(f"{title}: {_count(len(workers), 'worker')}, {_count(steps, 'step')} each")

    def starting(self, processes: int) -> None:
        self._print(_starting(processes))

    def training(self, startup_seconds: float, time: float) -> None:
        if self._state is not None:
            self._state.begin_training(startup_seconds, time, self._clock())
            self._print(self._state.phase)

    def meter(self, meter: Meter, time: float) -> None:
        state = self._state
        if state is None:
            return
        state.meters[meter.node] = meter
        state.time = time
        now = self._clock()
        if now < self._sample_due:
            return
        self._sample_due = now + SAMPLE_SECONDS
        state.sample(now)
        if now >= self._line_due:
            self._line_due = now + LINE_SECONDS
            self._print(
                f"{state.fraction():4.0%}  loss {_figure(state.loss())}  {_rate(state.rate())} samples/s  "
                f"{_duration(now - state.phase_began)} elapsed  {_duration(state.left(now))} left"
            )

    def evaluation(self, metrics: dict[str, float], time: float, step: int) -> None:
        self._print(f"step {step:,}, {_seconds(time)}: {_metrics(metrics)}")

    def note(self, text: str) -> None:
        self._print(text)

    def end(self, text: str) -> None:
        self._line_due = self._sample_due = math.inf
        self._print(text)

    def _print(self, text: str) -> None:
        # Without markup, and unwrapped: a line of a log is one line. A line that cannot be written ends no run.
        with suppress(OSError):
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


class _Picture(Progress):
    """What terminals and notebooks draw: a bar, a line for each worker, and the last metrics of the joint model."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._state: RunState | None = None
        self._evaluations: deque[tuple[dict[str, float], float, int]] = deque(maxlen=EVALUATIONS_SHOWN)

    def begin(self, title: str, workers: Sequence[str], steps: int) -> None:
        self._state = RunState(title, workers, steps, self._clock())

    def starting(self, processes: int) -> None:
        if self._state is not None:
            self._state.phase = _starting(processes)

    def training(self, startup_seconds: float, time: float) -> None:
        if self._state is not None:
            self._state.begin_training(startup_seconds, time, self._clock())

    def meter(self, meter: Meter, time: float) -> None:
        state = self._state
        if state is not None:
            state.meters[meter.node] = meter
            state.time = time

    def evaluation(self, metrics: dict[str, float], time: float, step: int) -> None:
        self._evaluations.append((metrics, time, step))

    def __rich__(self) -> RenderableType:
        state, now = self._state, self._clock()
        if state is None:
            return Text()
        state.sample(now)
        evaluations = self._evaluation_lines()
        # One line each: a wrapped line would make the display jump.
        title = Text.assemble((state.title, "bold"), no_wrap=True, overflow="ellipsis")
        if state.phase:
            title.append(f"  {state.phase}", "dim")
        workers = self._worker_lines(state, self._console.size.height - 8 - max(1, len(evaluations)))
        parts = [title, self._bar(state, now), Text(), *workers]
        return Group(*parts, Text(), *evaluations) if evaluations else Group(*parts)

    def _evaluation_lines(self) -> list[RenderableType]:
        """The last evaluations, the newest at the bottom; fewer in a low terminal."""
        shown = list(self._evaluations)[-max(1, (self._console.size.height - 8) // 3) :]
        lines: list[RenderableType] = []
        for i, (metrics, time, step) in enumerate(shown):
            heading = ("joint model  " if i == 0 else " " * 13, "bold")
            when = (f"  at step {step:,}, {_seconds(time)}", "dim")
            line = Text.assemble(heading, (_metrics(metrics), "" if i == len(shown) - 1 else "dim"), when, no_wrap=True)
            # A terminal writes "^C" behind the last line: without room it would wrap and spoil the last picture.
            line.truncate(max(1, self._console.size.width - 3), overflow="ellipsis")
            lines.append(line)
        return lines

    def _bar(self, state: RunState, now: float) -> RenderableType:
        fraction = state.fraction()
        line = Table.grid(*(Column(no_wrap=True) for _ in range(5)), padding=(0, 2))
        width = min(40, max(8, self._console.size.width - 54))  # 54: the words next to it
        line.add_row(
            # The bar pulses until the first step: processes take seconds to start.
            ProgressBar(total=1.0, completed=fraction, width=width, pulse=fraction == 0, animation_time=now),
            Text(f"{fraction:.0%}", style="progress.percentage"),
            Text(f"{_rate(state.rate())} samples/s"),
            Text(f"{_duration(now - state.phase_began)} elapsed", style="progress.elapsed"),
            Text(f"{_duration(state.left(now))} left", style="progress.remaining"),
        )
        return line

    def _worker_lines(self, state: RunState, room: int) -> list[RenderableType]:
        workers = state.workers()
        shown = workers if len(workers) <= WORKERS_SHOWN_MAX else workers[:WORKERS_SHOWN_OF_MANY]
        # A low terminal shows fewer workers, because lines that have scrolled away cannot be redrawn.
        shown = shown[: max(1, room)]
        lines = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
        lines.add_column("worker", no_wrap=True)
        widths = {"steps": len(f"{state.steps:,}"), "loss": 7, "samples/s": 9, "computing": 9}
        for heading, width in widths.items():
            lines.add_column(heading, justify="right", no_wrap=True, min_width=width)  # or the columns would jump
        for meter in shown:
            lines.add_row(
                Text(meter.node),
                f"{meter.steps:,}",
                _figure(meter.loss),
                _rate(state.rate(meter.node) if meter.steps else math.nan),
                f"{meter.utilization(state.time):.0%}" if meter.steps else "starting",
            )
        more = len(workers) - len(shown)
        return [lines, Text(f"... and {more:,} more", style="dim")] if more else [lines]


class LiveProgress(_Picture):
    """For terminals: the picture is redrawn in place, and notes scroll above it."""

    def __init__(self, console: Console, clock: Clock = wall.monotonic) -> None:
        super().__init__(console, clock)
        self._live: Live | None = None

    def begin(self, title: str, workers: Sequence[str], steps: int) -> None:
        self.close()
        super().begin(title, workers, steps)
        # Standard output that goes to a file must not be drawn into the terminal.
        redirect = sys.stdout is not None and sys.stdout.isatty()
        self._live = Live(self, console=self._console, refresh_per_second=REFRESH_HZ, redirect_stdout=redirect)
        with suppress(OSError):  # as on a terminal that was closed
            self._live.start(refresh=True)

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


class NotebookProgress(_Picture):
    """For notebooks: notes and picture are one output of the cell, which is updated in place.

    It uses nothing but IPython's `display`, which every notebook has. rich's own live display would need ipywidgets.
    """

    def __init__(self, clock: Clock = wall.monotonic) -> None:
        super().__init__(self._page(), clock)
        self._notes: deque[str] = deque(maxlen=NOTES_SHOWN)
        self._output: Any = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, title: str, workers: Sequence[str], steps: int) -> None:
        self.close()
        super().begin(title, workers, steps)
        self._draw()  # by the thread of the caller, whose cell then owns the output
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._redraw, args=(self._closed,), name="display", daemon=True)
        self._thread.start()

    def note(self, text: str) -> None:
        self._notes.append(text)

    def end(self, text: str) -> None:
        self.note(text)
        self.close()

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._closed.set()
            thread.join()
            self._draw()

    def _redraw(self, closed: threading.Event) -> None:
        while not closed.wait(1 / NOTEBOOK_HZ):
            self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        notes = [Text(note) for note in list(self._notes)]
        page = self._page()
        page.print(Group(*notes, self))
        html = page.export_html(
            inline_styles=True,
            clear=False,
            code_format="<pre style='white-space:pre;overflow-x:auto;line-height:normal'>{code}</pre>",
        )
        picture = {"text/html": html, "text/plain": page.export_text()}
        with suppress(Exception):  # whatever a notebook's front end raises: a display ends no run
            if self._output is None:
                self._output = display(picture, raw=True, display_id=True)
            else:
                self._output.update(picture, raw=True)

    @staticmethod
    def _page() -> Console:
        """A console that renders a picture into memory."""
        return Console(
            file=io.StringIO(),
            record=True,
            width=NOTEBOOK_COLUMNS,
            height=NOTEBOOK_LINES,
            color_system="truecolor",
            force_jupyter=False,
            _environ={},
        )


def _starting(processes: int) -> str:
    return f"starting {processes:,} process{'es' if processes != 1 else ''}"


def _figure(value: float) -> str:
    """A loss or a metric, short and steady in width; a dash if it is not finite."""
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
