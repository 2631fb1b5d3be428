"""Every protocol and every runtime passes the kit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tether import Averaging, Elastic, Grid, Local, Mpca, Server, Sim, Single, Spark, Streaming, Tide
from tether.core.message import Message, ReplicaState
from tether.protocols import Options, known, mpca, streaming, tide
from tether.protocols.averaging import Effort, Joint
from tether.protocols.elastic import Ask, Centre, Difference
from tether.protocols.grid import messages as grid
from tether.protocols.server.messages import (
    Current,
    DowncastArrived,
    GetPart,
    Halt,
    Mark,
    Part,
    Pull,
    Push,
    Refused,
    Round,
    Tally,
    Weights,
)
from tether.testing.conformance import (
    Blobs,
    check_messages,
    check_protocol,
    check_runtime,
    largest_difference,
    train_quietly,
)

VARIANTS = [options for cls in known().values() for options in cls.variants()]

EXAMPLES: dict[type[Options], list[Message]] = {
    Single: [],
    Server: [
        Pull(-1, 4),
        Weights(3, torch.arange(4.0), push=True),
        Current(),
        Current(push=True, clock=3),
        Refused("another model"),
        Push((Mark("worker-0", 2, 3), Mark("worker-1", 1, 0)), torch.ones(2), torch.zeros(0), 16, None),
        Push((Mark("worker-0", 2, 3),), torch.ones(2), torch.zeros(2), 16, 3),
        Push((Mark("worker-0", 2, 3),), torch.ones(5), torch.zeros(0), 16, None, (torch.tensor([4]),)),
        DowncastArrived(3),
        Tally(3),
        Tally(0, last=True),
        Halt(),
        Weights(3, torch.arange(4.0), push=True, buffers=torch.ones(2)),
        Round(3, (Mark("worker-0", 2, 3),), 0.5),
        GetPart(state=True),
        Part(torch.ones(2), None),
        Part(torch.ones(2), ReplicaState({"step": 1}, [torch.arange(2.0)])),
    ],
    Averaging: [
        Joint(1, torch.arange(3.0), {"worker-0": (4, 6), "worker-1": (5,)}, 4),
        Effort(None, 0.1),
        Effort(0.2, 0.1),
    ],
    Elastic: [
        Ask(first=True),
        Ask(),
        Centre(torch.arange(3.0), 0.1, 7, early=True),
        Difference(torch.ones(2), torch.zeros(1), 7, 0.1, 0.05, 0.0),
    ],
    Grid: [
        grid.Config(1, "worker-0", 3, ("worker-0", "worker-1"), 7, ((0, 7), (9, 11)), "all steps made"),
        grid.Welcome(grid.Config(2, "worker-1", 1, ("worker-1",), 7, ()), torch.arange(3.0)),
        grid.Ready((1, "worker-0", 3)),
        grid.NoWeights(("worker-0",)),
        grid.RequestVote(2, (1, "worker-0", 3)),
        grid.Vote(2, True, False, 7, ((0, 7),)),
        grid.Open((1, "worker-0", 3), 1, 5, 7, ((0, 7),)),
        grid.Slice((1, "worker-0", 3), 1, 5, 2, 1.0, torch.arange(3.0)),
        grid.Mean((1, "worker-0", 3), 1, 5, 2, 4.0, torch.arange(3.0)),
        grid.Report((1, "worker-0", 3), 1, 5),
        grid.Holdings(2, (3, 5), (7,)),
        grid.Tally(3),
    ],
    Mpca: [mpca.Projected(2, 7, 0.1, torch.arange(3.0), alpha=0.05), mpca.AreYouThere(), mpca.Here()],
    Streaming: [
        streaming.Fragment(2, 7, 0.1, torch.arange(3.0)),
        streaming.AreYouThere(),
        streaming.Here(),
    ],
    Tide: [
        tide.Joint(2, 7, 0.1, torch.arange(3.0), steps={"worker-0": 5}),
        tide.Moved(2, 7, 0.25),
        tide.AreYouThere(),
        tide.Here(),
    ],
}


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_protocol_keeps_its_promises_in_the_simulator(options: Options, tmp_path: Path) -> None:
    check_protocol(options, tmp_path)


@pytest.mark.parametrize("cls", [cls for cls in known().values() if cls.messages], ids=lambda cls: cls.name)
def test_every_message_survives_the_wire(cls: type[Options]) -> None:
    check_messages(cls(), EXAMPLES[cls])


def test_the_simulator_keeps_the_promises_of_a_runtime(tmp_path: Path) -> None:
    check_runtime(lambda workers: Sim(workers=workers), tmp_path)


def test_processes_on_one_machine_keep_the_promises_of_a_runtime(tmp_path: Path) -> None:
    check_runtime(lambda workers: Local(workers=workers), tmp_path)


@pytest.mark.spark
def test_agents_on_spark_keep_the_promises_of_a_runtime(spark: Any, tmp_path: Path) -> None:
    check_runtime(lambda workers: Spark(spark, workers), tmp_path, workers_max=3, records=False)


@pytest.mark.parametrize("overlap", [False, True], ids=["adv", "adv-star"])
def test_hardsync_over_a_tree_of_processes_equals_the_simulated(overlap: bool, tmp_path: Path) -> None:
    """Rudra, section 3.3: an architecture changes when things happen, but not the result."""
    options = Server(sync="hard", topology="tree", fan_out=2, overlap=overlap)
    real, simulated = (
        train_quietly(Blobs(norm=False), options, on, tmp_path / on.name, steps=30) for on in (Local(3), Sim(workers=3))
    )
    assert largest_difference(real.model, simulated.model) < 1e-5
    assert real.figures["staleness"]["histogram"] == {"0": 90}
