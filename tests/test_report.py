"""Reports: these tests write run directories by hand, as a run does, and read them back."""

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

import tether
from tether.analysis.report import table, write_report
from tether.analysis.runs import RunRecord, load_run
from tether.errors import UsageError

pytest.importorskip("matplotlib")
from tether.analysis import plots

RESULT = {
    "seconds": 20.0,
    "samples_per_second": 200.0,
    "metrics": {"error": 0.0125},
    "bytes_sent": 3_500_000,
    "overlap": 0.975,
    "utilization": {"mean": 0.8125},
    "staleness": {"histogram": {"0": 12}},
}


def run_in(
    path: Path, lines: list[dict[str, Any]], protocol: str = "averaging", runtime: str = "local", **config: Any
) -> RunRecord:
    path.mkdir(parents=True)
    named = {"task": {"name": "digits"}, "protocol": {"name": protocol}, "runtime": {"name": runtime}, "workers": 2}
    ended = {"status": "finished", "reason": "all steps made", "error": None, "result": RESULT}
    (path / "run.json").write_text(json.dumps({"version": 1, **named, **ended, **config}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_run(path)


def progress(node: str, time: float, loss: float | None = 1.0, samples: int = 100) -> dict[str, Any]:
    counts = {"samples": samples, "bytes_sent": 10_000 * time, "bytes_received": 20_000 * time}
    seconds = {"compute_seconds": 0.75 * time, "wait_seconds": 0.15 * time}
    return {"kind": "progress", "time": time, "node": node, "loss": loss, **counts, **seconds}


def evaluation(time: float, **metrics: float) -> dict[str, Any]:
    return {"kind": "evaluation", "time": time, "samples": int(100 * time), "metrics": metrics}


def note(text: str) -> dict[str, Any]:
    return {"kind": "note", "time": None, "text": text}


TRAINING = [
    line
    for tick in range(1, 11)
    for line in (
        progress("worker-0", 2.0 * tick, 2 * math.exp(-tick / 2), 100 * tick),
        progress("worker-1", 2.0 * tick, 3 * math.exp(-tick / 2), 100 * tick),
        evaluation(2.0 * tick, error=math.exp(-tick / 2), accuracy=1 - math.exp(-tick / 2)),
    )
]
RECORDS = [
    {"kind": "record", "time": 1.0 * t, "node": "hub", "shard": s, "tau": t + s, "round": t, "workers": 2}
    for t in range(9)
    for s in (0, 1)
]


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [b'{"kind": "progr', b'{"kind": "progress", "node": "w\xc3'])
def test_a_line_that_was_cut_off_is_ignored(tmp_path: Path, cut: bytes) -> None:
    run_in(tmp_path / "a", TRAINING)
    with (tmp_path / "a" / "metrics.jsonl").open("ab") as file:
        file.write(cut)
    run = load_run(tmp_path / "a")
    assert (len(run.evaluations), len(run.progress)) == (10, 20)


def test_nodes_are_in_the_order_of_their_numbers_and_a_hub_is_not_a_worker(tmp_path: Path) -> None:
    lines = [progress(f"worker-{i}", 1.0) for i in (10, 2, 0)] + [progress("hub", 1.0, samples=0)]
    run = run_in(tmp_path / "a", lines)
    assert list(run.nodes) == ["hub", "worker-0", "worker-2", "worker-10"]
    assert list(run.workers) == ["worker-0", "worker-2", "worker-10"]


def test_a_directory_without_a_run_of_a_known_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run directory: it has no run\.json"):
        load_run(tmp_path)
    with pytest.raises(UsageError, match="has version 3, and this Tether reads up to 2: use the newer Tether"):
        run_in(tmp_path / "a", [], version=3)


# ---- table ----------------------------------------------------------------------------------------------------------


def printed(runs: list[RunRecord], width: int = 80) -> tuple[dict[str, list[str]], str]:
    """The rows by their first cell (two spaces separate cells), and the whole output with single spaces."""
    console = Console(file=io.StringIO(), width=width, color_system=None, _environ={})
    console.print(table(runs))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    cells = (re.split(r"  +", line.strip()) for line in text.splitlines() if line.strip())
    return {name: values for name, *values in cells}, " ".join(text.split())


def test_the_table_shows_what_the_results_say(tmp_path: Path) -> None:
    runs = [run_in(tmp_path / "a", TRAINING), run_in(tmp_path / "b", [], "mpca", "sim", workers=64)]
    shown, _ = printed(runs)
    assert shown["run"] == ["a", "b"]
    assert shown["protocol"] == ["averaging", "mpca"]
    assert shown["workers"] == ["2", "64"]
    assert shown["time"] == ["20 s", "20 virtual s"]
    assert shown["samples/s"] == ["200", "200"]
    assert shown["utilization"] == ["81.2%", "81.2%"]
    assert shown["overlap"] == ["97.5%", "97.5%"]
    assert shown["MB sent"] == ["3.5", "3.5"]
    assert shown["error"] == ["0.0125", "0.0125"]


def test_a_run_that_has_not_ended_is_summed_up_from_its_metrics(tmp_path: Path) -> None:
    shown, text = printed([run_in(tmp_path / "a", TRAINING, status="failed", error="the hub died", result=None)])
    assert shown["time"] == ["20 s"]
    assert shown["samples/s"] == ["100"]  # two workers of 1000 samples in 20 s
    assert shown["utilization"] == ["75.0%"]
    assert shown["overlap"] == ["83.3%"]
    assert shown["MB sent"] == ["0.4"]
    assert shown["error"] == [f"{math.exp(-5):.4g}"]
    assert "a: failed (the hub died); the figures are those so far." in text


def test_many_runs_stand_below_each_other_and_brackets_are_not_markup(tmp_path: Path) -> None:
    runs = [run_in(tmp_path / f"run[{i}]", TRAINING, task={"name": "[red]"}) for i in range(6)]
    shown, text = printed(runs, width=140)
    assert "[red]: 6 runs" in text
    assert shown["run[3]"][:3] == ["averaging", "local", "2"]


@pytest.mark.parametrize("count", [3, 7])
def test_no_name_or_number_is_broken_in_a_terminal_that_is_too_narrow_for_all_runs(tmp_path: Path, count: int) -> None:
    runs = [run_in(tmp_path / f"a-run-with-a-long-name-{i}", TRAINING, runtime="sim") for i in range(count)]
    _, text = printed(runs)
    assert all(f" {run.name} " in text for run in runs)
    assert text.count("20 virtual s") == text.count("0.0125") == count
    assert text.count(f"digits: {count} runs") == 1


def test_start_up_has_a_column_of_its_own_where_it_was_measured(tmp_path: Path) -> None:
    runs = [run_in(tmp_path / "a", [], result={**RESULT, "startup_seconds": 2.5}), run_in(tmp_path / "b", [])]
    shown, _ = printed(runs)
    assert (shown["start-up"], shown["training"]) == (["2.5 s", "-"], ["20 s", "20 s"])
    assert "time" not in shown and "start-up" not in printed(runs[1:])[0]


def test_the_report_repeats_the_notes_of_a_run(tmp_path: Path) -> None:
    _, text = printed([run_in(tmp_path / "a", [*TRAINING, note("worker-1 died")])])
    assert "a: worker-1 died" in text


# ---- page and picture -----------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The page's tags, checked for balance, and the sources that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.sources: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """A report with every section."""
    root = tmp_path_factory.mktemp("runs")
    stale = {**RESULT, "staleness": {"histogram": {"0": 5, "2": 9}}}
    runs = [
        run_in(root / "one", TRAINING + RECORDS),
        run_in(root / "two", TRAINING, "server", "sim", result=stale),
        run_in(root / "three", TRAINING, task={"name": "<i>$x_$</i>"}, status="failed", error="<died> & gone"),
    ]
    page, picture = write_report(runs, root / "new" / "report")
    assert (page.name, picture.name) == ("report.html", "report.png")
    return page.read_text(encoding="utf-8"), picture.read_bytes()


def test_the_page_needs_nothing_but_itself_and_the_picture_is_a_png(full: tuple[str, bytes]) -> None:
    page = Page(full[0])
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert not re.search(r"url\(|@import|https?://", full[0])
    assert page.sources
    for source in page.sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
    assert full[1].startswith(b"\x89PNG\r\n\x1a\n")


def test_the_page_shows_everything_measured_but_no_counters(full: tuple[str, bytes]) -> None:
    headings = ["The joint model", "Training loss", "Where the time went", "Traffic", "Staleness", "Protocol"]
    assert re.findall(r"<h2>(.*?)</h2>", full[0]) == ["Summary", *headings, "Configuration"]
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", full[0])
    assert captions[:4] == ["error over time", "error over samples", "accuracy over time", "accuracy over samples"]
    assert captions[5:7] == ["time of one (averaging, 2 workers, local)", "time of two (server, 2 workers, sim)"]
    assert captions[-2:] == ["% of gradients over staleness", "tau over time"]
    assert "their seconds are virtual" in full[0]


def test_the_words_of_a_table_are_whole_and_a_wide_table_scrolls(full: tuple[str, bytes]) -> None:
    page, _ = full
    assert re.search(r"^table \{.*overflow-wrap: normal;", page, re.MULTILINE), "the page breaks long words elsewhere"
    assert ".scroll { overflow-x: auto;" in page
    assert page.count("<table>") == page.count('<div class="scroll"><table>') > 0


def test_a_note_stands_at_the_top_of_the_page(tmp_path: Path) -> None:
    page, _ = write_report([run_in(tmp_path / "a", TRAINING)], tmp_path, note="8 workers & a slow network")
    heading, note, summary = (page.read_text().index(text) for text in ("</h1>", "8 workers &amp; a", "Summary</h2>"))
    assert heading < note < summary


def test_text_is_escaped(full: tuple[str, bytes]) -> None:
    assert "i" not in Page(full[0]).tags
    assert "&lt;i&gt;$x_$&lt;/i&gt;" in full[0]
    assert "three: failed (&lt;died&gt; &amp; gone)" in full[0]


@pytest.mark.parametrize(
    ("lines", "headings"),
    [
        ([], []),
        ([evaluation(t, error=0.5) for t in (1.0, 2.0)], ["The joint model"]),
        ([progress("hub", 1.0, None, 0), progress("w", 1.0, math.nan, 0)], ["Traffic"]),
    ],
)
def test_what_was_not_measured_is_left_out_and_a_report_repeats_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]], headings: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    run = run_in(tmp_path / "a", lines, status="running", result=None)
    first, second = ([path.read_bytes() for path in write_report([run], tmp_path / name)] for name in "xy")
    assert first == second
    assert re.findall(r"<h2>(.*?)</h2>", first[0].decode()) == ["Summary", *headings, "Configuration"]


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "tether.analysis.plots")
    monkeypatch.delattr(tether.analysis, "plots")
    with pytest.raises(UsageError, match=r"needs matplotlib, .*'\.\[plot\]'"):
        write_report([run_in(tmp_path / "a", TRAINING)], tmp_path)


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one run"):
        write_report([], tmp_path)


