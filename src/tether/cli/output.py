"""What commands print: tables for people, or one JSON object for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tether.api import Result

out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)


def show_report(report: dict[str, Any], as_json: bool) -> None:
    """The rows and ratios of a benchmark or of `tether chaos`."""
    if as_json:
        from tether.execution.observer import finite

        print(json.dumps({**finite(report), "rows": [finite(row) for row in report["rows"]]}, allow_nan=False))
        return
    table = Table(*(name.replace("_", " ") for name in report["rows"][0]))
    for row in report["rows"]:
        table.add_row(*(_text(value) for value in row.values()))
    out.print(table)
    for ratio, value in report["ratios"].items():
        out.print(f"{ratio}: {'none' if value is None else f'{value:.4f}'}", highlight=False)


def show_result(result: Result, as_json: bool) -> None:
    """The figures of a run."""
    if as_json:
        print(json.dumps(result.figures))
        return
    figures = result.figures
    table = Table(show_header=False, box=None)
    virtual = " (virtual)" if figures["runtime"] == "sim" else ""
    part = figures["last_part"]
    resumed = part["samples"] != figures["samples"]
    of_part, in_part = (f" the last part {part['seconds']:.4g} with", " in the last part") if resumed else ("", "")
    for name, value in {
        "protocol": f"{figures['protocol']} on {figures['runtime']}, workers: {figures['workers']}",
        "steps": f"{figures['steps']} per worker, {figures['samples']} samples, {figures['reason']}",
        **({"model": f"of step {figures['model_step']}"} if figures["model_step"] != figures["steps"] else {}),
        "start-up": f"{figures['startup_seconds']:.4g} seconds",
        "seconds": f"{figures['seconds']:.4g}{virtual},{of_part} {figures['samples_per_second']:,.0f} samples/s",
        "utilization": f"{figures['utilization']['mean']:.1%} computing, overlap {figures['overlap']:.1%}{in_part}",
        "sent": f"{figures['bytes_sent'] / 1e6:,.1f} MB{_compressed(figures)}{in_part}",
        **{metric: f"{value:.4g}" for metric, value in figures["metrics"].items()},
        **(
            {"left out": f"{skipped} gradients that were not finite"}
            if (skipped := figures["gradients_skipped"])
            else {}
        ),
        **(
            {"refused": f"gradients by the guard: {refused}"}
            if (refused := _counts(figures["gradients_refused"]))
            else {}
        ),
        **({"warning": figures["warning"]} if figures["warning"] else {}),
        **({"not saved": ", ".join(figures["unsaved"])} if figures["unsaved"] else {}),
        "run": figures["run"],
    }.items():
        table.add_row(name, value)
    out.print(table)


def _counts(by_name: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in by_name.items())


def _compressed(figures: dict[str, Any]) -> str:
    if (compression := figures.get("compression")) is None:
        return ""
    error = compression["relative_error"]
    return f", {compression['share']:.1%} of what it was" + (f", relative error {error:.2g}" if error else "")


def _text(value: object) -> str:
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
