"""A recorded run replays into fresh machines, and a replay that differs says where."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tether import Averaging, Faults, Server, Single, StepTime
from tether.api import replay_recorded
from tether.core.effects import Compute, Install, Send, Step
from tether.core.snapshot import snapshot
from tether.errors import RunError, UsageError
from tether.execution.directory import RunDirectory
from tether.protocols import Options
from tether.protocols.server.messages import Weights
from tether.runtimes.record import effects_digest
from tether.testing.conformance import Blobs, train_quietly
from tether.testing.conformance import CheckedSim as Sim

SIM = Sim(workers=2, step_seconds=StepTime(0.1, spread=0.5))
Entry = list[Any]


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Path]:
    def train(options: Options, sim: Sim = SIM) -> Path:
        train_quietly(Blobs(), options, sim, tmp_path / "run", steps=6, record=True)
        return tmp_path / "run"

    return train


def entries(path: Path) -> list[Entry]:
    """Each entry as a list whose last item are the frames of the event."""
    data, found = path.read_bytes(), []
    while data:
        length = struct.unpack_from("<Q", data)[0]
        found.append(msgspec.msgpack.decode(data[8 : 8 + length]))
        data = data[8 + length :]
    return found


def rewrite(path: Path, written: list[Entry]) -> None:
    encoded = [msgspec.msgpack.encode(entry) for entry in written]
    path.write_bytes(b"".join(struct.pack("<Q", len(entry)) + entry for entry in encoded))


def clear_gradient(entry: Entry) -> None:
    """The first tensor of the event becomes zeros."""
    entry[-1][1] = bytes(len(entry[-1][1]))


def kinds(written: list[Entry]) -> list[str]:
    return [msgspec.msgpack.decode(entry[-1][0])["type"] for entry in written]


@pytest.mark.parametrize("options", [Server(), Averaging(tau=2), Averaging()], ids=str)
def test_a_recorded_run_replays_every_event_of_every_node(options: Options, recorded: Callable[..., Path]) -> None:
    run = recorded(options)
    files = {file.stem: len(entries(file)) for file in (run / "record").iterdir()}
    assert files.keys() == {"hub", "worker-0", "worker-1"}
    assert replay_recorded(run, Blobs()) == files


def test_a_single_worker_replays(recorded: Callable[..., Path]) -> None:
    assert replay_recorded(recorded(Single(), Sim(workers=1)), Blobs()) == {"worker-0": 7}


def test_the_dead_and_their_successors_replay_too(recorded: Callable[..., Path]) -> None:
    faults = Faults().crash("worker-0", step=2).restart("worker-1", step=1, seconds=0.0)
    counts = replay_recorded(recorded(Server(), Sim(workers=3, faults=faults, detect_seconds=0.01)), Blobs())
    assert counts.keys() == {"hub", "worker-0", "worker-1", "worker-1~2", "worker-2"}
    assert counts["worker-1~2"] > 2


def test_an_altered_joint_model_is_noticed_at_the_event_that_brought_it(recorded: Callable[..., Path]) -> None:
    run = recorded(Averaging(tau=2))
    file = run / "record" / "worker-1.events"
    written = entries(file)
    position = [i for i, kind in enumerate(kinds(written)) if kind == "Broadcasted"][1]
    values = bytearray(written[position][-1][1])
    values[0] ^= 1
    written[position][-1][1] = bytes(values)
    rewrite(file, written)
    with pytest.raises(RunError, match=rf"worker-1: event {position + 1}, Broadcasted at .* had other effects"):
        replay_recorded(run, Blobs())


def test_an_altered_gradient_is_noticed_when_the_hub_steps(recorded: Callable[..., Path]) -> None:
    run = recorded(Server())
    file = run / "record" / "hub.events"
    written = entries(file)
    first_push = next(i for i, entry in enumerate(written) if b"Push" in entry[-1][0])
    clear_gradient(written[first_push])
    rewrite(file, written)
    with pytest.raises(RunError, match=rf"hub: event {first_push + 2}, Received at .* had other effects"):
        replay_recorded(run, Blobs())


def test_an_altered_gradient_is_noticed_where_it_was_stepped_with(recorded: Callable[..., Path]) -> None:
    run = recorded(Averaging(tau=2))
    file = run / "record" / "worker-1.events"
    written = entries(file)
    first_gradient = kinds(written).index("GradientReady")
    clear_gradient(written[first_gradient])
    rewrite(file, written)
    with pytest.raises(RunError, match=rf"worker-1: event {first_gradient + 2}, .* found other weights"):
        replay_recorded(run, Blobs())


def test_an_event_that_cannot_be_is_named(recorded: Callable[..., Path]) -> None:
    run = recorded(Averaging(tau=2))
    file = run / "record" / "worker-0.events"
    written = entries(file)
    position = kinds(written).index("GradientReady")
    repeated = [*written[:position], written[position - 1][:2] + written[position][2:3] + written[position - 1][3:]]
    rewrite(file, repeated)
    with pytest.raises(
        RunError, match=rf"worker-0: event {position + 1}, Broadcasted at .* broke an invariant: round 0"
    ):
        replay_recorded(run, Blobs())


def test_a_damaged_record_is_named(recorded: Callable[..., Path]) -> None:
    run = recorded(Averaging(tau=2))
    file = run / "record" / "worker-0.events"
    data = bytearray(file.read_bytes())
    data[8] = 0xC1  # a byte that msgpack never uses
    file.write_bytes(data)
    with pytest.raises(RunError, match=r"worker-0\.events is damaged"):
        replay_recorded(run, Blobs())


def test_a_missing_event_is_noticed(recorded: Callable[..., Path]) -> None:
    run = recorded(Averaging(tau=2))
    file = run / "record" / "worker-0.events"
    written = entries(file)
    position = kinds(written).index("GradientReady")
    rewrite(file, written[:position] + written[position + 1 :])
    with pytest.raises(RunError, match=rf"worker-0: event {position + 1}, GradientReady"):
        replay_recorded(run, Blobs())


def test_another_machine_than_the_recorded_one_is_noticed_at_once(recorded: Callable[..., Path]) -> None:
    run = recorded(Averaging(tau=2))
    directory = RunDirectory.open(run)
    config = directory.read_config()
    directory.write_config({**config, "protocol": {**config["protocol"], "tau": 3}})
    with pytest.raises(RunError, match=r"hub: event 1, Started at 0 s, had other effects"):
        replay_recorded(run, Blobs())


def test_a_record_that_was_cut_off_replays_up_to_there(recorded: Callable[..., Path]) -> None:
    run = recorded(Averaging(tau=2))
    file = run / "record" / "worker-0.events"
    data = file.read_bytes()
    written = entries(file)
    complete = [0]
    for entry in written:
        complete.append(complete[-1] + 8 + len(msgspec.msgpack.encode(entry)))
    assert complete[-1] == len(data)
    for count, cut in [(4, complete[4]), (4, complete[4] + 5), (4, complete[5] - 1), (0, 3), (0, 0)]:
        file.write_bytes(data[:cut])
        assert replay_recorded(run, Blobs())["worker-0"] == count


def test_a_run_that_was_not_recorded_cannot_be_replayed(tmp_path: Path) -> None:
    train_quietly(Blobs(), Single(), Sim(workers=1), tmp_path / "run", steps=2)
    with pytest.raises(UsageError, match="was not recorded"):
        replay_recorded(tmp_path / "run", Blobs())


def test_recording_does_not_change_the_result(tmp_path: Path) -> None:
    runs = [
        train_quietly(Blobs(), Averaging(), SIM, tmp_path / str(record), steps=6, record=record)
        for record in (True, False)
    ]
    assert runs[0].figures["digest"] == runs[1].figures["digest"]


def test_a_digest_is_equal_for_equal_effects_and_for_no_others() -> None:
    def effects(value: float = 1.0, to: str = "hub", shape: tuple[int, ...] = (2, 2)) -> list[Any]:
        return [Step(torch.full(shape, value)), Send(to, Weights(3, snapshot(1))), Compute()]

    assert effects_digest(effects()) == effects_digest(effects())
    others = [
        effects(value=1.0000001),
        effects(to="bub"),
        effects(shape=(4,)),
        effects()[::-1],
        effects()[:2],
        [Install(torch.ones(2, 2)), *effects()[1:]],
        [Step(torch.ones(2, 2, dtype=torch.float64)), *effects()[1:]],
    ]
    digests = [effects_digest(other) for other in [effects(), *others]]
    assert len(set(digests)) == len(digests)