# ---- single panels --------------------------------------------------------------------------------------------------


def drawn(run: RunRecord | list[RunRecord], title: str) -> Any:
    """The axes of one panel."""
    from matplotlib.figure import Figure

    styles = plots.style_runs(run if isinstance(run, list) else [run])
    panels = [panel for section in plots.sections(styles) for row in section.rows for panel in row]
    figure = Figure(layout="constrained")
    next(panel for panel in panels if panel.title == title).draw(figure)
    return figure.axes[0]


@pytest.mark.parametrize(
    ("first", "last", "scale"),
    [(1.0, 0.05, "log"), (1.0, 0.5, "linear"), (1.0, 0.0, "linear"), (1.0, -1.0, "linear"), (0.05, 1.0, "linear")],
)
def test_a_quantity_that_falls_by_more_than_a_decade_has_a_logarithmic_axis(
    tmp_path: Path, first: float, last: float, scale: str
) -> None:
    run = run_in(tmp_path / "a", [evaluation(1.0, error=first), evaluation(2.0, error=last)])
    assert drawn(run, "error over time").get_yscale() == scale


def test_the_bars_of_a_worker_add_up_to_the_time_of_its_last_row(tmp_path: Path) -> None:
    run = run_in(tmp_path / "a", [progress("worker-0", 10.0), progress("worker-1", 10.0), progress("worker-0", 20.0)])
    widths = [patch.get_width() for patch in drawn(run, "time of a (averaging, 2 workers, local)").patches]
    assert widths == pytest.approx([15.0, 7.5, 3.0, 1.5, 2.0, 1.0])  # computing, waiting, other; two workers each


