"""What a run returns: the joint model, its metrics, and the figures of the run."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tether.core.trace import relative_error
from tether.core.vector import digest
from tether.errors import RunError
from tether.execution.checkpoint import Evaluated, save_tensors
from tether.execution.observer import RunObserver, finite
from tether.execution.plan import RunPlan
from tether.runtimes.base import Outcome, Runtime


@dataclass
class Result:
    """What a run returned."""

    #: the joint model, in evaluation mode
    model: nn.Module
    #: its metrics
    metrics: dict[str, float]
    #: the figures of the run, as run.json has them under `result`. Steps, samples and seconds are those of the whole
    #: run; rates, shares and bytes are those of its last part, if it was resumed
    figures: dict[str, Any]
    #: every evaluation of the joint model, in order
    history: list[dict[str, Any]]
    #: the run directory
    directory: Path

    def save(self, path: Path | str) -> None:
        """Write the model's state_dict to a file that ends in .safetensors, .pt or .pth; reading it needs no Tether."""
        save_tensors(self.model.state_dict(), Path(path))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        return f"Result({shown}, seconds={self.figures['seconds']:.4g}, run={str(self.directory)!r})"


def make_result(
    plan: RunPlan,
    on: Runtime,
    outcome: Outcome,
    observer: RunObserver,
    model: Evaluated,
    *,
    startup_seconds: float,
    wall_seconds: float,
) -> Result:
    """The result of a run that ended with this outcome.

    `startup_seconds` is the wall time from the call until training began, `wall_seconds` that until now.
    """
    workers = {node.name for node in plan.nodes if node.computes}
    meters = outcome.meters
    computing = [meter for name, meter in meters.items() if name.partition("~")[0] in workers]
    if not computing:
        raise RunError("the run ended, and no worker had reported its figures")
    staleness: Counter[int] = Counter()
    for meter in meters.values():
        staleness.update(meter.staleness)
    # meters begin with the last part of a run: since it was resumed, restarted or warmed up
    last_part = {"samples": observer.samples - plan.schedule.first_samples, "seconds": outcome.seconds}
    figures: dict[str, Any] = {
        "protocol": plan.protocol.name,
        "runtime": on.name,
        "workers": plan.workers,
        "steps": observer.step,
        "samples": observer.samples,
        "startup_seconds": startup_seconds,
        "seconds": observer.earlier_seconds + outcome.seconds,
        "last_part": last_part,
        "samples_per_second": last_part["samples"] / max(outcome.seconds, 1e-9),
        "wall_seconds": wall_seconds,
        "metrics": model.metrics,
        "untrained_metrics": observer.untrained,
        "warning": observer.warning,
        "model_step": model.step,
        "digest": digest(model.weights),
        "bytes_sent": sum(meter.bytes_sent for meter in meters.values()),
        "bytes_received": sum(meter.bytes_received for meter in meters.values()),
        "overlap": statistics.fmean(meter.overlap for meter in computing),
        "utilization": {
            "mean": statistics.fmean(meter.utilization(outcome.seconds) for meter in computing),
            "workers": {meter.node: meter.utilization(outcome.seconds) for meter in computing},
        },
        "staleness": {
            "mean": sum(k * n for k, n in staleness.items()) / max(1, sum(staleness.values())),
            "max": max(staleness, default=0),
            "histogram": {str(k): n for k, n in sorted(staleness.items())},
        },
        "gradients_skipped": sum(meter.gradients_skipped for meter in meters.values()),
        "gradients_refused": {
            name: meter.gradients_refused for name, meter in meters.items() if meter.gradients_refused
        },
        "events": outcome.events,
        "reason": outcome.reason,
        "run": str(observer.directory.path),
    }
    if plan.compress != "none":
        sent, saved = figures["bytes_sent"], sum(meter.bytes_saved for meter in meters.values())
        figures["compression"] = {
            "bytes_saved": saved,
            "share": sent / max(1, sent + saved),
            "relative_error": relative_error(meters.values()),
        }
    joint = observer.joint_model(model.weights)
    return Result(joint, model.metrics, finite(figures), observer.history, observer.directory.path)
