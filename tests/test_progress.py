"""The display of a run: what it shows, how often, and that it costs nothing if it shows nothing."""

from __future__ import annotations

import builtins
import io
import math
import re
import sys
import threading
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from tether.core.trace import Meter
from tether.execution.progress import (
    EVALUATIONS_SHOWN,
    LineProgress,
    LiveProgress,
    NotebookProgress,
    Progress,
    make_progress,
)


class Clock:
    """Wall time that a test sets by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


def terminal(width: int = 100, height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None, _environ={})


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def names(count: int) -> list[str]:
    return [f"worker-{i}" for i in range(count)]


def picture(progress: Progress, width: int = 100) -> str:
    """What the terminal would show now."""
    console = Console(file=io.StringIO(), width=width, color_system=None, _environ={})
    console.print(progress)
    return written(console)


def steps(progress: Progress, workers: Sequence[str], count: int, time: float, batch: int = 10) -> None:
    for worker in workers:
        progress.meter(Meter(worker, count, count * batch, loss=0.5, compute_seconds=0.9 * time), time)


# ---- which display --------------------------------------------------------------------------------------------------


def test_a_quiet_run_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with make_progress(quiet=True) as progress:
        progress.begin("digits", names(2), 10)
        steps(progress, names(2), 5, time=1.0)
        progress.evaluation({"error": 0.1}, 1.0, 5)
        progress.note("a note")
        progress.end("finished")
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_the_live_display_and_a_pipe_gets_lines() -> None:
    assert isinstance(make_progress(terminal()), LiveProgress)
    assert isinstance(make_progress(pipe()), LineProgress)


def test_without_a_console_it_writes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    make_progress().begin("digits", names(2), 10)
    assert capsys.readouterr() == ("", "digits: 2 workers, 10 steps each\n")


def test_forced_colours_do_not_bring_an_animation_into_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(make_progress(), LineProgress)


# ---- plain lines ----------------------------------------------------------------------------------------------------


def test_lines_are_printed_at_the_beginning_for_every_evaluation_and_at_the_end() -> None:
    console, clock = pipe(), Clock()
    with make_progress(console, clock=clock) as progress:
        progress.begin("digits: mpca x2 (local)", names(2), 1000)
        steps(progress, names(2), 100, time=1.0)
        progress.evaluation({"error": 0.25, "loss": 1.5}, 1.25, 100)
        progress.note("worker-1 [lost]")
        progress.end("finished")
    assert written(console).splitlines() == [
        "digits: mpca x2 (local): 2 workers, 1,000 steps each",
        "step 100, 1.2 s: error 0.2500  loss 1.5000",
        "worker-1 [lost]",
        "finished",
    ]


def test_at_most_one_progress_line_is_printed_in_five_seconds_of_wall_time() -> None:
    console, clock = pipe(), Clock()
    progress = make_progress(console, clock=clock)
    progress.begin("digits", names(2), 1000)
    for tick in range(1, 161):  # twenty seconds of wall time, 160 of the run
        clock.now += 0.125
        steps(progress, names(2), tick, time=float(tick))
    lines = [line for line in written(console).splitlines() if "samples/s" in line]
    assert [re.findall(r"\S+ elapsed", line) for line in lines] == [
        ["0:05 elapsed"],
        ["0:10 elapsed"],
        ["0:15 elapsed"],
    ]


def test_a_progress_line_has_the_rate_in_the_runs_time_and_the_time_left_in_wall_time() -> None:
    console, clock = pipe(), Clock()
    progress = make_progress(console, clock=clock)
    progress.begin("digits", names(2), 112)
    for tick in range(1, 51):
        clock.now += 0.125
        steps(progress, names(2), tick, time=2.0 * tick)
    line = next(line for line in written(console).splitlines() if "samples/s" in line)
    # 2 workers of 10 samples a step, a step in 2 virtual seconds; 72 of 112 steps are left at 8 a second
    assert line == " 36%  loss 0.5000  10.0 samples/s  0:05 elapsed  0:09 left"


def test_a_long_line_is_not_wrapped() -> None:
    console = pipe()
    make_progress(console).note("word " * 100)
    assert len(written(console).splitlines()) == 1


# ---- the live display -----------------------------------------------------------------------------------------------


def live(workers: int, goal: int = 1000, console: Console | None = None) -> tuple[LiveProgress, Clock]:
    clock = Clock()
    progress = LiveProgress(console or terminal(), clock)
    progress.begin("digits: mpca", names(workers), goal)
    return progress, clock


def test_the_picture_shows_bar_workers_and_the_joint_models_metrics() -> None:
    progress, clock = live(2)
    with progress:
        steps(progress, names(2), 100, time=1.0)
        picture(progress)
        clock.now += 10
        progress.meter(Meter("worker-0", 300, 3000, 0.25, compute_seconds=8.8), 11.0)
        progress.meter(Meter("worker-1", 500, 5000, 0.75, compute_seconds=5.5), 11.0)
        progress.evaluation({"error": 0.125}, 10.0, 350)
        shown = picture(progress)
    assert "digits: mpca" in shown
    assert " 40%  600 samples/s  0:10 elapsed  0:20 left" in shown
    assert re.search(r"worker-0 +300 +0.2500 +200 +80%", shown)
    assert re.search(r"worker-1 +500 +0.7500 +400 +50%", shown)
    assert "joint model  error 0.1250  at step 350, 10.0 s" in shown


def test_before_the_first_step_workers_are_starting_and_nothing_is_guessed() -> None:
    progress, clock = live(2)
    with progress:
        clock.now += 3
        shown = picture(progress)
    assert " 0%  - samples/s  0:03 elapsed  -:-- left" in shown
    assert shown.count("starting") == 2


def test_starting_up_does_not_count_for_the_time_left() -> None:
    progress, clock = live(1, goal=100)
    with progress:
        clock.now += 1000
        steps(progress, names(1), 1, time=1000.0)
        picture(progress)
        clock.now += 9
        steps(progress, names(1), 10, time=1009.0)
        assert "1:30 left" in picture(progress)


def test_the_picture_distinguishes_start_up_from_training() -> None:
    progress, clock = live(2)
    with progress:
        progress.starting(3)
        clock.now += 4
        shown = picture(progress)
        assert "digits: mpca  starting 3 processes" in shown and "0:04 elapsed" in shown
        clock.now += 1
        steps(progress, names(2), 100, time=2.0)
        progress.training(3.25, 2.0)
        shown = picture(progress)
        assert "digits: mpca  training; start-up took 3.2 s" in shown and "0:02 elapsed" in shown
        clock.now += 8
        assert "0:10 elapsed" in picture(progress)


def test_lines_distinguish_start_up_from_training() -> None:
    console, clock = pipe(), Clock()
    progress = make_progress(console, clock=clock)
    progress.begin("digits", names(1), 1000)
    progress.starting(1)
    clock.now += 10
    progress.training(9.5, 0.25)
    clock.now += 2
    steps(progress, names(1), 500, time=2.25)
    assert written(console).splitlines() == [
        "digits: 1 worker, 1,000 steps each",
        "starting 1 process",
        "training; start-up took 9.5 s",
        " 50%  loss 0.5000  2,222 samples/s  0:02 elapsed  -:-- left",
    ]


def test_the_last_evaluations_stay_in_view_across_restarts() -> None:
    progress, _ = live(1)
    with progress:
        for step in range(1, 8):
            progress.evaluation({"error": 1 / step}, float(step), 100 * step)
            if step == 4:
                progress.begin("digits: mpca", names(1), 600)
                progress.resumed(400)
        lines = picture(progress).splitlines()[-EVALUATIONS_SHOWN:]
    assert lines[0].rstrip() == "joint model  error 0.3333  at step 300, 3.0 s"
    assert lines[-1].rstrip() == "             error 0.1429  at step 700, 7.0 s"


def test_a_straggler_shows_in_the_recent_rate() -> None:
    progress, clock = live(1, goal=10_000)
    with progress:
        for second in range(1, 41):  # 100 samples a second, later 10
            clock.now += 1
            samples = 100 * min(second, 20) + 10 * max(0, second - 20)
            progress.meter(Meter("worker-0", second, samples, 0.5), float(second))
            shown = picture(progress)
    assert "  10.0 samples/s" in shown


@pytest.mark.parametrize(("workers", "shown", "more"), [(16, 16, None), (17, 8, 9), (2000, 8, 1992)])
def test_more_than_sixteen_workers_are_cut_to_eight(workers: int, shown: int, more: int | None) -> None:
    progress, _ = live(workers)
    with progress:
        text = picture(progress)
    assert len(re.findall(r"^worker-\d", text, re.MULTILINE)) == shown
    assert (f"... and {more:,} more" in text) if more else ("more" not in text)


@pytest.mark.parametrize("height", [10, 12, 24])
def test_the_picture_is_lower_than_the_terminal(height: int) -> None:
    progress, _ = live(16, console=terminal(height=height))
    with progress:
        steps(progress, names(16), 10, time=1.0)
        for step in range(10):
            progress.evaluation({"error": 0.125}, 10.0, 350 + step)
        text = picture(progress)
    assert len(text.splitlines()) < height
    assert "worker-0" in text and "joint model" in text and "at step 359" in text


def test_no_line_is_wider_than_a_narrow_terminal() -> None:
    progress, _ = live(4, console=terminal(width=60))
    with progress:
        steps(progress, names(4), 999, time=1.0)
        progress.evaluation({f"metric-{i}": 0.125 for i in range(20)}, 10.0, 350)
        lines = picture(progress, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert len(lines) == 10  # title, bar, blank, heading, four workers, blank, metrics: nothing was wrapped


def test_a_hub_is_not_shown_as_a_worker_but_a_worker_that_joins_late_is() -> None:
    progress, _ = live(1, goal=100)
    with progress:
        steps(progress, names(1), 50, time=1.0)
        progress.meter(Meter("hub"), 1.0)
        assert " 50% " in picture(progress) and "hub" not in picture(progress)
        steps(progress, ["worker-9"], 30, time=1.0)
        assert " 40% " in picture(progress) and "worker-9" in picture(progress)


def test_a_call_of_meter_only_stores_its_argument() -> None:
    console = terminal()
    progress, clock = live(1, console=console)
    progress._live.stop()  # type: ignore[union-attr]  # its thread also reads the clock
    reads, length = clock.reads, len(written(console))
    for count in range(10_000):
        progress.meter(Meter("worker-0", count), float(count))
    assert (clock.reads, len(written(console))) == (reads, length)
    progress.close()


def test_notes_and_the_end_are_printed_as_they_are() -> None:
    console = terminal()
    progress, _ = live(1, console=console)
    with progress:
        progress.note("worker-1 [bold]lost[/bold]")
        progress.end("finished [1]")
    assert "worker-1 [bold]lost[/bold]" in written(console)
    assert written(console).rstrip().endswith("finished [1]")


def test_an_error_gives_the_terminal_back() -> None:
    console = terminal()
    progress, _ = live(1, console=console)
    with pytest.raises(RuntimeError), progress:
        raise RuntimeError
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert written(console).rfind(show) > written(console).rfind(hide) >= 0


def test_a_loss_that_is_not_a_number_is_a_dash() -> None:
    progress, _ = live(1)
    with progress:
        progress.meter(Meter("worker-0", 5, 50, math.nan), 1.0)
        assert re.search(r"worker-0 +5 +- ", picture(progress))


def test_a_run_of_no_steps_is_shown_without_dividing_by_zero() -> None:
    progress, _ = live(0, goal=0)
    with progress:
        assert " 0% " in picture(progress)


class FullDisk(io.StringIO):
    """A log on a disk that is full, or a terminal that has been closed."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", [LineProgress, LiveProgress])
