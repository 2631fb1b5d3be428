"""Reports: run directories are written here by hand, as a run writes them, and read back."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tether import report
from tether.errors import UsageError
from tether.report import load_run, table, write_report

pytest.importorskip("matplotlib")


def write_run(
    path: Path,
    *,
    protocol: str = "averaging",
    runtime: str = "local",
    workers: int = 2,
    task: str = "digits",
    status: str = "finished",
    histogram: dict[str, int] | None = None,
    lines: list[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    path.mkdir(parents=True)
    ended = status == "finished"
    result = {
        "samples": 4000,
        "seconds": 20.0,
        "metrics": {"error": 0.0125},
        "bytes_sent": 3_500_000,
        "overlap": 0.975,
        "utilization": {"mean": 0.8125, "workers": {}},
        "staleness": {"mean": 0.0, "max": 0, "histogram": histogram or {"0": 12}},
    }
    run = {
        "version": 1,
        "status": status,
        "reason": "" if ended else "stopped by hand",
        "error": None,
        "task": {"name": task, "spec": None},
        "protocol": {"name": protocol, "tau": 10},
        "runtime": {"name": runtime},
        "workers": workers,
        "seed": 1,
        "started": "2026-01-01T00:00:00",
        "result": result if ended else None,
        **(config or {}),
    }
    (path / "run.json").write_text(json.dumps(run))
    lines = training(workers) if lines is None else lines
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def reading(node: str, time: float, loss: float | None = 1.0, samples: int = 100, **more: float) -> dict[str, Any]:
    counts = {"steps": samples // 10, "samples": samples, "bytes_sent": 10_000 * time, "bytes_received": 20_000 * time}
    seconds = {"compute_seconds": 0.75 * time, "wait_seconds": 0.15 * time}
    return {"kind": "progress", "time": time, "node": node, "loss": loss, **counts, **seconds, **more}


def evaluation(time: float, **metrics: float) -> dict[str, Any]:
    return {"kind": "evaluation", "time": time, "step": int(time), "samples": int(100 * time), "metrics": metrics}


def training(workers: int, times: int = 10) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for tick in range(1, times + 1):
        time = 2.0 * tick
        lines += [
            reading(f"worker-{i}", time, loss=2 * math.exp(-tick / 2), samples=100 * tick) for i in range(workers)
        ]
        lines.append(evaluation(time, error=math.exp(-tick / 2), accuracy=1 - math.exp(-tick / 2)))
    return lines


def printed(runs: list[report.RunRecord], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, _environ={})
    console.print(table(runs))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---- reading --------------------------------------------------------------------------------------------------------


def test_a_run_is_read_with_its_evaluations_progress_and_records(tmp_path: Path) -> None:
    lines = [
        reading("worker-0", 1.0, loss=0.5),
        evaluation(2.0, error=0.25),
        {"kind": "record", "time": 3.0, "node": "hub", "tau": 7, "shard": 1, "phase": "warm"},
    ]
    run = load_run(write_run(tmp_path / "a", lines=lines))
    assert run.label == "averaging x2 (local)"
    assert run.config["seed"] == 1
    assert (run.progress[0].node, run.progress[0].loss) == ("worker-0", 0.5)
    assert (run.evaluations[0].time, run.evaluations[0].metrics) == (2.0, {"error": 0.25})
    assert run.records[0].values == {"tau": 7, "shard": 1, "phase": "warm"}


@pytest.mark.parametrize(
    "cut", [b'{"kind": "progr', b'{"kind": "progress", "node": "w\xc3', b'{"kind": "progress", "ti']
)
def test_a_last_line_that_was_cut_off_is_ignored(tmp_path: Path, cut: bytes) -> None:
    path = write_run(tmp_path / "a", status="running")
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(cut)
    run = load_run(path)
    assert len(run.evaluations) == 10
    assert run.unreadable == 0


def test_other_lines_that_cannot_be_read_are_left_out_and_the_report_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    good = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text('{"kind": "pro\n{"kind": "progress", "time": "late", "node": "w"}\n' + good)
    run = load_run(path)
    assert run.unreadable == 2
    assert "a: 2 unreadable lines of metrics.jsonl were left out" in " ".join(printed([run]).split())


def test_unknown_kinds_and_unknown_fields_are_ignored(tmp_path: Path) -> None:
    lines = [{"kind": "weather", "sun": True}, [1, 2], {**evaluation(1.0, error=0.5), "new": 1}]
    run = load_run(write_run(tmp_path / "a", lines=lines))  # type: ignore[arg-type]
    assert (len(run.evaluations), run.unreadable) == (1, 0)


def test_losses_that_are_no_numbers_are_read(tmp_path: Path) -> None:
    lines = [reading("worker-0", 1.0, loss=math.nan), reading("hub", 1.0, loss=None), reading("w", 2.0, math.inf)]
    run = load_run(write_run(tmp_path / "a", lines=lines))
    assert [report._finite(reading.loss) for reading in run.progress] == pytest.approx([math.nan] * 3, nan_ok=True)


def test_what_is_no_run_directory_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere is no directory; a run directory holds run\.json and metrics"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"has no run\.json; a run directory holds"):
        load_run(tmp_path)
    write_run(tmp_path / "runs" / "one")
    with pytest.raises(UsageError, match=r"It contains runs: name one of them, such as .*runs/one"):
        load_run(tmp_path / "runs")


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is no JSON"), ("[]", "holds a list, not an object"), ('{"version": 2}', "has version 2, .* version 1")],
)
def test_a_run_json_of_another_shape_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = write_run(tmp_path / "a")
    (path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=words):
        load_run(path)


def test_a_run_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no metrics; expected lines of the kinds progress and evaluation"):
        load_run(write_run(tmp_path / "a", lines=[]))
    (write_run(tmp_path / "b") / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match=r"has no metrics\.jsonl"):
        load_run(tmp_path / "b")


# ---- table ----------------------------------------------------------------------------------------------------------


def rows(text: str) -> dict[str, list[str]]:
    """The printed table by its first word; cells are two blanks apart."""
    cells = (re.split(r"  +", line.strip()) for line in text.splitlines() if line.strip())
    return {name: values for name, *values in cells}


def test_the_table_shows_what_the_results_say(tmp_path: Path) -> None:
    runs = [
        load_run(write_run(tmp_path / "a")),
        load_run(write_run(tmp_path / "b", protocol="mpca", runtime="sim", workers=64, lines=training(2))),
    ]
    shown = rows(printed(runs))
    assert shown["run"] == ["a", "b"]
    assert shown["protocol"] == ["averaging", "mpca"]
    assert shown["workers"] == ["2", "64"]
    assert shown["runtime"] == ["local", "sim"]
    assert shown["time"] == ["20 s", "20 virtual s"]
    assert shown["samples/s"] == ["200", "200"]
    assert shown["utilization"] == ["81.2%", "81.2%"]
    assert shown["overlap"] == ["97.5%", "97.5%"]
    assert shown["MB sent"] == ["3.5", "3.5"]
    assert shown["error"] == ["0.0125", "0.0125"]


def test_a_run_that_has_not_ended_is_summed_up_from_its_metrics(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a", status="running"))
    text = printed([run])
    shown = rows(text)
    assert shown["time"] == ["20 s"]
    assert shown["samples/s"] == ["100"]  # two workers of 1000 samples in 20 s
    assert shown["utilization"] == ["75.0%"]
    assert shown["overlap"] == ["83.3%"]
    assert shown["MB sent"] == ["0.4"]
    assert shown["error"] == [f"{math.exp(-5):.4g}"]
    assert "a: running (stopped by hand); the figures are those so far." in " ".join(text.split())


def test_many_runs_stand_below_each_other_and_brackets_are_no_markup(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / f"run[{i}]", task="[red]")) for i in range(6)]
    text = printed(runs, width=140)
    assert "[red]: 6 runs" in text
    assert rows(text)["run[3]"][:3] == ["averaging", "local", "2"]


def test_runs_that_look_alike_are_told_apart_by_directory_then_path_then_number(tmp_path: Path) -> None:
    paths = [tmp_path / "x" / "a", tmp_path / "x" / "b", tmp_path / "y" / "b"]
    runs = [load_run(write_run(path)) for path in paths]
    other = load_run(write_run(tmp_path / "c", protocol="mpca"))
    assert report._labels([runs[0], other]) == ["averaging x2 (local)", "mpca x2 (local)"]
    assert report._labels(runs[:2]) == ["averaging x2 (local) a", "averaging x2 (local) b"]
    labels = report._labels([*runs, runs[0]])
    assert len(set(labels)) == 4
    assert str(paths[2]) in labels[2]


def test_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    lines = [reading(f"worker-{i}", 1.0) for i in (10, 2, 0)] + [reading("hub", 1.0, samples=0)]
    run = load_run(write_run(tmp_path / "a", lines=lines))
    assert list(run.last) == ["hub", "worker-0", "worker-2", "worker-10"]
    assert list(run.workers) == ["worker-0", "worker-2", "worker-10"]


# ---- page and picture -----------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The page's tags, checked for balance, with what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.sources: list[str] = []
        self.words = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + "\n"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """A report with everything there is to draw."""
    root = tmp_path_factory.mktemp("runs")
    records = [
        {"kind": "record", "time": 2.0 * t, "node": "hub", "shard": s, "tau": t + s} for t in range(9) for s in (0, 1)
    ]
    runs = [
        write_run(root / "one", lines=training(2) + records),
        write_run(root / "two", protocol="server", runtime="sim", histogram={"0": 5, "1": 9, "2": 1}),
        write_run(root / "three", status="failed", config={"error": "worker-1 <died> & $x_$"}, task="<i>digits</i>"),
    ]
    page, picture = write_report([load_run(run) for run in runs], root / "new" / "report")
    assert (page.name, picture.name) == ("report.html", "report.png")
    return page.read_text(encoding="utf-8"), picture.read_bytes()


def test_the_page_needs_nothing_but_itself(full: tuple[str, bytes]) -> None:
    page = Page(full[0])
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert page.sources and all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert not re.search(r"url\(|@import|https?://", full[0])


def test_every_plot_is_a_wellformed_svg(full: tuple[str, bytes]) -> None:
    for source in Page(full[0]).sources:
        assert ElementTree.fromstring(base64.b64decode(source.partition(",")[2])).tag.endswith("svg")


def test_the_page_has_a_section_for_everything_measured(full: tuple[str, bytes]) -> None:
    headings = re.findall(r"<h2>(.*?)</h2>", full[0])
    assert headings == [
        "Summary",
        "The joint model",
        "Training loss",
        "Where the time went",
        "Traffic",
        "Staleness",
        "Protocol",
        "Configuration",
    ]
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", full[0])
    assert captions[:4] == ["error over time", "error over samples", "accuracy over time", "accuracy over samples"]
    assert captions[-1] == "tau over time"


def test_text_is_escaped(full: tuple[str, bytes]) -> None:
    assert "i" not in Page(full[0]).tags
    assert "&lt;i&gt;digits&lt;/i&gt;" in full[0]
    assert "three: failed (worker-1 <died> & $x_$)" in Page(full[0]).words


def test_virtual_and_real_seconds_get_a_note(full: tuple[str, bytes], tmp_path: Path) -> None:
    assert "their seconds are virtual" in full[0]
    alike = [load_run(write_run(tmp_path / name, runtime="sim")) for name in "ab"]
    assert report._notes(alike) == []


def test_the_page_is_styled_for_light_and_dark(full: tuple[str, bytes]) -> None:
    assert "prefers-color-scheme: dark" in full[0]


def test_the_picture_is_a_png(full: tuple[str, bytes]) -> None:
    assert full[1].startswith(b"\x89PNG\r\n\x1a\n")


def test_what_was_not_measured_is_left_out_and_a_report_repeats_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # whoever imports it fails
    run = load_run(write_run(tmp_path / "a", lines=[evaluation(t, error=0.5) for t in (1.0, 2.0)]))
    first, second = (
        [path.read_bytes() for path in write_report([run], tmp_path / name)] for name in ("first", "second")
    )
    assert first == second
    assert re.findall(r"<h2>(.*?)</h2>", first[0].decode()) == ["Summary", "The joint model", "Configuration"]


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(write_run(tmp_path / "a"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"needs matplotlib, .*tether\[plot\]"):
        write_report([run], tmp_path)


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one run"):
        write_report([], tmp_path)


# ---- single panels --------------------------------------------------------------------------------------------------


def drawn(run: Path, title: str) -> Any:
    """The axes of one panel."""
    from matplotlib.figure import Figure

    panels = [panel for section in report._sections(report._curves([load_run(run)])) for panel in section.panels]
    figure = Figure()
    next(panel for panel in panels if panel.title == title).draw(figure)
    return figure.axes[0]


@pytest.mark.parametrize(("last", "scale"), [(0.05, "log"), (0.5, "linear"), (0.0, "linear"), (-1.0, "linear")])
def test_a_loss_over_more_than_a_decade_has_a_logarithmic_axis(tmp_path: Path, last: float, scale: str) -> None:
    lines = [reading("worker-0", 1.0, loss=1.0), reading("worker-0", 2.0, loss=last)]
    assert drawn(write_run(tmp_path / "a", lines=lines), "training loss over time").get_yscale() == scale


def test_a_falling_metric_is_drawn_by_ratio_and_a_rising_one_is_not(tmp_path: Path) -> None:
    lines = [evaluation(1.0, error=0.95, accuracy=0.05), evaluation(2.0, error=0.05, accuracy=0.95)]
    run = write_run(tmp_path / "a", lines=lines)
    assert drawn(run, "error over time").get_yscale() == "log"
    assert drawn(run, "accuracy over samples").get_yscale() == "linear"


def test_the_bars_of_a_worker_add_up_to_the_time_of_its_last_reading(tmp_path: Path) -> None:
    lines = [reading("worker-0", 10.0), reading("worker-1", 10.0), reading("worker-0", 20.0)]
    axes = drawn(write_run(tmp_path / "a", lines=lines), "averaging x2 (local)")
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx([15.0, 7.5, 3.0, 1.5, 2.0, 1.0])  # computing, waiting, other; two workers each


def test_every_series_of_a_record_has_its_own_line(tmp_path: Path) -> None:
    lines = [
        {"kind": "record", "time": time, "node": node, "shard": shard, "tau": 5}
        for time in (1.0, 2.0)
        for node in ("a", "b")
        for shard in (0, 1)
    ]
    axes = drawn(write_run(tmp_path / "a", lines=lines), "tau over time")
    assert [len(line.get_xdata()) for line in axes.lines] == [2, 2, 2, 2, 0]  # the empty one is for the legend


@pytest.mark.parametrize(
    ("seconds", "label"), [(0.01, "milliseconds"), (30, "seconds"), (900, "minutes"), (9000, "hours"), (1e6, "days")]
)
def test_a_time_axis_is_in_a_unit_that_can_be_read(tmp_path: Path, seconds: float, label: str) -> None:
    run = write_run(tmp_path / "a", status="running", runtime="sim", lines=[evaluation(seconds, error=0.5)])
    assert drawn(run, "error over time").get_xlabel() == f"virtual {label}"


def test_a_long_run_with_many_workers_is_thinned(tmp_path: Path) -> None:
    lines = [reading(f"worker-{i}", float(t)) for t in range(1, 201) for i in range(200)]
    run = write_run(tmp_path / "a", workers=200, lines=lines)
    axes = drawn(run, "training loss over time")
    assert sum(len(line.get_xdata()) for line in axes.lines) <= 1.1 * report.POINTS_MAX
    assert all(line.get_xdata()[-1] == 200 for line in axes.lines[:200])
    assert len(drawn(run, "averaging x200 (local)").get_yticks()) <= report.BARS_NAMED_MAX
