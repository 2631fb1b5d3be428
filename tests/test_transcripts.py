"""What every protocol says in a short run with a death, as text that a person reads and reviews as a diff.

`pytest --rewrite-transcripts` writes the texts anew. An entry is the time, the node, the event, and after the arrow
what the machine wanted done about it. Tensors are shown by their shapes; empty ones, None and fields with their
defaults not at all. worker-0#2@5 is the second gradient of worker-0, taken at weights of clock 5.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from tether import Averaging, Elastic, Faults, Grid, Mpca, Server, Single, Streaming, Tide
from tether.core.effects import Effect
from tether.core.events import Event
from tether.core.machine import Node, Replica
from tether.core.message import Message, Stream, Tag, Timer
from tether.core.snapshot import Snapshot
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.synthetic import SyntheticTask
from tether.protocols import Options, known
from tether.protocols.server.messages import Mark
from tether.runtimes.base import NullObserver
from tether.runtimes.interpreter import Recorder
from tether.testing.conformance import CheckedSim as Sim

FOLDER = Path(__file__).parent / "transcripts"
#: of each protocol's variants, those that show what is typical of the others; so many steps can be read
VARIANTS: dict[Options, int] = {
    Single(): 5,
    Server(sync="hard"): 4,
    Server(sync="soft"): 3,
    Server(sync="async", topology="tree", fan_out=2, overlap=True): 2,
    Server(sync="async", consistent=False): 2,
    Server(sync="hard", hubs=2): 2,
    Averaging(tau=1): 5,
    Averaging(tau=4): 5,
    Averaging(): 5,
    Elastic(tau=2): 5,
    Elastic(tau=4, exchangers=1): 9,
    Mpca(phases=1): 3,
    Mpca(phases=2): 1,
    Tide(phases=2): 1,
    Streaming(phases=1, shards=1, tau=2): 2,
    Grid(dimensions=1, steps_per_round=2): 4,
}
LINES_MAX = 60
WIDTH = 120


class Transcript(RunPlan):
    """A plan whose nodes are listened to."""

    def recorder(self, node: Node, replica: Replica) -> Recorder:
        def listen(event: Event, now: float, effects: list[Effect]) -> None:
            line = f"{now:6.3f}  {node.name:<{self.name_width}} {shown(event)} ->"
            for effect in [shown(effect) for effect in effects] or ["nothing"]:
                if len(line) + 1 + len(effect) > WIDTH:
                    self.lines.append(line)
                    line = " " * 12
                line += f" {effect}"
            self.lines.append(line)

        return listen

    @property
    def name_width(self) -> int:
        return max(9, *(len(node.name) for node in self.nodes))

    @property
    def lines(self) -> list[str]:
        return vars(self).setdefault("_lines", [])


def shown(value: Any) -> str:
    match value:
        case Tensor():
            return f"<{'x'.join(map(str, value.shape))}>"
        case Snapshot(start=start, stop=stop):
            return f"weights[{start or ''}:{'' if stop is None else stop}]"
        case Mark(worker=worker, number=number, clock=clock):
            return f"{worker}#{number}@{clock}"
        case Stream() | Tag() | Timer():
            return str(value)
        case msgspec.Struct():
            told = [told_field(field, getattr(value, field.name)) for field in msgspec.structs.fields(value)]
            return f"{type(value).__name__}({', '.join(filter(None, told))})"
        case dict():
            return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
        case (Mark(), *_):
            return " ".join(map(shown, value))
        case tuple():
            return "(" + " ".join(map(shown, value)) + ")"
        case float():
            return f"{value:.4g}"
    return str(value)


def told_field(field: msgspec.structs.FieldInfo, value: Any) -> str:
    """Names, messages and tensors speak for themselves; numbers do not."""
    if value is None or (isinstance(value, Tensor) and not value.numel()):
        return ""
    if isinstance(value, str | tuple | Tensor | Snapshot | Message | Stream | Tag | Timer):
        return "" if value == () else shown(value)
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return "" if value == default else f"{field.name}={shown(value)}"


def file_of(options: Options) -> Path:
    """Named after the protocol's first setting and those that are not as usual."""
    fields = dataclasses.fields(options)
    first = [field for field in fields if not field.kw_only][:1]
    told = [field for field in fields if field in first or getattr(options, field.name) != field.default]
    settings = [f"{field.name} {getattr(options, field.name)}" for field in told]
    return FOLDER / (re.sub(r"\W+", "-", " ".join([options.name, *settings])) + ".txt")


def transcript(options: Options) -> str:
    """Two workers, of which one dies after its second gradient, in the shortest after its first; one alone lives on."""
    workers = min(2, options.workers_max or 2)
    steps = VARIANTS[options]
    last, ordinal = (2, "second") if steps > 2 else (1, "first")
    faults = Faults().crash("worker-1", step=last) if workers > 1 else Faults()
    sim = Sim(workers=workers, link="100kbit", step_seconds=0.1, faults=faults, detect_seconds=0.05)
    request = Request(steps=steps, seed=0, evaluate_every=2 / 50, trace=False)
    task = SyntheticTask(parameters=8, samples=50 * workers, noise=0.0)
    plan = RunPlan.make(task, options, sim, request, None)
    listening = Transcript(**vars(plan))
    outcome = sim.execute(listening, NullObserver())
    death = f", 2 workers: worker-1 dies after its {ordinal} gradient" if faults.schedule else ""
    title = f"{options}, {steps} steps{death}"
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


def test_every_protocol_has_a_transcript() -> None:
    assert {type(options) for options in VARIANTS} == set(known().values())


def test_every_transcript_belongs_to_a_variant() -> None:
    assert {file.name for file in FOLDER.glob("*.txt")} == {file_of(options).name for options in VARIANTS}