def test_every_series_of_a_record_has_its_own_line(tmp_path: Path) -> None:
    axes = drawn(run_in(tmp_path / "a", RECORDS), "tau over time")
    assert [len(line.get_xdata()) for line in axes.lines] == [9, 9]


@pytest.mark.parametrize(("seconds", "label"), [(0.01, "seconds"), (900, "minutes"), (9000, "hours"), (1e6, "days")])
def test_a_time_axis_is_in_a_unit_that_can_be_read(tmp_path: Path, seconds: float, label: str) -> None:
    run = run_in(tmp_path / "a", [evaluation(seconds, error=0.5)], runtime="sim")
    assert drawn(run, "error over time").get_xlabel() == f"{label} (virtual in sim)"


def test_a_long_run_with_many_workers_is_thinned(tmp_path: Path) -> None:
    lines = [progress(f"worker-{i}", float(t)) for t in range(1, 3000) for i in range(20)]
    run = run_in(tmp_path / "a", lines)
    assert {len(line.get_xdata()) for line in drawn(run, "training loss over time").lines} == {plots.POINTS_MAX}
    assert len(drawn(run, "time of a (averaging, 2 workers, local)").get_yticks()) <= plots.BARS_NAMED_MAX


def test_a_time_axis_is_logarithmic_where_one_run_took_more_than_five_times_as_long(tmp_path: Path) -> None:
    short, near, long = (
        run_in(tmp_path / f"{seconds}", [evaluation(seconds / 2, error=0.5), evaluation(seconds, error=0.4)])
        for seconds in (100, 500, 501)
    )
    assert drawn([short, near], "error over time").get_xscale() == "linear"
    axes = drawn([short, long], "error over time")
    assert (axes.get_xscale(), axes.get_xlabel()) == ("log", "seconds, logarithmic")
    assert 0 < axes.get_xlim()[0] < 50 and axes.get_xlim()[1] > 501
    assert drawn([short, long], "error over samples").get_xscale() == "linear"
    assert drawn(short, "error over time").get_xscale() == "linear"


