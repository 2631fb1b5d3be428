"""What every protocol says in a short run with a death, as text that a person reads and reviews as a diff.

`pytest --rewrite-transcripts` writes the texts anew. An entry is the time, the node, the event, and after the arrow
what the machine wanted done about it. Tensors are shown by their shapes, fields with their defaults not at all.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from tether import Faults, Sim
from tether.machine import Effect, Event, Message, Node, Replica, Snapshot
from tether.protocols import Options, known
from tether.run import Request, RunPlan
from tether.runtimes.interpreter import Recorder
from tether.swarm import Nobody
from tether.task import SyntheticTask

FOLDER = Path(__file__).parent / "transcripts"
VARIANTS = [options for cls in known().values() for options in cls.variants()]
LINES_MAX = 60
WIDTH = 120
STEPS = 5


class Transcript(RunPlan):
    """A plan whose nodes are listened to."""

    def recorder(self, node: Node, replica: Replica) -> Recorder:
        def listen(event: Event, now: float, effects: list[Effect]) -> None:
            line = f"{now:6.3f}  {node.name:<9} {shown(event)} ->"
            for effect in [shown(effect) for effect in effects] or ["nothing"]:
                if len(line) + 1 + len(effect) > WIDTH:
                    self.lines.append(line)
                    line = " " * 20
                line += f" {effect}"
            self.lines.append(line)

        return listen

    @property
    def lines(self) -> list[str]:
        return vars(self).setdefault("_lines", [])


def shown(value: Any) -> str:
    match value:
        case Tensor():
            return f"<{'x'.join(map(str, value.shape))}>"
        case Snapshot(start=start, stop=stop):
            return f"weights[{start or ''}:{'' if stop is None else stop}]"
        case msgspec.Struct():
            told = [told_field(field, getattr(value, field.name)) for field in msgspec.structs.fields(value)]
            return f"{type(value).__name__}({', '.join(filter(None, told))})"
        case dict():
            return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
        case tuple():
            return "(" + " ".join(map(shown, value)) + ")"
        case float():
            return f"{value:.4g}"
    return str(value)


def told_field(field: msgspec.structs.FieldInfo, value: Any) -> str:
    """Names, messages and tensors speak for themselves; numbers do not."""
    if isinstance(value, str | tuple | Tensor | Snapshot | Message):
        return "" if value == () else shown(value)
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return "" if value == default else f"{field.name}={shown(value)}"


def file_of(options: Options) -> Path:
    settings = [f"{field.name} {getattr(options, field.name)}" for field in dataclasses.fields(options)]
    return FOLDER / (re.sub(r"\W+", "-", " ".join([options.name, *settings])) + ".txt")


def transcript(options: Options) -> str:
    """Two workers, of which one dies after its second gradient; a protocol for one worker sees no death."""
    workers = min(2, options.workers_max or 2)
    faults = Faults().crash("worker-1", step=2) if workers > 1 else Faults()
    sim = Sim(workers=workers, link="100kbit", step_seconds=0.1, faults=faults, detect_seconds=0.05)
    request = Request(steps=STEPS, seed=0, evaluate_every=2 / 50, trace=False)
    task = SyntheticTask(parameters=8, samples=50 * workers, noise=0.0)
    plan = RunPlan.make(task, options, sim, request, None)
    listening = Transcript(**vars(plan))
    outcome = sim.execute(listening, Nobody())
    death = ", 2 workers: worker-1 dies after its second gradient" if faults.schedule else ""
    title = f"{options}, {STEPS} steps{death}"
    return "\n".join([title, "", *listening.lines, "", f"{outcome.reason} at {outcome.seconds:.3f}", ""])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_protocol_says_what_its_transcript_says(options: Options, pytestconfig: pytest.Config) -> None:
    text, file = transcript(options), file_of(options)
    if pytestconfig.getoption("--rewrite-transcripts"):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.exists(), f"{file.name} is not there: pytest --rewrite-transcripts writes it"
    assert text.splitlines() == file.read_text().splitlines(), "pytest --rewrite-transcripts takes the new text over"


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_transcript_is_short_enough_to_be_read(options: Options) -> None:
    assert len(transcript(options).splitlines()) < LINES_MAX


def test_every_transcript_belongs_to_a_variant() -> None:
    assert {file.name for file in FOLDER.glob("*.txt")} == {file_of(options).name for options in VARIANTS}