def test_a_display_that_cannot_be_written_ends_no_run(kind: type[LineProgress | LiveProgress]) -> None:
    progress = kind(Console(file=FullDisk(), force_terminal=kind is LiveProgress, width=80))
    progress.begin("digits", ["worker-0"], 10)
    progress.meter(Meter("worker-0", steps=3, samples=30, loss=1.0), 1.0)
    progress.evaluation({"error": 0.1}, 1.0, 3)
    progress.note("worker-1 has joined")
    progress.end("error 0.1")
    progress.close()


# ---- in a notebook --------------------------------------------------------------------------------------------------


class Notebook:
    """The outputs that IPython would show, each a bundle of formats."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, str]] = []
        self.updates = 0

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        """As IPython.display.display, which returns a handle."""
        assert raw and display_id
        self.outputs.append(bundle)
        place = len(self.outputs) - 1

        def update(bundle: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.outputs[place] = bundle
            self.updates += 1

        return SimpleNamespace(update=update)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """A notebook without a kernel: what rich recognizes a notebook by, and the part of IPython that shows something."""
    fake = Notebook()
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", cast(ModuleType, fake))
    return fake


def test_a_notebook_has_one_output_that_is_updated_in_place(
    notebook: Notebook, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = threading.active_count()
    with make_progress() as progress:
        assert isinstance(progress, NotebookProgress)
        for part in range(2):  # as after a restart
            progress.begin("digits: mpca", names(2), 100)
            progress.starting(3)
            progress.note(f"note {part} <of two>")
            steps(progress, names(2), 50, time=1.0)
            progress.training(2.5, 1.0)
            progress.evaluation({"error": 0.25}, 1.0, 50 + part)
        progress.end("error 0.25")
    assert len(notebook.outputs) == 1 and notebook.updates >= 3
    plain = notebook.outputs[0]["text/plain"]
    assert plain.index("note 0 <of two>") < plain.index("note 1") < plain.index("error 0.25")
    assert "training; start-up took 2.5 s" in plain and " 50% " in plain and "at step 51" in plain
    assert "note 0 &lt;of two&gt;" in notebook.outputs[0]["text/html"]
    assert capfd.readouterr() == ("", ""), "nothing is printed as well"
    assert threading.active_count() == threads


def test_a_notebook_is_redrawn_while_the_run_goes_on(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tether.execution.progress.NOTEBOOK_HZ", 1000.0)
    drawn = threading.Event()
    monkeypatch.setattr(notebook, "display", lambda *_, **__: SimpleNamespace(update=lambda *_, **__: drawn.set()))
    with make_progress() as progress:
        progress.begin("digits", names(1), 10)
        assert drawn.wait(60)


def test_a_notebook_that_shows_nothing_ends_no_run(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the front end is gone")

    monkeypatch.setattr(notebook, "display", broken)
    with make_progress() as progress:
        progress.begin("digits", names(1), 10)
        progress.end("finished")