def test_a_logarithmic_time_axis_begins_where_the_shortest_run_can_be_read(tmp_path: Path) -> None:
    """A first row at 0 s or after a microsecond does not press everything else to the right."""
    lines = [{"kind": "record", "time": time, "node": "hub", "tau": 1} for time in (0.0, 1e-6, 10.0)]
    runs = [run_in(tmp_path / "a", lines), run_in(tmp_path / "b", [*lines, {**lines[0], "time": 1000.0}])]
    assert drawn(runs, "tau over time").get_xlim()[0] == pytest.approx(0.09)


def test_a_legend_tells_runs_of_one_protocol_apart_by_their_names(tmp_path: Path) -> None:
    lines = [evaluation(1.0, error=0.5)]
    runs = [
        run_in(tmp_path / "tau=5", lines),
        run_in(tmp_path / "tau=20", lines, workers=1),
        run_in(tmp_path / "averaging", lines, runtime="sim"),
        run_in(tmp_path / "x" / "tau=5", lines),
    ]
    axes = drawn(runs, "error over time")
    labels = [text.get_text() for legend in axes.figure.legends for text in legend.get_texts()]
    assert labels[1:3] == ["tau=20 (averaging, 1 worker, local)", "averaging (2 workers, sim)"]
    assert labels[::3] == [f"{runs[at].path}: tau=5 (averaging, 2 workers, local)" for at in (0, 3)]
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(looks) == len({line.get_marker() for line in axes.lines}) == 4
